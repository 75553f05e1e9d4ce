"""Iterators that can be set back."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_harmony.engine.structures.seekable import Seekable, exchange, given_back, make_seekable, seekable


def counting() -> Iterator[int]:
    yield from range(100)


KINDS: dict[str, Callable[[], Any]] = {
    "generator": counting,
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([0, 1, 2, 3, 4]),
    "chain": lambda: itertools.chain(range(3), range(3, 9)),
    "list": lambda: iter(list(range(9))),
    "dict": lambda: iter(dict.fromkeys(range(9))),
    "range": lambda: iter(range(9)),
    "zip": lambda: (pair[0] for pair in zip(range(9), range(9), strict=True)),
    "map": lambda: map(int, "01234"),
    "calls": lambda: iter(itertools.count().__next__, 99),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_drawn_is_drawn_again(kind: str) -> None:
    iterator = seekable(KINDS[kind]())
    assert type(iterator) is Seekable
    assert next(iterator) == 0
    position = iterator.position
    assert [next(iterator), next(iterator)] == [1, 2]
    now = iterator.position
    iterator.seek(position)
    assert next(iterator) == 1
    iterator.seek(now)
    assert next(iterator) == 3


def test_a_seekable_iterator_ends_as_often_as_it_is_drawn_to_its_end() -> None:
    iterator = seekable(iter([0, 1]))
    position = iterator.position
    for _ in range(2):
        assert list(iterator) == [0, 1]
        with pytest.raises(StopIteration):
            next(iterator)
        iterator.seek(position)


def test_a_generator_is_sent_to_once() -> None:
    sent: list[Any] = []

    def generator() -> Any:
        value = None
        while True:
            value = yield value
            sent.append(value)

    iterator = seekable(generator())
    next(iterator)
    position = iterator.position
    assert iterator.send("a") == "a"
    iterator.seek(position)
    assert iterator.send("b") == "a"
    assert sent == ["a"]
    iterator.close()
    assert iterator.gi_frame is None


def test_one_seekable_iterator_stands_for_an_iterator_wherever_that_is() -> None:
    cycle = itertools.cycle([0, 1, 2])
    one, method, (_, inner) = seekable(cycle), seekable(cycle.__next__), seekable((1, cycle))
    assert one is inner is method.__self__
    assert [next(one), method(), next(inner)] == [0, 1, 2]
    assert given_back(one) is cycle
    assert given_back((1, one)) == (1, cycle)
    assert given_back(method).__self__ is cycle


@pytest.mark.parametrize("value", [3, "text", [1], (1, (2, "x")), range(3), zip, {1}, len, [].append])
def test_what_is_no_iterator_stays_as_it_is(value: Any) -> None:
    assert seekable(value) is value
    assert given_back(value) is value


class Own:
    """Python knows what it keeps: it is in its attributes."""

    def __iter__(self) -> Own:
        return self

    def __next__(self) -> int:
        return 1


def test_iterators_of_ones_own_and_files_stay(tmp_path: Any) -> None:
    own = Own()
    with (tmp_path / "file").open("w") as file:
        assert [seekable(own), seekable(file)] == [own, file]


class Loud(list[Any]):
    """Its own code is not to run."""

    def __setitem__(self, *args: Any) -> None:
        raise AssertionError


def test_containers_hold_them_past_the_code_of_their_classes() -> None:
    content = Loud([iter([7]), 2])
    assert make_seekable(content, list(content))
    assert type(content[0]) is Seekable
    assert not make_seekable(content, list(content))


class Marked(tuple[Any, ...]):
    """A tuple with attributes."""


def test_sets_and_tuples_with_attributes_hold_them_and_give_them_back() -> None:
    alone, inner = iter([7]), iter([8])
    pair = Marked((inner, 2))
    pair.name = "pair"  # type: ignore[attr-defined]
    content: Any = {alone}
    assert make_seekable(content, content.copy())
    (found,) = content
    assert type(found) is Seekable
    assert exchange(content, content.copy(), given_back)
    assert content == {alone}
    remade = seekable(pair)
    assert (type(remade), remade.name, type(remade[0])) == (Marked, "pair", Seekable)
    given = given_back(remade)
    assert (given, given.name) == (pair, "pair")


def test_a_seekable_iterator_is_copied_and_printed_as_the_iterator_itself() -> None:
    iterator = iter([7, 8])
    found = seekable(iterator)
    assert repr(found) == repr(iterator)
    assert next(found) == 7
    copied = copy.copy(found)
    assert type(copied) is type(iterator)
    assert [list(copied), list(found)] == [[8], [8]]


def test_values_that_nobody_can_go_back_to_are_gone() -> None:
    iterator = seekable(Own() for _ in range(9))
    position = iterator.position
    gone = weakref.ref(next(iterator))
    assert gone() is not None
    del position
    gc.collect()
    assert gone() is None

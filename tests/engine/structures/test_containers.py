"""Lists, dicts, sets and deques: whether they hold what they held."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest

from lightning_harmony.engine.structures.containers import ChangesOf, Unchanged


def unchanged(*contents: Any) -> Unchanged:
    return Unchanged([(content, content.copy()) for content in contents])


def held(kind: type) -> Any:
    """Something of a class that holds a few objects."""
    if issubclass(kind, dict):
        content = kind()
        content.update(a=1, b=2)
        return content
    return kind((1, 2))


KINDS = (dict, OrderedDict, defaultdict, list, set, deque)
CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "another value of a dict": ({"a": 1}, lambda content: content.update(a=2)),
    "another value of an ordered dict": (OrderedDict(a=1), lambda content: content.update(a=2)),
    "a name that comes": ({"a": 1}, lambda content: content.update(b=2)),
    "a name that goes": ({"a": 1}, lambda content: content.pop("a")),
    "an empty dict that is filled with another one": ({}, lambda content: content.update({"a": 1})),
    "an empty list that is filled": ([], lambda content: content.append(1)),
    "another order": (OrderedDict(a=1, b=2), lambda content: content.move_to_end("a")),
    "another item of a list": ([1, 2], lambda content: content.__setitem__(0, 3)),
    "an item of a set": ({1}, lambda content: content.add(2)),
    "a deque that turns": (deque([1, 2]), lambda content: content.rotate()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_changes_is_unchanged(kind: type) -> None:
    both = unchanged(held(kind), kind())
    assert both.holds()
    assert both.holds()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_again_and_again(name: str) -> None:
    content, change = CHANGES[name][0].copy(), CHANGES[name][1]
    among = unchanged({"c": 3}, content)
    change(content)
    assert not among.holds()
    assert not among.holds()


def test_a_change_that_was_taken_back_is_none() -> None:
    content = {"a": 1}
    same = unchanged(content)
    content["a"] = 2
    assert not same.holds()
    content["a"] = 1
    assert same.holds()
    content["a"] = 3
    assert not same.holds()


DICTS: dict[str, tuple[dict[str, int], Callable[[dict[str, int]], Any]]] = {
    "another value": ({"a": 1}, lambda content: content.update(a=2)),
    "a value that is set again": ({"a": 1}, lambda content: (content.update(a=2), content.update(a=1))),
    "a name that comes": ({"a": 1}, lambda content: content.update(b=2)),
    "a name that goes": ({"a": 1, "b": 2}, lambda content: content.pop("a")),
    "all names go": ({"a": 1}, lambda content: content.clear()),
    "an empty one is filled": ({}, lambda content: content.update(a=1)),
    "an empty one is filled with another one": ({}, lambda content: content.update({"a": 1})),
    "emptied and filled": ({"a": 1}, lambda content: (content.clear(), content.update({"a": 1}))),
}


@pytest.mark.parametrize("name", DICTS)
def test_dicts_that_have_changed_are_told_once(name: str) -> None:
    content, change = DICTS[name][0].copy(), DICTS[name][1]
    dicts: list[dict[str, int]] = [{}, {"b": 1}, content, {}, {"c": 1}]
    changes = ChangesOf(dicts)
    assert changes.again() == []
    change(content)
    assert not changes.are_none()
    assert changes.again() == [2]
    assert changes.are_none()
    assert changes.again() == []


def test_a_dict_that_goes_from_empty_to_full_and_back_is_told_each_time() -> None:
    dicts: list[dict[str, int]] = [{}, {"a": 1}, {}]
    changes = ChangesOf(dicts)
    for _ in range(3):
        dicts[0].update({"a": 1})
        dicts[1].clear()
        assert changes.again() == [0, 1]
        dicts[0].clear()
        dicts[1].update({"a": 1})
        dicts[2].clear()
        assert changes.again() == [0, 1]


def test_what_is_known_is_no_change() -> None:
    dicts: list[dict[str, int]] = [{}, {"a": 1}, {"b": 1}]
    changes = ChangesOf(dicts)
    dicts[0]["a"] = dicts[1]["a"] = dicts[2]["b"] = 2
    changes.know([0, 1])
    assert changes.again() == [2]
    dicts[0].clear()
    changes.know([0])
    assert changes.again() == []
    dicts[0].update({"a": 1})
    assert changes.again() == [0]

"""Names that no dict of Python's own holds: what was added, changed or taken away there is taken back past the user's code."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lightning_harmony.held.held_state import Held, Kind
from lightning_harmony.held.variables import (
    AttributesOfClass,
    Chosen,
    EntriesOf,
    PartsOf,
    SlotsOf,
    VariableOfClosure,
    Variables,
)


class Guarded(OrderedDict[str, Any]):
    """A dict that lets nobody change it."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise AssertionError

    __delitem__ = __setitem__  # type: ignore[assignment]


def entries() -> Variables:
    content = Guarded()
    OrderedDict.__setitem__(content, "a", 1)
    return EntriesOf(content)


def variable_of_closure() -> Variables:
    a = 1

    def read() -> int:
        return a

    assert read.__closure__ is not None
    return VariableOfClosure(read.__closure__[0], "a")


def slots() -> Variables:
    class Slotted:
        __slots__ = ("a", "b")

        def __setattr__(self, name: str, value: Any) -> None:
            raise AssertionError

    content = SlotsOf(Slotted())
    content["a"] = 1
    return content


def attributes_of_class() -> Variables:
    class Owner:
        a = 1

    return AttributesOfClass(Owner)


MADE: dict[str, Callable[[], Variables]] = {
    "the entries of a dict of one's own": entries,
    "a variable of a closure": variable_of_closure,
    "slots": slots,
    "attributes of a class": attributes_of_class,
    "some attributes": lambda: Chosen({"a": 1, "c": 3}, ["a", "b"]),
}


@pytest.mark.parametrize("kind", MADE)
def test_what_names_stood_for_is_put_back(kind: str) -> None:
    content = MADE[kind]()
    held = Held("content", content, Kind.OBJECT)
    before = held.look()
    assert before == {"a": 1}
    content["a"] = 2
    assert held.look() == dict(content) == {"a": 2}
    held.put(before)
    assert content["a"] == 1
    del content["a"]
    assert held.look() == {}
    assert "a" not in content
    assert not content
    held.put(before)
    assert held.look() == before
    if kind != "a variable of a closure":
        content["b"] = 3
        assert held.look() == {"a": 1, "b": 3}
        held.put(before)
        assert held.look() == before


@pytest.mark.parametrize("function", [partial(max, 1), lambda a=1: a], ids=["of a partial", "defaults"])
def test_arguments_that_were_added_to_a_function_are_taken_away(function: Any) -> None:
    content = PartsOf(function)
    held = Held("content", content, Kind.OBJECT)
    before = held.look()
    assert before == {0: 1}
    content[0], content[1] = 2, 3
    assert held.look() == {0: 2, 1: 3}
    held.put(before)
    assert held.look() == before

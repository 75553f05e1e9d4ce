"""Code that only adds to a list or set is told from code that reads it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from lightning_harmony.held.reads import added_to

NUMBER = 1


class _Told:
    """Tells of each time that it is asked for."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        instance.found.append(added_to(sys._getframe(1), "held", instance.value))
        return instance.value


class Holder:
    held: Any = _Told()

    def __init__(self, value: Any) -> None:
        self.value = value
        self.found: list[Any] = []


class OwnList(list[Any]):
    """Its methods may be anything."""


def by_another_name(holder: Holder) -> None:
    held = holder.held
    held.append(1)


def in_a_loop(holder: Holder) -> None:
    for each in holder.held:
        each.append(1)


@pytest.mark.parametrize(
    ("value", "add"),
    [
        ([1], lambda holder: holder.held.append(2)),
        ([1], lambda holder: holder.held.extend([2, 3])),
        ({1}, lambda holder: holder.held.add(2)),
        ({"a": []}, lambda holder: holder.held["a"].append(float(3) + 1)),
        ({"a": {"b": []}}, lambda holder: holder.held["a"]["b"].append(1)),
        (defaultdict(list, a1=[]), lambda holder: holder.held[f"a{NUMBER}"].append(1)),
        ([[1], [2]], lambda holder: holder.held[NUMBER].append(1)),
    ],
)
def test_additions_are_told(value: Any, add: Callable[[Holder], Any]) -> None:
    holder = Holder(value)
    add(holder)
    (found,) = holder.found
    assert found
    assert all(type(each) in (list, set) for each in found)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ([1], by_another_name),
        ([[1]], in_a_loop),
        ([1], lambda holder: len(holder.held)),
        ([1], lambda holder: holder.held[-1]),
        ([1], lambda holder: holder.held * 2),
        ([1, 2], lambda holder: holder.held.pop()),
        ([1], lambda holder: (holder.held or []).append(1)),
        ([1], lambda holder: getattr(holder, "held").append(1)),  # noqa: B009
        ([[1]], lambda holder: holder.held[0 if NUMBER else 1].append(1)),
        (OwnList(), lambda holder: holder.held.append(1)),
        ({"a": OwnList()}, lambda holder: holder.held["a"].append(1)),
        ({"a": {}}, lambda holder: holder.held["a"].update(b=1)),
    ],
)
def test_all_else_may_read(value: Any, read: Callable[[Holder], Any]) -> None:
    holder = Holder(value)
    read(holder)
    assert holder.found == [[]]


def test_what_is_added_may_be_read_before() -> None:
    holder = Holder([1])
    holder.held.append(holder.held[-1])
    assert [bool(each) for each in holder.found] == [True, False]

"""Which code only adds to what an attribute has."""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest

from lightning_harmony.held.reads import added_to


class Asked:
    """Notes to what code adds that asks for `seen`."""

    def __init__(self, seen: Any) -> None:
        self.kept = seen
        self.added: list[Any] = []

    @property
    def seen(self) -> Any:
        self.added = added_to(sys._getframe(1), "seen", self.kept)
        return self.kept


class Seen(list[int]):
    """Its methods may read what it has."""


def item(asked: Asked, key: str) -> None:
    asked.seen[key].append(1)


def item_of_an_item(asked: Asked, key: str) -> None:
    asked.seen[0][key + ""].append(1)


def by_name(asked: Asked, key: str) -> None:
    getattr(asked, key + "een").append(1)


# What adds, what is there, and what of it is added to.
ADD: dict[str, tuple[Callable[[Asked, str], Any], Any, Callable[[Any], list[Any]]]] = {
    "append": (lambda asked, key: asked.seen.append(key), [1], lambda seen: [seen]),
    "add": (lambda asked, key: asked.seen.add(key), {1}, lambda seen: [seen]),
    "extend": (lambda asked, key: asked.seen.extend([key, *key]), deque([1]), lambda seen: [seen]),
    "of an item": (item, {"s": [1], "t": [2]}, lambda seen: [*seen.values()]),
    "of an item's item": (item_of_an_item, [{"s": [1]}, {"s": [2]}], lambda seen: [each["s"] for each in seen]),
}
READ: dict[str, tuple[Callable[[Asked, str], Any], Any]] = {
    "pop": (lambda asked, key: asked.seen.pop(), [1]),
    "length": (lambda asked, key: len(asked.seen), [1]),
    "both": (lambda asked, key: (asked.seen[0], key), [1]),
    "a choice": (lambda asked, key: asked.seen[0 if key else 1].append(1), [[1], [2]]),
    "own class": (lambda asked, key: asked.seen.append(key), Seen([1])),
    "a mapping of an own class": (item, type("Own", (OrderedDict,), {})(s=[1])),
    "by name": (by_name, [1]),
    "by a getter": (lambda asked, key: operator.attrgetter("seen")(asked).append(key), [1]),
}


@pytest.mark.parametrize("case", ADD)
def test_code_that_adds_is_told_from_what_it_runs(case: str) -> None:
    add, seen, targets = ADD[case]
    asked = Asked(seen)
    add(asked, "s")
    assert [id(each) for each in asked.added] == [id(each) for each in targets(seen)]


@pytest.mark.parametrize("case", READ)
def test_code_that_may_read_is_not_taken_for_such(case: str) -> None:
    read, seen = READ[case]
    asked = Asked(seen)
    read(asked, "s")
    assert asked.added == []

"""Objects that hold the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lightning_harmony.held.equal_objects import are_equal_objects


class Some:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Further(Some):
    """Of another class."""


class Slotted:
    __slots__ = ("__dict__", "value")


class Listed(list[int]):
    """Holds more than attributes."""


MARKER, TENSOR = object(), torch.ones(2)
EQUAL = {
    "number": 1.5,
    "text": "a",
    "list": [1, (2, "b")],
    "dict": {"a": {1, 2}, MARKER: None},
    "object": Some(of=Some(n=1)),
    "tensor": TENSOR,
}


@pytest.mark.parametrize("name", EQUAL)
def test_a_copy_holds_the_same(name: str) -> None:
    # Tensors and markers are the same ones.
    memo = {id(each): each for each in (MARKER, TENSOR)}
    assert are_equal_objects(Some(it=EQUAL[name]), Some(it=copy.deepcopy(EQUAL[name], memo)))


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "number": (Some(n=1), Some(n=2)),
    "type": (Some(n=1), Some(n=1.0)),
    "name": (Some(n=1), Some(m=1)),
    "order": (Some(of={"a": 1, "b": 2}), Some(of={"b": 2, "a": 1})),
    "length": (Some(of=[1]), Some(of=[1, 1])),
    "marker": (Some(of=object()), Some(of=object())),
    "set": (Some(of={1}), Some(of={True})),
    "tensor": (Some(of=torch.ones(2)), Some(of=torch.ones(2))),
    "class": (Some(n=1), Further(n=1)),
    "nothing": (Some(), Some()),
    "a list's": (Listed([1]), Listed([1])),
    "builtin": ([1], [1]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_or_may_be_told_apart_is_not_equal(name: str) -> None:
    assert not are_equal_objects(*DIFFERENT[name])


def test_what_is_in_slots_is_not_compared() -> None:
    one, other = Slotted(), Slotted()
    one.value, other.value = 1, 2
    vars(one)["n"] = vars(other)["n"] = 1
    assert not are_equal_objects(one, other)


def test_what_refers_to_itself_or_is_large_is_not_compared_to_its_end() -> None:
    one, other = Some(), Some()
    one.it, other.it = one, other
    assert not are_equal_objects(one, other)
    assert not are_equal_objects(Some(of=list(range(20_000, 40_000))), Some(of=[*map(int, range(20_000, 40_000))]))

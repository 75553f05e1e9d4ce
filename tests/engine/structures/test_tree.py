"""What layers are called with and return, taken apart into leaves and put together again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_harmony.engine.structures.tree import flatten


@dataclass(frozen=True)
class Output:
    hidden: Any
    loss: Any = None
    # Computed once, and not an argument.
    size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.size + 1)


@dataclass
class Partial:
    hidden: Any
    later: Any = field(init=False)


def test_dataclasses_are_made_anew_of_other_leaves_and_not_constructed() -> None:
    x, y = torch.ones(1), torch.zeros(2)
    leaves, unflatten = flatten([Output((x, Output(y))), {"a": x}])
    assert leaves == [x, y, None, 1, None, 1, x]
    first, second = unflatten(iter(range(7)))
    assert (first, second) == (unflatten(iter(range(7)))[0], {"a": 6})
    assert (first.hidden[0], first.hidden[1].hidden, first.hidden[1].size, first.loss, first.size) == (0, 1, 3, 4, 5)


def test_a_field_without_a_value_stays_without_one() -> None:
    leaves, unflatten = flatten(Partial(1))
    assert leaves == [1]
    again = unflatten(iter([2]))
    assert again.hidden == 2
    assert not hasattr(again, "later")


def test_an_empty_list_has_no_leaves() -> None:
    leaves, unflatten = flatten([])
    assert leaves == unflatten(iter(())) == []

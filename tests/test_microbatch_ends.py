"""The backward of a microbatch finds what its forward has left, and what backwards change themselves stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_harmony.held.places import Places
from lightning_harmony.microbatches.microbatch_ends import MicrobatchEnds


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tensor: Any = None
        self.number = 0
        self.same = object()
        self.items: list[Any] = []
        self.entries: dict[Any, Any] = {}


def run_forward(module: Keeping, ends: MicrobatchEnds, number: int) -> dict[str, Any]:
    """A microbatch leaves things; what it has left."""
    ends.switch(number)
    module.tensor, module.number = torch.full((), number), module.number + 1
    module.items.append(number)
    module.entries["last"], module.entries[f"of {number}"] = number, torch.full((), number)
    # Any key may be one of the user's.
    module.entries[None] = number
    return {"tensor": module.tensor, "number": module.number, "items": [*module.items], "entries": {**module.entries}}


def left_on(module: Keeping) -> dict[str, Any]:
    return {"tensor": module.tensor, "number": module.number, "items": module.items, "entries": module.entries}


def test_each_microbatch_finds_what_it_has_left_and_then_all_is_as_the_last_one_left_it() -> None:
    module = Keeping()
    ends, same, items = MicrobatchEnds(Places(module)), module.same, module.items
    left = [run_forward(module, ends, number) for number in range(3)]
    ends.end_forward()
    for number in (0, 1, 2, 1, 0):
        ends.switch(number)
        assert left_on(module) == left[number]
    ends.finish()
    assert left_on(module) == left[2]
    assert module.same is same
    assert module.items is items


def test_what_a_backward_counts_collects_and_sets_stays() -> None:
    module = Keeping()
    ends = MicrobatchEnds(Places(module))
    left = [run_forward(module, ends, number) for number in range(2)]
    ends.end_forward()
    gradient = torch.ones(())
    for number in range(2):
        ends.switch(number)
        module.number += 10
        module.items.append(f"backward {number}")
        if number == 0:
            module.entries["last"] = gradient
    ends.finish()
    assert module.number == left[1]["number"] + 20
    assert module.items == [*left[1]["items"], "backward 0", "backward 1"]
    assert module.entries["last"] is gradient


def test_a_step_that_has_failed_leaves_nothing_for_the_next_one() -> None:
    module = Keeping()
    ends = MicrobatchEnds(Places(module))
    run_forward(module, ends, 0)
    ends.finish()
    left = [run_forward(module, ends, number) for number in range(2)]
    ends.end_forward()
    ends.switch(0)
    assert left_on(module) == left[0]

"""A training step may change the weights of layers before it calls them: norms of prototypes, bounds, weight decay by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from support.nets import WIDTH, Chain
from support.same_training import Net, assert_same_training, room, train_harmony
from support.sampling import combined

pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def normalize(net: Bounded) -> None:
    """As SwAV does: reads, and then writes."""
    weight = net.prototypes.weight.data.clone()
    net.prototypes.weight.copy_(F.normalize(weight, dim=1))


def tie(net: Bounded) -> None:
    net.blocks[0].linear.weight.copy_(net.blocks[2].linear.weight)  # type: ignore[union-attr,operator]


def clip(net: Bounded) -> None:
    for parameter in net.parameters():
        parameter.data.clamp_(-0.2, 0.2)


CHANGES: dict[str, Callable[[Bounded], Any]] = {
    "normalize": normalize,
    "tie": tie,
    "clip": clip,
    "all at once": lambda net: torch._foreach_mul_(list(net.parameters()), 0.9),
    "an item": lambda net: net.prototypes.weight.__setitem__(0, 0.0),
    "data": lambda net: setattr(net.prototypes.weight, "data", F.normalize(net.prototypes.weight.data, dim=1)),
}


class Bounded(Chain):
    """Changes weights when some layers have been called, and others not.

    Args:
        change: does that.
        at: before which block.
    """

    def __init__(self, change: str, at: int) -> None:
        super().__init__(Block)
        self.prototypes = nn.Linear(WIDTH, 6, bias=False)
        self.change, self.at = torch.no_grad()(CHANGES[change]), at

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == self.at:
                self.change(self)
            x = block(x)
        return self.prototypes(x).log_softmax(-1).pow(2).mean()


@pytest.mark.one_after_the_other
@pytest.mark.parametrize(
    ("change", "at", "num_microbatches", "devices"),
    combined(
        [*((change, 0) for change in CHANGES), ("normalize", 2), ("data", 1)],
        [(1, 1), (4, 1), (2, 2)],
    ),
)
def test_a_step_may_change_weights_of_layers_that_it_has_not_called(
    change: str, at: int, num_microbatches: int, devices: int
) -> None:
    """That was refused."""
    assert_same_training(
        Net(Bounded(change, at)),
        torch.randn(40, WIDTH),
        device_memory=room("16KiB") if devices == 1 else None,
        num_microbatches=num_microbatches,
        devices=devices,
    )


@pytest.mark.one_after_the_other
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_step_may_change_weights_while_batches_accumulate(num_microbatches: int) -> None:
    """That was refused from the second batch on: the graphs of all microbatches waited, to be added to what was there."""
    assert_same_training(
        Net(Bounded("normalize", 2)),
        torch.randn(48, WIDTH),
        device_memory=room("16KiB"),
        num_microbatches=num_microbatches,
        accumulate_grad_batches=3,
    )


class Constrained(Chain):
    """Each layer has its constraint before it is called."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with torch.no_grad():
                block.linear.weight.copy_(torch.renorm(block.linear.weight, 2, 0, 0.5))
            x = block(x)
        return x.pow(2).mean()


@pytest.mark.one_after_the_other
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_each_layer_may_be_constrained_before_its_call(num_microbatches: int) -> None:
    assert_same_training(
        Net(Constrained(Block)),
        torch.randn(40, WIDTH),
        device_memory=room("16KiB"),
        num_microbatches=num_microbatches,
    )


@pytest.mark.parametrize(("change", "at"), [("tie", 1), ("clip", 2)])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_weights_of_layers_that_it_has_called_are_not_changed(change: str, at: int, num_microbatches: int) -> None:
    """Their recompute would find others."""
    strategy = HarmonyStrategy(device_memory=room("16KiB"), num_microbatches=num_microbatches, profile_cache=False)
    with pytest.raises(UnsupportedModelError, match=r"'net\.blocks\.0\.linear.*is changed inside the step"):
        train_harmony(Net(Bounded(change, at)), torch.randn(40, WIDTH), strategy, 8, with_gradients=False)

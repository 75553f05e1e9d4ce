"""A block of the model to which a list, a dict or an object refers, too, as code for explanations and hooks does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support import nets
from support.same_training import Net, assert_same_training, room
from support.sampling import combined

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Scaled(nets.Block):
    """With a parameter of its own, which no module within it has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * super().forward(x)


class Unregistered:
    """Calls what it has."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, x: Tensor) -> Any:
        return self.block(x)


class Slotted:
    __slots__ = ("block",)

    def __init__(self, block: nn.Module) -> None:
        self.block = block


HOLDS: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda blocks: [blocks[-1]],
    "tuple": lambda blocks: (blocks[-1],),
    "dict": lambda blocks: {"last": {"block": blocks[-1]}},
    "deque": deque,
    "names": lambda blocks: [[name, block] for name, block in enumerate(blocks)],
    "object": lambda blocks: SimpleNamespace(block=blocks[-1]),
    "slot": lambda blocks: Slotted(blocks[-1]),
    "method": lambda blocks: blocks[-1].forward,
}


class Held(nets.Language):
    """The reference comes before the block is registered, and after it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        del self.blocks
        blocks = [Scaled() for _ in range(4)]
        self.before = HOLDS[how](blocks)
        self.blocks = nn.ModuleList(blocks)
        self.after = HOLDS[how](blocks)


class Follows(nets.Language):
    """Each block has the next one in a list: no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        for one, other in zip(self.blocks, self.blocks[1:], strict=False):
            one.following = [other]  # type: ignore[assignment]


class CallsWhatItHolds(nets.Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.steps = [Unregistered(block) for block in self.blocks]

    def body(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class HoldsAnotherInEachCall(nets.Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.newest: Any = ()

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            self.newest = [block]
            x = block(x)
        return x


NETS: dict[str, Callable[[], nn.Module]] = {
    **{how: lambda how=how: Held(how) for how in HOLDS},  # type: ignore[misc]
    "of another block": Follows,
    "called": CallsWhatItHolds,
    "in each call": HoldsAnotherInEachCall,
}


@pytest.mark.parametrize(("name", "devices"), combined(NETS, [(1,), (2,)]))
def test_a_block_that_is_also_held_elsewhere_trains_with_equal_bits(name: str, devices: int) -> None:
    """Its own parameter was refused to it in the backward: the walk took what torch keeps on it for a dict of the user's.

    Recomputes then put back what was in there between calls of layers, where something stands in for the parameters.
    """
    torch.manual_seed(0)
    assert_same_training(
        Net(NETS[name]()), nets.tokens(), device_memory=room("44KiB"), devices=devices, updates=["just in time"]
    )


class UsesAListOfItsOwn(nets.Block):
    """And a dict, in which it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(nets.WIDTH))
        self.shift = nn.Parameter(torch.zeros(nets.WIDTH))
        self.own = [self.scale, self.shift]
        self.named: dict[str, Any] = {"scale": self.scale, "calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.named["calls"] += 1
        x = super().forward(x * (1 + 0.1 * (self.named["calls"] % 3)))
        return x * self.own[0] * self.named["scale"] + self.own[1]


class HeldList(nets.Language):
    """The list of a block's parameters is held by an object, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(UsesAListOfItsOwn() for _ in range(4))
        self.helper = SimpleNamespace(of_blocks=[block.own for block in self.blocks])


@pytest.mark.devices(1, 2)
def test_a_layer_finds_its_parameters_in_a_list_of_its_own_when_it_runs_again() -> None:
    """A recompute put into such lists what stood there for the parameters while no layer ran."""
    torch.manual_seed(0)
    assert_same_training(Net(HeldList()), nets.tokens(), updates=["just in time"])

"""A layer's code reads what another layer keeps on its modules, which that changes later in the same step."""

from __future__ import annotations

import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_harmony.engine.memory import stash
from lightning_harmony.errors import UnsupportedModelError
from support import nets
from support.same_training import Net, assert_same_training
from support.taking_turns import samples

# How the layer comes to the other one.
WAYS = ("list", "object", "tuple", "method", "weak reference", "partial function", "module around it")
# What that keeps.
KINDS = ("number", "tensor", "entry", "of a part")


class Keeps(nets.Block):
    """Keeps something of what it has computed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.part = kind, nn.Module()
        self.number, self.entries, self.part.number = 1.0, {"mean": 1.0}, 1.0  # type: ignore[assignment]
        self.row = torch.ones(nets.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        mean = x.detach().mean(0)
        if self.kind == "number":
            self.number = 1 + float(mean.mean())
        elif self.kind == "tensor":
            self.row = 1 + mean
        elif self.kind == "tensor in place":
            self.row.mul_(0.9).add_(mean, alpha=0.1)
        elif self.kind == "entry":
            self.entries["mean"] = 1 + float(mean.mean())
        else:
            self.part.number = 1 + float(mean.mean())  # type: ignore[assignment]
        return x

    def kept(self) -> Any:
        return {
            "number": self.number,
            "entry": self.entries["mean"],
            "of a part": self.part.number,
        }.get(self.kind, self.row.mean())


class Looks(nets.Block):
    """Scales by what another layer has kept, earlier in the model than that."""

    def __init__(self, way: str, around: nn.Module) -> None:
        super().__init__()
        self.way = way
        # Out of sight of torch.
        self.ways: dict[str, Any] = {"around": [around]}

    def look_at(self, other: Keeps) -> None:
        self.ways |= {
            "list": [other],
            "object": SimpleNamespace(other=other),
            "tuple": ((other,),),
            "method": other.kept,
            "weak reference": weakref.ref(other),
            "partial function": partial(Keeps.kept, other),
        }
        self.ways = {name: self.ways[name] for name in (self.way, "around") if name in self.ways}

    def forward(self, x: Tensor) -> Tensor:
        if self.way in ("method", "partial function"):
            return super().forward(x * self.ways[self.way]())
        return super().forward(x * self.other().kept())

    def other(self) -> Keeps:
        way = self.ways.get(self.way)
        match self.way:
            case "list":
                found = way[0]
            case "object":
                found = way.other
            case "tuple":
                found = way[0][0]
            case "weak reference":
                found = way()
            case _:
                found = self.ways["around"][0].last
        return found  # type: ignore[no-any-return]


class Pair(nn.Module):
    def __init__(self, kind: str, way: str) -> None:
        super().__init__()
        self.first, self.between, self.last = Looks(way, self), nets.Block(), Keeps(kind)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        # Not before the model was copied.
        if len(self.first.ways) == 1:
            self.first.look_at(self.last)
        return F.mse_loss(self.last(self.between(self.first(x))), y)


def train_as_plain(kind: str, way: str, num_microbatches: int) -> None:
    assert_same_training(
        Net(Pair(kind, way)),
        samples(),
        layers=[Looks, nets.Block, Keeps],
        num_microbatches=num_microbatches,
        updates=["just in time"],
    )


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_finds_what_another_had_kept_when_it_was_called(kind: str, way: str, num_microbatches: int) -> None:
    """When it ran again in the backward, it found what that kept since, and nothing told of it."""
    train_as_plain(kind, way, num_microbatches)


@pytest.mark.cpu
def test_a_tensor_that_is_no_small_one_and_is_changed_in_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stash, "SMALLEST_BYTES", 0)
    with pytest.raises(
        UnsupportedModelError, match=r"'net.last' which was changed in place after the layer was called"
    ):
        train_as_plain("tensor in place", "list", 1)


@pytest.mark.cpu
def test_a_small_tensor_that_is_changed_in_place_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stash, "SMALLEST_BYTES", 1024)
    train_as_plain("tensor in place", "list", 1)

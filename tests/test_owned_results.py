"""What a layer hands out of its weights, in an object or on its modules, outlives their stay on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.layers.owned_results import OwnedResults
from lightning_harmony.engine.model.host_store import lies_in
from lightning_harmony.engine.model.weight_copies import WeightCopies
from lightning_harmony.engine.structures.tree import tensors_of
from support.nets import WIDTH
from support.same_training import Net, assert_same_training, room, trainer_for
from support.sampling import combined

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content


class Prior(nn.Module):
    """A table, of which a row is asked for after other layers have taken its place."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.way = way
        self.kept: list[Any] = []
        self.last: Any = None

    def forward(self) -> Any:
        self.kept.clear()
        return WAYS[self.way][0](self)


WAYS: Mapping[str, tuple[Callable[[Prior], Any], Callable[[Prior, Any], Tensor]]] = {
    "a view in an object": (lambda prior: Box(prior.table[:3]), lambda prior, found: found.content[0]),
    "the weight in an object": (lambda prior: Box(prior.table), lambda prior, found: found.content[0]),
    "deep in an object": (lambda prior: Box({"rows": [prior.table[0]]}), lambda prior, found: found.content["rows"][0]),
    "a distribution": (lambda prior: Normal(prior.table[0], 1.0), lambda prior, found: found.mean),
    "an attribute": (lambda prior: setattr(prior, "last", prior.table[0]), lambda prior, found: prior.last),
    "a list": (lambda prior: prior.kept.append((prior.table[0],)), lambda prior, found: prior.kept[0][0]),
}


class Matched(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.prior = Prior(way)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        found = self.prior()
        x = self.layers(x)
        return (x - WAYS[self.prior.way][1](self.prior, found)).pow(2).mean()


class Predicting(Net):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss


@pytest.mark.parametrize(
    ("way", "memory", "devices"), combined(WAYS, [(None, 2), ("12KiB", 1), ("12KiB", 2), (None, 1)])
)
def test_a_frozen_weight_is_what_it_was(way: str, memory: str | None, devices: int) -> None:
    # It was what lay in its place when it was read.
    torch.manual_seed(0)
    module = Net(Matched(way))
    module.net.prior.requires_grad_(False)  # type: ignore[operator, union-attr]
    samples = torch.randn(24, WIDTH)
    layers = [nn.Linear, Prior]
    assert_same_training(module, samples, device_memory=room(memory), devices=devices, layers=layers)


@pytest.mark.parametrize(("way", "memory"), combined(WAYS, [(None,), ("12KiB",)]))
def test_a_prediction_finds_weights_as_they_are(way: str, memory: str | None) -> None:
    torch.manual_seed(0)
    module, loader = Predicting(Matched(way)), DataLoader(torch.randn(24, WIDTH), batch_size=8)
    ours = HarmonyStrategy(room(memory), num_microbatches=1, layers=[nn.Linear, Prior])
    plain, found = (trainer_for(s, 1, []).predict(copy.deepcopy(module), loader) for s in ("auto", ours))
    assert torch.equal(torch.stack(plain), torch.stack(found))


# ---- by itself ----------------------------------------------------------------------------------------------------------

WEIGHTS = torch.zeros(64, dtype=torch.uint8)


def weight() -> Tensor:
    """A view of the weights, which the memory of others will take the place of."""
    return WEIGHTS.view(torch.float32)[2:6]


def in_no_parameter() -> Any:
    """A residency of weights that are no parameters."""
    return SimpleNamespace(weights=WEIGHTS, device=VirtualDevice(None), parameter_at=lambda tensor: None)


@pytest.mark.parametrize(
    "make",
    [lambda t: t, lambda t: (t, 3), lambda t: {"a": [t, t]}, lambda t: t.requires_grad_(), lambda t: t.view(2, 2).mT],
    ids=["it", "a tuple", "a dict", "with a gradient", "a view"],
)
def test_what_lies_in_weights_is_copied(make: Any) -> None:
    given = make(weight())
    owned = OwnedResults(in_no_parameter(), WeightCopies("layer")).value(given)
    (before, *_), (tensor, *more) = tensors_of(given), tensors_of(owned)
    assert lies_in(before, WEIGHTS)
    assert not lies_in(tensor, WEIGHTS)
    assert torch.equal(tensor, before)
    assert all(not lies_in(each, WEIGHTS) for each in more)
    assert tensor.requires_grad == before.requires_grad


def test_what_has_other_memory_is_returned_itself() -> None:
    value = {"a": [torch.ones(2), None]}
    assert OwnedResults(in_no_parameter(), WeightCopies("layer")).value(value) is value

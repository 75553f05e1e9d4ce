"""Tensors of the user's own classes, and attributes on tensors: layers see them, and so does the code between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.nets import WIDTH
from support.same_training import Net, assert_same_training, room
from support.sampling import combined

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")

# Rows of a sample: what a layer takes is large enough for the stash, from which it comes back as any tensor.
ROWS = 16


class Tagged(Tensor):
    """A class that only Python sees."""


class Labelled(Tensor):
    """One that keeps what is set on it by methods of its own, which fail where it is not there."""

    labels: list[str]

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        copy: Any = super().clone(*args, **kwargs)
        copy.labels = list(self.labels)
        return copy

    def detach(self) -> Any:
        copy: Any = super().detach()
        copy.labels = list(self.labels)
        return copy

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        tensor: Any = super().requires_grad_(requires_grad)
        tensor.labels = list(self.labels)
        return tensor


def set_on(tensor: Tensor, **attributes: Any) -> Tensor:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


class Seeing(nn.Module):
    """Computes by what it sees of its input, and leaves something to see on its output, and on its input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Any) -> Tensor:
        scale = getattr(x, "scale", 1.0) * (2.0 if isinstance(x, Tagged) else 1.0) + len(getattr(x, "labels", ()))
        x.was_seen = True
        y = self.linear(x * scale).tanh()
        return KINDS[self.kind](y)


KINDS: Mapping[str, Any] = {
    "a number": lambda x: set_on(x, scale=0.5),
    "a tensor": lambda x: set_on(x, scale=torch.full((WIDTH,), 0.5, device=x.device)),
    "a class": lambda x: x.as_subclass(Tagged),
    "a class and a number": lambda x: set_on(x.as_subclass(Tagged), scale=0.3),
    "methods of its own": lambda x: set_on(x.as_subclass(Labelled), labels=["a", "b"]),
}


class Chain(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Seeing(kind) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = KINDS[self.kind](x[:, None] * torch.linspace(0.1, 1.0, ROWS, device=x.device)[:, None])
        for layer in self.layers:
            given, x = x, layer(x)
            # What it was of the input, and what is to be seen of the output.
            x = KINDS[self.kind](x * 0.9) if given.was_seen else x  # type: ignore[attr-defined]
        return x.as_subclass(Tensor).pow(2).mean()


@pytest.mark.parametrize(
    ("kind", "memory", "devices"), combined(KINDS, [("48KiB", 1), (None, 2), ("48KiB", 2), (None, 1)])
)
def test_layers_compute_by_what_they_see(kind: str, memory: str | None, devices: int) -> None:
    """Attributes reached no layer in training, and a class none that was run again: gradients were silently wrong."""
    torch.manual_seed(0)
    module = Net(Chain(kind))
    assert_same_training(
        module,
        torch.randn(24, WIDTH),
        device_memory=room(memory),
        devices=devices,
        layers=[Seeing],
    )


class Attentive(nn.Module):
    """Leaves what came of its weights on what it returns, for whoever wants to see it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return set_on(self.linear(x), weight=self.linear.weight[:2], hidden=self.linear(x).exp())


class Reading(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers, self.name = nn.ModuleList(Attentive() for _ in range(5)), name

    def forward(self, x: Any) -> Tensor:
        first = None
        for layer in self.layers:
            x = layer(x)
            first = x if first is None else first
        found: Tensor = getattr(first, self.name)
        return (x - (found.detach() if self.name == "weight" else found).mean()).pow(2).mean()


@pytest.mark.parametrize("memory", [None, "16KiB"])
def test_a_frozen_weight_on_an_output_outlives_its_stay(memory: str | None) -> None:
    torch.manual_seed(0)
    module = Net(Reading("weight"))
    module.net.layers[0].requires_grad_(False)  # type: ignore[index, operator, union-attr]
    assert_same_training(module, torch.randn(24, WIDTH), device_memory=room(memory), layers=[Attentive])


@pytest.mark.parametrize("memory", [None, "16KiB"])
def test_a_gradient_goes_through_an_attribute_of_an_output(memory: str | None) -> None:
    torch.manual_seed(0)
    assert_same_training(Net(Reading("hidden")), torch.randn(24, WIDTH), device_memory=room(memory), layers=[Attentive])


class Weighted(nn.Module):
    """The loss of samples whose weights are an attribute of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Any) -> Tensor:
        return (self.layers(x).pow(2).mean(1) * x.weights).mean()


class Weighing(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return set_on(batch, weights=batch[:, 0].abs())


def test_microbatches_have_the_attributes_of_their_batch_and_their_own_rows_of_them() -> None:
    torch.manual_seed(0)
    assert_same_training(Weighing(Weighted()), torch.randn(24, WIDTH))

"""Frozen weights whose values are in tensors of their own (``__tensor_flatten__``) are swapped as those."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from lightning_harmony.engine.structures.parts import num_bytes_of, parts_of
from support.composed import Composed, Lookup, Nested, Overlapping, Packed, Views
from support.same_training import Net, assert_same_training, room, train_harmony, trainer_for

KINDS: list[type[Any]] = [Packed, Nested, Views, Overlapping, Lookup]
SIZE = 64
SAMPLES = torch.randn(16, SIZE, generator=torch.Generator().manual_seed(1))


def frozen(kind: type[Any]) -> nn.Parameter:
    return nn.Parameter(kind.of(torch.randn(SIZE, SIZE) / 8), requires_grad=False)


def base(kind: type[Any]) -> nn.Linear:
    linear = nn.Linear(SIZE, SIZE).requires_grad_(False)
    linear.weight = frozen(kind)
    return linear


class Adapted(nn.Module):
    """A frozen weight and a trained product of two small ones."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(SIZE, 4, bias=False), nn.Linear(4, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) + self.up(self.down(x))


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()  # type: ignore[no-any-return]


def stack(kind: type[Any]) -> nn.Module:
    return Stack(*[Adapted(base(kind)) for _ in range(4)])


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("device_memory", [None, "80KiB"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_beside_a_composed_weight_train_with_equal_bits(kind: type[Any], device_memory: str | None) -> None:
    assert_same_training(Net(stack(kind)), SAMPLES, device_memory=room(device_memory))

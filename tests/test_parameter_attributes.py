"""Layers find on their weights the class and the attributes that the user's parameters have."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.estimating.estimation import estimate
from lightning_harmony.plan.values.machine import H200
from support.same_training import Net, assert_same_training


class Scaled(nn.Linear):
    """Reads an attribute of its weight with a default, as muP's readout does: where it is lacking, nothing fails."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.weight.multiplier = 0.5  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * getattr(self.weight, "multiplier", 1.0), self.bias)


class Packed(nn.Parameter):
    """Four bits an element, two in a byte, and what it takes to read them, as a parameter of bitsandbytes."""

    state: Any

    @staticmethod
    def of(values: Tensor) -> Packed:
        scale = values.abs().amax(1, keepdim=True) / 7
        codes = (values / scale).round().to(torch.int8) + 8
        packed = (codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8)
        parameter = Tensor._make_subclass(Packed, packed, False)
        parameter.state = SimpleNamespace(scale=scale, shape=values.shape)
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        parameter = memo[id(self)] = Tensor._make_subclass(Packed, self.detach().clone(), False)
        parameter.state = self.state
        return parameter

    def unpacked(self) -> Tensor:
        codes = torch.stack([self.data >> 4, self.data & 15], 2).reshape(self.state.shape)
        return (codes.to(self.state.scale.dtype) - 8) * self.state.scale


class QLoRA(nn.Module):
    """A frozen packed weight and a trained product of two small ones."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = Packed.of(torch.randn(size, size))
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.linear(x, self.weight.unpacked()) / 8 + self.up(self.down(x))


class Offset(nn.Module):
    """Its weight carries a tensor."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size)
        self.weight.center = torch.randn(size)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.weight.center) @ self.weight  # type: ignore[attr-defined]


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.layers(batch) - 1).pow(2).mean()
        return loss


class InGlue(nn.Module):
    """Code between layers reads an attribute of a parameter that no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.gain = nn.Parameter(torch.randn(16))
        self.gain.power = 3  # type: ignore[attr-defined]

    def forward(self, batch: Tensor) -> Tensor:
        power = getattr(self.gain, "power", 1)
        loss: Tensor = (self.layers[1](self.layers[0](batch) * self.gain**power) - 1).pow(2).mean()
        return loss


class Marked(Net):
    """Its copies keep what was set on parameters, which `copy.deepcopy` leaves out."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Marked:
        copied = memo[id(self)] = Marked.__new__(Marked)
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        for own, other in zip(self.parameters(), copied.parameters(), strict=True):
            vars(other).update(vars(own))
        return copied


def trained(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("kind", [Scaled, QLoRA, Offset])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.cpu
def test_attributes_of_weights_reach_the_forward(kind: type[nn.Module], devices: int) -> None:
    torch.manual_seed(0)
    net = Stack(*(kind(16) for _ in range(3)))  # type: ignore[call-arg]
    assert_same_training(Marked(net, trained), torch.randn(32, 16), devices=devices)


def test_attributes_of_parameters_reach_the_code_between_layers() -> None:
    torch.manual_seed(0)
    assert_same_training(Marked(InGlue(), trained), torch.randn(32, 16))


@pytest.mark.cpu
def test_packed_bytes_alone_are_swapped_in() -> None:
    torch.manual_seed(0)
    net = Stack(*(QLoRA(64) for _ in range(3)))
    reports = assert_same_training(Marked(net, trained), torch.randn(32, 64), device_memory="64KiB")
    # Three layers, at most once for the forward and once for the backward; arenas are padded to 512 bytes a weight.
    assert reports[-1].swapped_in_bytes["weights"] <= 2 * 3 * (64 * 32 + 2 * 64 * 2 * 4 + 3 * 512)


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [Scaled, QLoRA, Offset])
def test_estimates_find_the_class_and_the_attributes_of_weights(kind: type[nn.Module]) -> None:
    net = Stack(*(kind(64) for _ in range(3)))  # type: ignore[call-arg]
    machine = replace(H200, host_bytes=2**40, device_bytes=None, library_bytes=0)
    batch = torch.empty(8, 64, device="meta")
    outlook = estimate(Marked(net, trained), batch, device_memory="80KiB", num_microbatches=4, machine=machine).outlook
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    assert weights <= outlook.host.weight_bytes <= weights + 3 * 3 * 512

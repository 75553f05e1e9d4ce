"""Layers whose autograd functions keep weights on their context, beside what autograd saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.cuda_device import CudaDevice
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from support import nets
from support.adapters import Stack
from support.same_training import Net, assert_same_training, root


class Product(torch.autograd.Function):
    """A product that keeps its weight on the context, as those of packages for quantized weights do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        return gradient @ ctx.weight, gradient.t() @ ctx.x if ctx.needs_input_grad[1] else None


class InAnObject(torch.autograd.Function):
    """The same, in an object."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.kept = {"factors": (x, weight.detach().view(-1))}
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, flat = ctx.kept["factors"]
        weight = flat.view(gradient.shape[-1], -1)
        return gradient @ weight, gradient.t() @ x if ctx.needs_input_grad[1] else None


class Layer(nn.Module):
    def __init__(self, function: type[torch.autograd.Function], *, frozen: bool) -> None:
        super().__init__()
        self.function = function
        self.base = nn.Linear(8, 8, bias=False).requires_grad_(not frozen)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.function.apply(x, self.base.weight)))  # type: ignore[no-untyped-call]


class AloneAtTheEnd(Layer):
    """The first node that a backward comes to has saved nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(torch.tanh(self.out(x)), self.base.weight)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("kind", [Layer, AloneAtTheEnd])
@pytest.mark.parametrize("function", [Product, InAnObject])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_weights_that_a_function_keeps_on_its_context_are_those_of_its_forward(
    kind: type[Layer], function: type[torch.autograd.Function], frozen: bool
) -> None:
    net = Stack(*[kind(function, frozen=frozen) for _ in range(4)])
    assert_same_training(Net(net), torch.randn(24, 8))


def test_ordinary_layers_keep_no_weights_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    device = VirtualDevice if root().type == "cpu" else CudaDevice
    free = device.free

    def noting(self: Any, buffer: Tensor, uses: Any, *, is_kept: bool = False) -> None:
        kept.append(is_kept)
        free(self, buffer, uses, is_kept=is_kept)

    monkeypatch.setattr(device, "free", noting)
    assert_same_training(Net(nets.Rich()), nets.tokens(16), device_memory="40KiB")
    assert_same_training(Net(nets.Language()), nets.tokens(16), precision="bf16-mixed")
    assert kept
    assert not any(kept)

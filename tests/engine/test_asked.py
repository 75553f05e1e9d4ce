"""Whose gradients a backward is asked for is seen before anything is summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.asked import anchored, is_asked_for
from lightning_harmony.engine.layer import SwappedLayer
from lightning_harmony.errors import UnsupportedModelError


class Probe(torch.autograd.Function):
    """Notes what it finds out in its backward."""

    @staticmethod
    def forward(ctx: Any, found: list[bool], anchor: Tensor, x: Tensor) -> Tensor:
        ctx.found = found
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        ctx.found.append(is_asked_for(ctx.next_functions[0][0], "model.layer"))
        return None, None, gradient.expand(3)


def probed(module: nn.Module) -> tuple[Tensor, Tensor, list[bool]]:
    layer = SwappedLayer(0, "model.layer", module, list(module.parameters()))
    x, found = torch.ones(3, requires_grad=True), list[bool]()
    return Probe.apply(found, anchored(torch.zeros((), requires_grad=True), layer), x), x, found


def test_a_backward_asks_for_all() -> None:
    module = nn.Linear(3, 3)
    module.bias.requires_grad_(False)
    loss, x, found = probed(module)
    loss.backward()
    assert found == [True]
    assert module.weight.grad is None
    assert x.grad is not None


def test_gradients_of_inputs_ask_for_none() -> None:
    loss, x, found = probed(nn.Linear(3, 3))
    torch.autograd.grad(loss, x)
    assert found == [False]


def test_a_backward_for_whole_layers_asks_for_theirs() -> None:
    module, other = nn.Linear(3, 3), nn.Linear(3, 3)
    loss, _, found = probed(module)
    (rest, _, found_other) = probed(other)
    (loss + rest).backward(inputs=list(module.parameters()))
    assert (found, found_other) == ([True], [])


def test_hooks_of_parameters_hear_of_no_gradient() -> None:
    module = nn.Linear(3, 3)
    heard: list[Any] = []
    module.weight.register_hook(heard.append)
    loss, _, found = probed(module)
    loss.backward()
    assert (found, heard) == ([True], [])


def test_gradients_of_parameters_that_would_have_to_be_returned_are_refused() -> None:
    """They used to come back as None, or as zeros, where ``allow_unused`` was set."""
    module = nn.Linear(3, 3)
    loss, _, _ = probed(module)
    with pytest.raises(UnsupportedModelError, match=r"'model\.layer'.* read p\.grad"):
        torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)


def test_gradients_of_some_parameters_of_a_layer_are_refused() -> None:
    module = nn.Linear(3, 3)
    loss, _, _ = probed(module)
    with pytest.raises(UnsupportedModelError, match="whole layers"):
        loss.backward(inputs=[module.weight])

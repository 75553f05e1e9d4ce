"""Whose gradients a backward is asked for is seen before anything is summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.updates.requested_gradients import anchored, requested_gradients
from lightning_harmony.errors import UnsupportedModelError


class Probe(torch.autograd.Function):
    """Notes what it finds out in its backward."""

    @staticmethod
    def forward(ctx: Any, found: list[set[nn.Parameter]], module: nn.Module, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.found, ctx.module = found, module
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        ctx.found.append(
            set(requested_gradients(ctx.next_functions[0][0], list(ctx.module.parameters()), "layer 'model.layer'"))
        )
        return None, None, None, gradient.expand(3)


def probed(module: nn.Module) -> tuple[Tensor, Tensor, list[set[nn.Parameter]]]:
    x, found = torch.ones(3, requires_grad=True), list[set[nn.Parameter]]()
    return Probe.apply(found, module, anchored(torch.zeros((), requires_grad=True), module.parameters()), x), x, found


def test_a_backward_asks_for_all() -> None:
    module = nn.Linear(3, 3)
    module.bias.requires_grad_(False)
    loss, x, found = probed(module)
    loss.backward()
    assert found == [set(module.parameters())]
    assert module.weight.grad is None
    assert x.grad is not None


def test_gradients_of_inputs_ask_for_none() -> None:
    loss, x, found = probed(nn.Linear(3, 3))
    torch.autograd.grad(loss, x)
    assert found == [set()]


def test_a_backward_for_some_parameters_asks_for_those() -> None:
    module, other = nn.Linear(3, 3), nn.Linear(3, 3)
    loss, _, found = probed(module)
    (rest, _, found_other) = probed(other)
    (loss + rest).backward(inputs=[module.weight])
    assert (found, found_other) == ([{module.weight}], [])


def test_hooks_of_parameters_hear_of_no_gradient() -> None:
    module = nn.Linear(3, 3)
    heard: list[Any] = []
    module.weight.register_hook(heard.append)
    loss, _, found = probed(module)
    loss.backward()
    assert (found, heard) == ([set(module.parameters())], [])


def test_some_parameters_are_refused_where_others_have_hooks() -> None:
    """Those with a hook used to get gradients, too."""
    module = nn.Linear(3, 3)
    module.weight.register_hook(lambda gradient: None)
    loss, _, _ = probed(module)
    with pytest.raises(UnsupportedModelError, match=r"'model\.layer'.*register_hook.*without inputs"):
        loss.backward(inputs=[module.bias])


def test_gradients_of_parameters_that_would_have_to_be_returned_are_refused() -> None:
    """They used to come back as None, or as zeros, where ``allow_unused`` was set."""
    module = nn.Linear(3, 3)
    loss, _, _ = probed(module)
    with pytest.raises(UnsupportedModelError, match=r"'model\.layer'.* read p\.grad"):
        torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)


def test_gradients_of_all_leaves_that_a_graph_has_are_refused() -> None:
    """As code finds them that walks through the graph: torch said that a leaf node was passed to one of its own functions."""
    loss, _, _ = probed(nn.Linear(3, 3))
    leaves, nodes = list[Tensor](), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        leaves += [node.variable] if hasattr(node, "variable") else []
        nodes += [following for following, _ in getattr(node, "next_functions", ()) if following is not None]
    with pytest.raises(UnsupportedModelError, match=r"'model\.layer'.* read p\.grad"):
        torch.autograd.grad(loss, leaves, allow_unused=True)

"""Gradients that somebody asks for by parameter: while layers are swapped, they come to each parameter's ``grad`` alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_harmony.engine.layer import SwappedLayer
from lightning_harmony.errors import UnsupportedModelError


def anchored(anchor: Tensor, layer: SwappedLayer) -> Tensor:
    """An anchor with the parameters of a layer behind it, so that the engine knows who leads to them.

    Those with hooks are left out: the engine would call these, too, with no gradient.
    """
    shown = [p for p in layer.parameters if p.requires_grad and not p._backward_hooks]
    result: Tensor = _Anchor.apply(anchor, *shown)
    return result


def is_asked_for(anchor: Any, name: str) -> bool:
    """Whether the running backward sums the gradients of the parameters behind an anchor, a node of the graph.

    Raises:
        UnsupportedModelError: if it wants those of some of them, or to have them returned.
    """
    if anchor is None or not torch._C._will_engine_execute_node(anchor):
        return False
    if not all(_sums(node) for node, _ in anchor.next_functions[1:] if node is not None):
        raise UnsupportedModelError(
            f"gradients are asked for by parameters of layer {name!r}, as by torch.autograd.grad(loss, parameters), but "
            "come to p.grad alone while layers are swapped: call backward() and read p.grad, or ask backward(inputs=...) "
            "for those of whole layers"
        )
    return True


def _sums(parameter: Any) -> bool:
    """Whether the running backward adds to the ``grad`` of a parameter, a leaf of the graph."""
    try:
        executes: bool = torch._C._will_engine_execute_node(parameter)
    except RuntimeError:
        # As torch.autograd.grad returns it, the engine does not say.
        return False
    return executes


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *nothing: Any) -> tuple[None, ...]:
        nobody: tuple[None, ...] = (None,) * (1 + ctx.num_parameters)
        return nobody

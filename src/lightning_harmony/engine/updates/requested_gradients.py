"""Which parameters the running backward accumulates into. While layers are swapped, it can return gradients of none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_harmony.errors import UnsupportedModelError


def anchored(anchor: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """An anchor with parameters behind it, so that the engine knows what leads to them.

    Those with hooks are left out: the engine would call these, too, with no gradient.
    """
    shown = [p for p in parameters if p.requires_grad and not p._backward_hooks]
    result: Tensor = _Anchor.apply(anchor, *shown)
    return result


def requested_gradients(anchor: Any, parameters: Iterable[nn.Parameter], what: str) -> frozenset[nn.Parameter]:
    """Those parameters to whose ``grad`` the running backward adds.

    Args:
        anchor: the node of an anchor, behind which the parameters may be.
        parameters: all that could be asked for.
        what: whose parameters they are.

    Raises:
        UnsupportedModelError: if the backward is to return gradients of any of them, or it asks for some, and nobody knows
            which, as others have hooks.
    """
    if anchor is None or not _executes(anchor, what):
        return frozenset()
    leaf = anchor.next_functions[0][0] if anchor.next_functions else anchor
    if _executes(leaf, what):
        # Nobody asks for the anchor itself: a backward that comes to it goes everywhere.
        return frozenset(parameters)
    return frozenset(parameter for parameter in parameters if parameter.requires_grad and _sums(parameter, what))


def _sums(parameter: nn.Parameter, what: str) -> bool:
    if parameter._backward_hooks:
        raise UnsupportedModelError(
            f"backward(inputs=...) asks for some parameters of {what}, of which one has a hook (register_hook), so that "
            "nobody knows whether it is asked for, too: call backward() without inputs, or change its gradient afterwards"
        )
    return _executes(get_gradient_edge(parameter).node, what)


def _executes(node: Any, what: str) -> bool:
    try:
        executes: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        # The engine does not say, of a leaf whose gradient it is to return. An anchor is one, too, to code that looks for all
        # leaves of a graph.
        raise UnsupportedModelError(
            f"gradients are asked for by parameters of {what}, as by torch.autograd.grad(loss, parameters), but come to "
            "p.grad alone while layers are swapped: call backward(), or backward(inputs=parameters), and read p.grad"
        ) from error
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

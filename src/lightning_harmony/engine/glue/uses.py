"""Uses of a parameter by the code between layers, in the graph of a microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_harmony.engine.glue.runtime import Runtime
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.plan.values.task import Phase


class Token(torch.autograd.Function):
    """Stands for the parameter in the graph of one microbatch: gradients of all uses meet here, in the engine's order."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        layer: SwappedLayer,
        device: torch.device,
        dtype: torch.dtype,
        runtime: Runtime,
    ) -> Tensor:
        """Announce a backward of the parameter's layer. The anchor makes it part of the graph."""
        # Not an argument of its own: autograd would call the hooks that it has.
        (parameter,) = layer.parameters
        ctx.layer, ctx.parameter, ctx.runtime = layer, parameter, runtime
        ctx.use = runtime.expect_backward(layer)
        return torch.zeros((), dtype=dtype, device=device).expand(parameter.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Hand the gradient of all uses over."""
        with ctx.runtime.calling(), ctx.runtime.visit(ctx.layer, Phase.BACKWARD):
            ctx.runtime.accumulate(ctx.layer, ctx.use, [(ctx.parameter, gradient)])
            ctx.runtime.end_backward(ctx.layer)
        return None, None, None, None, None


class Use(torch.autograd.Function):
    """One use of a parameter: the value comes from the device, the gradient goes to the token."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, value: Tensor) -> Tensor:
        """The parameter on the device."""
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient of this use."""
        return gradient, None

"""Plain Lightning's update as harmony's on a GPU machine, on the host and fused: then all else can be compared bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_harmony.engine.updates.fused import FusedGroups


class HostUpdate:
    """Lets an optimizer, of parameters on a GPU, step on the host."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._on_gpu: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []
        self._written: list[Any] = []
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._to_gpu)

    def _begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")

        def compute() -> Any:
            self._to_gpu(optimizer)
            result = closure()
            self._to_host(optimizer)
            return result

        self._to_host(optimizer)
        return (optimizer,), {} if closure is None else {"closure": compute}

    def _to_host(self, optimizer: Optimizer) -> None:
        for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
            data, gradient = parameter.data, parameter.grad
            self._on_gpu.append((parameter, data, gradient))
            _place(parameter, data.cpu(), None if gradient is None else gradient.cpu())
            state = optimizer.state.get(parameter, {})
            state.update({name: value.cpu() for name, value in state.items() if isinstance(value, Tensor)})
        self._written = [group.get("fused") for group in optimizer.param_groups]
        FusedGroups().fuse(optimizer)

    def _to_gpu(self, optimizer: Optimizer, *_: Any) -> None:
        for group, written in zip(optimizer.param_groups, self._written, strict=True):
            group.update({"fused": written} if "fused" in group else {})
        for parameter, data, gradient in self._on_gpu:
            # Others may refer to the memory.
            _place(parameter, data.copy_(parameter.data), gradient)
        self._on_gpu = []


def _place(parameter: nn.Parameter, data: Tensor, gradient: Tensor | None) -> None:
    parameter.grad = None
    parameter.data = data
    parameter.grad = gradient


def clip_grad_by_norm(self: Any, optimizer: Optimizer, clip_val: float) -> None:
    """Lightning's clipping, by the norm that the host makes of the gradients."""
    parameters = [parameter for parameter in self.main_params(optimizer) if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad.cpu() for parameter in parameters])
    nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)


def install(monkeypatch: pytest.MonkeyPatch, tree: str) -> None:
    """Let a Lightning tree, "lightning.pytorch" or "pytorch_lightning", clip by the host's norms, and update on the host."""
    strategy = import_module(f"{tree}.strategies").SingleDeviceStrategy
    setup_optimizers = strategy.setup_optimizers

    def setup(self: Any, trainer: Any) -> None:
        setup_optimizers(self, trainer)
        for optimizer in self.optimizers:
            HostUpdate(optimizer)

    monkeypatch.setattr(strategy, "setup_optimizers", setup)
    precision = import_module(f"{tree}.plugins.precision").Precision
    monkeypatch.setattr(precision, "clip_grad_by_norm", clip_grad_by_norm)

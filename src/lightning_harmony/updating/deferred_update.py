"""The deferred update: Lightning's `optimizer.step` only asks for it, where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.engine.updates.postponed import Clip, by_norm, by_value
from lightning_harmony.engine.updates.update import why_not_separable
from lightning_harmony.updating.update_policy import UpdatePolicy


class DeferredUpdate:
    """Postpones an update, and the clipping before it, until the forward of the next batch.

    Attributes:
        policy: when it may be.
        may_wait: whether this step's update is deferred, and might be postponed.
    """

    def __init__(self, policy: UpdatePolicy, engine: Executor) -> None:
        self.policy = policy
        self.may_wait = False
        self._engine = engine
        self._clip: Clip | None = None

    @contextmanager
    def around(self, optimizer: Optimizer) -> Iterator[None]:
        """The context of all that Lightning does for a step of an optimizer."""
        if not self.policy.trainer.lightning_module.automatic_optimization or why_not_separable(optimizer) is not None:
            yield
            return
        is_deferred = self.policy.choose()[0] == "deferred"
        with self._clipping_late(), self._stepping_late(optimizer) if is_deferred else nullcontext():
            yield

    @contextmanager
    def _stepping_late(self, optimizer: Optimizer) -> Iterator[None]:
        """Within the context, the optimizer's step only asks for the update, where nothing looks at parameters soon."""
        step = optimizer.step

        def ask(closure: Callable[[], Any] | None = None) -> Any:
            with torch.enable_grad():
                result = None if closure is None else closure()
            if self.policy.why_at_once() is None:
                self._engine.postpone_update(optimizer, self._clip)
                # Schedulers look whether a step came before theirs.
                optimizer._opt_called = True  # type: ignore[attr-defined]
            else:
                step()
            return result

        ask.asks_for = step  # type: ignore[attr-defined]
        self.may_wait, self._clip = True, None
        try:
            with _replaced(optimizer, "step", ask):
                yield
        finally:
            self.may_wait, self._clip = False, None

    @contextmanager
    def _clipping_late(self) -> Iterator[None]:
        """Within the context, Lightning's clipping uses the norms that are known, and waits for the update."""
        if not self.policy.clips_late():
            yield
            return

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            clip(optimizer, by_norm(clip_val, self._engine.updater.norms.total(_parameters(optimizer))))

        def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
            clip(optimizer, by_value(clip_val))

        def clip(optimizer: Optimizer, how: Clip | None) -> None:
            parameters = [parameter for parameter in _parameters(optimizer) if parameter.grad is not None]
            if self.may_wait and self.policy.why_at_once() is None:
                self._clip = how
            elif how is not None and parameters:
                how(parameters)

        plugin = self.policy.trainer.precision_plugin
        with (
            _replaced(plugin, "clip_grad_by_norm", clip_grad_by_norm),
            _replaced(plugin, "clip_grad_by_value", clip_grad_by_value),
        ):
            yield


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the context, an instance has another method."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

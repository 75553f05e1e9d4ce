"""The deferred update: `optimizer.step` asks for it, and only waits for it where somebody may look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_harmony.engine.nodes.division import Need, parameters_of
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.engine.structures.containers import attribute_replaced
from lightning_harmony.engine.updates.optimizer_twin import Clip, by_norm, by_value
from lightning_harmony.engine.updates.separable_optimizers import watcher_of
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.updating.hooks import end_of_batches
from lightning_harmony.updating.update_policy import UpdatePolicy


class DeferredUpdate:
    """Makes an optimizer's step on the device, and postpones it until the forward of the next batch where nobody can tell.

    Attributes:
        policy: when it may be postponed.
        may_wait: whether this step's update is deferred, and might be postponed.
    """

    def __init__(self, policy: UpdatePolicy, engine: Executor) -> None:
        self.policy = policy
        self.may_wait = False
        # Whether the backward of this step may have updated all just in time.
        self._may_be_made = False
        self._engine = engine
        self._clip: Clip | None = None
        self._has_warned = False

    @contextmanager
    def around(self, optimizer: Optimizer) -> Iterator[None]:
        """The context of all that Lightning does for a step of an optimizer."""
        if not self.policy.trainer.lightning_module.automatic_optimization:
            with self.by_hand([optimizer]):
                yield
            return
        self.may_wait, self._clip = self.policy.choose()[0] == "deferred", None
        self._may_be_made = not self.may_wait
        if self.policy.why_whole(optimizer) is not None:
            self.may_wait = False
        # Before the step counts.
        another_follows = end_of_batches(self.policy.trainer) is None
        try:
            with self._clipping(), self._stepping(optimizer):
                yield
        except BaseException:
            # Code that hears of the error may look at parameters.
            self._engine.updater.postponed.drain()
            raise
        finally:
            self.may_wait, self._may_be_made, self._clip = False, False, None
        if another_follows or self._engine.updater.postponed.goes_on:
            self.policy.lookout.keep(self.policy.trainer.lightning_module.parameters())

    def follow(self, policy: UpdatePolicy, engine: Executor) -> DeferredUpdate:
        """Another engine runs the step that this is around, and those that follow; the same update."""
        self.policy, self._engine = policy, engine
        return self

    @contextmanager
    def by_hand(self, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """The context of a training_step that steps optimizers itself."""
        with ExitStack() as stack:
            stack.enter_context(self._clipping())
            for optimizer in optimizers:
                stack.enter_context(self._stepping(optimizer))
            yield

    @contextmanager
    def _stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Within the context, the optimizer's step asks for the update, and waits for it if somebody may look soon."""
        step = optimizer.step
        if hasattr(step, "asks_for"):
            yield
            return

        def make(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            with torch.enable_grad():
                result = None if closure is None else closure()
            if not self._is_made(optimizer):
                self._refuse_division(optimizer)
                waits = not self.may_wait or self.policy.why_at_once() is not None
                self._engine.updater.update_all(
                    optimizer,
                    self._engine.parameters_in_order(),
                    self._clip,
                    waits=waits,
                    state_may_stay=self.policy.hides_state(),
                )
            # Schedulers look whether a step came before theirs.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return result

        heard = Optimizer.profile_hook_step(make)

        def ask(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if self.policy.why_whole(optimizer) is not None:
                result = self._step_as_a_whole(optimizer, step, closure)
            else:
                result = heard(optimizer) if closure is None else heard(optimizer, closure=closure)
            self._engine.end_update()
            return result

        with _replaced_step(optimizer, ask):
            yield

    def _is_made(self, optimizer: Optimizer) -> bool:
        """Whether the backward has updated all just in time. A step's code can make updates deferred while it runs."""
        is_late = not self._may_be_made or self.policy.choose()[0] == "deferred"
        return not is_late and all(parameter.grad is None for parameter in parameters_of(optimizer))

    def _step_as_a_whole(
        self, optimizer: Optimizer, step: Callable[..., Any], closure: Callable[[], Any] | None
    ) -> Any:
        self._engine.updater.postponed.finish()
        streamed = self._engine.updater.streamed
        whole = streamed.whole_step
        if whole is None:
            return step() if closure is None else step(closure)
        result = whole.make(optimizer, step, closure)
        if whole.why_on_host is not None and streamed.spares_the_bus and not self._has_warned:
            self._has_warned = True
            self.policy.tree.warn(
                f"{type(optimizer).__name__} steps as a whole, and on the host, where the last bit can differ: "
                f"{whole.why_on_host}. One of torch's optimizers may step on the GPU"
            )
        return result

    def _refuse_division(self, optimizer: Optimizer) -> None:
        """Refuse a step that somebody sees where this node has a part of the gradients, or of the optimizer's state."""
        division, reason = self.policy.division, watcher_of(optimizer)
        if division is not None and division.is_divided and reason is not None:
            raise UnsupportedModelError(
                f"{reason} since this step's backward, in which several machines have divided its update: let it be so before "
                "the step, or train on one machine"
            )

    @contextmanager
    def _clipping(self) -> Iterator[None]:
        """Within the context, Lightning's clipping uses norms that devices compute, and waits for the update if it may."""
        if not self.policy.lightning_clips():
            yield
            return

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            division = self.policy.division
            needs_norms = division is not None and division.need is Need.OWN_AND_NORMS
            merge = division.exchange.merge if division is not None and needs_norms else None
            total = self._engine.updater.norms.total(parameters_of(optimizer), merge)
            clip(optimizer, by_norm(clip_val, total, [device.torch_device for device in self._engine.devices]))

        def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
            clip(optimizer, by_value(clip_val))

        def clip(optimizer: Optimizer, how: Clip | None) -> None:
            parameters = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
            if self.may_wait and self.policy.clips_late() and self.policy.why_whole(optimizer) is None:
                self._clip = how
            elif how is not None and parameters:
                how(parameters)

        plugin = self.policy.trainer.precision_plugin
        with (
            attribute_replaced(plugin, "clip_grad_by_norm", clip_grad_by_norm),
            attribute_replaced(plugin, "clip_grad_by_value", clip_grad_by_value),
        ):
            yield


@contextmanager
def _replaced_step(optimizer: Optimizer, ask: Any) -> Iterator[None]:
    """Within the context, an optimizer has another step, which tells the one that it stands for."""
    ask.asks_for = optimizer.step
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        ask._wrapped_by_lr_sched = True
    with attribute_replaced(optimizer, "step", MethodType(ask, optimizer)):
        yield

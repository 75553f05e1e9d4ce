"""Training: a batch runs in microbatches, and their backward when Lightning asks for that of the batch's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.batches.merge import merge_losses, merge_outputs
from lightning_harmony.engine.lanes.rng import stream_seed
from lightning_harmony.engine.memory.opaque import without_caches
from lightning_harmony.engine.model.layer import layer_of_caller
from lightning_harmony.engine.nodes.averaging import Averaging
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.engine.step.turns import Microbatch
from lightning_harmony.engine.updates.optimizer_twin import by_value
from lightning_harmony.engine.updates.requested_gradients import anchored, requested_gradients
from lightning_harmony.engine.updates.update import StepUpdate
from lightning_harmony.errors import CapacityError, UnsupportedModelError
from lightning_harmony.fit.unchanged import UnchangedBatch, UnchangedParameters
from lightning_harmony.fit.user_steps import TrainingStep, before_accumulation, run_without_backward
from lightning_harmony.held.optimizer_readers import OptimizerReaders, scheduler_reader
from lightning_harmony.microbatches.interleaving import Interleaving
from lightning_harmony.microbatches.snapshot import Snapshot
from lightning_harmony.microbatches.split_check import SplitCheck, found
from lightning_harmony.reporting.fit_summary import FitSummary
from lightning_harmony.reporting.step_reports import StepReports
from lightning_harmony.setup import compat
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.setup.refusals import refuse_several_losses
from lightning_harmony.setup.settings import Settings
from lightning_harmony.updating.deferred_update import DeferredUpdate
from lightning_harmony.updating.divided_update import agree_on_update
from lightning_harmony.updating.hooks import end_of_batches
from lightning_harmony.updating.host_budget import HostBudget


@dataclass
class Training:
    """Runs the training_step.

    Attributes:
        deferred: the update that follows the backward, where none runs within it.
    """

    tree: LightningTree
    trainer: Any
    engine: Executor
    settings: Settings
    deferred: DeferredUpdate
    split_check: SplitCheck
    reports: StepReports
    summary: FitSummary

    def __post_init__(self) -> None:
        self._interleaving = Interleaving(self.tree, self.trainer, self.engine)
        self._interleaving.listen()
        of_layers = chain.from_iterable(self.engine.modules_of_layers())
        self._readers = OptimizerReaders(self._interleaving.places, self._module, of_layers)
        self.deferred.policy.default_dtypes = self._interleaving.default_dtypes
        self._budget = HostBudget(self.engine, self.trainer, self.deferred.policy)
        # Where nothing says it, the fewest that fit. Of several devices each has one to run, and one to wait for.
        self._number = 1 if len(self.engine.devices) == 1 else 2 * len(self.engine.devices)
        self.split_check.look_at_model()

    def start(self) -> None:
        """Say what is known before the first step.

        Raises:
            CapacityError: if the host has too little memory.
        """
        runs_alone = self.tree.runs_alone(self._module)
        self._budget.refuse_too_little(runs_alone=runs_alone)
        self.summary.show_start(runs_alone=runs_alone)

    def run(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a batch; the backward runs when that of the result does.

        Args:
            step: runs the user's training_step as it is.
            args: the batch and its number, and perhaps more.
            kwargs: more of the same.
        """
        self.reports.begin(self.engine)
        self.deferred.policy.others_defer = False
        # Again: an optimizer may call the step more than once, and assign to `parameter.data` between.
        self.engine.catch_up()
        self._finish_what_is_read()
        if self.tree.runs_alone(self._module):
            # Each call of a layer brings its weights, and its gradients stay for later.
            with self.engine.outside_of_lanes(), self._interleaving.alone(), self._stepping_by_hand():
                output = step(*args, **kwargs)
            does = "fetches its batches" if self._module.automatic_optimization else "steps its optimizers"
            self._report(1, "deferred", f"the training_step {does} itself")
            return output
        number = self._number
        while True:
            sizes, parts, steps = self._split(args, kwargs)
            before = None
            if self.settings.leaves_number and self.engine.measures(_largest(steps), is_training=True):
                before = Snapshot(self.trainer, self.engine.devices, (args, kwargs))
            try:
                output = self._run_split(sizes, parts, steps)
                break
            except CapacityError:
                # A parameter that the step has changed would be changed once more.
                if before is None or before.has_exchanged() or self.engine.step.changed_parameter is not None:
                    raise
                fewest = self.split_check.fewest(args[0], len(sizes))
                if fewest is None or not fewest.fails():
                    raise
                self._number = fewest.number
            del parts, steps
            left = before.restore()
            self.engine.start_over()
            if left:
                self.tree.warn(f"a batch does not fit, and its step runs again in more microbatches{left}")
        for why, names in groupby(self.engine.recordings.news(), itemgetter(1)):
            layers = [name for name, _ in names]
            more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
            self.tree.info(f"Harmony: no CUDA graph is made of layer {layers[0]!r}{more}: {why}. Results are the same.")
        if self._number != number:
            self.tree.info(found(len(sizes)))
        return output

    def _finish_what_is_read(self) -> None:
        """End the update of the last step if this one's code may read optimizer state."""
        optimizers, policy = self.trainer.optimizers, self.deferred.policy
        reader = self._readers.find(optimizers)
        policy.step_reader = None if reader is None else reader.in_words
        # Who has asked for optimizers in a backward may do so again.
        if reader is not None and reader.runs_in_backward:
            policy.backward_reader = reader.in_words
        if policy.step_reader is None:
            configs = self.trainer.lr_scheduler_configs
            schedulers = [config.scheduler for config in configs if config.interval == "step"]
            policy.step_reader = scheduler_reader(schedulers, optimizers)
        if policy.step_reader is not None:
            self.engine.updater.postponed.finish()
        self.summary.show_late_reader()

    def give_optimizers(self) -> None:
        """The user's code asks for optimizers: their state is that after the last step.

        Raises:
            UnsupportedModelError: in the backward, if updates just in time are changing it.
        """
        self.engine.updater.postponed.finish()
        self.deferred.policy.was_asked = True
        self.deferred.policy.was_asked_between |= not self.engine.step.is_driven
        is_in_backward = torch._C._current_graph_task_id() != -1
        if not is_in_backward and layer_of_caller() is None:
            return
        asks = "code that runs in the backward asks for the optimizers"
        self.deferred.policy.backward_reader = asks
        # The first step changes nothing before its backward is over.
        if is_in_backward and self.engine.updater.is_just_in_time and self.engine.has_succeeded:
            raise UnsupportedModelError(
                f"{asks} for the first time, while updates just in time change their state: "
                'use HarmonyStrategy(update="deferred")'
            )

    def _split(self, args: Any, kwargs: Any) -> tuple[tuple[int, ...], list[Any], list[TrainingStep]]:
        """The samples of each microbatch of a batch, the microbatches, and the steps on them."""
        sizes, parts = self.split_check.split(args, kwargs, self._number)
        step, precision = self._module.training_step, self.trainer.precision_plugin
        return sizes, parts, [TrainingStep(self.engine, precision, step, (part, *args[1:]), kwargs) for part in parts]

    def _run_split(self, sizes: tuple[int, ...], parts: Sequence[Any], steps: Sequence[TrainingStep]) -> Any:
        """Run the microbatches of a batch."""
        weights, batch = self.settings.weights(sizes), UnchangedBatch(parts)
        with self.split_check.explaining(sizes):
            batches = self.trainer.accumulate_grad_batches
            self._forward(steps, [weight / batches for weight in weights], sizes, batch)
        batch.check()
        output = merge_outputs([each.output for each in steps], sizes)
        losses = [each.loss for each in steps if each.loss is not None]
        if len(losses) < len(steps):
            self._abandon()
            return output
        refuse_several_losses(losses)
        loss = merge_losses(losses, weights)
        # The last epoch of stochastic weight averaging has no backward: what it is for, statistics, must reach the host.
        if compat.is_backward_skipped(self.trainer) or not any(each.requires_grad for each in steps):
            self._abandon()
        else:
            parameters = () if self.tree.calls_backward(self.trainer) else self._module.parameters()
            anchor = anchored(torch.zeros((), requires_grad=True), parameters)
            unchanged = UnchangedParameters(self.tree, self.trainer, self.engine.parameters_in_graph())
            loss = DeferredBackward.apply(anchor, loss, partial(self._backward, len(sizes), unchanged))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def after_backward(self) -> None:
        """Once, show the plan, and check the loss if that was asked for."""
        if not self.tree.runs_alone(self._module):
            self.summary.show_plan(takes_turns=self._interleaving.hazard is None)
        self.split_check.after_backward(self._losses_of, self.engine.devices)

    def _losses_of(self, batches: Sequence[Any], like: Any) -> list[Tensor | None]:
        """Run the training_step on some batches, without a backward."""
        module, engine = self._module, self.engine
        steps = [
            TrainingStep(engine, self.trainer.precision_plugin, module.training_step, (batch, *like.rest), like.kwargs)
            for batch in batches
        ]
        engine.notify()
        with without_caches(module):
            microbatches = [Microbatch(step, Fraction(1), None) for step in steps]
            run_without_backward(engine, microbatches, _largest(steps))
        return [step.loss for step in steps]

    def _forward(
        self, steps: Sequence[TrainingStep], weights: Sequence[Fraction], sizes: Sequence[int], batch: UnchangedBatch
    ) -> None:
        batch_number = self.trainer.fit_loop.epoch_loop.total_batch_idx
        seed = torch.initial_seed()
        seeds = [stream_seed(seed, batch_number, number) if len(steps) > 1 else None for number in range(len(steps))]
        microbatches = [Microbatch(*each) for each in zip(steps, weights, seeds, strict=True)]
        num_elements, policy = _largest(steps), self.deferred.policy
        adds = policy.adds_to_earlier()
        predicted = policy.predicted_gradient(adds_to_earlier=adds)

        def forward(interleave: bool) -> None:
            self.engine.forward(
                microbatches,
                num_elements=num_elements,
                predicted_gradient=predicted,
                adds_to_earlier=adds,
                interleave=interleave,
                on_plan=self._budget.limit,
            )
            if not self.engine.step.is_sequential:
                self._budget.check()

        self._budget.limit()
        if len(sizes) > 1 and not self.engine.planner.takes_turns and self._interleaving.hazard is None:
            short = "the device has no room for the activations and gradients of all of them at once"
            self._interleaving.end(short, len(sizes), "use smaller batches, or more memory")
        with without_caches(self._module):
            self._interleaving.run(forward, sizes, batch.parts, batch.shared)

    def _backward(self, num_microbatches: int, unchanged: UnchangedParameters, gradient: Tensor, anchor: Any) -> None:
        """Run the backward of all microbatches; the gradient of the batch's loss has come.

        Args:
            num_microbatches: how many there are.
            unchanged: the parameters that their forward has used.
            gradient: of that loss.
            anchor: the node that knows whose gradients are asked for.
        """
        try:
            unchanged.check()
            whole = before_accumulation(
                gradient, self.deferred.policy.loss_scale(), self.trainer.accumulate_grad_batches
            )
            self._backward_and_report(whole, self._requested(anchor), num_microbatches)
        finally:
            self.engine.step.averaging = None
            self._interleaving.finish()

    def hear_of(self, averaging: Averaging) -> bool:
        """A backward begins whose gradients are averaged over nodes; whether this node will agree on what it needs of them."""
        if self.tree.runs_alone(self._module):
            return False
        self.engine.step.averaging = averaging
        return True

    def _requested(self, anchor: Any) -> frozenset[nn.Parameter] | None:
        """The parameters that the running backward asks for; None for all."""
        parameters = frozenset(self._module.parameters())
        requested = requested_gradients(anchor, parameters, "the module")
        return None if requested == parameters else requested

    def _backward_and_report(
        self, gradient: Tensor, requested: frozenset[nn.Parameter] | None, num_microbatches: int
    ) -> None:
        policy, is_averaged = self.deferred.policy, self.engine.step.averaging is not None
        if is_averaged:
            agree_on_update(policy, may_wait=self.deferred.may_wait)
        update, reason = policy.choose()
        if update == "just-in-time" and self.trainer.world_size > 1 and not is_averaged:
            update, reason = "deferred", "the gradients of this backward are not averaged over nodes"
        if update == "just-in-time" and not self.deferred.may_wait:
            if not self.engine.has_succeeded:
                update, reason = "deferred", "the first step measures, and changes nothing until it has succeeded"
            # Plans are made for steps that another one follows.
            outlast = self.engine.updater.speeds.outlast = policy.why_never_later() is None
            limit = self.trainer.gradient_clip_val
            asked = StepUpdate(
                self.trainer.optimizers[0],
                clip=by_value(limit) if limit else None,
                may_outlast=outlast and end_of_batches(self.trainer) is None,
                state_may_stay=policy.hides_state(),
            )
        else:
            asked = StepUpdate(with_norms=policy.needs_norms())
        self.engine.backward(gradient, asked, requested=requested)
        if self.deferred.may_wait:
            waits = policy.why_at_once()
            reason += f"; before the next batch, as {waits}" if waits else "; under the forward of the next batch"
        self._report(num_microbatches, update, reason)

    def _abandon(self) -> None:
        """No backward will come."""
        self.engine.refuse_changed_weights()
        self.leave()

    def leave(self) -> None:
        """Leave a step without a backward, also where it has failed and runs again."""
        self.engine.abandon()
        self._interleaving.finish()

    def _report(self, num_microbatches: int, update: str, reason: str) -> None:
        optimizers, num_samples = self.trainer.optimizers, self.split_check.num_samples
        self.reports.write(self.engine, optimizers, num_microbatches, num_samples, update, reason)

    def _stepping_by_hand(self) -> AbstractContextManager[None]:
        """The context of a training_step that may step optimizers itself."""
        is_by_hand = not self._module.automatic_optimization
        return self.deferred.by_hand(self.trainer.optimizers) if is_by_hand else nullcontext()

    @property
    def _module(self) -> Any:
        return self.trainer.lightning_module


def _largest(steps: Sequence[TrainingStep]) -> int:
    """Elements of the largest microbatch."""
    return max(step.num_elements() for step in steps)


class DeferredBackward(torch.autograd.Function):
    """The loss of a batch: its backward runs those of the microbatches, and tells the anchor's node who asks for it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, run: Callable[[Tensor, Any], None]) -> Tensor:
        """Return the loss.

        Args:
            ctx: of autograd.
            anchor: as `anchored` makes it.
            loss: of the batch.
            run: runs the backwards of the microbatches, given the gradient of the loss, as a scalar, and the anchor's node.
        """
        ctx.run, ctx.has_run = run, False
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Run them.

        Raises:
            UnsupportedModelError: in a second backward, and where the backward is to be differentiated.
        """
        if torch.is_grad_enabled():
            raise UnsupportedModelError(
                "double backward (create_graph=True) through the loss of several microbatches, or while layers are swapped, "
                "is not possible: no graph of the backward is kept; use num_microbatches=1 where the model fits"
            )
        if ctx.has_run:
            raise UnsupportedModelError(
                "the loss of a batch is differentiated a second time, but the graphs of its microbatches are used up: sum the "
                "losses and call backward once, or optimize manually (self.automatic_optimization = False)"
            )
        ctx.has_run = True
        ctx.run(gradient.reshape(()), ctx.next_functions[0][0])
        return None, None, None

"""Training in memory: a model that fits on its device runs as in plain Lightning, without interception and without copies."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_harmony.engine.batches.merge import loss_of, merge_losses, merge_outputs
from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.lanes.rng import RandomStreams, stream_seed
from lightning_harmony.engine.structures.nested import map_tensors
from lightning_harmony.engine.updates.requested_gradients import anchored, requested_gradients
from lightning_harmony.errors import CapacityError
from lightning_harmony.fit.training import DeferredBackward
from lightning_harmony.fit.unchanged import UnchangedBatch
from lightning_harmony.fit.user_steps import num_elements
from lightning_harmony.microbatches.logs import MicrobatchLogs
from lightning_harmony.microbatches.snapshot import Snapshot
from lightning_harmony.microbatches.split_check import SplitCheck
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.reporting.step_reports import StepReports
from lightning_harmony.setup import compat
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.setup.refusals import refuse_several_losses
from lightning_harmony.setup.settings import Settings
from lightning_harmony.updating.hooks import between_passes
from lightning_harmony.updating.optimizer_state import ASSUMED_STATE_COPIES, expected_state_bytes

Result = TypeVar("Result")


class DoesNotFit(Exception):
    """A batch does not fit in device memory beside the model. What its step did is undone."""


@dataclass(frozen=True)
class LastingBytes:
    """What a model holds on its device from step to step.

    Attributes:
        weights: parameters and buffers.
        gradients: of the parameters that are trained.
        state: of the optimizers.
    """

    weights: int
    gradients: int = 0
    state: int = 0

    @classmethod
    def of(cls, module: nn.Module, optimizers: Sequence[Optimizer] | None) -> LastingBytes:
        """Count, each storage once.

        Args:
            module: the model.
            optimizers: those that train it; None where nothing is trained.
        """
        tensors = [*module.parameters(), *module.buffers()]
        strided = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if _has_storage(t)}
        others = sum(t.numel() * t.element_size() for t in tensors if not _has_storage(t))
        weights = sum(strided.values()) + others
        if optimizers is None:
            return cls(weights)
        gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        state = expected_state_bytes(optimizers)
        return cls(weights, gradients, ASSUMED_STATE_COPIES * gradients if state is None else state)

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.state


def fits(lasting: LastingBytes, device: Device) -> bool:
    """Whether what lasts leaves room for anything else; whether a batch finds room beside it, its first step shows."""
    return device.capacity_bytes is None or lasting.total < device.capacity_bytes


@dataclass
class InMemory:
    """Runs the user's steps on a model that is on its device as a whole.

    With one microbatch, which is the default, a step is Lightning's own. With several, they run one after the other in the
    caller's thread, forward and backward, as batches do under ``accumulate_grad_batches``.

    Where the device has a capacity, a batch that is larger than all before it runs under watch: if it does not fit, all that
    its step changed is undone, and `DoesNotFit` is raised.

    Attributes:
        device: where the model is.
        lasting: what it holds there.
        compiled: the layers that are compiled for as long as this lasts.
    """

    tree: LightningTree
    trainer: Any
    settings: Settings
    device: Device
    lasting: LastingBytes
    split_check: SplitCheck
    compiled: Sequence[nn.Module] = ()
    _num_microbatches: int = 1
    # The most that was seen to be on the device; None where nothing is counted.
    _peak_bytes: int | None = None
    # Elements of the largest batch that is known to fit, by the name of the step.
    _largest: dict[str, int] = field(default_factory=dict)

    def training_step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a batch; where it runs in microbatches or under watch, its backward runs, too, if its gradient can be told.

        Args:
            step: runs the user's training_step as it is.
            args: the batch and its number, and perhaps more.
            kwargs: more of the same.

        Raises:
            DoesNotFit: if there is no room for the batch.
            CapacityError: if there is none, and the step cannot be undone.
        """
        name = "training_step"
        fits = self._is_known_to_fit(name, args)
        if not self._module.automatic_optimization or self.tree.takes_iterator(self._module.training_step):
            with nullcontext() if fits else self._bounded():
                return step(*args, **kwargs)
        sizes, parts = self._split(args, kwargs)
        self._num_microbatches = len(sizes)
        if len(sizes) == 1 and fits:
            return step(*args, **kwargs)
        if not self._predicts_gradient():
            # The graph of the batch waits for its gradient, as in plain Lightning.
            with nullcontext() if fits else self._bounded():
                if len(sizes) == 1:
                    return step(*args, **kwargs)
                return self._run(args, kwargs, sizes, parts, predicts=False)
        run = partial(self._run, args, kwargs, sizes, parts, predicts=True)
        if fits:
            return run()
        with self._keeping_gradients():
            return self._watched(name, args, run)

    def show_start(self) -> None:
        """Where Lightning shows its model summary, say that nothing is swapped."""
        kind = self.tree.part("callbacks").ModelSummary
        if not any(isinstance(callback, kind) for callback in self.trainer.callbacks):
            return
        capacity = self.device.capacity_bytes
        room = "without a limit" if capacity is None else f"of {format_bytes(capacity)}"
        self.tree.info(
            f"Harmony: {format_bytes(self.lasting.total)} of weights, gradients and optimizer state fit on a "
            f"{self.device.torch_device.type} device {room}. Nothing is swapped; a batch runs whole unless "
            "HarmonyStrategy(num_microbatches=...) says otherwise."
        )

    def end(self) -> None:
        """The fit is over, or goes on with layers that are swapped: these are compiled in another way."""
        for layer in self.compiled:
            layer._compiled_call_impl = None

    def report(self, reports: StepReports) -> None:
        """The backward of a step has ended."""
        self.split_check.after_backward(self._losses_of, [self.device])
        reports.write_in_memory(self._num_microbatches, self._peak_bytes)

    def evaluate(self, name: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a validation, test or prediction step as it is.

        Raises:
            DoesNotFit: if there is no room for the batch.
        """
        if self._is_known_to_fit(name, args):
            return step(*args, **kwargs)
        return self._watched(name, args, partial(step, *args, **kwargs))

    # ---- under watch ---------------------------------------------------------------------------------------------------

    def _is_known_to_fit(self, name: str, args: Any) -> bool:
        return self.device.capacity_bytes is None or num_elements(args) <= self._largest.get(name, -1)

    def _watched(self, name: str, args: Any, run: Callable[[], Result]) -> Result:
        """Run a step on a batch that may not fit, and undo it if it does not."""
        device, capacity = self.device, self.device.capacity_bytes
        assert capacity is not None
        before = Snapshot(self.trainer, [device])
        error: str | None = None
        try:
            with self._counting() as most:
                result = run()
            if most() <= capacity:
                self._peak_bytes = max(self._peak_bytes or 0, most())
                self._largest[name] = num_elements(args)
                return result
            error = f"{format_bytes(most())} are needed"
            # The device has had the room for it, but the user lets the process have less.
            del result
        except torch.OutOfMemoryError as shortage:
            error = str(shortage)
        # Not within the except clause: the error's frames hold what the attempt has allocated.
        gc.collect()
        before.restore()
        raise DoesNotFit(
            f"a batch does not fit into {format_bytes(capacity)} beside {format_bytes(self.lasting.total)} of weights, "
            f"gradients and optimizer state ({error})"
        )

    @contextmanager
    def _counting(self) -> Iterator[Callable[[], int]]:
        """A context; what it gives tells the most bytes that the process had on the device in it, optimizer state included."""
        device, lasting = self.device, self.lasting
        if not isinstance(device, VirtualDevice):
            peak = device.watch_peak()
            # It comes when the optimizer first steps.
            missing = 0 if any(optimizer.state for optimizer in self.trainer.optimizers) else lasting.state
            yield lambda: peak() + missing
            return
        # Weights and optimizer state are where they always were: only what is allocated from here on is counted.
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None and not device.owns(p.grad)]
        uncounted = lasting.weights + lasting.state + sum(g.numel() * g.element_size() for g in gradients)
        capacity = device.capacity_bytes
        assert capacity is not None
        device.capacity_bytes = max(capacity - uncounted, 0)
        try:
            with device.computing():
                peak = device.watch_peak()
                yield lambda: peak() + uncounted
        finally:
            device.capacity_bytes = capacity

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """The context of a step that nobody can undo: what exceeds the capacity is refused, with the way out."""
        capacity = self.device.capacity_bytes
        assert capacity is not None
        try:
            with self._counting() as most:
                yield
            if most() > capacity:
                raise torch.OutOfMemoryError(f"{format_bytes(most())} were needed")
        except torch.OutOfMemoryError as error:
            less = format_bytes(self.lasting.total * 9 // 10)
            raise CapacityError(
                f"a batch exceeds the device's memory of {format_bytes(capacity)} beside {format_bytes(self.lasting.total)} "
                "of weights, gradients and optimizer state. The step cannot be undone, as it optimizes or fetches batches "
                "itself, or hooks between forward and backward are overridden. Use smaller batches, or have layers swapped "
                f"from the start by giving less than that: HarmonyStrategy(device_memory={less!r}) ({error})"
            ) from error

    # ---- microbatches --------------------------------------------------------------------------------------------------

    def _split(self, args: Any, kwargs: Any) -> tuple[tuple[int, ...], list[Any]]:
        """The samples of each microbatch of a batch, and the microbatches."""
        settings, (batch, *rest) = self.settings, args
        if settings.num_microbatches in (1, None) and settings.microbatch_size is None:
            return (1,), [batch]
        samples = self.split_check.splitting.samples(batch)
        sizes = (1,) if samples is None else settings.sizes(samples.number)
        self.split_check.note(batch, samples, sizes, rest, kwargs)
        return sizes, self.split_check.splitting.split(batch, samples, sizes)

    def _losses_of(self, batches: Sequence[Any], like: Any) -> list[Tensor | None]:
        """Run the training_step on some batches, without a backward."""
        losses: list[Tensor | None] = []
        for batch in batches:
            with self.trainer.precision_plugin.train_step_context():
                output = self._module.training_step(batch, *like.rest, **like.kwargs)
            loss = loss_of(output)
            losses.append(loss if isinstance(loss, Tensor) else None)
        return losses

    def _predicts_gradient(self) -> bool:
        """Whether Lightning's own code alone decides which gradient comes to the loss, and sees gradients before it does.

        Each microbatch's backward can then follow its forward, and its graph go.
        """
        plugin, base = type(self.trainer.precision_plugin), self.tree.part("plugins.precision").Precision
        return (
            plugin.backward is base.backward
            and plugin.__module__.startswith((f"{self.tree.name}.plugins.", "lightning_harmony."))
            and not between_passes(self.tree, self.trainer)
            and not compat.is_backward_skipped(self.trainer)
            and all(type(each).zero_grad is Optimizer.zero_grad for each in self.trainer.optimizers)
        )

    def _run(self, args: Any, kwargs: Any, sizes: tuple[int, ...], parts: Sequence[Any], *, predicts: bool) -> Any:
        """Run microbatches one after the other; where the gradient of each loss is predicted, with its backward."""
        rest, weights = args[1:], self.settings.weights(sizes)
        shared = UnchangedBatch(parts)
        logs = MicrobatchLogs(compat.logged_results(self.trainer), sizes) if len(sizes) > 1 else None
        zeroed = self._zeroed() if predicts else []
        outputs: list[Any] = []
        losses: list[Tensor] = []
        with self.split_check.explaining(sizes), self._random_streams(len(parts)) as switch_to, logs or nullcontext():
            for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
                switch_to(number)
                if logs is not None:
                    logs.microbatch = number
                with self.trainer.precision_plugin.train_step_context():
                    output = self._module.training_step(part, *rest, **kwargs)
                loss = loss_of(output)
                if predicts and number == 0:
                    # Where Lightning zeroes them: after the first forward, before the first backward.
                    for parameter in zeroed:
                        parameter.grad = None
                if isinstance(loss, Tensor):
                    refuse_several_losses([loss])
                    if predicts and loss.requires_grad:
                        _differentiate(loss, self._upstream(loss), weight, None)
                    losses.append(loss.detach().requires_grad_(loss.requires_grad) if predicts else loss)
                outputs.append(map_tensors(Tensor.detach, output) if predicts else output)
                del output, loss
        shared.check()
        output = merge_outputs(outputs, sizes)
        if len(losses) < len(outputs) or compat.is_backward_skipped(self.trainer):
            return output
        loss = merge_losses([loss.detach() for loss in losses], weights)
        if any(each.requires_grad for each in losses):
            made = [(p, p.grad) for p in zeroed if p.grad is not None]
            backward = partial(self._give, made) if predicts else partial(self._backward, losses, weights)
            parameters = () if predicts else self._module.parameters()
            loss = DeferredBackward.apply(anchored(torch.zeros((), requires_grad=True), parameters), loss, backward)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _backward(self, losses: Sequence[Tensor], weights: Sequence[float], gradient: Tensor, node: Any) -> None:
        """The gradient of the batch's loss has come, for which the graphs of all microbatches wait."""
        every = frozenset(self._module.parameters())
        requested = requested_gradients(node, every, "the module")
        for loss, weight in zip(losses, weights, strict=True):
            _differentiate(loss, gradient, weight, None if requested == every else requested)

    def _give(self, made: Sequence[tuple[nn.Parameter, Tensor]], gradient: Tensor, node: Any) -> None:
        """The gradient of the batch's loss has come as predicted: Lightning has zeroed what these take the place of."""
        for parameter, own in made:
            parameter.grad = own

    def _upstream(self, loss: Tensor) -> Tensor:
        """The gradient that Lightning brings to the loss of a batch, rounded as it rounds it."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        one = torch.ones((), dtype=loss.dtype, device=loss.device)
        scaled: Tensor = one if scaler is None else scaler.scale(one)
        upstream: Tensor = scaled / self.trainer.accumulate_grad_batches
        return upstream

    def _zeroed(self) -> list[nn.Parameter]:
        """The parameters whose gradients Lightning zeroes between the forward of this batch and its backward."""
        if self.trainer.fit_loop.epoch_loop.batch_idx % self.trainer.accumulate_grad_batches:
            return []
        groups = (group for optimizer in self.trainer.optimizers for group in optimizer.param_groups)
        return list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))

    @contextmanager
    def _keeping_gradients(self) -> Iterator[None]:
        """A context that leaves gradients of earlier batches as they were, if its step was undone."""
        zeroed = frozenset(self._zeroed())
        earlier = [
            (p, None if p.grad is None else p.grad.clone()) for p in self._module.parameters() if p not in zeroed
        ]
        try:
            yield
        except DoesNotFit:
            for parameter, gradient in earlier:
                parameter.grad = gradient
            for parameter in zeroed:
                parameter.grad = None
            raise

    @contextmanager
    def _random_streams(self, number: int) -> Iterator[Callable[[int], None]]:
        """A context in which each of several microbatches draws from a stream of its own, the same whatever the plan."""
        if number == 1:
            yield lambda microbatch: None
            return
        step, seed = self.trainer.fit_loop.epoch_loop.total_batch_idx, torch.initial_seed()
        index = self.device.torch_device.index
        seeds = [stream_seed(seed, step, microbatch) for microbatch in range(number)]
        streams = RandomStreams(seeds, [] if index is None else [index])
        try:
            yield streams.switch_to
        finally:
            streams.switch_back()

    @property
    def _module(self) -> Any:
        return self.trainer.lightning_module


def _differentiate(loss: Tensor, upstream: Tensor, weight: float, requested: frozenset[nn.Parameter] | None) -> None:
    """Run the backward of a microbatch's loss, for some parameters or for all."""
    gradient = (upstream.to(loss.device) * weight).to(loss.dtype).expand_as(loss)
    torch.autograd.backward(loss, gradient, inputs=None if requested is None else list(requested))


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def move_optimizer_state(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Bring what optimizers keep of their parameters to where these are."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)

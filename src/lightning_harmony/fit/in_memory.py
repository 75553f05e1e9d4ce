"""Training in memory: a model that fits on its device runs as in plain Lightning, without interception and without copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from lightning_harmony.engine.batches.merge import gradient_of, loss_of, merge_losses, merge_outputs
from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.lanes.rng import RandomStreams, stream_seed
from lightning_harmony.engine.model.compiled import is_compiled
from lightning_harmony.engine.model.decompose import find_layers
from lightning_harmony.engine.replicas.runs import Runs
from lightning_harmony.engine.structures.nested import map_tensors
from lightning_harmony.engine.updates.requested_gradients import anchored, requested_gradients
from lightning_harmony.fit.device_memory import LastingBytes, MemoryWatch
from lightning_harmony.fit.spread import Spread
from lightning_harmony.fit.training import DeferredBackward
from lightning_harmony.fit.unchanged import UnchangedBatch
from lightning_harmony.fit.user_steps import before_accumulation
from lightning_harmony.microbatches.logs import MicrobatchLogs
from lightning_harmony.microbatches.split_check import SplitCheck, found
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.reporting.step_reports import StepReports
from lightning_harmony.setup import compat
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.setup.refusals import refuse_several_losses
from lightning_harmony.setup.settings import Settings
from lightning_harmony.updating.hooks import between_passes, zeroed_parameters, zeroes_as_torch


@dataclass
class InMemory:
    """Runs the user's steps on a model that is on its device as a whole.

    With one microbatch, which is the default on one device if the batch fits, a step is Lightning's own. With several, they
    run one after the other in the caller's thread, forward and backward, as batches do under ``accumulate_grad_batches``.
    Several devices take turns in them, each with a copy of the model.

    Where the device has a capacity, a batch that is larger than all before it runs under watch: if it does not fit, all that
    its step changed is undone, and it runs in more microbatches. If none fit, `DoesNotFit` is raised.

    Attributes:
        devices: the first of them is where the model is.
        lasting: what it holds there.
    """

    tree: LightningTree
    trainer: Any
    settings: Settings
    devices: Sequence[Device]
    lasting: LastingBytes
    _num_microbatches: int = 1
    # The layers that are compiled for as long as this lasts.
    _compiled: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = self.devices[0]
        self._watch = MemoryWatch(self.tree, self.trainer, self.device, self.lasting)
        self.split_check = SplitCheck(self.tree, self.trainer, self.settings)
        self.split_check.look_at_model()
        self._spread = Spread(self.tree, self.trainer, self.devices) if len(self.devices) > 1 else None
        # Where nothing says it, one for each device, or the fewest that fit.
        self._number = len(self.devices)

    def training_step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a batch; where it runs in microbatches or under watch, its backward runs, too, if its gradient can be told.

        Args:
            step: runs the user's training_step as it is.
            args: the batch and its number, and perhaps more.
            kwargs: more of the same.

        Raises:
            DoesNotFit: if there is no room for the batch, whatever the number of microbatches where nothing says it.
            CapacityError: if there is none, and the step cannot be undone.
        """
        self._watch.state.come_back()
        fits = self._watch.knows_to_fit("training_step", args)
        if self.tree.runs_alone(self._module):
            with nullcontext() if fits else self._watch.bounding():
                return step(*args, **kwargs)
        sizes, parts = self._split(args, kwargs)
        if len(sizes) == 1 and fits:
            return step(*args, **kwargs)
        if not self._predicts_gradient():
            # The graph of the batch waits for its gradient, as in plain Lightning.
            with nullcontext() if fits else self._watch.bounding():
                if len(sizes) == 1:
                    return step(*args, **kwargs)
                return self._run(args, kwargs, sizes, parts, False)
        if fits:
            return self._running(args, kwargs, sizes, parts)()

        def run(number: int | None) -> Any:
            if number is not None:
                self._number = number
            return self._running(args, kwargs, *self._split(args, kwargs))()

        search = partial(self.split_check.fewest, args[0], len(sizes))
        result = self._watch.train_in_fewest(args, run, search, self._keeping_gradients)
        if self._num_microbatches != len(sizes):
            self.tree.info(found(self._num_microbatches))
        return result

    def _split(self, args: Any, kwargs: Any) -> tuple[tuple[int, ...], list[Any]]:
        """The samples of each microbatch of a batch, and the microbatches."""
        sizes, parts = self.split_check.split(args, kwargs, self._number)
        self._num_microbatches = len(sizes)
        return sizes, parts

    def _running(self, args: Any, kwargs: Any, sizes: tuple[int, ...], parts: Sequence[Any]) -> Callable[[], Any]:
        """What runs microbatches, each with its backward, on the devices that there are."""
        run = partial(self._run, args, kwargs, sizes, parts, True)
        if self._spread is None or len(sizes) == 1:
            return run
        return partial(self._spread.run, run, self._keeping_gradients, parts=parts)

    def start(self) -> None:
        """Compile layers if that is wanted. Where Lightning shows its model summary, say that nothing is swapped."""
        options = self.settings.compile_options
        if options is not None:
            found = find_layers(self._module, max_layer_bytes=None, layers=self.settings.layers)
            # What the user has compiled stays so.
            self._compiled = [layer.module for layer in found if not is_compiled(layer.module)]
            for layer in self._compiled:
                layer.compile(**options)
        if not self.tree.shows_summary(self.trainer):
            return
        capacity = self.device.capacity_bytes
        room = "without a limit" if capacity is None else f"of {format_bytes(capacity)}"
        number = len(self.devices)
        runs = "whole if it fits" if number == 1 else f"in {number} microbatches, one for each device,"
        self.tree.show(
            f"Harmony: {format_bytes(self.lasting.total)} of weights, gradients and optimizer state fit on a "
            f"{self.device.torch_device.type} device {room}. Nothing is swapped; a batch runs {runs} unless "
            "HarmonyStrategy(num_microbatches=...) says otherwise."
        )

    def end(self) -> None:
        """The fit is over, or goes on with layers that are swapped: these are compiled in another way."""
        self._watch.state.end()
        if self._spread is not None:
            self._spread.end()
        for layer in self._compiled:
            layer._compiled_call_impl = None

    def locked(self, batch: Any) -> Any:
        """A batch in page-locked memory where several devices run it: a copy from other memory waits for all launched work."""
        return batch if self._spread is None else map_tensors(_locked, batch)

    def report(self, reports: StepReports) -> None:
        """The backward of a step has ended."""
        self.split_check.after_backward(self._losses_of, [self.device])
        reports.write_in_memory(self._num_microbatches, self.split_check.num_samples, self._watch.peak_bytes)

    def evaluate(self, name: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a validation, test or prediction step as it is.

        Raises:
            DoesNotFit: if there is no room for the batch.
        """
        run = partial(step, *args, **kwargs)
        return run() if self._watch.knows_to_fit(name, args) else self._watch.run_evaluation(name, args, run)

    # ---- microbatches --------------------------------------------------------------------------------------------------

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
        return (
            self.tree.calls_backward(self.trainer)
            and self.tree.is_known(type(self.trainer.precision_plugin))
            and not between_passes(self.tree, self.trainer)
            and not compat.is_backward_skipped(self.trainer)
            and all(map(zeroes_as_torch, self.trainer.optimizers))
        )

    def _run(
        self,
        args: Any,
        kwargs: Any,
        sizes: tuple[int, ...],
        parts: Sequence[Any],
        predicts: bool,
        spread: Runs | None = None,
    ) -> Any:
        """Run microbatches one after the other; where the gradient of each loss is predicted, with its backward.

        Args:
            args: of the user's step.
            kwargs: more of them.
            sizes: the samples of each microbatch.
            parts: the microbatches.
            predicts: whether the gradient is predicted.
            spread: how they run on several devices, or are watched for that; None where the model is.
        """
        runs = spread or Runs()
        rest, weights = args[1:], self.settings.weights(sizes)
        batches = self.trainer.accumulate_grad_batches
        shared = UnchangedBatch(parts)
        is_held_back = len(sizes) > 1 or self.trainer.world_size > 1
        logs = MicrobatchLogs(compat.logged_results(self.trainer), sizes) if is_held_back else None
        zeroed = zeroed_parameters(self.tree, self.trainer) if predicts else ()
        outputs: list[Any] = []
        losses: list[Tensor] = []
        with (
            self.split_check.explaining(sizes),
            self._random_streams(len(parts)) as switch_to,
            logs or nullcontext(),
            runs.step(parts) as there,
        ):
            for number, (part, weight) in enumerate(zip(there, weights, strict=True)):
                switch_to(number)
                if logs is not None:
                    logs.microbatch = number
                with runs.forward(number), self.trainer.precision_plugin.train_step_context():
                    output = self._module.training_step(part, *rest, **kwargs)
                loss = loss_of(output)
                if predicts and number == 0:
                    # Where Lightning zeroes them: after the first forward, before the first backward.
                    for parameter in zeroed:
                        parameter.grad = None
                if isinstance(loss, Tensor):
                    refuse_several_losses([loss])
                    if predicts and loss.requires_grad:
                        gradient = gradient_of(loss, self._scale(loss), weight / batches)
                        with runs.backward(number):
                            torch.autograd.backward(loss, gradient)
                    losses.append(loss.detach().requires_grad_(loss.requires_grad) if predicts else loss)
                outputs.append(map_tensors(Tensor.detach, output) if predicts else output)
                del output, loss
        shared.check()
        if spread is not None:
            outputs, losses = (map_tensors(self._at_home, each) for each in (outputs, losses))
        output = merge_outputs(outputs, sizes)
        if len(losses) < len(outputs):
            return output
        loss = merge_losses([loss.detach() for loss in losses], weights)
        if any(each.requires_grad for each in losses) and not compat.is_backward_skipped(self.trainer):
            made = [(p, p.grad) for p in zeroed if p.grad is not None]
            backward = partial(self._give, made) if predicts else partial(self._backward, losses, weights)
            parameters = () if predicts else self._module.parameters()
            loss = DeferredBackward.apply(anchored(torch.zeros((), requires_grad=True), parameters), loss, backward)
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _backward(self, losses: Sequence[Tensor], weights: Sequence[Fraction], gradient: Tensor, node: Any) -> None:
        """The gradient of the batch's loss has come, for which the graphs of all microbatches wait."""
        every = frozenset(self._module.parameters())
        requested = requested_gradients(node, every, "the module")
        inputs = None if requested == every else list(requested)
        batches = self.trainer.accumulate_grad_batches
        whole = before_accumulation(gradient, self._scale(gradient), batches)
        for loss, weight in zip(losses, weights, strict=True):
            torch.autograd.backward(loss, gradient_of(loss, whole, weight / batches), inputs=inputs)

    def _give(self, made: Sequence[tuple[nn.Parameter, Tensor]], gradient: Tensor, node: Any) -> None:
        """The gradient of the batch's loss has come as predicted: Lightning has zeroed what these take the place of."""
        for parameter, own in made:
            parameter.grad = own

    def _scale(self, like: Tensor) -> Tensor:
        """The gradient that Lightning brings to the sum over all batches of a step."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        one = torch.ones((), dtype=like.dtype, device=like.device)
        scaled: Tensor = one if scaler is None else scaler.scale(one)
        return scaled

    @contextmanager
    def _keeping_gradients(self) -> Iterator[None]:
        """A context that leaves gradients of earlier batches as they were, if its step fails or was undone."""
        # Not kept: what is zeroed makes room for the step.
        parameters = zeroed_parameters(self.tree, self.trainer)
        zeroed = {p: None if p.grad is None else TensorWeakRef(p.grad) for p in parameters}
        earlier = [
            (p, None if p.grad is None else p.grad.clone()) for p in self._module.parameters() if p not in zeroed
        ]
        try:
            yield
        except Exception:
            for parameter, gradient in earlier:
                parameter.grad = gradient
            for parameter, known in zeroed.items():
                # An error may have come before Lightning would have zeroed them.
                if known is None or known() is not parameter.grad:
                    parameter.grad = None
            raise

    @contextmanager
    def _random_streams(self, number: int) -> Iterator[Callable[[int], None]]:
        """A context in which each of several microbatches draws from a stream of its own, the same whatever the plan."""
        if number == 1:
            yield lambda microbatch: None
            return
        step, seed = self.trainer.fit_loop.epoch_loop.total_batch_idx, torch.initial_seed()
        indices = [device.torch_device.index for device in self.devices]
        seeds = [stream_seed(seed, step, microbatch) for microbatch in range(number)]
        streams = RandomStreams(seeds, [index for index in indices if index is not None])
        try:
            yield streams.switch_to
        finally:
            streams.switch_back()

    def _at_home(self, tensor: Tensor) -> Tensor:
        """A tensor that a microbatch has made, where the model is."""
        home = self.device.torch_device
        is_elsewhere = tensor.device.type == home.type and tensor.device != home
        return tensor.to(home).requires_grad_(tensor.requires_grad) if is_elsewhere else tensor

    @property
    def _module(self) -> Any:
        return self.trainer.lightning_module


def _locked(tensor: Tensor) -> Tensor:
    can_be = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided
    return tensor.pin_memory() if can_be and torch.cuda.is_available() else tensor

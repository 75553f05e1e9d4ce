"""The step that runs: its lanes, and what all that they ask for depends on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_harmony.engine.lanes.lane import AnyLane, this_thread
from lightning_harmony.engine.lanes.rng import RandomStreams
from lightning_harmony.engine.layers.runtime import Listeners, StepWatch
from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.engine.nodes.averaging import Averaging
from lightning_harmony.engine.step.gradient_flags import GradientFlags
from lightning_harmony.engine.step.read_buffers import ReadBuffers
from lightning_harmony.engine.step.turns import LaneProgress, Turns
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.task import Phase


@dataclass
class Grant:
    """A lane's turn.

    Attributes:
        progress: whose it is.
        device: the number of the device where it runs.
        phase: the phase of the pack.
        pack: the one that it runs; None for the code before the first layer.
    """

    progress: LaneProgress
    device: int
    phase: Phase
    pack: SwappedPack | None


class Step:
    """The step that runs, or the last one, of which no lane runs any more.

    Attributes:
        turns: gives its lanes their turns.
        predicted: the gradient of its loss, if that was known before: the backward of each microbatch then follows its loss.
        adds_to_earlier: whether gradients that come before that are added to those of earlier batches as these are.
        predicts: whether gradients that were predicted have come so far: after another one, none is predicted.
        fuses: whether a lane that comes to the fused packs goes through them to its loss and back.
        is_sequential: whether one microbatch runs after the other, in the caller's own thread.
        watch: watches its microbatches while one runs after the other.
        has_optimizer: whether an optimizer has a parameter.
        changed_parameter: the name of a parameter that its code has changed, or what is set on it; None if there is none.
        changed_in_backward: the buffer of a layer whose own code has changed it in the backward, in words; None if none has.
        gradient_flags: what its code says of parameters that need gradients.
        read_buffers: the buffers of layers that others have read, and the layers.
        buffer_copies: what those have read.
        is_driven: whether lanes run, or wait for each other: parameters are then not what they are between hooks.
        is_reentrant: whether layers were called in a backward, in any step so far (reentrant checkpointing). Which of their
            gradients are the last is not known before the end of it.
        in_backward: whether the gradient of its loss has come.
        has_trained: whether there was a training step before it.
        upstream: that gradient.
        random: what its microbatches draw from.
        averaging: makes its gradients means over nodes; None where there is one node.
        granted: the turn that a lane has.
        listeners: told of it.
    """

    turns: Turns

    def __init__(self, has_optimizer: Callable[[nn.Parameter], bool]) -> None:
        self.predicted: float | None = None
        self.adds_to_earlier = False
        self.predicts = True
        self.fuses = False
        self.is_sequential = False
        self.watch: StepWatch | None = None
        self.has_optimizer = has_optimizer
        self.changed_parameter: str | None = None
        self.changed_in_backward: str | None = None
        self.gradient_flags = GradientFlags()
        self.read_buffers: dict[BufferKey, SwappedLayer] = {}
        self.buffer_copies = ReadBuffers()
        self.in_backward = self.has_trained = self.is_driven = self.is_reentrant = False
        self.upstream = torch.ones(())
        self.random = RandomStreams([], [])
        self.averaging: Averaging | None = None
        self.granted: Grant | None = None
        self.listeners = Listeners()
        self._progress: dict[AnyLane | None, LaneProgress] = {}

    @property
    def is_running(self) -> bool:
        """Whether it has lanes."""
        return bool(self._progress)

    def note_attribute(self, parameter: str) -> None:
        """The code between layers is about to set something on a parameter with a name.

        Raises:
            UnsupportedModelError: if microbatches take turns. Nothing is set yet, and the step runs again without.
        """
        if self.is_running and not self.is_sequential:
            raise UnsupportedModelError(
                f"an attribute of parameter {parameter!r} is set by code outside of its layer for the first time when "
                "microbatches take turns, and others would find it: use HarmonyStrategy(num_microbatches=1), or set it in a "
                "hook such as on_train_batch_start"
            )
        self.changed_parameter = parameter

    @property
    def runs_whole(self) -> bool:
        """Whether each microbatch runs forward and backward before the next one begins."""
        return self.is_sequential and self.predicted is not None

    def note_changed_in_backward(self, layer: str, buffer: str) -> None:
        """The own code of a layer has changed buffers in the backward, as where a checkpoint runs a part of it again.

        Args:
            layer: its name.
            buffer: that of one of them.

        Raises:
            UnsupportedModelError: if another microbatch was to find that in its forward.
        """
        found = f"buffer {buffer!r} of layer {layer!r}"
        if len(self.turns.running) > 1 and not self.runs_whole:
            raise UnsupportedModelError(
                f"{found} is changed in the backward, where a checkpoint runs a part of the model again: other microbatches "
                "should have found that in their forward. Use HarmonyStrategy(num_microbatches=1), or leave that checkpoint "
                "out: layers are recomputed without it"
            )
        self.changed_in_backward = found

    @property
    def read_buffer(self) -> str | None:
        """A buffer of a layer that others have read, and that the layer has changed, in words."""
        return next(
            (
                f"buffer {key[1]!r} of layer {layer.name!r}"
                for key, layer in self.read_buffers.items()
                if key in layer.changed_buffers
            ),
            None,
        )

    def correction(self, gradient: Tensor) -> float:
        """What its gradients have to be multiplied with because this one has come, and another one was predicted."""
        if self.predicted is None:
            return 1.0
        actual = float(gradient)
        if actual == self.predicted:
            return 1.0
        self.predicts = False
        if self.adds_to_earlier:
            raise UnsupportedModelError(
                "the strategy or a plugin changes the gradient of a loss, whose backward has run while batches accumulate: "
                "change the loss in the training_step"
            )
        return actual / self.predicted

    @property
    def adds_now(self) -> bool:
        """Whether gradients of earlier batches are by now what those that come are added to."""
        return self.in_backward or self.adds_to_earlier

    def start(self, running: Sequence[LaneProgress], plan: Plan, having_buffers: Collection[int]) -> None:
        """These lanes run from now on.

        Args:
            running: the lanes, in the order of microbatches.
            plan: what runs where.
            having_buffers: the packs whose layers have buffers, which they may change.
        """
        if running:
            self.read_buffers, self.changed_parameter, self.changed_in_backward = {}, None, None
            self.gradient_flags.forget()
        self.buffer_copies = ReadBuffers()
        self._progress = {progress.lane: progress for progress in running}
        self.turns = Turns(running, plan, having_buffers, fuses=self.fuses)

    def of(self, lane: AnyLane | None) -> LaneProgress | None:
        """How far a lane has come; None if it has no part in the step."""
        return self._progress.get(lane)

    def current(self) -> LaneProgress | None:
        """How far the calling lane has come; None outside of lanes."""
        return self._progress.get(this_thread.lane)

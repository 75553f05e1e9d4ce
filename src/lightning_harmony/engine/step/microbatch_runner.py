"""Running microbatches: the user's code of each, up to its loss and back, in its lane."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.glue.glue import Glue
from lightning_harmony.engine.lanes.lane import CallerLane, Lane
from lightning_harmony.engine.step.granting import Granting
from lightning_harmony.engine.step.pack_preparation import PackPreparation
from lightning_harmony.engine.step.runtime import Runtime
from lightning_harmony.engine.step.step import Step
from lightning_harmony.engine.step.turns import LaneProgress, Request
from lightning_harmony.plan.values.task import Phase


class MicrobatchRunner:
    """Runs the microbatches of a step.

    Args:
        step: the step.
        devices: where it runs.
        granting: gives lanes their turns.
        preparation: makes room for the backward of a loss.
        runtime: serves the layers that microbatches call.
        glue: the code between layers.

    Attributes:
        is_running_here: whether a microbatch runs in the calling thread.
    """

    def __init__(
        self,
        step: Step,
        devices: Sequence[Device],
        granting: Granting,
        preparation: PackPreparation,
        runtime: Runtime,
        glue: Glue,
    ) -> None:
        self.is_running_here = False
        self._step = step
        self._devices = devices
        self._granting = granting
        self._preparation = preparation
        self._runtime = runtime
        self._glue = glue

    def run_lane(self, number: int) -> None:
        """Run a microbatch whose lane takes turns with others."""
        progress = self._step.turns.running[number]
        assert isinstance(progress.lane, Lane)
        with self._working(progress):
            loss = self._run_forward(progress)
            if loss is None:
                return
            if self._step.predicted is None:
                progress.lane.park(Request(Phase.BACKWARD, None))
                # The gradient comes from the caller, who has computed since the lane began.
                for device in self._devices:
                    device.catch_up()
            else:
                self._preparation.enter_loss(progress)
            self._run_backward(progress, loss)

    def run_one_after_another(self) -> None:
        """Run all microbatches in the calling thread, as far as their losses, or from there on."""
        self.is_running_here = True
        try:
            for progress in self._step.turns.running:
                if not progress.lane.finished:
                    self._run_here(progress)
        finally:
            self.is_running_here = False

    def _run_here(self, progress: LaneProgress) -> None:
        """Run a microbatch in the calling thread, as far as its loss, or from there on."""
        lane = progress.lane
        assert isinstance(lane, CallerLane)
        with lane.entered():
            loss, progress.loss = progress.loss, None
            watch = self._step.watch
            if loss is None:
                self._granting.go_on(lane)
                if watch is not None:
                    watch.begin(lane.microbatch)
                with self._working(progress):
                    loss = self._run_forward(progress)
                    if watch is not None:
                        watch.end()
                    if loss is not None and self._step.predicted is not None:
                        if self._step.fuses:
                            self._preparation.enter_loss(progress)
                        else:
                            lane.park(Request(Phase.BACKWARD, None))
                        self._run_backward(progress, loss)
                        loss = None
                progress.loss = loss
            else:
                lane.park(Request(Phase.BACKWARD, None))
                with self._working(progress):
                    self._run_backward(progress, loss)
            lane.finished = progress.loss is None
            self._granting.end()

    @contextmanager
    def _working(self, progress: LaneProgress) -> Iterator[None]:
        """The context of a lane's own code."""
        with ExitStack() as stack:
            # The root last: it is the current one.
            for device in reversed(self._devices):
                stack.enter_context(device.lane(progress.lane.microbatch))
            stack.callback(self._runtime.open_call.leave)
            yield

    def _run_forward(self, progress: LaneProgress) -> Tensor | None:
        """Run a microbatch up to its loss; None if there is nothing to differentiate."""
        with self._glue.stashing(), progress.glue or nullcontext():
            loss = progress.microbatch.step()
        return None if loss is None or not loss.requires_grad else loss

    def _run_backward(self, progress: LaneProgress, loss: Tensor) -> None:
        """Differentiate the loss of a microbatch."""
        if self._step.predicted is None:
            upstream = self._runtime.sent(self._step.upstream, self._runtime.home(loss))
        else:
            # Made where it is needed: to copy it to a GPU, the host would wait for all that was launched there.
            upstream = torch.full((), self._step.predicted, device=loss.device)
        progress.differentiating = True
        gradient = (upstream.to(loss.device) * progress.microbatch.weight).to(loss.dtype)
        with ExitStack() as stack:
            # Glue's backward begins where its forward ended.
            if progress.glue is not None:
                stack.enter_context(self._devices[self._runtime.home(loss) or 0].selected())
                # Hooks, checkpoints and functions of the user's own run glue in it.
                stack.enter_context(progress.glue)
            torch.autograd.backward(loss, gradient.expand_as(loss))

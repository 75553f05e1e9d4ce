"""Running microbatches: each in a lane, which runs the user's code up to its loss and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_harmony.engine.batches.merge import gradient_of
from lightning_harmony.engine.devices.hidden_shortages import finding_shortages
from lightning_harmony.engine.glue.functions import functions_as_operations
from lightning_harmony.engine.glue.glue import Glue
from lightning_harmony.engine.glue.one_device import OneDevice
from lightning_harmony.engine.lanes.lane import AnyLane, CallerLane, Lane, LanePool
from lightning_harmony.engine.layers.saved_tensors import refuse_hooks_of_others
from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.memory.stash import LaneStash
from lightning_harmony.engine.memory.transfer import LaneTransfers, Launched, Transfers
from lightning_harmony.engine.memory.unseen_changes import UnseenChanges
from lightning_harmony.engine.step.granting import Granting
from lightning_harmony.engine.step.pack_preparation import PackPreparation
from lightning_harmony.engine.step.runtime import Runtime
from lightning_harmony.engine.step.shortage import exceeded_in_turn
from lightning_harmony.engine.step.step import Step
from lightning_harmony.engine.step.turns import LaneProgress, Microbatch, Request
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.task import Phase


@dataclass(eq=False, repr=False)
class MicrobatchRunner:
    """Runs the microbatches of a step.

    Args:
        step: the step.
        lanes: run microbatches that take turns.
        placement: of the step's packs.
        transfers: between devices.
        granting: gives lanes their turns.
        preparation: makes room for the backward of a loss.
        runtime: serves the layers that microbatches call.
        glue: the code between layers.
        discard_record: discards the record that predicted something else than what happens; returns a word on it.
    """

    _step: Step
    _lanes: LanePool
    _placement: Placement
    _transfers: Transfers
    _granting: Granting
    _preparation: PackPreparation
    _runtime: Runtime
    _glue: Glue
    _discard_record: Callable[[], str]

    def __post_init__(self) -> None:
        self._devices = self._transfers.devices
        self.end()

    def begin(self, microbatches: Sequence[Microbatch]) -> None:
        """Give each microbatch a lane that has not started: where they run one after the other, the calling thread is it."""
        # Lanes would not find them, which have threads of their own.
        refuse_hooks_of_others("a step")
        numbers = range(len(microbatches))
        lanes: Sequence[AnyLane] = (
            [CallerLane(number, self._granting.go_on) for number in numbers]
            if self._step.is_sequential
            else self._lanes.lanes([partial(self._run_lane, number) for number in numbers])
        )
        self._start([self._progress(lane, each) for lane, each in zip(lanes, microbatches, strict=True)])

    def _progress(self, lane: AnyLane, microbatch: Microbatch) -> LaneProgress:
        stashes = [LaneStash(residents.stash) for residents in self._placement.residents]
        transfers = LaneTransfers(Launched(self._transfers, self._runtime.go_over))
        glue = OneDevice(transfers, self._transfers) if len(self._devices) > 1 else None
        looks = self._preparation.looks_at_inputs
        changes = UnseenChanges(self._devices[0].on_host, self._end_sharing) if looks else None
        return LaneProgress(lane, microbatch, stashes, transfers, glue, unseen_changes=changes)

    def _end_sharing(self) -> None:
        for residents in self._placement.residents:
            residents.stash.shares = False

    def _start(self, running: Sequence[LaneProgress]) -> None:
        placement = self._placement
        self._step.start(running, placement.plan, {pack.index for pack in placement.packs if pack.buffers})

    def prepare_lanes(self, number: int) -> None:
        """Let so many lanes take of the devices what libraries keep for each thread, so that plans are made without it."""
        for device in self._devices if number else ():
            if device.computes_apart:
                self._lanes.prepare(number, device.prepare_thread)

    def drive(self, until: Phase) -> None:
        """Grant lanes, one at a time, until each has ended or waits for what comes after ``until``."""
        step = self._step
        # Hooks have run between the forward and the backward.
        step.buffer_copies.refuse_changed()
        step.is_driven = True
        try:
            # A compiled container around layers runs as it is written where its operations may be on several devices.
            whole = torch.compiler.set_stance("force_eager") if len(self._devices) > 1 else nullcontext()
            with finding_shortages(), whole, functions_as_operations():
                if step.is_sequential:
                    self._run_one_after_another()
                else:
                    self._lanes.drive(partial(self._granting.next, until))
        except torch.OutOfMemoryError as error:
            if step.granted is None:
                raise
            words = self._full_host() + self._discard_record()
            raise exceeded_in_turn(step.granted, self._devices, error, words) from error
        except Exception as error:
            granted = step.granted
            if granted is not None and granted.pack is not None and hasattr(error, "add_note"):
                microbatch, phase = granted.progress.lane.microbatch, granted.phase.name.lower()
                on_device = f" on device {granted.device}" if len(self._devices) > 1 else ""
                error.add_note(
                    f"in the {phase} of microbatch {microbatch}, in or next to {granted.pack.name}{on_device}"
                )
            raise
        finally:
            step.granted, step.is_driven = None, False

    def abort(self) -> None:
        """Unwind all lanes."""
        self._lanes.abort()

    def end(self) -> None:
        """No lane runs any more."""
        self._start([])

    def close(self) -> None:
        """Unwind all lanes and join their threads."""
        self._lanes.close()

    # ---- one microbatch ------------------------------------------------------------------------------------------------

    def _run_lane(self, number: int) -> None:
        """Run a microbatch whose lane takes turns with others."""
        progress = self._step.turns.running[number]
        assert isinstance(progress.lane, Lane)
        with self._working():
            loss = self._run_forward(progress)
            if loss is None:
                return
            # Where it does not come back through the last layer at once, the gradient of what that has returned, which may be
            # large, is not made before its turn.
            if self._step.predicted is None or not self._preparation.comes_back_at_once:
                progress.lane.park(Request(Phase.BACKWARD, None))
            self._run_backward(progress, loss)

    def _full_host(self) -> str:
        """A word on what is on devices for the host has no room for it."""
        kept = sum(residents.stash.kept_bytes for residents in self._placement.residents)
        return f". {format_bytes(kept)} of the stash stay there, for which the host has no room" if kept else ""

    def _run_one_after_another(self) -> None:
        """Run all microbatches in the calling thread, as far as their losses, or from there on."""
        for progress in (running := self._step.turns.running):
            if not progress.lane.finished:
                self._run_here(progress)
                waiting = [each for each in running if not each.lane.finished]
                # Behind the last one, nothing would be left to measure. The graphs of those that have one have wide weights.
                if progress.lane.finished and waiting and all(each.loss is None for each in waiting):
                    self._preparation.narrow()

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
                with self._working():
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
                with self._working():
                    self._run_backward(progress, loss)
            lane.finished = progress.loss is None
            self._granting.end()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """The context of a lane's own code."""
        with ExitStack() as stack:
            # The root last: it is the current one.
            for device in reversed(self._devices):
                stack.enter_context(device.lane())
            stack.callback(self._runtime.open_call.leave)
            yield

    def _run_forward(self, progress: LaneProgress) -> Tensor | None:
        """Run a microbatch up to its loss; None if there is nothing to differentiate."""
        with self._glue.stashing(), progress.glue or nullcontext():
            loss = progress.microbatch.step()
        if progress.unseen_changes is not None:
            progress.unseen_changes.look_again()
            progress.unseen_changes = None
        self._refuse_lost_changes(progress)
        return None if loss is None or not loss.requires_grad else loss

    def _run_backward(self, progress: LaneProgress, loss: Tensor) -> None:
        """Differentiate the loss of a microbatch."""
        whole: Tensor | float | None = self._step.predicted
        if whole is None:
            whole = self._runtime.sent(self._step.upstream, self._transfers.home(loss))
        progress.differentiating = True
        gradient = gradient_of(loss, whole, progress.microbatch.weight)
        with ExitStack() as stack:
            # Glue's backward begins where its forward ended.
            if progress.glue is not None:
                stack.enter_context(self._devices[self._transfers.home(loss) or 0].selected())
                # Hooks, checkpoints and functions of the user's own run glue in it.
                stack.enter_context(progress.glue)
            torch.autograd.backward(loss, gradient)
        self._refuse_lost_changes(progress)
        # What the graph has saved is gone.
        self._step.buffer_copies.refuse_kept()

    def _refuse_lost_changes(self, progress: LaneProgress) -> None:
        progress.views.refuse_changed()
        self._step.buffer_copies.refuse_changed()

"""Granting: a lane gets its turn, in a pack that is ready for it, when the turn before is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_harmony.engine.lanes.lane import CallerLane, Lane
from lightning_harmony.engine.measure.step_recorder import StepRecorder
from lightning_harmony.engine.memory.agenda import Place
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.step.gradient_sums import GradientSums
from lightning_harmony.engine.step.observer import Observer
from lightning_harmony.engine.step.pack_preparation import PackPreparation
from lightning_harmony.engine.step.step import Grant, Step
from lightning_harmony.engine.step.turns import LaneProgress
from lightning_harmony.engine.structures.operations import Unseen
from lightning_harmony.plan.values.task import Phase


@dataclass(eq=False, repr=False)
class Granting:
    """Gives the lanes of a step their turns, one at a time.

    Args:
        step: the step that runs.
        residents: of each device.
        preparation: makes these ready.
        sums: of gradients, which may be final after a turn.
        observer: of what turns take.
        recorder: notes when lanes compute.
    """

    _step: Step
    _residents: Sequence[Residents]
    _preparation: PackPreparation
    _sums: GradientSums
    _observer: Observer
    _recorder: StepRecorder

    def next(self, until: Phase, previous: Lane | None) -> Lane | None:
        """The lane whose turn it is, everything ready for it. Called in whichever lane has the baton.

        Args:
            until: lanes that ask for what comes after this phase wait.
            previous: the lane that parked last.
        """
        step = self._step
        # Modes that are active in the lane are not to see this.
        with Unseen():
            self._end_turn()
            progress = step.turns.next(until, step.of(previous))
            if progress is None:
                return None
            self._grant(progress)
            assert isinstance(progress.lane, Lane)
            return progress.lane

    def go_on(self, lane: CallerLane) -> None:
        """The turn of a lane in the calling thread is over, and its next one begins."""
        progress = self._step.of(lane)
        assert progress is not None
        with Unseen():
            self._end_turn()
            self._grant(progress)

    def end(self) -> None:
        """The turn of a lane in the calling thread is over, which asks for no other one now."""
        with Unseen():
            self._end_turn()

    def _end_turn(self) -> None:
        """Note what a turn took, let go what can go now, and hand over the gradients that are final."""
        granted = self._step.granted
        if granted is None:
            return
        residents = self._residents[granted.device]
        with residents.device.scheduling():
            if self._observer.observes_turns:
                self._observer.end_turn(granted)
            self._recorder.leave()
            if self._step.turns.has_several_devices:
                granted.progress.transfers.launched.end_turn()
            if residents.stash.pending:
                residents.stash.retire()
            residents.device.leaving.retire()
            if self._step.in_backward and granted.pack is not None:
                self._sums.deliver_final((granted.pack.index,))
        self._step.granted = None

    def _grant(self, progress: LaneProgress) -> None:
        step, lane, preparation = self._step, progress.lane, self._preparation
        turns, request = step.turns, lane.request
        number = turns.device_of(progress) if turns.has_several_devices else 0
        residents = self._residents[number]
        with residents.device.scheduling():
            step.random.switch_to(lane.microbatch)
            if not step.is_sequential:
                step.gradient_flags.switch_to(lane.microbatch)
            phase = Phase.FORWARD if request is None else request.phase
            pack = None if request is None or request.pack is None else residents.packs[request.pack]
            # First: where there is no room for what the turn needs, it is named.
            step.granted = Grant(progress, number, phase, pack)
            if request is not None:
                if pack is None:
                    preparation.enter_loss(progress)
                else:
                    preparation.enter(progress, Place(pack, phase, request.position))
                    if turns.has_several_devices:
                        turns.take(progress, number)
            step.listeners.on_switch(lane.microbatch)
            if self._observer.observes_turns:
                self._observer.begin_turn(residents.device, phase, pack)
            preparation.note_task(number, progress, phase, pack)
            if request is None:
                progress.transfers.launched.begin(number)

"""The observer: what turns are seen to take, in steps that are measured or timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Moment
from lightning_harmony.engine.measure.profile import Period, Profiler, Visit
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.measure.workspace import WorkSpace
from lightning_harmony.engine.memory.agenda import Place
from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.engine.step.step import Grant, Step
from lightning_harmony.plan.values.task import Phase


@dataclass(frozen=True)
class Observation:
    """What is measured of a turn.

    Attributes:
        peak: gives the most bytes that were allocated since it began.
        bytes_before: what was allocated before it.
        stashed_before: what had been stashed before it.
        summing: whether the pack had gradients before it.
        began: when it began, where that is measured.
        granted_seconds: the same on the clock of the host's own work.
    """

    peak: Callable[[], int]
    bytes_before: int
    stashed_before: int
    summing: bool
    began: Moment | None
    granted_seconds: float


@dataclass(frozen=True)
class TimedVisit:
    """A visit by the plan that is timed.

    Attributes:
        visit: what it is.
        device: where it computes.
        began: when it began there.
        began_seconds: the same on the clock of the host's own work.
    """

    visit: Visit
    device: Device
    began: Moment
    began_seconds: float


class LastTurn(NamedTuple):
    """A turn that was observed.

    Attributes:
        pack: the pack that ran, if any.
        phase: its phase.
        seconds: what it took of the host.
        ended_seconds: the clock of the host's own work when it was over, and all of it noted.
    """

    pack: SwappedPack | None
    phase: Phase
    seconds: float
    ended_seconds: float


class Observer:
    """Observes turns where microbatches are larger than ever before, for the planner and for `Residents`, which make room.

    Args:
        step: the step that runs.
        placement: of its packs.
        traffic: counts what is stashed.
        profiler: keeps times.
        pool: of host buffers.

    Attributes:
        num_elements: of the largest microbatch.
        works: work space, of training steps and of others: an evaluation may have other batches.
        is_training: whether the step is one that is run again and again.
        is_measuring: whether its turns are observed.
        is_watching: whether it is to show which weights may be narrow.
        is_timing: whether its turns are timed as they come, by the plan.
        has_seen_narrow: whether what was measured is the work with narrow weights, after those were watched.
        observes_turns: whether anything is to be seen of turns.
        is_profiling: whether times and copies are measured, too: in the step that is to be planned, while it goes layer by
            layer.
        work: work space of the kind of step that runs.
    """

    def __init__(self, step: Step, placement: Placement, traffic: Traffic, profiler: Profiler, pool: HostPool) -> None:
        self.works = {is_training: WorkSpace() for is_training in (True, False)}
        self.is_training = self.is_measuring = self.is_profiling = self.observes_turns = True
        self.work = self.works[True]
        self.is_watching = self._has_watched = self.is_timing = self.has_seen_narrow = False
        self._watched: set[int] = set()
        self._step = step
        self._placement = placement
        self._traffic = traffic
        self._profiler = profiler
        self._pool = pool
        self.num_elements = 0
        self._observation: Observation | None = None
        self._recomputes: list[Period] = []
        self._last_turn: LastTurn | None = None
        self._copying_seconds = 0.0
        # The visit that runs, and the one that the host was at last.
        self._timed: TimedVisit | None = None
        self._launched: TimedVisit | None = None

    @property
    def has_seen_casts(self) -> bool:
        """Whether the step has shown which weights may be narrow."""
        return self.is_watching and bool(self._watched)

    def begin_step(
        self, num_elements: int, *, is_training: bool, is_measuring: bool, is_watching: bool, is_timing: bool
    ) -> None:
        """A step of microbatches of so many elements begins."""
        self.is_training, self.is_measuring, self.is_watching = is_training, is_measuring, is_watching
        self.is_timing, self.has_seen_narrow, self.num_elements = is_timing, False, num_elements
        self.is_profiling, self.observes_turns = is_measuring and is_training, is_measuring or is_timing
        self.work = self.works[is_training]
        if is_timing:
            self._profiler.begin_visits()
        if self.is_profiling:
            self._profiler.begin(num_elements)
            self._pool.take_missed()

    def begin_narrow(self) -> None:
        """From now on weights come as narrow as the step has shown that they may: what was measured before does not count."""
        self.has_seen_narrow = True
        self.forget_turns()
        self.work.clear()
        self._profiler.clear()
        self._profiler.begin(self.num_elements)

    # ---- turns ---------------------------------------------------------------------------------------------------------

    def begin_turn(self, device: Device, phase: Phase, pack: SwappedPack | None) -> None:
        """A lane has its turn in a pack, which is ready for it."""
        self._note_period(pack, phase)
        self._observation = self._observe(device, pack) if self.is_measuring else None
        self._recomputes = []
        self._begin_visit(device, phase, pack)

    def _observe(self, device: Device, pack: SwappedPack | None) -> Observation:
        peak = device.watch_peak()
        summing = pack is not None and bool(pack.accumulators)
        began = device.moment() if self.is_profiling else None
        stashed, now = self._traffic.swapped_out["stash"], self._busy_seconds()
        return Observation(peak, device.allocated_bytes(), stashed, summing, began, now)

    def end_turn(self, granted: Grant) -> None:
        """The lane has parked or ended."""
        self._end_visit()
        observation, self._observation = self._observation, None
        if observation is None:
            return
        taken = self._busy_seconds() - observation.granted_seconds
        device = self._placement.residents[granted.device].device
        self._note_seconds(granted, device, observation)
        self._note_work(granted, device, observation)
        self._last_turn = LastTurn(granted.pack, granted.phase, taken, self._busy_seconds())

    def forget_turns(self) -> None:
        """What comes next has nothing to do with the last turn."""
        self._observation = self._last_turn = self._timed = self._launched = None

    def _note_period(self, pack: SwappedPack | None, phase: Phase) -> None:
        """Keep what the last turn took of the host, up to the next one; not what it took to observe, and to copy weights.

        Where that is more than what the device computed, launching bounds the step. If microbatches take turns, only one that
        another lane takes in the same layer counts.
        """
        last, self._last_turn = self._last_turn, None
        if last is None or last.pack is None or len(last.pack.layers) > 1 or not self.is_profiling:
            return
        if self._step.is_sequential or (last.pack, last.phase) == (pack, phase):
            seconds = last.seconds + self._busy_seconds() - last.ended_seconds
            self._profiler.note_period(last.pack.layers[0], last.phase, seconds)

    def _busy_seconds(self) -> float:
        """A clock that stands still while the host makes buffers, which it does once, or waits until copies leave room.

        When they do depends on the plan, and replay tells. So it does while weights are copied that are waited for.
        """
        waited = sum(residents.waited_seconds for residents in self._placement.residents)
        return perf_counter() - self._pool.making_seconds - waited - self._copying_seconds

    def _note_seconds(self, granted: Grant, device: Device, observation: Observation) -> None:
        """Keep how long a turn in a layer took, and what it stashed."""
        pack = granted.pack
        if observation.began is None or pack is None or len(pack.layers) > 1:
            return
        ended, stashed = device.moment(), self._traffic.swapped_out["stash"]
        self._profiler.note_turn(pack.layers[0], granted.phase, (observation.began, ended), self._recomputes)
        if granted.phase is Phase.FORWARD:
            self._profiler.note_stash(pack.layers[0], stashed - observation.stashed_before)
            with device.on_host():
                self._provide_for_others(pack)

    def _provide_for_others(self, pack: SwappedPack) -> None:
        """Make the host buffers that the lanes behind this one will need: to make them takes longer than what is timed.

        A microbatch that runs whole leaves its own to the next one.
        """
        if self._step.runs_whole:
            return
        waiting = sum(progress.task != (Phase.FORWARD, pack.index) for progress in self._step.turns.running)
        for num_bytes, number in self._pool.take_missed().items():
            self._pool.provide(num_bytes, number * waiting)

    def _note_work(self, granted: Grant, device: Device, observation: Observation) -> None:
        """Keep the most that was allocated in a pack."""
        pack, num_bytes = granted.pack, observation.peak() - observation.bytes_before
        plan, num_lanes = self._placement.plan, len(self._step.turns.running)
        if pack is None and granted.phase is Phase.BACKWARD and plan.visits:
            # From the loss back to the last layer: glue counts to the layer before it.
            pack = self._placement.packs[plan.visits[-1]]
            left = device.allocated_bytes() - observation.bytes_before
            self.work.loss_bytes = max(self.work.loss_bytes, left)
        elif pack is not None and granted.phase is Phase.BACKWARD and (pack.index,) == plan.visits[-1:]:
            num_bytes += self.work.loss_bytes
        has_watched, self._has_watched = self._has_watched, False
        if pack is None or (has_watched and num_lanes > 1):
            return
        if pack.accumulators and not observation.summing:
            # They were made in this turn, and count as gradients. Where others follow, those tell what the work takes.
            if num_lanes > 1:
                return
            num_bytes -= pack.gradient_layout()[1]
        self.work.note(pack.layers, granted.phase, num_bytes)

    # ---- visits by the plan --------------------------------------------------------------------------------------------

    def go_on(self, device: Device, phase: Phase, pack: SwappedPack) -> None:
        """The lane comes to another pack within its turn."""
        self._end_visit()
        self._begin_visit(device, phase, pack)

    def _begin_visit(self, device: Device, phase: Phase, pack: SwappedPack | None) -> None:
        if not self.is_timing:
            return
        now, launched, self._launched = self._busy_seconds(), self._launched, None
        if launched is not None:
            self._profiler.note_visit_period(launched.visit, now - launched.began_seconds)
        if pack is None:
            return
        plan = self._placement.plan
        has_graph = pack.index in plan.kept or (self._step.fuses and pack.index in plan.fused)
        visit = Visit(tuple(layer.index for layer in pack.layers), phase, phase is Phase.BACKWARD and not has_graph)
        self._timed = self._launched = TimedVisit(visit, device, device.moment(), now)

    def _end_visit(self) -> None:
        timed, self._timed = self._timed, None
        if timed is not None:
            self._profiler.note_visit(timed.visit, (timed.began, timed.device.moment()))

    # ---- within a turn -------------------------------------------------------------------------------------------------

    @contextmanager
    def copying(self) -> Iterator[None]:
        """The context of a copy of weights that the host waits for."""
        before = perf_counter()
        yield
        self._copying_seconds += perf_counter() - before

    def note_found(self, residents: Residents, place: Place) -> None:
        """Keep what lanes have on a device when the first comes to a layer there."""
        pack, plan = place.pack, self._placement.plan
        if place.phase is Phase.BACKWARD and (pack.index,) == plan.visits[-1:]:
            return
        state = pack.layout.num_bytes + pack.buffer_bytes + sum(a.buffer.numel() for a in pack.accumulators.values())
        num_bytes = residents.device.allocated_bytes() - state
        # In turn, one microbatch after the other is there by itself.
        num_lanes = 1 if self._step.is_sequential else len(self._step.turns.running)
        number = self._placement.residents.index(residents)
        self.work.note_found(pack.layers, place.phase, num_bytes, num_lanes, number)

    @contextmanager
    def measuring_graph(self, layer: SwappedLayer, device: Device) -> Iterator[None]:
        """The context in which a layer's graph is made again, in a step that is measured."""
        times = self.is_profiling and self._observation is not None
        before, began = device.allocated_bytes(), device.moment() if times else None
        yield
        self.work.note_graph(layer, device.allocated_bytes() - before)
        if began is not None:
            self._recomputes.append((began, device.moment()))

    def timing_transfer(self, source: Device, target: Device, num_bytes: int) -> AbstractContextManager[None]:
        """The context of a copy from device to device."""
        return self._profiler.transferring(source, target, num_bytes) if self.is_profiling else nullcontext()

    def start_watching(self, layer: SwappedLayer) -> bool:
        """Watch a layer unless it is known what it does with its weights. A turn in which one is watched tells no work."""
        if not self.is_watching or layer.index in self._watched:
            return False
        self._watched.add(layer.index)
        self._has_watched = True
        return True

"""The step recorder: how long devices compute in a training step, and when each task of it runs, for those who ask.

On a GPU, moments are events on the stream where the work runs, and they are read when the step is over: nothing waits for
them. On the CPU they are the clock, read where the work runs. With one device, a lane's turn is what computes: glue and
layers, less the waiting for what was stashed. With several, a lane's glue is in the lane's own order, where it waits for other
devices: there the calls of layers count alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

from torch import nn

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Moment
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.plan.drawing.recording import Recording
from lightning_harmony.plan.simulate.order import owner
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.prediction import DevicePrediction, Prediction, Span
from lightning_harmony.plan.values.task import COMPUTE, STREAM_OF, Errand, Phase, Task

_ARRIVING = frozenset({Errand.SWAP_IN, Errand.UNPARK, Errand.STASH_IN})
_LEAVING = frozenset({Errand.SWAP_OUT, Errand.PARK, Errand.STASH_OUT})


@dataclass(frozen=True)
class _Work:
    """Something that ran.

    Attributes:
        task: what it was.
        began: when it began.
        ended: when it ended.
        clock: the number of the device by whose clock that is.
        what: the kind of bytes that it copied.
        num_bytes: how many.
    """

    task: Task
    began: Moment
    ended: Moment
    clock: int
    what: str = ""
    num_bytes: int = 0


@dataclass
class _Open:
    """What computes now.

    Attributes:
        device: the number of the device where it does.
        task: what it is.
        began: when it began.
        peak: gives the most that was allocated since its turn began, where that is noted.
    """

    device: int
    task: Task
    began: Moment
    peak: Callable[[], int] | None


@dataclass
class _Step:
    """The notes of one step.

    Attributes:
        plan: what it runs by, with all packs that there are.
        in_full: whether all of its tasks are noted, and not only how long devices compute.
        origins: when it began, on each device.
        start_seconds: the same by the host's clock.
        work: what ran on each device.
        memory: for each device, moments, and what was allocated from then on.
        task: that of the lane that runs, or ran last.
        pack_of: the pack of each parameter.
        updates: the tasks of the host, with their beginning and end by its clock.
        more_packs: those that came up in it: parameters that glue used for the first time.
        open: what computes now.
    """

    plan: Plan
    in_full: bool
    origins: list[Moment]
    start_seconds: float
    work: list[list[_Work]]
    memory: list[list[tuple[Moment, int]]]
    task: Task
    pack_of: dict[nn.Parameter, int] = field(default_factory=dict)
    updates: list[tuple[Task, float, float]] = field(default_factory=list)
    more_packs: dict[int, tuple[str, ...]] = field(default_factory=dict)
    open: _Open | None = None


class StepRecorder:
    """Notes what devices do in training steps. Where nothing is to be recorded, it does nothing.

    Args:
        devices: all of them.

    Attributes:
        measures_busy: whether steps from the next one on are to tell how long devices compute.
        records_next: whether all of the next step is to be recorded; until one has come to its end.
        recording: the newest step that was recorded, until a callback takes it.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.measures_busy = False
        self.records_next = False
        self.recording: Recording | None = None
        self._devices = devices
        self._step: _Step | None = None

    @property
    def is_recording(self) -> bool:
        """Whether anything is noted of the step that runs."""
        return self._step is not None

    def take_over(self, other: StepRecorder) -> None:
        """Do what another one, whose devices are closed, was asked to do."""
        self.measures_busy, self.records_next = other.measures_busy, other.records_next

    # ---- the step ------------------------------------------------------------------------------------------------------

    def begin(self, plan: Plan, packs: Sequence[SwappedPack]) -> None:
        """A training step begins.

        Args:
            plan: what it runs by.
            packs: its packs, and those that the plan does not know.
        """
        self.drop()
        if not (self.measures_busy or self.records_next):
            return
        in_full = self.records_next
        if in_full:
            # Then the clocks of all devices and of the host agree on when it began.
            for device in self._devices:
                device.record().synchronize()
        self._step = _Step(
            plan=plan,
            in_full=in_full,
            origins=[device.moment() for device in self._devices] if in_full else [],
            start_seconds=perf_counter(),
            work=[[] for _ in self._devices],
            memory=[[] for _ in self._devices],
            task=Task(0, Phase.FORWARD, 0),
        )
        self.run_by(plan, packs)
        for device in self._devices:
            device.recorder = self

    def run_by(self, plan: Plan, packs: Sequence[SwappedPack]) -> None:
        """The step runs by a plan, which may be made when it has begun, but before anything ran."""
        step = self._step
        if step is not None:
            step.plan = replace(plan, packs=tuple(map(_names, packs))) if step.in_full else plan
            step.pack_of = {p: pack.index for pack in packs for p in pack.parameters} if step.in_full else {}

    def drop(self) -> None:
        """Forget a step that did not come to its end."""
        self._step = None
        for device in self._devices:
            device.recorder = None

    def end(self, seconds: float, num_microbatches: int, update: str) -> list[float]:
        """The step is over.

        Args:
            seconds: what it took.
            num_microbatches: how many it had.
            update: when parameters are updated, and why.

        Returns:
            The share of its time in which each device computed; empty where that was not to be measured, or nothing ran.
        """
        step = self._step
        self.drop()
        if step is None:
            return []
        if step.in_full:
            self.records_next = False
            # Less than that of the whole step where a first attempt was undone.
            recorded = min(seconds, perf_counter() - step.start_seconds)
            self.recording = self._recording(step, recorded, num_microbatches, update)
        computed = [[work for work in several if _stream(work.task) == COMPUTE] for several in step.work]
        if not any(computed):
            return []
        return [sum(each.ended.seconds_since(each.began) for each in several) / seconds for several in computed]

    # ---- what computes -------------------------------------------------------------------------------------------------

    def enter(self, number: int, task: Task, pack: SwappedPack | None) -> None:
        """A lane comes to a task on a device, and all that it waits for is there.

        Args:
            number: of the device.
            task: what it does.
            pack: the pack that it does it to; None for the code before the first layer, and for the loss.
        """
        step = self._step
        if step is None:
            return
        step.task = task
        if pack is not None and pack.index >= len(step.plan.packs):
            step.more_packs[pack.index] = _names(pack)
        if len(self._devices) == 1:
            self._open(step, number, task)

    def leave(self) -> None:
        """What computed has been launched, or on the CPU has ended."""
        if self._step is not None:
            self._close(self._step)

    def computing(self, device: Device) -> AbstractContextManager[None]:
        """The context of a layer's own code on one of several devices."""
        return self._noted(device, device.computing())

    def differentiating(self, device: Device) -> AbstractContextManager[None]:
        """The context of the backward of a layer's own code on one of several devices."""
        return self._noted(device, device.differentiating())

    def _noted(self, device: Device, context: AbstractContextManager[None]) -> AbstractContextManager[None]:
        return context if self._step is None else self._noting(self._step, device, context)

    @contextmanager
    def _noting(self, step: _Step, device: Device, context: AbstractContextManager[None]) -> Iterator[None]:
        with context:
            interrupted = self._close(step)
            self._open(step, self._devices.index(device), step.task)
            try:
                yield
            finally:
                self._close(step)
                if interrupted is not None:
                    self._open(step, interrupted.device, interrupted.task)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The context in which what computes waits for a copy."""
        step = self._step
        if step is None or step.open is None:
            yield
            return
        interrupted = self._close(step)
        yield
        if interrupted is not None:
            # Who measures may watch a peak over all of the turn: that is not begun anew.
            step.open = replace(interrupted, began=self._devices[interrupted.device].moment())

    def _open(self, step: _Step, number: int, task: Task) -> None:
        device = self._devices[number]
        peak = device.watch_peak() if step.in_full else None
        step.open = _Open(number, task, device.moment(), peak)

    def _close(self, step: _Step) -> _Open | None:
        computed, step.open = step.open, None
        if computed is None:
            return None
        number, device = computed.device, self._devices[computed.device]
        work = _Work(computed.task, computed.began, device.moment(), number)
        step.work[number].append(work)
        if computed.peak is not None:
            step.memory[number] += [(work.began, computed.peak()), (work.ended, device.allocated_bytes())]
        return computed

    # ---- copies and updates --------------------------------------------------------------------------------------------

    def copying(
        self, device: Device, kind: Errand, what: str, num_bytes: int, work: Callable[[], None], pack: int | None
    ) -> Callable[[], None]:
        """The work of a copy between host and device, with a note of when it runs.

        Args:
            device: which one.
            kind: the kind of its task.
            what: the kind of what is copied.
            num_bytes: how much of that.
            work: runs on the stream of that kind.
            pack: which one's; None for what belongs to the running lane.
        """
        step = self._step
        if step is None or not step.in_full:
            return work
        task = Task(step.task.pack if pack is None else pack, kind)
        if pack is None or kind in (Errand.UNPARK, Errand.GATHER):
            # For the running lane: others share what comes and goes of a pack.
            task = task._replace(microbatch=step.task.microbatch)
        number = self._devices.index(device)
        notes, moment = step.work[number], device.stream_of(kind).moment

        def noted() -> None:
            began = moment()
            work()
            notes.append(_Work(task, began, moment(), number, what, num_bytes))

        return noted

    @contextmanager
    def transferring(self, source: Device, target: Device, num_bytes: int, task: Task | None) -> Iterator[None]:
        """The context in which a tensor is copied from device to device; ``task`` is None for one of the running lane."""
        step = self._step
        if step is None or not step.in_full:
            yield
            return
        if task is None:
            is_forward = step.task.kind is Phase.FORWARD
            kind = Errand.TRANSFER_FORWARD if is_forward else Errand.TRANSFER_BACKWARD
            task = step.task._replace(kind=kind)
        # The copy runs in the order of the device that it comes from.
        began, clock = source.lane_moment(), self._devices.index(source)
        yield
        number = self._devices.index(target)
        step.work[number].append(_Work(task, began, source.lane_moment(), clock, num_bytes=num_bytes))

    def note_update(self, parameters: Iterable[nn.Parameter], start_seconds: float, end_seconds: float) -> None:
        """The host has updated the parameters of a pack."""
        step = self._step
        if step is None or not step.in_full:
            return
        pack = next((step.pack_of[p] for p in parameters if p in step.pack_of), None)
        if pack is not None:
            step.updates.append((Task(pack, Errand.UPDATE), start_seconds, end_seconds))

    # ---- the recording -------------------------------------------------------------------------------------------------

    def _recording(self, step: _Step, seconds: float, num_microbatches: int, update: str) -> Recording:
        plan = step.plan
        packs = (*plan.packs, *(step.more_packs[index] for index in sorted(step.more_packs)))
        plan = replace(plan, packs=packs, num_microbatches=plan.num_microbatches or num_microbatches)
        devices = tuple(self._device(step, plan, number) for number in range(len(self._devices)))
        ends = [span.end_seconds for device in devices for span in device.spans]
        return Recording(plan, Prediction(max(seconds, *ends, 0.0), devices), update)

    def _device(self, step: _Step, plan: Plan, number: int) -> DevicePrediction:
        since = [lambda moment, origin=origin: max(moment.seconds_since(origin), 0.0) for origin in step.origins]
        spans = [
            Span(each.task, _stream(each.task), since[each.clock](each.began), since[each.clock](each.ended))
            for each in list(step.work[number])
        ]
        spans += [
            Span(task, _stream(task), max(start - step.start_seconds, 0.0), end - step.start_seconds)
            for task, start, end in list(step.updates)
            if owner(plan, task.pack) == number and end > step.start_seconds
        ]
        memory = [(since[number](moment), num_bytes) for moment, num_bytes in step.memory[number]]
        swapped_in, swapped_out = Counter[str](), Counter[str]()
        transferred = 0
        for each in list(step.work[number]):
            if each.task.kind in _ARRIVING:
                swapped_in[each.what] += each.num_bytes
            elif each.task.kind in _LEAVING:
                swapped_out[each.what] += each.num_bytes
            else:
                transferred += each.num_bytes
        peak = max((num_bytes for _, num_bytes in memory), default=0)
        return DevicePrediction(
            spans=tuple(sorted(spans, key=lambda span: (span.start_seconds, span.end_seconds))),
            peak_bytes=peak,
            bound_bytes=peak,
            memory=tuple(sorted(memory, key=lambda point: point[0])),
            compute_seconds=sum(s.end_seconds - s.start_seconds for s in spans if s.stream == COMPUTE),
            swapped_in_bytes=dict(swapped_in),
            swapped_out_bytes=dict(swapped_out),
            transferred_bytes=transferred,
        )


def _names(pack: SwappedPack) -> tuple[str, ...]:
    return tuple(layer.name for layer in pack.layers)


def _stream(task: Task) -> str:
    return STREAM_OF[task.kind]

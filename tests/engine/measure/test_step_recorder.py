"""The step recorder: what computes, copies and updates when, told by moments that the test sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.step_recorder import StepRecorder
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.plan.drawing.recording import Recording
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.prediction import Span
from lightning_harmony.plan.values.task import Errand, Phase, Task
from support.clocks import set_clock
from support.plans import parse_task

PLAN = Plan((("0",), ("1",)), (0, 1), 2, num_microbatches=2)


@dataclass
class Moment:
    seconds: float

    def seconds_since(self, earlier: Moment) -> float:
        return self.seconds - earlier.seconds


class Clock:
    """Moments of this clock are when the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def moment(self) -> Any:
        return Moment(self.now)


class Stream:
    """Runs what it is given when the test says."""

    def __init__(self, clock: Clock) -> None:
        self.moment = clock.moment
        self._submitted: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None], after: Any) -> None:
        self._submitted.append(work)

    def run(self) -> None:
        for work in self._submitted:
            work()
        self._submitted.clear()

    def close(self) -> None:
        pass


class Device(VirtualDevice):
    def __init__(self, clock: Clock) -> None:
        super().__init__(None)
        self.clock = clock
        for stream in (self.swap_in, self.swap_out, self.stash_in):
            stream.close()
        self.copies = Stream(clock)
        self.swap_in = self.swap_out = self.stash_in = self.copies  # type: ignore[assignment]

    def moment(self) -> Any:
        return self.clock.moment()

    lane_moment = moment


class Run:
    """A recorder with devices, one of which computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_devices: int = 1) -> None:
        self.clock = Clock()
        self.devices = [Device(self.clock) for _ in range(num_devices)]
        self.recorder = StepRecorder(self.devices)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        store = HostStore(list(model.parameters()), self.devices[0])
        layers = [SwappedLayer(i, str(i), layer, list(layer.parameters()), None) for i, layer in enumerate(model)]
        self.packs = [SwappedPack(index, [layer], store) for index, layer in enumerate(layers)]
        set_clock(monkeypatch, lambda: self.clock.now)

    def begin(self, *, busy: bool = False, record: bool = False) -> StepRecorder:
        self.recorder.measures_busy, self.recorder.records_next = busy, record
        self.recorder.begin(PLAN, self.packs)
        return self.recorder

    def compute(self, until: float, task: str = "0F0", device: int = 0) -> None:
        """A turn from now on."""
        parsed = parse_task(task)
        self.recorder.enter(device, parsed, self.packs[parsed.pack])
        with self.recorder.computing(self.devices[device]) if len(self.devices) > 1 else torch.no_grad():
            self.clock.now = until
        self.recorder.leave()

    def spans(self, device: int = 0) -> list[tuple[str, float, float]]:
        recording = self.recorder.recording
        assert recording is not None
        return [(str(s.task), s.start_seconds, s.end_seconds) for s in recording.measured.devices[device].spans]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    return lambda num_devices=1: Run(monkeypatch, num_devices)


class TestBusy:
    def test_is_the_share_in_which_turns_run_without_what_they_wait_for(self, make: Callable[..., Run]) -> None:
        run = make()
        recorder = run.begin(busy=True)
        run.clock.now = 1.0
        recorder.enter(0, Task(0, Phase.FORWARD, 0), run.packs[0])
        run.clock.now = 3.0
        with run.devices[0].waiting():
            run.clock.now = 4.0
        run.clock.now = 5.0
        recorder.leave()
        run.clock.now = 8.0
        assert recorder.end(10.0, 2, "") == [0.3]
        assert recorder.recording is None

    def test_of_several_devices_counts_the_calls_of_layers_on_each(self, make: Callable[..., Run]) -> None:
        run = make(2)
        recorder = run.begin(busy=True)
        run.compute(2.0)
        recorder.enter(1, Task(1, Phase.FORWARD, 0), run.packs[1])
        # The code between layers, which may be anywhere.
        run.clock.now = 3.0
        with recorder.computing(run.devices[1]):
            run.clock.now = 4.0
        run.clock.now = 7.0
        recorder.leave()
        assert recorder.end(10.0, 2, "") == [0.2, 0.1]

    def test_is_not_told_where_nobody_asked_or_nothing_computed(self, make: Callable[..., Run]) -> None:
        run = make()
        recorder = run.begin()
        run.compute(1.0)
        assert recorder.end(1.0, 2, "") == []
        assert run.begin(busy=True).end(1.0, 2, "") == []

    def test_of_a_step_that_was_dropped_goes_into_no_other(self, make: Callable[..., Run]) -> None:
        run = make()
        run.begin(busy=True)
        run.compute(1.0)
        run.recorder.drop()
        run.compute(2.0)
        assert run.recorder.end(2.0, 2, "") == []
        run.begin(busy=True)
        run.compute(3.0)
        assert run.recorder.end(2.0, 2, "") == [0.5]


class TestRecording:
    def test_tells_tasks_with_their_streams_bytes_and_memory(self, make: Callable[..., Run]) -> None:
        run = make()
        (device,) = run.devices
        run.clock.now = 100.0
        recorder = run.begin(record=True)

        def copying(until: float) -> Callable[[], None]:
            return lambda: setattr(run.clock, "now", until)

        device.start_copy(Errand.SWAP_IN, "weights", 10, copying(101.0), pack=0)
        device.copies.run()
        recorder.enter(0, Task(0, Phase.FORWARD, 0), run.packs[0])
        buffer = device.empty(300)
        device.start_copy(Errand.STASH_OUT, "stash", 5, copying(104.0))
        run.clock.now = 103.0
        del buffer
        kept = device.empty(100)
        recorder.leave()
        device.start_copy(Errand.SWAP_OUT, "gradients", 7, copying(105.0), pack=1)
        device.copies.run()
        recorder.note_update(run.packs[1].parameters, 105.0, 106.0)
        run.clock.now = 107.0
        recorder.end(7.0, 2, "just-in-time: so")
        assert not recorder.records_next

        assert recorder.recording is not None
        (done,) = recorder.recording.measured.devices
        assert done.spans == (
            Span(parse_task("0SWAP_IN"), "swap-in", 0.0, 1.0),
            Span(parse_task("0F0"), "compute", 1.0, 3.0),
            Span(parse_task("0STASH_OUT0"), "swap-out", 3.0, 4.0),
            Span(parse_task("1SWAP_OUT"), "swap-out", 4.0, 5.0),
            Span(parse_task("1U"), "update", 5.0, 6.0),
        )
        assert done.memory == ((1.0, 300), (3.0, 100))
        assert (done.peak_bytes, done.compute_seconds) == (300, 2.0)
        assert (done.swapped_in_bytes, done.swapped_out_bytes) == ({"weights": 10}, {"stash": 5, "gradients": 7})
        assert (recorder.recording.measured.seconds, recorder.recording.plan) == (7.0, PLAN)
        assert recorder.recording.update == "just-in-time: so"
        assert kept.numel() == 100

    def test_shows_waiting_as_a_gap(self, make: Callable[..., Run]) -> None:
        run = make()
        recorder = run.begin(record=True)
        recorder.enter(0, Task(1, Phase.BACKWARD, 1), run.packs[1])
        run.clock.now = 1.0
        with run.devices[0].waiting():
            run.clock.now = 2.0
        run.clock.now = 3.0
        recorder.leave()
        recorder.end(3.0, 2, "")
        assert run.spans() == [("1B1", 0.0, 1.0), ("1B1", 2.0, 3.0)]

    def test_a_transfer_belongs_to_the_device_where_it_arrives(self, make: Callable[..., Run]) -> None:
        run = make(2)
        recorder = run.begin(record=True)
        run.compute(1.0)
        recorder.enter(1, Task(1, Phase.FORWARD, 0), run.packs[1])
        with run.devices[1].receiving(run.devices[0], 40, None):
            run.clock.now = 2.0
        with run.devices[0].receiving(run.devices[1], 60, Task(0, Errand.REDUCE, 1)):
            run.clock.now = 3.0
        recorder.end(3.0, 2, "")
        assert run.spans(0) == [("0F0", 0.0, 1.0), ("0REDUCE1", 2.0, 3.0)]
        assert run.spans(1) == [("1TRANSFER_F0", 1.0, 2.0)]
        assert recorder.recording is not None
        assert [device.transferred_bytes for device in recorder.recording.measured.devices] == [60, 40]

    def test_an_update_that_began_before_counts_from_the_beginning(self, make: Callable[..., Run]) -> None:
        run = make()
        run.clock.now = 10.0
        recorder = run.begin(record=True)
        recorder.note_update(run.packs[0].parameters, 8.0, 9.0)
        recorder.note_update(run.packs[0].parameters, 9.0, 11.0)
        recorder.end(2.0, 2, "")
        assert run.spans() == [("0U", 0.0, 1.0)]

    def test_packs_that_the_plan_does_not_know_have_their_names(self, make: Callable[..., Run]) -> None:
        run = make()
        later = run.packs.pop()
        run.begin(record=True)
        run.compute(1.0)
        run.recorder.enter(0, Task(1, Phase.FORWARD, 0), later)
        run.recorder.leave()
        run.recorder.end(1.0, 2, "")
        assert run.recorder.recording is not None
        assert run.recorder.recording.plan.packs == PLAN.packs

    def test_only_the_step_that_was_asked_for_is_recorded(self, make: Callable[..., Run]) -> None:
        run = make()
        recorder = run.begin(record=True)
        run.compute(1.0)
        recorder.end(1.0, 2, "")
        first = recorder.recording
        recorder.begin(PLAN, run.packs)
        run.compute(2.0)
        assert recorder.end(1.0, 2, "") == []
        assert recorder.recording is first
        assert all(device.recorder is None for device in run.devices)

    def test_sums_that_make_way_come_back_for_the_microbatch_that_runs(self, make: Callable[..., Run]) -> None:
        run = make()
        recorder = run.begin(record=True)
        run.compute(1.0, "0B1")
        device = run.devices[0]
        for kind in (Errand.PARK, Errand.UNPARK):
            device.start_copy(kind, "gradients", 3, lambda: None, pack=1)
        device.copies.run()
        recorder.end(1.0, 2, "")
        assert recorder.recording is not None
        # Both have to be read back.
        recording = Recording.from_json(recorder.recording.to_json())
        assert [str(span.task) for span in recording.measured.devices[0].spans] == ["0B1", "1PARK", "1UNPARK1"]
        (done,) = recording.measured.devices
        assert (done.swapped_in_bytes, done.swapped_out_bytes) == ({"gradients": 3}, {"gradients": 3})

    def test_a_plan_that_is_made_when_the_step_has_begun_is_the_one_it_ran_by(self, make: Callable[..., Run]) -> None:
        run = make()
        recorder = run.begin(record=True)
        later = replace(PLAN, first_fused=1)
        recorder.run_by(later, run.packs)
        run.compute(1.0)
        recorder.end(1.0, 2, "")
        assert recorder.recording is not None
        assert recorder.recording.plan == later

    def test_an_attempt_that_is_undone_leaves_the_recording_to_the_next_one(self, make: Callable[..., Run]) -> None:
        run = make()
        recorder = run.begin(record=True)
        run.compute(2.0)
        recorder.drop()
        recorder.begin(PLAN, run.packs)
        run.compute(3.0)
        recorder.end(3.0, 2, "")
        assert run.spans() == [("0F0", 0.0, 1.0)]
        assert recorder.recording is not None
        assert recorder.recording.measured.seconds == 1.0

    def test_another_recorder_takes_over_what_was_asked(self, make: Callable[..., Run]) -> None:
        run, other = make(), make()
        run.recorder.records_next = True
        other.recorder.take_over(run.recorder)
        other.recorder.begin(PLAN, other.packs)
        other.compute(1.0)
        other.recorder.end(1.0, 2, "")
        assert other.spans() == [("0F0", 0.0, 1.0)]

"""Which layer a rehearsed step's work counts to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.measure.workspace import WorkSpace
from lightning_harmony.engine.memory.stash import Stash
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.rehearsal.fakes import FakeDevice
from lightning_harmony.engine.rehearsal.work_counter import WorkCounter
from lightning_harmony.plan.outlook.work import Held, Work
from lightning_harmony.plan.values.task import Phase


@dataclass
class Turn:
    """From a layer's call to the next.

    Attributes:
        layer: what it counts to; None for the code before the first layer.
        phase: forward or backward.
        is_visit: whether it began with a call.
        before: what was allocated then.
        measured: gives the most that was since.
    """

    layer: SwappedLayer | None
    phase: Phase
    is_visit: bool
    before: int
    measured: Callable[[], int]


@dataclass
class Totals:
    """What one layer was seen to do."""

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    recompute: Work = field(default_factory=Work)
    held: Held = field(default_factory=Held)
    input_bytes: int = 0
    stash_bytes: int = 0
    num_calls: int = 0
    has_returned: bool = False


class WorkByLayer:
    """Counts what is allocated, computed and stashed to the layer in whose turn it is.

    Args:
        device: counts what is allocated.
        counter: counts what is computed.
        stash: retires what is on its way out.
        traffic: counts what is stashed.

    Attributes:
        work: what layers allocate.
        totals: what each did, by its index.
        calls: the layers in the order in which they were called, by their indices.
        start_bytes: what the code before the first layer allocated.
        loss_bytes: the most that a microbatch has on the device in the backward of its loss, up to the last layer's.
        resident_bytes: what is on the device throughout.
    """

    def __init__(self, device: FakeDevice, counter: WorkCounter, stash: Stash, traffic: Traffic) -> None:
        self.work = WorkSpace()
        self.totals: defaultdict[int, Totals] = defaultdict(Totals)
        self.calls: list[int] = []
        self.start_bytes = self.loss_bytes = self.resident_bytes = 0
        self._device = device
        self._counter = counter
        self._stash = stash
        self._traffic = traffic
        self._turn: Turn | None = None
        self._loss_layer: SwappedLayer | None = None

    def begin(self, layer: SwappedLayer | None, phase: Phase, *, is_visit: bool = False) -> None:
        """A turn begins, as where a lane parks."""
        self.end()
        self._stash.retire()
        before = self._device.allocated_bytes()
        if layer is not None:
            self._note_waiting(layer, phase, before - self.resident_bytes, is_visit=is_visit)
        self._turn = Turn(layer, phase, is_visit, before, self._device.watch_peak())

    def end(self) -> None:
        """The turn is over."""
        turn, self._turn = self._turn, None
        if turn is None:
            return
        most, work = turn.measured(), self._counter.take()
        num_bytes = most - turn.before
        stashed = self._traffic.swapped_out["stash"]
        self._traffic.reset()
        if turn.layer is None:
            self.start_bytes = max(self.start_bytes, num_bytes)
            return
        if turn.phase is Phase.BACKWARD and not turn.is_visit:
            self._loss_layer = turn.layer
            self.work.loss_bytes = self._device.allocated_bytes() - turn.before
            self.loss_bytes = max(self.loss_bytes, most - self.resident_bytes)
        elif turn.phase is Phase.BACKWARD and turn.layer is self._loss_layer:
            num_bytes += self.work.loss_bytes
        self.work.note([turn.layer], turn.phase, num_bytes)
        totals, held = self.totals[turn.layer.index], self.totals[turn.layer.index].held
        totals.stash_bytes += stashed
        most -= self.resident_bytes
        if turn.phase is Phase.FORWARD:
            totals.forward += work
            totals.held = replace(held, forward_bytes=max(held.forward_bytes, most))
        else:
            totals.backward += work
            if turn.is_visit:
                totals.held = replace(held, backward_bytes=max(held.backward_bytes, most))

    def _note_waiting(self, layer: SwappedLayer, phase: Phase, num_bytes: int, *, is_visit: bool) -> None:
        """A microbatch held so much when it came to a layer."""
        totals, held = self.totals[layer.index], self.totals[layer.index].held
        # Where the backward of the loss has just ended, the same microbatch goes on, and the others do not wait like this.
        is_first = phase is Phase.BACKWARD and is_visit and self.calls[-1] == layer.index and not totals.has_returned
        if not is_first:
            totals.held = replace(held, waiting_bytes=max(held.waiting_bytes, num_bytes))
        totals.has_returned |= phase is Phase.BACKWARD and is_visit

    @contextmanager
    def visiting(self, layer: SwappedLayer, phase: Phase) -> Iterator[None]:
        """The context of a layer's call, forth or back."""
        if phase is Phase.FORWARD:
            self.calls.append(layer.index)
            self.totals[layer.index].num_calls += 1
        turn = self._turn
        if turn is None or not turn.is_visit or (turn.layer, turn.phase) != (layer, phase):
            self.begin(layer, phase, is_visit=True)
        stashed = self._traffic.swapped_out["stash"]
        yield
        if phase is Phase.FORWARD:
            totals = self.totals[layer.index]
            totals.input_bytes = max(totals.input_bytes, self._traffic.swapped_out["stash"] - stashed)

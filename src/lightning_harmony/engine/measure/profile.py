"""The profiler: what layers and copies were seen to take while a step trained as it would anyway."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median_low
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Moment
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.plan.values.cost import SECONDS, Cost
from lightning_harmony.plan.values.task import Phase

# From one moment to another.
Period: TypeAlias = tuple[Moment, Moment]

# What of a cost a turn tells.
_SECONDS_OF = {Phase.FORWARD: "forward_seconds", Phase.BACKWARD: "backward_seconds"}


class Visit(NamedTuple):
    """What a lane does to a pack in a step by the plan.

    Attributes:
        layers: of the pack, by their indices.
        phase: forward or backward.
        recomputes: whether its backward runs them again.
    """

    layers: tuple[int, ...]
    phase: Phase
    recomputes: bool


@dataclass
class Speed:
    """Copies, or updates, that were timed."""

    num_bytes: int = 0
    seconds: float = 0.0

    def note(self, num_bytes: int, seconds: float) -> None:
        """One more."""
        self.num_bytes += num_bytes
        self.seconds += seconds

    def recall(self, bytes_per_second: float | None) -> None:
        """What was seen before all that has been timed here: it counts as if it had been timed for a second."""
        if bytes_per_second and not self.num_bytes:
            self.note(int(bytes_per_second), 1.0)

    def keep_faster(self, other: Speed) -> None:
        """Keep the faster of two rates: a step that was held up says nothing of the next."""
        ours, theirs = self.bytes_per_second, other.bytes_per_second
        if theirs is not None and (ours is None or theirs > ours):
            self.num_bytes, self.seconds = other.num_bytes, other.seconds

    @property
    def bytes_per_second(self) -> float | None:
        """What all of them together came to; None if there was nothing to time."""
        return self.num_bytes / self.seconds if self.num_bytes and self.seconds > 0 else None


@dataclass
class UpdateSpeeds:
    """Of updates just in time.

    Attributes:
        fastest: of the step in which they were fastest. The first ones share the host with its making of buffers.
        newest: of the newest step in which there were any.
        outlast: whether those of most steps may go on when these have ended; None before the first.
        in_place: whether the newest step's could use gradients where they were summed, and that spares a bus.
        state_may_stay: whether behind the newest one nobody looks at optimizer state before the next update.
    """

    fastest: Speed = field(default_factory=Speed)
    newest: Speed = field(default_factory=Speed)
    outlast: bool | None = None
    in_place: bool = False
    state_may_stay: bool = False

    def note(self, of_step: Speed) -> None:
        """The updates of a step are done."""
        self.fastest.keep_faster(of_step)
        if of_step.num_bytes:
            self.newest = of_step

    def settle(self, bytes_per_second: float) -> None:
        """What was faster before does not count any more."""
        self.fastest = Speed()
        self.fastest.recall(bytes_per_second)


class Profiler:
    """Times each layer's turns, the copies of its weights and gradients, and what goes from device to device.

    It does so in steps that run layer by layer, which come first. A later one, by the plan, is timed by visits.

    Args:
        traffic: counts the copies.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.swap_in = Speed()
        self.swap_out = Speed()
        self._traffic = traffic
        self._transfer = Speed()
        self._transfers: list[tuple[int, Period]] = []
        # By layers and the names of their costs: of each turn what counts, and what the host was busy with it.
        self._turns: defaultdict[tuple[int, str], list[Sequence[Period]]] = defaultdict(list)
        self._host_seconds: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        self._seconds: dict[tuple[int, str], float] = {}
        # The same of a step by the plan.
        self._visits: defaultdict[Visit, list[Period]] = defaultdict(list)
        self._visit_seconds: defaultdict[Visit, list[float]] = defaultdict(list)
        self._copied: Counter[int] = Counter()
        self._stashed: Counter[int] = Counter()
        self._inputs: Counter[int] = Counter()
        self._num_elements = 0
        self._scaled: set[tuple[int, str]] = set()

    def begin(self, num_elements: int) -> None:
        """A step of microbatches of so many elements is timed.

        If they are larger than before, layers that are not timed alone any more are taken to need time in proportion.
        """
        if 0 < self._num_elements < num_elements:
            self._read_clocks()
            factor = num_elements / self._num_elements
            for key in self._seconds:
                self._seconds[key] *= factor
            self._scaled = set(self._seconds)
        self._num_elements = num_elements

    def recall(self, layer: SwappedLayer, cost: Cost) -> None:
        """What an earlier fit has seen of a layer."""
        for name in SECONDS:
            if seconds := getattr(cost, name):
                self._seconds[layer.index, name] = seconds
        self._copied[layer.index] = cost.copied_bytes
        self._stashed[layer.index] = cost.stash_bytes
        self._inputs[layer.index] = cost.input_bytes

    def note_turn(self, layer: SwappedLayer, phase: Phase, turn: Period, recomputes: Sequence[Period] = ()) -> None:
        """A lane's turn in a layer, and when it ran the layer again in it."""
        self._turns[layer.index, _SECONDS_OF[phase]].append([turn])
        if phase is Phase.BACKWARD:
            self._turns[layer.index, "recompute_seconds"].append(recomputes)

    def note_period(self, layer: SwappedLayer, phase: Phase, seconds: float) -> None:
        """From the beginning of a turn on the host to that of the next one in the same layer."""
        self._host_seconds[layer.index, _SECONDS_OF[phase]].append(seconds)

    def begin_visits(self) -> None:
        """A step by the plan is timed."""
        self._visits.clear()
        self._visit_seconds.clear()

    def note_visit(self, visit: Visit, period: Period) -> None:
        """A lane's visit in it."""
        self._visits[visit].append(period)

    def note_visit_period(self, visit: Visit, seconds: float) -> None:
        """From the beginning of a visit on the host to that of what comes next."""
        self._visit_seconds[visit].append(seconds)

    def keep_faster_visits(self) -> None:
        """Take layers to need no more time than the step by the plan has shown.

        The host is busier in first steps, and where it bounds a turn, layers seem to take longer. What takes longer by the
        plan says nothing of a layer: its visit may wait for a copy.
        """
        self._read_clocks()
        shares: dict[tuple[int, str], float] = {}
        for visit, periods in self._visits.items():
            taken = median_low(_seconds([period]) for period in periods)
            taken = max(taken, median_low(self._visit_seconds.get(visit, [0.0])))
            names = [_SECONDS_OF[visit.phase]]
            known = self._known_seconds(visit.layers, names[0])
            if visit.phase is Phase.BACKWARD:
                names.append("recompute_seconds")
                known -= 0.0 if visit.recomputes else self._known_seconds(visit.layers, names[1])
            if 0 < taken < known:
                for key in product(visit.layers, names):
                    shares[key] = min(shares.get(key, 1.0), taken / known)
        self._seconds.update({key: self._seconds[key] * share for key, share in shares.items() if key in self._seconds})
        self.begin_visits()

    def _known_seconds(self, layers: Sequence[int], name: str) -> float:
        return sum(self._seconds.get((layer, name), 0.0) for layer in layers)

    def note_stash(self, layer: SwappedLayer, num_bytes: int) -> None:
        """What a forward stashed."""
        self._stashed[layer.index] = max(self._stashed[layer.index], num_bytes)

    def note_input(self, layer: SwappedLayer, num_bytes: int) -> None:
        """What of that it was called with."""
        self._inputs[layer.index] = max(self._inputs[layer.index], num_bytes)

    @contextmanager
    def swapping_in(self, layer: SwappedLayer, device: Device) -> Iterator[None]:
        """The context in which a layer's weights come to a device, waited for."""
        before = self._traffic.swapped_in["weights"]
        with self._timing(device, self.swap_in, lambda: self._traffic.swapped_in["weights"]):
            yield
        self._copied[layer.index] = max(self._copied[layer.index], self._traffic.swapped_in["weights"] - before)

    @contextmanager
    def swapping_out(self, device: Device) -> Iterator[None]:
        """The context in which gradients leave a device, waited for."""
        with self._timing(device, self.swap_out, lambda: self._traffic.swapped_out["gradients"]):
            yield

    @contextmanager
    def _timing(self, device: Device, speed: Speed, counted: Callable[[], int]) -> Iterator[None]:
        # The copy waits for what has been computed before: that is not to count.
        with device.scheduling():
            device.record().synchronize()
        before, start = counted(), perf_counter()
        yield
        speed.note(counted() - before, perf_counter() - start)

    @contextmanager
    def transferring(self, source: Device, target: Device, num_bytes: int) -> Iterator[None]:
        """The context of a copy from device to device, in the order of the one that it comes from."""
        # It waits for what has been launched on the other one: that is not to count.
        with source.selected():
            target.record().wait()
        began = source.lane_moment()
        yield
        self._transfers.append((num_bytes, (began, source.lane_moment())))

    @property
    def transfer(self) -> Speed:
        """Of the copies from device to device."""
        for num_bytes, period in self._transfers:
            self._transfer.note(num_bytes, _seconds([period]))
        self._transfers.clear()
        return self._transfer

    def complete(self, cost: Cost, layer: SwappedLayer) -> Cost:
        """The cost of a layer with what was seen of it added."""
        self._read_clocks()
        seconds: dict[str, Any] = {name: self._seconds.get((layer.index, name), 0.0) for name in SECONDS}
        return replace(
            cost,
            copied_bytes=self._copied[layer.index],
            input_bytes=self._inputs[layer.index],
            stash_bytes=self._stashed[layer.index],
            **seconds,
        )

    def _read_clocks(self) -> None:
        """Keep a middle turn of each layer: the first ones load and choose kernels, and check what they compute.

        It lasts as long as the device computes, or as the host is busy with it if that is longer.
        """
        for key, turns in self._turns.items():
            taken = median_low(map(_seconds, turns))
            if self._host_seconds[key]:
                taken = max(taken, median_low(self._host_seconds[key]))
            if key not in self._scaled:
                taken = min(taken, self._seconds.get(key, taken))
            self._seconds[key] = taken
            self._scaled.discard(key)
        self._turns.clear()
        self._host_seconds.clear()

    def clear(self) -> None:
        """Forget what layers took: from now on they run otherwise."""
        self._turns.clear()
        self._host_seconds.clear()
        self._seconds.clear()
        self._scaled.clear()
        self.begin_visits()
        self._num_elements = 0
        self._copied.clear()
        self._stashed.clear()
        self._inputs.clear()


def _seconds(periods: Sequence[Period]) -> float:
    """How long they last in all."""
    return sum(ended.seconds_since(began) for began, ended in periods)

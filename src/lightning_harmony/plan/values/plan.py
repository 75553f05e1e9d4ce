"""The plan of a step: packs, the order in which the forward visits them, and what follows from that order."""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from math import inf
from typing import Literal

from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.document import Count, Document, DocumentKind, Seconds
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.printed import Printed
from lightning_harmony.plan.values.profile import Profile
from lightning_harmony.plan.values.task import Phase


@dataclass(frozen=True)
class Predicted:
    """What a step was predicted to take.

    Attributes:
        seconds: from its first task to its last.
        peak_bytes: the most on each device.
    """

    seconds: Seconds
    peak_bytes: tuple[Count, ...]


# How packs are placed on several devices: the microbatches go round, or the packs do.
Parallel = Literal["pipeline", "data"]

# How long what a microbatch brought stays for others to use: as long as there is room, which makes just-in-time computing and
# updates possible; as long as microbatches run through its pack; or not at all, as where memory is merely virtual.
Reuse = Literal["just-in-time", "visit", "none"]

# How many packs beyond the running one are fetched ahead, where there is room.
LOOKAHEAD = 2


@dataclass(frozen=True)
class Plan(Printed, Document):
    """Packs, the order of their visits, and where they run.

    Attributes:
        packs: names of the layers of each pack.
        visits: indices of the packs in the order in which one microbatch's forward reaches them. A pack that is
            used twice is visited twice; the backward goes the same way in reverse.
        first_fused: the visit from which a microbatch runs through to its loss and back without parking.
        kept: the packs before that keep their graphs from forward to backward.
        joined: the visits before that whose forward a microbatch runs in one turn with the visit before, without parking. So
            the forward goes by packs of its own: each is a run of those that are swapped, and that the backward goes by.
        device_updated: the packs whose gradients stay on their device until it has updated them, and never go to the host. So
            do the weights that came for their backward.
        state_on_device: the packs whose optimizer state stays on their device from one update to the next.
        spread: the packs of a pipeline whose microbatches go round the devices, so that one that computes for long bounds no
            device. They begin with its home, the one that it would have alone: there their gradients are summed one by one.
        num_devices: how many devices share the work.
        parallel: "pipeline", where each pack has its device, or "data", where each microbatch has.
        num_microbatches: how many the step is planned for; None before it was seen.
        reuse: how long weights and sums of gradients stay on a device. "just-in-time": as long as there is room, and each
            pack is updated when its gradients are final. "visit": while all microbatches run through the pack, and the
            update follows the whole backward. "none": each microbatch goes through all packs by itself, and swaps each
            anew. The latter two are what Harmony is compared with.
        lookahead: how many packs beyond the running one are fetched ahead, where there is room.
        fingerprint: of the model that it is for, as `fingerprint` makes it; empty if that is not told.
        profile: what it was made from, if that is known.
        predicted: what the step was predicted to take, if it was.
    """

    # A reader of one version refuses all others: plans are quickly made anew.
    kind = DocumentKind("lightning-harmony plan", 11, "plan", "plan", way_out=": plan anew")

    packs: tuple[tuple[str, ...], ...]
    visits: tuple[Count, ...]
    first_fused: Count
    kept: frozenset[Count] = frozenset()
    joined: frozenset[Count] = frozenset()
    device_updated: frozenset[Count] = frozenset()
    state_on_device: frozenset[Count] = frozenset()
    spread: frozenset[Count] = frozenset()
    num_devices: Count = 1
    parallel: Parallel = "pipeline"
    num_microbatches: Count | None = None
    reuse: Reuse = "just-in-time"
    lookahead: Count = LOOKAHEAD
    fingerprint: str = ""
    profile: Profile | None = None
    predicted: Predicted | None = None

    def device_of(self, pack: int, microbatch: int) -> int:
        """The device where a pack runs for a microbatch.

        In a pipeline, packs go round the devices, and so do the microbatches of those that are spread. Where each microbatch
        goes through all packs by itself, that would have every device swap whenever a lane comes round: there, each device has
        a stage of consecutive ones.
        """
        if self.num_devices == 1:
            return 0
        if self.parallel == "data":
            return microbatch % self.num_devices
        if self.groups:
            return (pack + microbatch if pack in self.spread else pack) % self.num_devices
        return min(pack * self.num_devices // max(len(self.packs), 1), self.num_devices - 1)

    def runs_on(self, pack: int, device: int) -> bool:
        """Whether a pack runs on a device, for any microbatch."""
        return self.parallel == "data" or pack in self.spread or self.device_of(pack, 0) == device

    @cached_property
    def groups(self) -> bool:
        """Whether all microbatches run through a pack while it is there."""
        return self.reuse != "none"

    @property
    def just_in_time(self) -> bool:
        """Whether what is on a device is used as long as it is there, by the backward and for the update."""
        return self.reuse == "just-in-time"

    @property
    def predicted_seconds(self) -> float:
        """What a step is predicted to take; infinite where nothing is predicted of it."""
        return inf if self.predicted is None else self.predicted.seconds

    @property
    def stash_bytes(self) -> int:
        """What all microbatches of a step stash, as far as it is known what layers cost."""
        if self.profile is None or self.num_microbatches is None:
            return 0
        costs = self.profile.pack_costs(self.packs)
        stashing = [pack for place, pack in enumerate(self.visits) if not self.keeps_graph(place)]
        return self.num_microbatches * sum(costs[pack].stash_bytes for pack in stashing)

    def state_bytes_there(self, costs: Sequence[Cost]) -> int:
        """What optimizer state that stays takes of a device, of the one that has most of it.

        Args:
            costs: of the packs.
        """
        of_device = [0] * self.num_devices
        for pack in self.state_on_device:
            of_device[self.device_of(pack, 0)] += costs[pack].optimizer_bytes
        return max(of_device)

    def __str__(self) -> str:
        lines = [f"pack {index}: {', '.join(layers)}" for index, layers in enumerate(self.packs)]
        before = " ".join("+".join(str(self.visits[place]) for place in turn) for turn in self.forward_turns)
        lines.append(f"visits: {before} [{' '.join(map(str, self.fused_visits))}]".replace("  ", " "))
        lines += [f"{self.parallel} on {self.num_devices} devices"] if self.num_devices > 1 else []
        several = {
            "keep their graphs": self.kept,
            "updated where their gradients are": self.device_updated,
            "optimizer state stays on the device": self.state_on_device,
            "spread over all devices": self.spread,
        }
        lines += [f"{what}: {' '.join(map(str, sorted(packs)))}" for what, packs in several.items() if packs]
        lines += [f"microbatches: {self.num_microbatches}"] if self.num_microbatches is not None else []
        lines += [] if self.just_in_time else [f"reuse: {self.reuse}"]
        lines += [] if self.lookahead == LOOKAHEAD else [f"packs fetched ahead: {self.lookahead}"]
        lines += [f"predicted: {_text(self.predicted)}"] if self.predicted is not None else []
        return "\n".join(lines)

    def keeps_graph(self, position: int) -> bool:
        """Whether the visit at a position of the forward keeps graphs for its backward, so that it stashes nothing."""
        return position >= self.first_fused or self.visits[position] in self.kept

    @cached_property
    def forward_turns(self) -> tuple[range, ...]:
        """The visits before the fused ones, as positions, by the turns in which the forward runs through them."""
        starts = [position for position in range(self.first_fused) if position not in self.joined]
        return tuple(range(start, end) for start, end in pairwise([*starts, self.first_fused]))

    def packs_of_turn(self, position: int) -> frozenset[int]:
        """The packs that a microbatch runs through in one turn of the forward, as it does that of the visit at a position."""
        return frozenset(self.visits[place] for turn in self.forward_turns if position in turn for place in turn)

    @property
    def fused_visits(self) -> tuple[int, ...]:
        """The visits of which forward, loss and backward follow each other at once."""
        return self.visits[self.first_fused :]

    @cached_property
    def fused(self) -> frozenset[int]:
        """The packs of these visits."""
        return frozenset(self.fused_visits)

    def position(self, phase: Phase, pack: int, start: int) -> int:
        """Where in a phase's order a lane stands that asks for ``pack``, having come as far as ``start``.

        A pack that the order doesn't name from there on was not expected: it is served where the lane stands.
        """
        first = self._place(phase, 0)
        try:
            return self._step.index(pack, first + start, first + len(self.visits)) - first
        except ValueError:
            return start

    def upcoming(self, phase: Phase, position: int) -> Iterator[int]:
        """The packs that are needed after ``position`` of ``phase``, to the end of the step, soonest first."""
        return islice(self._step, self._place(phase, position) + 1, None)

    def needed_last(self, packs: Sequence[int], phase: Phase, position: int) -> int:
        """The one of ``packs`` that is needed last, or never again: the one to evict (Belady's rule)."""
        now = self._place(phase, position)
        return max(packs, key=lambda pack: self._next_visit(pack, now))

    def is_over(self, pack: int, phase: Phase, position: int) -> bool:
        """Whether a pack is not needed any more after ``position`` of ``phase``."""
        return self._next_visit(pack, self._place(phase, position)) == len(self._step)

    def comes_back_to(self, pack: int, phase: Phase, position: int) -> bool:
        """Whether it is for the backward that a pack is needed at ``position`` of ``phase``, or next after it."""
        now = self._place(phase, position)
        return bisect_left(self._places[pack], now) >= self.visits.count(pack)

    def _next_visit(self, pack: int, now: int) -> int:
        """The place in the step where a pack is visited next; the end if it isn't."""
        places = self._places[pack]
        following = bisect_right(places, now)
        return places[following] if following < len(places) else len(self._step)

    @cached_property
    def _step(self) -> tuple[int, ...]:
        """The visits of the whole step: of the forward, then of the backward."""
        return self.visits + self.visits[::-1]

    @cached_property
    def _places(self) -> defaultdict[int, list[int]]:
        """Where in the step each pack is visited."""
        places: defaultdict[int, list[int]] = defaultdict(list)
        for place, pack in enumerate(self._step):
            places[pack].append(place)
        return places

    def _place(self, phase: Phase, position: int) -> int:
        """A position of a phase as a place in the step."""
        return position if phase is Phase.FORWARD else len(self.visits) + position


def fingerprint(layers: Iterable[tuple[str, Iterable[Sequence[int]]]]) -> str:
    """What tells models apart for which a plan is made: their layers' names, and the shapes of their parameters.

    Args:
        layers: of each, the name and the shapes.
    """
    text = json.dumps([[name, [list(shape) for shape in shapes]] for name, shapes in layers])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text(predicted: Predicted) -> str:
    peaks = ", ".join(format_bytes(num_bytes) for num_bytes in predicted.peak_bytes)
    return f"{predicted.seconds:.3g} s, at most {peaks}"


def visits_of(calls: Sequence[int]) -> tuple[int, ...]:
    """The visits in a record of calls, each given by the pack of its layer: consecutive calls are one visit."""
    return tuple(pack for index, pack in enumerate(calls) if index == 0 or calls[index - 1] != pack)


def merge_calls(records: Sequence[Sequence[int]]) -> list[int]:
    """One order of calls from the records of all microbatches: the first's, with what only others called put in."""
    merged = list(records[0]) if records else []
    for record in records[1:]:
        for place, call in enumerate(record):
            if call not in merged:
                after = merged.index(record[place - 1]) + 1 if place else 0
                merged.insert(after, call)
    return merged

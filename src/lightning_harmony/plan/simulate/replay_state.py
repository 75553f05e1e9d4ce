"""The state of a replay: what each lane and device has at a moment of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_harmony.plan.simulate.device_memory import DeviceMemory
from lightning_harmony.plan.simulate.footprint import Footprint
from lightning_harmony.plan.values.prediction import Span
from lightning_harmony.plan.values.streams import COMPUTE, STREAMS
from lightning_harmony.plan.values.task import Phase, Task


@dataclass
class Lane:
    """Where a microbatch is.

    Attributes:
        position: the visit that comes next; in the backward, counted down.
        phase: the phase of that.
        device: where its tensors are; None before it began.
        ready: when they are there.
    """

    position: int = 0
    phase: Phase = Phase.FORWARD
    device: int | None = None
    ready: float = 0.0


@dataclass
class Stashed:
    """What a forward left for its backward.

    Attributes:
        footprint: of the visit.
        where: on the device, on the host, or back from there.
        ready: when it is there.
    """

    footprint: Footprint
    where: str
    ready: float


@dataclass
class Made:
    """Gradients of a microbatch that are to be gathered.

    Attributes:
        position: the visit that they are of.
        device: where they are.
        ready: when they are there.
    """

    position: int
    device: Device
    ready: float


@dataclass
class Device:
    """A device in the middle of its tasks."""

    number: int
    tasks: Sequence[Task]
    memory: DeviceMemory
    place: int = 0
    waits_for: str = ""
    streams: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0.0))
    issued: float = 0.0
    spans: list[Span] = field(default_factory=list)
    weights: dict[int, float] = field(default_factory=dict)
    first_use: dict[int, float] = field(default_factory=dict)
    last_use: dict[int, float] = field(default_factory=dict)
    num_graphs: Counter[int] = field(default_factory=Counter)
    stash: dict[tuple[int, int], list[Stashed]] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    summed_at: dict[int, float] = field(default_factory=dict)
    parked: dict[int, float] = field(default_factory=dict)
    reduced: dict[int, list[int]] = field(default_factory=dict)
    next_sum: dict[int, int] = field(default_factory=dict)
    swapped_in: Counter[str] = field(default_factory=Counter)
    swapped_out: Counter[str] = field(default_factory=Counter)
    transferred_bytes: int = 0

    def hold(self, seconds: float) -> None:
        """Nothing that comes behind is asked for before."""
        self.streams[COMPUTE] = max(self.streams[COMPUTE], seconds)
        self.issued = max(self.issued, seconds)

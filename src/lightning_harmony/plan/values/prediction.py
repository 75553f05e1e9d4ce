"""What a step is predicted to do: when each of its tasks runs, and what it takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_harmony.plan.values.document import Count, Seconds
from lightning_harmony.plan.values.task import Task


class Span(NamedTuple):
    """When a task runs, and on which stream."""

    task: Task
    stream: str
    start_seconds: Seconds
    end_seconds: Seconds


@dataclass(frozen=True)
class DevicePrediction:
    """What a step does on one device.

    Attributes:
        spans: its tasks but evictions, which take no time, in order, and the updates of its packs in theirs.
        peak_bytes: the most that is on it, even if copies take a little longer.
        bound_bytes: the most that is on it, however long copies take.
        memory: each moment at which that changes, and what is on it from then on.
        compute_seconds: how long it computes.
        swapped_in_bytes: host to device, by kind: "weights", "gradients", "stash".
        swapped_out_bytes: device to host, by kind: "gradients", "stash".
        transferred_bytes: what comes from other devices.
    """

    spans: tuple[Span, ...]
    peak_bytes: Count
    bound_bytes: Count
    memory: tuple[tuple[Seconds, Count], ...]
    compute_seconds: Seconds
    swapped_in_bytes: Mapping[str, Count]
    swapped_out_bytes: Mapping[str, Count]
    transferred_bytes: Count


@dataclass(frozen=True)
class Prediction:
    """What a step does.

    Attributes:
        seconds: from the beginning of a step to that of the next. Updates may go on under that, where nothing looks at weights
            before: as long as each pack's is over when it is fetched.
        devices: for each device.
    """

    seconds: Seconds
    devices: tuple[DevicePrediction, ...]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most on each device."""
        return tuple(device.peak_bytes for device in self.devices)

    @property
    def end_seconds(self) -> float:
        """When the last task has ended, updates included."""
        ends = (span.end_seconds for device in self.devices for span in device.spans)
        return max(self.seconds, max(ends, default=0.0))

"""What a training step did: bytes counted where the copies are made, and the figures users see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock

from lightning_harmony.plan.drawing.page import format_seconds
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.printed import Printed, amount, fact_lines, table_lines

KINDS = ("weights", "gradients", "optimizer", "stash")


_TIMES = {
    "just-in-time": "Weights are updated during the backward",
    "deferred": "Weights are updated after the backward",
}


def in_words(update: str, reason: str) -> str:
    """When weights are updated, and why.

    Args:
        update: as in `StepReport`.
        reason: the same.
    """
    return f"{_TIMES.get(update, 'Nothing is swapped')}: {reason}"


@dataclass(frozen=True)
class StepReport(Printed):
    """The last training step. Prints as a table.

    Attributes:
        seconds: from the split of the batch to the end of the backward, or of the last just-in-time update.
        swapped_in_bytes: host to device, by kind: weights, gradients, optimizer, stash. "optimizer" is all that comes for
            updates, in the step in which it comes.
        swapped_out_bytes: device to host, by kind. "optimizer" is all that updates have changed.
        transferred_bytes: device to device.
        peak_device_bytes: for each device, the most that was allocated on it up to this step. Empty where nothing is counted,
            as the model fits and the device has no capacity.
        host_bytes: the most that the host store took: parameters, optimizer state, and at their largest since the step before,
            the buffers of gradients and of the stash.
        num_microbatches: lanes of the step.
        num_packs: packs of the plan that the step ran.
        update: "just-in-time" or "deferred"; "in-memory" where the model fits and nothing is swapped.
        update_reason: why.
        update_hidden: the share of the updates' seconds in which the device had other work, between 0 and 1: of this step's
            update just in time, under its backward; or of the deferred one that the step before asked for, under this step's
            forward. 0 where no update ran beside the step.
        predicted_seconds: how long a step by its plan was predicted to take, a deferred update counted as no time; None if it
            was not.
        busy: for each device, the share of `seconds` in which it computed, between 0 and 1. What a microbatch does counts from
            its first operation in a pack to its last, waiting for what is copied excepted. With several devices, calls of
            layers count, and not the code between them. Empty where nobody asked: `HarmonyMonitor` does.
        reserved_device_bytes: for each device, the most that was taken of it up to this step, with what torch's allocator
            keeps unused, but without the process's context. Empty where nothing is counted.
        disk_read_bytes: optimizer state and weights that were read from disk since the step before.
        disk_written_bytes: what updates wrote there.
        node_sent_bytes: gradients and weights that this node sent to others since the report before.
        num_samples: of the batch; None where they cannot be told with certainty.
    """

    seconds: float
    swapped_in_bytes: Mapping[str, int]
    swapped_out_bytes: Mapping[str, int]
    transferred_bytes: int
    peak_device_bytes: list[int]
    host_bytes: int
    num_microbatches: int
    num_packs: int
    update: str
    update_reason: str
    update_hidden: float
    predicted_seconds: float | None = None
    busy: list[float] = field(default_factory=list)
    reserved_device_bytes: list[int] = field(default_factory=list)
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    node_sent_bytes: int = 0
    num_samples: int | None = None

    def __str__(self) -> str:
        microbatches = "1 microbatch" if self.num_microbatches == 1 else f"{self.num_microbatches} microbatches"
        packs = {0: "", 1: ", 1 pack"}.get(self.num_packs, f", {self.num_packs} packs")
        lines = [f"A step of {microbatches}{packs}"]
        if self.num_packs:
            # What comes and goes as "optimizer" are weights and gradients, too.
            rows = [
                ("for updates" if kind == "optimizer" else kind, *map(amount, (self.swapped_in_bytes[kind], out)))
                for kind, out in self.swapped_out_bytes.items()
            ]
            lines += table_lines([("", "In", "Out"), *rows])
        return "\n".join([*lines, *fact_lines(list(self._facts()))])

    def _facts(self) -> Iterator[tuple[str, str]]:
        predicted = (
            "" if self.predicted_seconds is None else f"; {format_seconds(self.predicted_seconds)} were predicted"
        )
        yield format_seconds(self.seconds), f"Time of the step{predicted}"
        if self.num_packs and self.num_samples:
            yield f"{self.num_samples / self.seconds:.3g}", "Samples a second"
        for number, peak in enumerate(self.peak_device_bytes):
            yield format_bytes(peak), f"Peak on device {number}"
        if self.num_packs:
            yield format_bytes(self.host_bytes), "In host memory"
        if self.transferred_bytes:
            yield format_bytes(self.transferred_bytes), "From device to device"
        if self.node_sent_bytes:
            yield format_bytes(self.node_sent_bytes), "Sent to other nodes"
        if self.disk_read_bytes or self.disk_written_bytes:
            yield format_bytes(self.disk_read_bytes), f"Read from disk; {format_bytes(self.disk_written_bytes)} written"
        for number, busy in enumerate(self.busy):
            yield f"{busy:.0%}", f"Of the time, device {number} computed"
        if self.update_hidden:
            yield f"{self.update_hidden:.0%}", "Of the time of updates, devices had other work"
        yield self.update, in_words(self.update, self.update_reason)


@dataclass
class Traffic:
    """Bytes that are copied between host and devices, and from device to device, in one step. All threads count."""

    swapped_in: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    swapped_out: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    transferred: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def count_in(self, kind: str, num_bytes: int) -> None:
        """Count a copy to the device."""
        with self._lock:
            self.swapped_in[kind] += num_bytes

    def count_out(self, kind: str, num_bytes: int) -> None:
        """Count a copy to the host."""
        with self._lock:
            self.swapped_out[kind] += num_bytes

    def reset(self) -> None:
        """Begin a new step."""
        self.swapped_in = dict.fromkeys(KINDS, 0)
        self.swapped_out = dict.fromkeys(KINDS, 0)
        self.transferred = 0

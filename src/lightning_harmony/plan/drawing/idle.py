"""Idle time: when a device computes nothing, and what it waits for meanwhile."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning_harmony.plan.values.prediction import DevicePrediction, Prediction, Span
from lightning_harmony.plan.values.task import COMPUTE, STREAMS, Errand, Kind

# What no copy and no update explains: Python, launches of operations, code between layers.
HOST, _OTHER = "host", "other device"
_CAUSES: dict[Kind, str] = {
    Errand.SWAP_IN: "weights",
    Errand.UNPARK: "gradients",
    Errand.STASH_IN: "stash",
    Errand.UPDATE: "update",
    Errand.TRANSFER_FORWARD: _OTHER,
    Errand.TRANSFER_BACKWARD: _OTHER,
    Errand.GATHER: _OTHER,
}
# What a step ends with.
_LAST_CAUSES: dict[Kind, str] = {
    Errand.UPDATE: "update",
    Errand.SWAP_OUT: "gradients",
    Errand.REDUCE: _OTHER,
}
# Copies to the host and updates, of whichever pack, make room for what runs next.
_ROOM = (Errand.STASH_OUT, Errand.SWAP_OUT, Errand.PARK, Errand.UPDATE)
CAUSES = (*dict.fromkeys(_CAUSES.values()), "room", HOST)


class Idle(NamedTuple):
    """Time in which a device computes nothing.

    Attributes:
        cause: what it waits for, one of `CAUSES`.
        start_seconds: from when.
        end_seconds: to when.
    """

    cause: str
    start_seconds: float
    end_seconds: float


def idle_times(step: Prediction, number: int) -> list[Idle]:
    """All idle times of one device in a step, in order."""
    device = step.devices[number]
    streams = [_Stream(device, stream) for stream in STREAMS if stream != COMPUTE]
    found: list[Idle] = []
    end = 0.0
    for span in sorted((s for s in device.spans if s.stream == COMPUTE), key=lambda span: span.start_seconds):
        found += _explained(streams, end, span.start_seconds, span)
        end = max(end, span.end_seconds)
    # Of several devices, one may have nothing left to do.
    rest = HOST if len(step.devices) == 1 else _OTHER
    return [*found, *_explained(streams, end, step.seconds, None, rest)]


def idle_by_cause(step: Prediction, number: int) -> dict[str, float]:
    """Seconds of idle time of one device by cause, the longest first."""
    found: defaultdict[str, float] = defaultdict(float)
    for idle in idle_times(step, number):
        found[idle.cause] += idle.end_seconds - idle.start_seconds
    return dict(sorted(found.items(), key=lambda cause: -cause[1]))


class _Stream:
    """What runs on one stream of a device, one after the other."""

    def __init__(self, device: DevicePrediction, stream: str) -> None:
        self._spans = sorted((s for s in device.spans if s.stream == stream), key=lambda span: span.end_seconds)
        self._ends = [span.end_seconds for span in self._spans]

    def ending(self, start: float, end: float) -> list[Span]:
        """What ends between two moments."""
        return self._spans[bisect_right(self._ends, start) : bisect_right(self._ends, end)]


def _explained(
    streams: Sequence[_Stream], start: float, end: float, awaited: Span | None, rest: str = HOST
) -> Iterator[Idle]:
    """Idle time up to the end of what was waited for last, and the rest, which nothing explains.

    Args:
        streams: all but that of computing.
        start: of the idle time.
        end: of it.
        awaited: what runs then; None for the end of the step.
        rest: the cause of what nothing explains.
    """
    if start >= end:
        return
    ended = [span for stream in streams for span in stream.ending(start, end)]
    known = [(span.end_seconds, cause) for span in ended if (cause := _cause(span, awaited)) is not None]
    until, cause = max(known, default=(start, rest))
    room = max((span.end_seconds for span in ended if span.task.kind in _ROOM), default=start)
    if not known and end - room < 0.1 * (end - start):
        until, cause = room, "room"
    if until > start:
        yield Idle(cause, start, until)
    if end > until:
        yield Idle(rest, until, end)


def _cause(ended: Span, awaited: Span | None) -> str | None:
    """What is waited for if something waits for a span that has ended; None if it does not depend on that."""
    task = ended.task
    if awaited is None:
        return _LAST_CAUSES.get(task.kind)
    is_of_it = task.pack == awaited.task.pack and task.microbatch in (None, awaited.task.microbatch)
    return _CAUSES.get(task.kind) if is_of_it else None

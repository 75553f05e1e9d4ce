"""Streams and events: work that goes on beside the lanes, on CUDA and on the host behind one interface."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from typing_extensions import Self


class Event(Protocol):
    """The completion of a piece of work; it travels with the buffer that the work produced."""

    def wait(self) -> None:
        """Order what the caller computes next after the work."""

    def synchronize(self) -> None:
        """Block the calling thread until the work is done; raise what it raised."""

    def done(self) -> bool:
        """Whether the work is done."""


class Moment(Protocol):
    """A point in a device's computing, whose time can be told once it has come there."""

    def seconds_since(self, earlier: Self) -> float:
        """The time from another moment to this one. Blocks until this one has come."""


class Stream(Protocol):
    """Runs submitted work in order of submission."""

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        """Run ``work`` once the events of ``after`` have happened; return the event of its completion."""

    def moment(self) -> Moment:
        """Within such work: the moment at which it has come so far."""

    def close(self) -> None:
        """Finish what was submitted and release the thread, if there is one."""


class Happened:
    """The event of work that was done when it was submitted."""

    def wait(self) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Always true."""
        return True


class HostMoment:
    """The host computes in the calling thread: the moment is now."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def seconds_since(self, earlier: HostMoment) -> float:
        """By the clock."""
        return self._seconds - earlier._seconds


class HostEvent:
    """The event of work on a `HostStream`. The host computes in the calling thread, so waiting blocks it."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Block until the work is done; raise what it raised."""
        self._future.result()

    synchronize = wait

    def done(self) -> bool:
        """Whether the work is done."""
        return self._future.done()


class HostStream:
    """A thread that does host work, copies and updates, in order of submission."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"harmony-{name}")

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> HostEvent:
        """Run ``work`` in this stream's thread."""
        return HostEvent(self._pool.submit(_run, [work], tuple(after)))

    def moment(self) -> HostMoment:
        """Now."""
        return HostMoment()

    def close(self) -> None:
        """Finish what was submitted and join the thread."""
        self._pool.shutdown(wait=True)


def _run(holder: list[Callable[[], None]], after: Sequence[Event]) -> None:
    # The pool keeps the arguments for a moment after the event has happened: what the work refers to must be gone then.
    work = holder.pop()
    for event in after:
        event.synchronize()
    # A thread has its own grad mode: copies must never be recorded.
    with torch.no_grad():
        work()


class CudaEvent:
    """The event of work on a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        """Make the current stream wait."""
        self._event.wait()

    def synchronize(self) -> None:
        """Block the calling thread."""
        self._event.synchronize()

    def done(self) -> bool:
        """Whether the work is done."""
        return bool(self._event.query())


class CudaMoment:
    """A point in the work of a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def seconds_since(self, earlier: CudaMoment) -> float:
        """By the device's clock."""
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000


class CudaStream:
    """A CUDA stream for one kind of copy."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> CudaEvent:
        """Launch ``work`` on this stream."""
        with torch.cuda.stream(self._stream), torch.no_grad():
            for event in after:
                event.wait()
            work()
            return CudaEvent(self._stream)

    def moment(self) -> CudaMoment:
        """A timed event on this stream."""
        return CudaMoment(self._stream)

    def close(self) -> None:
        """Finish what was submitted."""
        self._stream.synchronize()

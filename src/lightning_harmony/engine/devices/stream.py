"""Streams and events: work that goes on beside the lanes, on CUDA and on the host behind one interface."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch._C import DisableTorchFunction

from lightning_harmony.engine.devices.cores import run_anywhere
from lightning_harmony.engine.structures.operations import Unseen

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

    def submit_brief(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        """As `submit`, of work that takes less than to wake a thread for it."""

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
        self._seconds = perf_counter()

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


def wait_for_one(events: Iterable[HostEvent]) -> None:
    """Block until some of this work is done, or has failed."""
    wait([event._future for event in events], return_when=FIRST_COMPLETED)


class OutOfSight(Unseen):
    """The context of work as in a thread of its own: no mode of the caller's sees it, and no graph records it.

    As torch's own four contexts one in another, which take several times as long.
    """

    __slots__ = ("_functions", "_inference")

    def __enter__(self) -> None:
        self._functions: Any = DisableTorchFunction()
        self._functions.__enter__()
        self._inference: Any = torch._C._InferenceMode(False)
        self._inference.__enter__()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._inference.__exit__(*error)
        self._functions.__exit__(*error)


class CallingThread:
    """A stream of work that the calling thread does at once."""

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        """Do it. What fails is raised here."""
        for event in after:
            event.synchronize()
        with OutOfSight():
            work()
        return Happened()

    submit_brief = submit

    def moment(self) -> HostMoment:
        """Now."""
        return HostMoment()

    def close(self) -> None:
        """Nothing to do."""


class Urgency(NamedTuple):
    """How urgent work is.

    Attributes:
        rank: the lowest comes first, where that counts.
        gives_way: where it does not, whether it comes behind all that doesn't give way.
    """

    rank: int
    gives_way: bool = False


class _HostWork:
    """Work that waits in line for a thread."""

    def __init__(self, work: Callable[[], None], after: Sequence[Event], urgency: Urgency | None) -> None:
        self.after = after
        self.urgency = urgency
        self.future: Future[None] = Future()
        self._work = [work]

    def may_begin(self) -> bool:
        """Whether what it waits for has happened."""
        return all(event.done() for event in self.after)

    def run(self) -> None:
        """Do it when what it waits for has happened, and let it be known."""
        try:
            for event in self.after:
                event.synchronize()
            # A thread has its own grad mode: copies must never be recorded.
            with torch.no_grad():
                # When its event happens, what it refers to must be gone.
                self._work.pop()()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(None)


class HostStream:
    """A thread that does host work, copies and updates: in order of submission, or what is most urgent first.

    Args:
        name: of the thread.
        spared_cores: of the processor, where neither it runs nor the threads that torch computes its work with.

    Attributes:
        goes_by_rank: whether of work that has a rank the lowest begins first; else what has been submitted first, unless it
            gives way.
    """

    def __init__(self, name: str, spared_cores: Collection[int] = ()) -> None:
        # The thread begins with the first work, which a lane may submit.
        begin = partial(run_anywhere, spared_cores)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"harmony-{name}", initializer=begin)
        self._lock = threading.Lock()
        self._line: list[_HostWork] = []
        self._num_unfinished = 0
        self.goes_by_rank = True

    def submit(
        self, work: Callable[[], None], after: Sequence[Event] = (), urgency: Urgency | None = None
    ) -> HostEvent:
        """Run ``work`` in this stream's thread.

        Args:
            work: what to do.
            after: the events that have to happen before.
            urgency: of what has one and may begin, the most urgent begins first. None for work that stays in order: nothing
                that is submitted before begins after it, and nothing that is submitted after begins before.
        """
        submitted = _HostWork(work, tuple(after), urgency)
        with self._lock:
            self._line.append(submitted)
            self._num_unfinished += 1
        self._pool.submit(self._run_next)
        return HostEvent(submitted.future)

    def submit_brief(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Event:
        """As `submit`, but at once, in the calling thread, where nothing has to come before. What fails is raised here."""
        if self._num_unfinished > 0 or not all(event.done() for event in after):
            return self.submit(work, after)
        for event in after:
            event.synchronize()
        with OutOfSight():
            work()
        return Happened()

    def run_more_urgent(self, urgency: Urgency) -> None:
        """Within work: do first what is more urgent than that, and may begin by now."""
        while True:
            with self._lock:
                place = self._next()
                is_first = bool(self._line) and self._may_precede(self._line[place], urgency)
                chosen = self._line.pop(place) if is_first else None
            if chosen is None:
                return
            self._run(chosen)

    def _run_next(self) -> None:
        with self._lock:
            # Each piece of work asks for one, and some have been done within others.
            chosen = self._line.pop(self._next()) if self._line else None
        if chosen is not None:
            self._run(chosen)

    def _run(self, chosen: _HostWork) -> None:
        chosen.run()
        with self._lock:
            self._num_unfinished -= 1

    def _next(self) -> int:
        """The place in line of what is next. What nothing may begin before is waited for in order of submission."""
        ready: list[tuple[int, int]] = []
        for place, each in enumerate(self._line):
            if each.urgency is None:
                break
            if each.may_begin():
                ready.append((self._order_of(each.urgency), place))
        return min(ready, default=(0, 0))[1]

    def _may_precede(self, work: _HostWork, urgency: Urgency) -> bool:
        """Whether work is more urgent than other work, and may begin."""
        return work.urgency is not None and self._order_of(work.urgency) < self._order_of(urgency) and work.may_begin()

    def _order_of(self, urgency: Urgency) -> int:
        return urgency.rank if self.goes_by_rank else urgency.gives_way

    def moment(self) -> HostMoment:
        """Now."""
        return HostMoment()

    def close(self) -> None:
        """Finish what was submitted and join the thread."""
        self._pool.shutdown(wait=True)


# By what torch knows them by. They last as long as the process, and to make such an object takes longer than a launch.
_cuda_streams: dict[Any, torch.cuda.Stream] = {}


def current_cuda_stream(index: int | None = None) -> torch.cuda.Stream:
    """The current stream of a GPU, the current one if none is given.

    By its number: to find out which one None or a `torch.device` means takes torch longer than a launch.
    """
    number = torch.cuda.current_device() if index is None else index
    key = torch._C._cuda_getCurrentStream(number)
    stream = _cuda_streams.get(key)
    if stream is None:
        stream = _cuda_streams[key] = torch.cuda.current_stream(number)
    return stream


class OnCudaStream:
    """The context of work on a CUDA stream. As `torch.cuda.stream`, which takes several times as long.

    Args:
        stream: the one to make current.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        here, index = current_cuda_stream(), self._stream.device_index
        self._before = [here] if here.device_index == index else [current_cuda_stream(index), here]
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        # The last one's device becomes current with it.
        for stream in self._before:
            torch.cuda.set_stream(stream)


class CudaEvent:
    """The event of work on a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        """Make the current stream wait."""
        self._event.wait(current_cuda_stream())

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
    """A CUDA stream for one kind of work.

    Args:
        device: of which GPU.
        is_urgent: whether its kernels go before those of other streams.
    """

    def __init__(self, device: torch.device, *, is_urgent: bool = False) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1 if is_urgent else 0)

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> CudaEvent:
        """Launch ``work`` on this stream. No mode of the caller's sees it, and no graph records it."""
        with self.selected(), OutOfSight():
            for event in after:
                event.wait()
            work()
            return CudaEvent(self._stream)

    def submit_brief(self, work: Callable[[], None], after: Sequence[Event] = ()) -> CudaEvent:
        """As `submit`: to launch takes no thread."""
        return self.submit(work, after)

    def selected(self) -> OnCudaStream:
        """The context of what is done on this stream."""
        return OnCudaStream(self._stream)

    def moment(self) -> CudaMoment:
        """A timed event on this stream."""
        return CudaMoment(self._stream)

    def close(self) -> None:
        """Finish what was submitted."""
        self._stream.synchronize()

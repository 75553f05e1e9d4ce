"""Lanes: threads that each run one microbatch's step and pass a baton, so that exactly one runs at a time.

A microbatch that shares its step with no other at the same time needs no thread: its lane is the caller's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

import torch

from lightning_harmony.engine.devices.cores import keep_to, start_computing_threads
from lightning_harmony.engine.lanes.ambient import AmbientState, ProcessState
from lightning_harmony.engine.lanes.lock_wait import LockWatch
from lightning_harmony.errors import UnsupportedModelError

# Of a lane: an evaluation before the fit, steps that are measured, and the first one by the plan.
NUM_FIRST_JOBS = 4
# How often the lane that has the baton is looked at, and how often it must have been seen to wait for a lock: in a step, and
# where lanes are unwound. There, how often it may compute nothing: who presses Ctrl-C waits for no other thread.
_GLANCE_SECONDS = 0.5
_PATIENCE, _LITTLE_PATIENCE, _STILLNESS = 60, 2, 4


class _ThisThread(threading.local):
    """The calling thread.

    Attributes:
        lane: the lane that it is, if it is one.
    """

    lane: AnyLane | None = None


this_thread = _ThisThread()


class LaneAborted(BaseException):
    """Raised in a parked lane to unwind it. Not an Exception: user code must not swallow it."""


class Lane:
    """A pooled thread that runs a job while it has the baton, and parks where the job calls `park`.

    Attributes:
        microbatch: which microbatch it runs; its number in the pool.
        request: what the parked job asks for; None before it began and after it ended.
        finished: whether there is no job, or it has ended.
    """

    def __init__(self, microbatch: int, pool: LanePool) -> None:
        self.microbatch = microbatch
        self.request: Any = None
        self.finished = True
        self._pool = pool
        self._aborted = False
        self._closing = False
        self._num_jobs = 0
        self._job: Callable[[], None] | None = None
        self._ambient = AmbientState()
        # A bare lock, released by the other side: a semaphore takes several times as long to hand over.
        self.go = threading.Lock()
        self.go.acquire()
        self._thread = threading.Thread(target=self._loop, name=f"harmony-lane-{microbatch}", daemon=True)
        self._thread.start()

    def begin(self, job: Callable[[], None], core: int | None) -> None:
        """Take a job, to be started when the lane first gets the baton, in the context of the calling thread.

        Args:
            job: what to run.
            core: of the processor, to run on after the first jobs. In those, libraries start threads of their own, for good,
                which may run where the one may that starts them. None to run anywhere.
        """
        assert self.finished
        self._job, self._aborted, self.finished = job, False, False
        self._ambient = AmbientState()
        if core is not None and self._num_jobs >= NUM_FIRST_JOBS:
            keep_to(core, self._thread)
        self._num_jobs += 1

    def park(self, request: Any) -> None:
        """Hand the baton on and wait until it comes back. Called by the job."""
        if self._aborted:
            raise LaneAborted
        state = ProcessState.capture()
        self.request = request
        found = self._pool.hand_on(self, state)
        self.request = None
        state.enter(found)
        if self._aborted:
            raise LaneAborted

    def abort(self) -> None:
        """From now on, unwind the job wherever it parks or is parked."""
        self._aborted = True

    def look(self, watch: LockWatch) -> None:
        """Let what watches for locks look at the thread."""
        watch.look(self._thread)

    def close(self) -> None:
        """Join the thread. The job must have ended."""
        self.leave()
        self._thread.join()

    def leave(self) -> None:
        """Let the thread end by itself when the job has ended."""
        self._closing = True
        self.go.release()

    def _loop(self) -> None:
        if self._pool.computes:
            start_computing_threads()
        while True:
            self.go.acquire()
            if self._closing:
                return
            # Apart: who handles an error is to have it alone, with what its frames hold, however long this thread takes.
            self._pool.note(self, self._run_job())
            self._pool.end(self)

    def _run_job(self) -> BaseException | None:
        this_thread.lane = self
        job, self._job = self._job, None
        assert job is not None
        try:
            if not self._aborted:
                # The engine then runs every node of a backward in this thread, which can park in it.
                with self._ambient.entered(), torch.autograd.set_multithreading_enabled(False):
                    self._ambient.run(partial(self._run_to_end, job))
        except LaneAborted:
            pass
        except BaseException as error:
            return error
        finally:
            self._finish()
        return None

    def _run_to_end(self, job: Callable[[], None]) -> None:
        job()
        self._finish()
        # Here what the thread keeps is still the job's: it is looked at when a turn ends.
        self._pool.choose_behind(self)

    def _finish(self) -> None:
        self.request = None
        self.finished = True


class CallerLane:
    """A lane in the caller's own thread. It parks nowhere: it is granted its turns where it asks for them.

    Attributes:
        microbatch: which microbatch it runs.
        request: what it asks for; None before its first turn.
        finished: whether it has run.
    """

    def __init__(self, microbatch: int, grant: Callable[[CallerLane], None]) -> None:
        self.microbatch = microbatch
        self.request: Any = None
        self.finished = False
        self._grant = grant

    def park(self, request: Any) -> None:
        """Have a turn at once. Called by the job."""
        self.request = request
        self._grant(self)
        self.request = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The context in which the calling thread is this lane."""
        before = this_thread.lane
        this_thread.lane = self
        try:
            # The engine then runs every node of a backward in this thread, which is the only one that is this lane.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            this_thread.lane = before


AnyLane = Lane | CallerLane


# Given the lane that parked or ended, None at first: the lane that goes on, or None for the caller of `LanePool.drive`.
Choose = Callable[[Lane | None], Lane | None]


class LanePool:
    """Lanes that live across steps, and the baton that goes from one to the next.

    Args:
        core: tells the core of the processor that lanes share from now on, as they wait for each other; None for all cores.
            From core to core, each would find caches without what all of them use, and often a core asleep.
        computes: whether lanes compute, each with several threads of its own, which may run anywhere.
    """

    def __init__(self, core: Callable[[], int | None] = lambda: None, *, computes: bool = False) -> None:
        self._core = core
        self.computes = computes
        self._lanes: list[Lane] = []
        self._choose: Choose | None = None
        self._holder: Lane | None = None
        self._error: BaseException | None = None
        # Who follows the lane whose job has ended, if that is known.
        self._chosen: list[Lane | None] = []
        # What the lane that handed the baton on has left; None if that is not known.
        self._left: ProcessState | None = None
        self._back = threading.Lock()
        self._back.acquire()

    def lanes(self, jobs: Sequence[Callable[[], None]]) -> list[Lane]:
        """A lane for each job, not yet started."""
        while len(self._lanes) < len(jobs):
            self._lanes.append(Lane(len(self._lanes), self))
        lanes, core = self._lanes[: len(jobs)], self._core()
        for lane, job in zip(lanes, jobs, strict=True):
            lane.begin(job, core)
        return lanes

    def prepare(self, number: int, work: Callable[[], None]) -> None:
        """Let each of so many lanes do something in its thread, one after the other."""
        lanes = iter(self.lanes([work] * number))
        self.drive(lambda lane: next(lanes, None))

    def drive(self, choose: Choose) -> None:
        """Let lanes run, one at a time, until ``choose`` names none.

        The lane that parks or ends calls ``choose`` in its own thread and wakes the next itself: handing over takes one
        change of threads, and none where a lane goes on.

        Raises:
            BaseException: what a job or ``choose`` raised, with its own traceback.
            UnsupportedModelError: if a lane waits for a lock, as it seems for one that another lane holds.
        """
        self._choose = choose
        state = ProcessState.capture()
        try:
            first = choose(None)
            where = None if first is None else self._run_until_back(first, _PATIENCE)
            if where is not None:
                raise UnsupportedModelError(
                    f"a microbatch waits for a lock ({where}) that another one seems to hold while it waits for its turn in a "
                    "layer: hold no lock around calls of layers, or use HarmonyStrategy(num_microbatches=1)"
                )
        finally:
            # Ctrl-C can end this anywhere: the lane that has the baton must give it back.
            self._choose = None
            state.enter()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def hand_on(self, lane: Lane, state: ProcessState) -> ProcessState | None:
        """Called by the lane that has the baton: choose who goes on, and wait for the baton unless it is the lane.

        Args:
            lane: who has it.
            state: the state of the process that it leaves.

        Returns:
            The state that it finds afterwards; None if that is not known.
        """
        following = self._following(lane)
        if following is lane:
            return state
        self._give(following, state)
        lane.go.acquire()
        return self._left

    def choose_behind(self, lane: Lane) -> None:
        """Called by the lane whose job has ended: choose who goes on when it gives the baton."""
        if lane is self._holder:
            self._chosen = [self._following(lane)]

    def note(self, lane: Lane, error: BaseException | None) -> None:
        """Called by the lane whose job has ended, with what it raised."""
        if lane is self._holder:
            self._error = self._error or error
            self._chosen = [] if error is not None else self._chosen

    def end(self, lane: Lane) -> None:
        """Called by the lane whose job has ended, after `note`."""
        # A lane that waited for a lock while others were unwound has no baton to give.
        if lane is self._holder:
            self._give(self._chosen.pop() if self._chosen else self._following(lane))

    def abort(self) -> None:
        """Unwind all lanes; they can be used again."""
        for lane in self._lanes:
            lane.abort()
        # Whatever a lane is within, it leaves, and sets what it found there.
        state = ProcessState.capture()
        stuck = self._stuck(self._wait(_LITTLE_PATIENCE, _STILLNESS))
        # Who holds the lock that one waits for is among those that are unwound now.
        for lane in self._lanes:
            while lane not in stuck and not lane.finished:
                stuck += self._stuck(self._run_until_back(lane, stillness=_STILLNESS))
        for lane in stuck:
            self._end(lane)
        state.enter()
        self._error = None

    def close(self) -> None:
        """Unwind all lanes and join their threads."""
        self.abort()
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()

    def _following(self, lane: Lane) -> Lane | None:
        choose = self._choose
        if choose is None or self._error is not None:
            return None
        try:
            return choose(lane)
        except BaseException as error:
            self._error = error
            return None

    def _give(self, to: Lane | None, state: ProcessState | None = None) -> None:
        self._holder, self._left = to, state
        (self._back if to is None else to.go).release()

    def _stuck(self, where: str | None) -> list[Lane]:
        """The lane that has the baton, if it was seen to wait somewhere. Nobody has it from now on."""
        holder, self._holder = self._holder, None
        return [] if where is None or holder is None else [holder]

    def _run_until_back(self, lane: Lane, patience: float = inf, stillness: float = inf) -> str | None:
        # What came back when nobody waited any more.
        self._back.acquire(blocking=False)
        self._give(lane)
        return self._wait(patience, stillness)

    def _wait(self, patience: float, stillness: float) -> str | None:
        """Wait until the baton is back.

        Args:
            patience: how often who has it may be seen to wait for a lock, while another lane may hold that.
            stillness: how often it may be seen to compute nothing.

        Returns:
            Where it is, if it was seen so too often.
        """
        watch = LockWatch()
        while (holder := self._holder) is not None:
            if not self._back.acquire(timeout=_GLANCE_SECONDS):
                holder.look(watch)
                others = any(lane is not holder and not lane.finished for lane in self._lanes)
                if watch.still >= stillness or (watch.times >= patience and others):
                    return watch.where
        return None

    def _end(self, waiting: Lane) -> None:
        """Let a lane end that waited for something. One that still waits is replaced."""
        for _ in range(_LITTLE_PATIENCE):
            if waiting.finished:
                return
            time.sleep(_GLANCE_SECONDS)
        waiting.leave()
        self._lanes[waiting.microbatch] = Lane(waiting.microbatch, self)

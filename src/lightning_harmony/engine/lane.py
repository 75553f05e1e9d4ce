"""Lanes: threads that each run one microbatch's step and pass a baton, so that exactly one runs at a time."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_local = threading.local()


class LaneAborted(BaseException):
    """Raised in a parked lane to unwind it. Not an Exception: user code must not swallow it."""


class Lane:
    """A pooled thread. `run` lets its job go on until it parks or ends; `park`, called by the job, hands back.

    Attributes:
        microbatch: which microbatch it runs; its number in the pool.
        request: what the parked job asks for; None before it began and after it ended.
        finished: whether there is no job, or it has ended.
    """

    def __init__(self, microbatch: int) -> None:
        self.microbatch = microbatch
        self.request: Any = None
        self.finished = True
        self._error: BaseException | None = None
        self._aborted = False
        self._closing = False
        self._has_baton = False
        self._job: Callable[[], None] | None = None
        self._context = contextvars.copy_context()
        self._thread_state = ThreadState.capture()
        # Bare locks, each released by the other side: a semaphore takes several times as long to hand over.
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._loop, name=f"harmony-lane-{microbatch}", daemon=True)
        self._thread.start()

    def begin(self, job: Callable[[], None]) -> None:
        """Take a job, to be started by the first `run`, in the context of the calling thread."""
        assert self.finished
        self._job, self._error, self._aborted, self.finished = job, None, False, False
        self._context = contextvars.copy_context()
        self._thread_state = ThreadState.capture()

    def run(self) -> None:
        """Let the job go on until it parks or ends.

        Raises:
            BaseException: what the job raised, with its own traceback.
        """
        # The default dtype is the process's, and user code sets it for a while (Lightning's 64-true does).
        dtype = torch.get_default_dtype()
        try:
            self._exchange()
        finally:
            torch.set_default_dtype(dtype)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _exchange(self) -> None:
        """Give the baton away and take it back.

        Ctrl-C can end this anywhere: then the lane may still have the baton, or its return was not noticed yet.
        """
        if not self._has_baton:
            self._back.acquire(blocking=False)
            self._has_baton = True
            self._go.release()
        while self._has_baton:
            self._back.acquire()

    def _hand_back(self) -> None:
        self._has_baton = False
        self._back.release()

    def park(self, request: Any) -> None:
        """Hand the baton back and wait until `run` is called again. Called by the job."""
        if self._aborted:
            raise LaneAborted
        dtype = torch.get_default_dtype()
        self.request = request
        self._hand_back()
        self._go.acquire()
        self.request = None
        torch.set_default_dtype(dtype)
        if self._aborted:
            raise LaneAborted

    def abort(self) -> None:
        """Unwind the job, wherever it is parked."""
        self._aborted = True
        while not self.finished or self._has_baton:
            self._exchange()
        self._error = None

    def close(self) -> None:
        """Unwind the job and join the thread."""
        self.abort()
        self._closing = True
        self._go.release()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            self._go.acquire()
            if self._closing:
                return
            self._run_job()
            self._hand_back()

    def _run_job(self) -> None:
        _local.lane = self
        job, self._job = self._job, None
        assert job is not None
        try:
            if not self._aborted:
                with self._thread_state.applied():
                    self._context.run(job)
        except LaneAborted:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.request = None
            self.finished = True


def current_lane() -> Lane | None:
    """The lane that the calling thread is, if it is one."""
    return getattr(_local, "lane", None)


class LanePool:
    """Lanes that live across steps."""

    def __init__(self) -> None:
        self._lanes: list[Lane] = []

    def lanes(self, jobs: Sequence[Callable[[], None]]) -> list[Lane]:
        """A lane for each job, not yet started."""
        while len(self._lanes) < len(jobs):
            self._lanes.append(Lane(len(self._lanes)))
        lanes = self._lanes[: len(jobs)]
        for lane, job in zip(lanes, jobs, strict=True):
            lane.begin(job)
        return lanes

    def abort(self) -> None:
        """Unwind all lanes; they can be used again."""
        for lane in self._lanes:
            lane.abort()

    def close(self) -> None:
        """Unwind all lanes and join their threads."""
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()


class ThreadState:
    """What PyTorch keeps for each thread, so that a lane computes as its caller would."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._casting = CastingState()
        self._default_device = torch.get_default_device()
        self._cuda_device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @classmethod
    def capture(cls) -> ThreadState:
        """The state of the calling thread."""
        return cls()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the calling thread this state."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            stack.enter_context(self._casting.applied())
            if self._default_device != torch.device("cpu"):
                stack.enter_context(self._default_device)
            if self._cuda_device is not None:
                stack.enter_context(torch.cuda.device(self._cuda_device))
            # The engine then runs every node of a backward in this thread, which can park in it.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield


class CastingState:
    """Which device types autocast, and to what; and the default dtype."""

    def __init__(self) -> None:
        self._default_dtype = torch.get_default_dtype()
        self._types = {
            device_type: (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            for device_type in ("cpu", "cuda")
        }

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Cast so. Without the cache of casts: it would keep casts of weights that were swapped out."""
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._default_dtype)
            for device_type, (enabled, dtype) in self._types.items():
                if (enabled, dtype) != (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)):
                    stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield

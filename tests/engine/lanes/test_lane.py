"""Lanes: one runs at a time, parks where it likes, and ends when it must."""

import contextvars
import gc
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_harmony.engine.lanes import lane as lane_module
from lightning_harmony.engine.lanes.ambient import AmbientState, read_thread_locals, share_thread_local
from lightning_harmony.engine.lanes.lane import Lane, LaneAborted, LanePool, this_thread
from lightning_harmony.errors import UnsupportedModelError

NUMBER = contextvars.ContextVar("number", default=0)


@pytest.fixture
def pool() -> Iterator[LanePool]:
    pool = LanePool()
    yield pool
    pool.close()


def parking() -> Lane:
    lane = this_thread.lane
    assert lane is not None
    return lane


def run(pool: LanePool, *lanes: Lane) -> None:
    """Let lanes go on, one after the other, each until it parks or ends."""
    turns = iter(lanes)
    pool.drive(lambda previous: next(turns, None))


def in_lane(pool: LanePool, job: Callable[[], Any]) -> Any:
    """What a job returns when a lane runs it."""
    results: list[Any] = []
    (lane,) = pool.lanes([lambda: results.append(job())])
    run(pool, lane)
    assert lane.finished
    return results[0]


def test_lanes_do_something_each_in_its_own_thread(pool: LanePool) -> None:
    names: list[str] = []
    pool.prepare(3, lambda: names.append(threading.current_thread().name))
    assert names == [f"harmony-lane-{number}" for number in range(3)]


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("harmony-lane")]


class _Park(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parking().park("backward")
        return gradient


class TestBaton:
    def test_a_job_starts_at_the_first_run(self, pool: LanePool) -> None:
        done: list[str] = []
        (lane,) = pool.lanes([lambda: done.append("ran")])
        assert not done
        assert not lane.finished
        run(pool, lane)
        assert done == ["ran"]
        assert lane.finished

    def test_a_lane_goes_on_where_it_parked(self, pool: LanePool) -> None:
        done: list[int] = []

        def job() -> None:
            for number in range(3):
                done.append(number)
                parking().park(f"after {number}")

        (lane,) = pool.lanes([job])
        seen = []
        while not lane.finished:
            run(pool, lane)
            seen.append((lane.request, list(done)))
        assert seen == [("after 0", [0]), ("after 1", [0, 1]), ("after 2", [0, 1, 2]), (None, [0, 1, 2])]

    def test_exactly_one_runs_at_a_time_in_the_order_of_the_runs(self, pool: LanePool) -> None:
        running: list[int] = []
        order: list[int] = []

        def job(number: int) -> None:
            for _ in range(10):
                running.append(number)
                order.append(number)
                assert running == [number]
                running.remove(number)
                parking().park(None)

        lanes = pool.lanes([lambda number=number: job(number) for number in range(4)])
        wanted = [2, 0, 3, 1] * 5 + [1, 3, 0, 2] * 5
        for number in wanted:
            run(pool, lanes[number])
        assert order == wanted

    def test_backward_parks_inside_autograd(self, pool: LanePool) -> None:
        x = torch.ones(3, requires_grad=True)
        (lane,) = pool.lanes([lambda: _Park.apply(x * 2).sum().backward()])
        run(pool, lane)
        assert lane.request == "backward"
        assert x.grad is None
        run(pool, lane)
        assert lane.finished
        assert torch.equal(x.grad, torch.full((3,), 2.0))

    def test_backwards_of_several_lanes_interleave(self, pool: LanePool) -> None:
        inputs = [torch.full((2,), float(number), requires_grad=True) for number in range(3)]

        def job(x: Tensor) -> None:
            _Park.apply(_Park.apply(x).square()).sum().backward()

        lanes = pool.lanes([lambda x=x: job(x) for x in inputs])
        for _ in range(3):
            for lane in lanes:
                run(pool, lane)
        assert all(lane.finished for lane in lanes)
        assert all(torch.equal(x.grad, 2 * x) for x in inputs)

    def test_the_caller_is_no_lane(self) -> None:
        assert this_thread.lane is None

    def test_each_lane_knows_itself(self, pool: LanePool) -> None:
        found: list[Lane | None] = []
        lanes = pool.lanes([lambda: found.append(this_thread.lane)] * 3)
        for lane in lanes:
            run(pool, lane)
        assert found == lanes
        assert [lane.microbatch for lane in lanes] == [0, 1, 2]

    def test_threads_live_across_steps(self, pool: LanePool) -> None:
        first = in_lane(pool, threading.current_thread)
        assert in_lane(pool, threading.current_thread) is first
        assert first is not threading.current_thread()


class TestChoosing:
    def test_happens_in_the_lane_that_has_the_baton(self, pool: LanePool) -> None:
        choosers: list[Lane | None] = []
        lanes = pool.lanes([lambda: parking().park(None)] * 2)
        turns = iter([lanes[0], lanes[1], lanes[1], lanes[0]])

        def choose(previous: Lane | None) -> Lane | None:
            assert this_thread.lane is previous
            choosers.append(previous)
            return next(turns, None)

        pool.drive(choose)
        assert choosers == [None, lanes[0], lanes[1], lanes[1], lanes[0]]
        assert all(lane.finished for lane in lanes)

    def test_an_error_of_it_is_raised_in_the_caller_and_not_in_the_lane(self, pool: LanePool) -> None:
        caught: list[BaseException] = []

        def job() -> None:
            try:
                parking().park(None)
            except Exception as error:
                caught.append(error)

        (lane,) = pool.lanes([job])

        def choose(previous: Lane | None) -> Lane | None:
            if previous is not None:
                raise ZeroDivisionError("while choosing")
            return lane

        with pytest.raises(ZeroDivisionError, match="while choosing"):
            pool.drive(choose)
        pool.abort()
        assert not caught
        assert lane.finished


class TestErrors:
    def test_an_error_is_raised_in_the_caller_with_its_own_traceback(self, pool: LanePool) -> None:
        def culprit() -> None:
            raise ZeroDivisionError("in the lane")

        (lane,) = pool.lanes([culprit])
        with pytest.raises(ZeroDivisionError, match="in the lane") as raised:
            run(pool, lane)
        names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert names[-1] == "culprit"
        assert lane.finished

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_what_is_no_exception_is_raised_too(self, pool: LanePool, error: type[BaseException]) -> None:
        def job() -> None:
            raise error

        (lane,) = pool.lanes([job])
        with pytest.raises(error):
            run(pool, lane)

    def test_an_error_in_backward_is_raised(self, pool: LanePool) -> None:
        def job() -> None:
            x = torch.ones(2, requires_grad=True)
            y = _Park.apply(x)
            y.register_hook(lambda gradient: 1 / 0)
            y.sum().backward()

        (lane,) = pool.lanes([job])
        with pytest.raises(ZeroDivisionError):
            run(pool, lane)

    def test_a_lane_that_failed_takes_another_job(self, pool: LanePool) -> None:
        def job() -> None:
            raise ZeroDivisionError

        (lane,) = pool.lanes([job])
        with pytest.raises(ZeroDivisionError):
            run(pool, lane)
        assert in_lane(pool, lambda: 7) == 7


class TestAbort:
    def test_unwinds_parked_lanes_and_runs_their_finally(self, pool: LanePool) -> None:
        left: list[int] = []

        def job(number: int) -> None:
            try:
                parking().park(None)
            finally:
                left.append(number)

        lanes = pool.lanes([lambda number=number: job(number) for number in range(3)])
        for lane in lanes[:2]:
            run(pool, lane)
        pool.abort()
        assert left == [0, 1]
        assert all(lane.finished for lane in lanes)

    def test_unwinds_user_code_that_catches_exceptions(self, pool: LanePool) -> None:
        went_on: list[bool] = []

        def job() -> None:
            try:
                parking().park(None)
            except Exception:
                went_on.append(True)

        (lane,) = pool.lanes([job])
        run(pool, lane)
        pool.abort()
        assert not went_on
        assert lane.finished

    def test_unwinds_user_code_that_catches_everything_at_its_next_park(self, pool: LanePool) -> None:
        caught: list[BaseException] = []

        def job() -> None:
            for _ in range(3):
                try:
                    parking().park(None)
                except BaseException as error:
                    caught.append(error)

        (lane,) = pool.lanes([job])
        run(pool, lane)
        pool.abort()
        assert [type(error) for error in caught] == [LaneAborted] * 3
        assert lane.finished

    def test_unwinds_a_backward(self, pool: LanePool) -> None:
        x = torch.ones(3, requires_grad=True)
        (lane,) = pool.lanes([lambda: _Park.apply(x).sum().backward()])
        run(pool, lane)
        pool.abort()
        assert lane.finished
        assert x.grad is None

    def test_never_starts_a_job_that_has_not_begun(self, pool: LanePool) -> None:
        done: list[int] = []
        (lane,) = pool.lanes([lambda: done.append(1)])
        pool.abort()
        assert not done
        assert lane.finished

    def test_drops_errors_raised_while_unwinding(self, pool: LanePool) -> None:
        def job() -> None:
            try:
                parking().park(None)
            finally:
                raise ZeroDivisionError

        (lane,) = pool.lanes([job])
        run(pool, lane)
        pool.abort()
        assert in_lane(pool, lambda: 7) == 7

    def test_of_finished_lanes_does_nothing(self, pool: LanePool) -> None:
        in_lane(pool, lambda: None)
        pool.abort()
        pool.abort()
        assert in_lane(pool, lambda: 7) == 7


class _Interrupted:
    """A lock whose next wait Ctrl-C ends, before the lane hands back or right after; not before its job has begun."""

    def __init__(self, lock: Any, *, after: bool, begun: threading.Event | None = None) -> None:
        self._lock = lock
        self._begun = begun
        self._after = after
        self._armed = True

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not blocking or not self._armed:
            return self._lock.acquire(blocking, timeout if blocking else -1)
        self._armed = False
        if self._begun is not None:
            self._begun.wait()
        if self._after:
            self._lock.acquire()
        raise KeyboardInterrupt

    def release(self) -> None:
        self._lock.release()


class TestInterruption:
    @pytest.mark.parametrize("num_parks", [0, 1, 2])
    def test_of_a_run_leaves_a_lane_that_can_be_aborted(
        self, pool: LanePool, monkeypatch: pytest.MonkeyPatch, num_parks: int
    ) -> None:
        started, go = threading.Event(), threading.Event()
        left: list[bool] = []

        def job() -> None:
            try:
                started.set()
                go.wait(60)
                for _ in range(num_parks):
                    parking().park(None)
            finally:
                left.append(True)

        (lane,) = pool.lanes([job])
        monkeypatch.setattr(pool, "_back", _Interrupted(pool._back, after=False))
        with pytest.raises(KeyboardInterrupt):
            run(pool, lane)
        # The job still runs in its thread.
        started.wait(60)
        assert not left
        go.set()
        pool.abort()
        assert left == [True]
        assert lane.finished
        assert in_lane(pool, lambda: 7) == 7

    @pytest.mark.parametrize("num_parks", [0, 1, 2])
    def test_as_a_lane_hands_back_leaves_one_that_can_be_aborted(
        self, pool: LanePool, monkeypatch: pytest.MonkeyPatch, num_parks: int
    ) -> None:
        def job() -> None:
            for _ in range(num_parks):
                parking().park(None)

        (lane,) = pool.lanes([job])
        monkeypatch.setattr(pool, "_back", _Interrupted(pool._back, after=True))
        with pytest.raises(KeyboardInterrupt):
            run(pool, lane)
        pool.abort()
        assert lane.finished
        assert in_lane(pool, lambda: 7) == 7


class Guarded:
    """A job that holds a lock around where it parks."""

    def __init__(self, lock: Any, *, releases: bool = True) -> None:
        self.lock = lock
        self.releases = releases
        self.done: list[str] = []

    def __call__(self, name: str) -> None:
        if self.releases:
            with self.lock:
                self.done.append(f"{name} has the lock")
                parking().park(None)
        else:
            self.lock.acquire()
            parking().park(None)
        self.done.append(f"{name} ends")


class TestLocks:
    """A lane that waits for a lock has the baton, for which the lock's holder waits."""

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lane_module, "_PATIENCE", 3)
        monkeypatch.setattr(lane_module, "_GLANCE_SECONDS", 0.05)

    @pytest.mark.parametrize("kind", [threading.Lock, threading.RLock, threading.Semaphore, threading.Condition])
    def test_a_lock_that_another_lane_holds_is_refused_and_lanes_can_be_used_again(
        self, pool: LanePool, kind: Callable[[], Any]
    ) -> None:
        job = Guarded(kind())
        first, second = pool.lanes([lambda: job("1"), lambda: job("2")])
        with pytest.raises(UnsupportedModelError, match=r'waits for a lock \(in __call__, file ".*test_lane.py", line'):
            run(pool, first, second, first)
        pool.abort()
        # The first one has unwound, and so released it.
        assert job.done == ["1 has the lock", "2 has the lock"]
        assert first.finished
        assert second.finished
        assert in_lane(pool, lambda: 7) == 7
        with job.lock:
            pass

    def test_a_lock_that_nobody_releases_costs_the_thread_that_waits(self, pool: LanePool) -> None:
        job = Guarded(threading.Lock(), releases=False)
        lanes = pool.lanes([lambda: job("1"), lambda: job("2")])
        with pytest.raises(UnsupportedModelError, match="waits for a lock"):
            run(pool, *lanes)
        pool.abort()
        others = pool.lanes([lambda: job.done.append("3"), lambda: job.done.append("4")])
        run(pool, *others)
        assert job.done == ["3", "4"]
        # Whatever the lost one does when it may go on concerns nobody.
        job.lock.release()
        lanes[1]._thread.join(60)
        assert not lanes[1]._thread.is_alive()
        assert in_lane(pool, lambda: 7) == 7

    def test_do_not_keep_ctrl_c_from_ending_a_step(self, pool: LanePool, monkeypatch: pytest.MonkeyPatch) -> None:
        job = Guarded(threading.Lock())
        lanes = pool.lanes([lambda: job("1"), lambda: job("2")])
        run(pool, lanes[0])
        monkeypatch.setattr(pool, "_back", _Interrupted(pool._back, after=False))
        with pytest.raises(KeyboardInterrupt):
            run(pool, lanes[1])
        pool.abort()
        assert all(lane.finished for lane in lanes)

    def test_a_lock_in_a_list_is_found(self, pool: LanePool) -> None:
        locks = [threading.Lock(), threading.Lock()]

        def job() -> None:
            with locks[1]:
                parking().park(None)

        first, second = pool.lanes([job, job])
        with pytest.raises(UnsupportedModelError, match="waits for a lock"):
            run(pool, first, second, first)
        pool.abort()
        assert first.finished
        assert second.finished

    def test_ctrl_c_waits_for_no_lane_that_waits_for_something(
        self, pool: LanePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No lock is in it, and nothing tells how long the lane will wait."""
        begun, told, done = threading.Event(), threading.Event(), list[str]()

        def job() -> None:
            begun.set()
            told.wait()
            done.append("told")
            parking().park(None)
            done.append("went on")

        parked, waiting = pool.lanes([lambda: parking().park(None), job])
        run(pool, parked)
        monkeypatch.setattr(pool, "_back", _Interrupted(pool._back, after=False, begun=begun))
        with pytest.raises(KeyboardInterrupt):
            run(pool, waiting)
        pool.abort()
        assert parked.finished
        assert in_lane(pool, lambda: 7) == 7
        told.set()
        waiting._thread.join(60)
        assert not waiting._thread.is_alive()
        # It unwinds where it would have parked.
        assert done == ["told"]
        assert in_lane(pool, lambda: 7) == 7

    def test_a_lock_that_another_thread_holds_for_a_while_is_waited_for(self, pool: LanePool) -> None:
        """One of a thread of the user's, where no lane can be what holds it; a queue and a thread, with a lock of its own."""
        lock, told = threading.Lock(), queue.Queue[int]()
        lock.acquire()
        (lane,) = pool.lanes([lambda: Guarded(lock)("1")])
        threading.Timer(0.6, lock.release).start()
        run(pool, lane)
        pool.abort()

        def job() -> None:
            with lock:
                told.get(timeout=60)
                thread = threading.Thread(target=told.get)
                thread.start()
                thread.join()

        lanes = pool.lanes([lambda: parking().park(None), job])
        for seconds in (0.6, 1.2):
            threading.Timer(seconds, lambda: told.put(1)).start()
        run(pool, *lanes)
        assert lanes[1].finished


class TestClose:
    def test_unwinds_and_joins_all_threads(self) -> None:
        before = len(lane_threads())
        pool = LanePool()
        lanes = pool.lanes([lambda: parking().park(None)] * 3)
        run(pool, lanes[0])
        assert len(lane_threads()) == before + 3
        pool.close()
        assert len(lane_threads()) == before

    def test_twice_is_once(self) -> None:
        pool = LanePool()
        in_lane(pool, lambda: None)
        pool.close()
        pool.close()


class TestThreadState:
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
    def test_grad_and_inference_mode_are_the_callers(self, pool: LanePool, mode: Callable[[], Any]) -> None:
        with mode():
            expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            assert in_lane(pool, lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled())) == expected

    def test_grad_enabled_inside_inference_mode_is_seen(self, pool: LanePool) -> None:
        with torch.inference_mode(), torch.enable_grad():
            found = in_lane(pool, lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        assert found == (True, True)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_is_the_callers(self, pool: LanePool, dtype: torch.dtype) -> None:
        with torch.autocast("cpu", dtype=dtype):
            assert in_lane(pool, lambda: torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
        assert in_lane(pool, lambda: torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32

    def test_autocast_disabled_inside_autocast_is_seen(self, pool: LanePool) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert not in_lane(pool, lambda: torch.is_autocast_enabled("cpu"))

    def test_default_device_is_the_callers(self, pool: LanePool) -> None:
        with torch.device("meta"):
            assert in_lane(pool, lambda: torch.ones(1)).is_meta
        assert not in_lane(pool, lambda: torch.ones(1)).is_meta

    def test_default_dtype_is_each_lanes_own(self, pool: LanePool) -> None:
        found: list[torch.dtype] = []

        def job(dtype: torch.dtype) -> None:
            torch.set_default_dtype(dtype)
            parking().park(None)
            found.append(torch.ones(1).dtype)

        dtypes = [torch.float64, torch.float16, torch.float32]
        lanes = pool.lanes([lambda dtype=dtype: job(dtype) for dtype in dtypes])
        for lane in lanes:
            run(pool, lane)
            assert torch.get_default_dtype() is torch.float32
        for lane in lanes:
            run(pool, lane)
        assert found == dtypes
        assert torch.get_default_dtype() is torch.float32

    def test_default_dtype_is_its_own_whoever_had_the_baton_before(self, pool: LanePool) -> None:
        """One that has parked, one that has ended, one that begins, the lane itself, or who drives them."""
        found: list[torch.dtype] = []

        def parks(dtype: torch.dtype) -> None:
            torch.set_default_dtype(dtype)
            for _ in range(3):
                parking().park(None)
                found.append(torch.ones(1).dtype)

        def ends() -> None:
            found.append(torch.ones(1).dtype)
            torch.set_default_dtype(torch.bfloat16)

        first, second, third = pool.lanes([lambda: parks(torch.float64), lambda: parks(torch.float16), ends])
        run(pool, first, second, first, third, second, second)
        assert torch.get_default_dtype() is torch.float32
        run(pool, first, second, first)
        callers, one, other = torch.float32, torch.float64, torch.float16
        assert found == [one, callers, other, other, one, other, one]
        assert torch.get_default_dtype() is torch.float32

    def test_default_dtype_of_an_aborted_lane_does_not_escape(self, pool: LanePool) -> None:
        def job() -> None:
            torch.set_default_dtype(torch.float64)
            parking().park(None)

        lanes = pool.lanes([job, job])
        for lane in lanes:
            run(pool, lane)
        pool.abort()
        assert torch.get_default_dtype() is torch.float32

    def test_what_aborted_lanes_found_of_each_other_does_not_escape(self, pool: LanePool) -> None:
        # One begins within what another, which parks, has set; unwound in their order, it put that back last.
        def job() -> None:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                parking().park(None)
            finally:
                torch.set_default_dtype(before)

        run(pool, *pool.lanes([job, job]))
        pool.abort()
        assert torch.get_default_dtype() is torch.float32

    def test_context_variables_are_the_callers(self, pool: LanePool) -> None:
        token = NUMBER.set(5)
        assert in_lane(pool, NUMBER.get) == 5
        NUMBER.reset(token)
        assert in_lane(pool, NUMBER.get) == 0

    def test_what_a_lane_sets_stays_in_the_lane(self, pool: LanePool) -> None:
        def job() -> None:
            NUMBER.set(9)
            torch.set_grad_enabled(False)

        in_lane(pool, job)
        assert NUMBER.get() == 0
        assert torch.is_grad_enabled()
        assert in_lane(pool, lambda: (NUMBER.get(), torch.is_grad_enabled())) == (0, True)

    def test_a_job_has_the_state_of_the_place_where_it_was_given(self, pool: LanePool) -> None:
        found: list[bool] = []
        with torch.no_grad():
            (lane,) = pool.lanes([lambda: found.append(torch.is_grad_enabled())])
        run(pool, lane)
        assert found == [False]

    def test_lanes_that_take_turns_keep_their_own(self, pool: LanePool) -> None:
        found: list[bool] = []

        def job(*, enabled: bool) -> None:
            with torch.set_grad_enabled(enabled):
                parking().park(None)
                found.append(torch.is_grad_enabled())

        lanes = pool.lanes([lambda: job(enabled=True), lambda: job(enabled=False)])
        for _ in range(2):
            for lane in lanes:
                run(pool, lane)
        assert found == [True, False]

    def test_backward_runs_in_the_lanes_own_thread(self, pool: LanePool) -> None:
        def job() -> bool:
            x = torch.ones(2, requires_grad=True)
            y = x * 2
            threads: list[threading.Thread] = []
            y.register_hook(lambda gradient: threads.append(threading.current_thread()))
            y.sum().backward()
            assert not torch._C._is_multithreading_enabled()
            return threads == [threading.current_thread()]

        assert in_lane(pool, job)


class TestAmbientState:
    def test_it_holds_whether_cudnn_rounds_to_tf32(self) -> None:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            state = AmbientState()
        assert torch.backends.cudnn.allow_tf32
        with state.entered():
            assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.allow_tf32

    @pytest.mark.parametrize("enabled", [True, False])
    def test_is_given_back_whatever_is_on(self, enabled: bool) -> None:
        with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            state = AmbientState()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with state.entered():
                assert torch.is_autocast_enabled("cpu") is enabled
                assert not enabled or torch.get_autocast_dtype("cpu") is torch.float16
            assert torch.get_autocast_dtype("cpu") is torch.bfloat16

    def test_keeps_no_casts_of_weights(self) -> None:
        weight = torch.ones(2, 2, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            state = AmbientState()
        with state.entered():
            before = torch.ones(2, 2) @ weight
            with torch.no_grad():
                weight.zero_()
            after = torch.ones(2, 2) @ weight
        assert before.sum() == 8
        assert after.sum() == 0


class Large:
    """What a job has made when it fails."""


def test_what_a_job_has_made_goes_with_its_error_however_slow_its_thread_is(
    pool: LanePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that had not fitted failed again in microbatches: a thread that came to rest late held what it had made."""
    made: list[weakref.ref[Large]] = []
    handed, go, give = threading.Event(), threading.Event(), LanePool._give

    def give_and_rest(self: LanePool, to: Lane | None) -> None:
        give(self, to)
        if threading.current_thread() is not threading.main_thread():
            handed.set()
            go.wait(30)

    def fail() -> None:
        large = Large()
        made.append(weakref.ref(large))
        raise ValueError

    monkeypatch.setattr(LanePool, "_give", give_and_rest)
    try:
        with suppress(ValueError):
            run(pool, *pool.lanes([fail]))
        assert handed.wait(30)
        gc.collect()
        assert made[0]() is None
    finally:
        go.set()


def test_which_lane_a_thread_is_stays_its_own_where_objects_of_the_model_lead_there() -> None:
    """Each lane took itself for the one that had started it, in all later fits of the process."""
    share_thread_local(this_thread)
    assert all(each is not this_thread for each in read_thread_locals())

"""Cores: lanes may share one, which updates leave to them; what else computes has all."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_harmony.engine.devices import touched_memory
from lightning_harmony.engine.devices.cores import core_of_caller, siblings_of
from lightning_harmony.engine.devices.stream import HostStream
from lightning_harmony.engine.lanes.lane import NUM_FIRST_JOBS, LanePool
from support.cores import all_cores

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads can't choose their cores here")


@pytest.fixture
def cores() -> Iterator[set[int]]:
    """All there are; those of this process again afterwards."""
    with all_cores() as cores:
        yield cores


def in_lane(pool: LanePool, job: Callable[[], Any]) -> Any:
    """What a job returns in a lane."""
    results: list[Any] = []
    (lane,) = pool.lanes([lambda: results.append(job())])
    turns = iter([lane])
    pool.drive(lambda previous: next(turns, None))
    return results[0]


@pytest.fixture
def pool_of() -> Iterator[Callable[..., LanePool]]:
    """Makes pools of lanes, which end with the test however it does: other tests see that no thread is left."""
    with ExitStack() as stack:

        def made(*arguments: Any, **options: Any) -> LanePool:
            pool = LanePool(*arguments, **options)
            stack.callback(pool.close)
            return pool

        yield made


@pytest.fixture
def shared(pool_of: Callable[..., LanePool], cores: set[int]) -> LanePool:
    """Lanes that share a core, their first jobs behind them."""
    pool = pool_of(lambda: min(cores))
    for _ in range(NUM_FIRST_JOBS):
        in_lane(pool, lambda: None)
    return pool


def affinity() -> set[int]:
    return os.sched_getaffinity(0)


def begun_in_lane(pool: LanePool, stream: HostStream) -> set[int]:
    """The cores of the thread of a stream whose first work a lane submits."""
    found: list[set[int]] = []
    in_lane(pool, lambda: stream.submit(lambda: found.append(affinity())).synchronize())
    stream.close()
    (cores,) = found
    return cores


def test_the_core_of_the_caller_is_where_it_runs(cores: set[int]) -> None:
    for core in sorted(cores):
        os.sched_setaffinity(0, {core})
        assert core_of_caller() == core
        assert core in siblings_of(core)


def test_lanes_share_a_core(shared: LanePool, cores: set[int]) -> None:
    assert in_lane(shared, affinity) == {min(cores)}
    assert affinity() == cores


def test_in_their_first_jobs_lanes_run_anywhere(pool_of: Callable[..., LanePool], cores: set[int]) -> None:
    """Threads that a library starts in a lane, for good, may run where that may: they would all share its core."""
    pool = pool_of(lambda: min(cores))
    for _ in range(NUM_FIRST_JOBS):
        assert in_lane(pool, affinity) == cores
    assert in_lane(pool, affinity) == {min(cores)}


def test_lanes_that_share_no_core_run_anywhere(pool_of: Callable[..., LanePool], cores: set[int]) -> None:
    pool = pool_of()
    for _ in range(NUM_FIRST_JOBS + 1):
        in_lane(pool, lambda: None)
    assert in_lane(pool, affinity) == cores


def test_the_core_is_found_anew_for_each_step(pool_of: Callable[..., LanePool], cores: set[int]) -> None:
    """Another process may be busy with the one that it was before."""
    pool = pool_of(core_of_caller)
    for _ in range(NUM_FIRST_JOBS):
        in_lane(pool, lambda: None)
    for core in sorted(cores):
        os.sched_setaffinity(0, {core})
        assert in_lane(pool, affinity) == {core}


def affinities() -> dict[int, set[int]]:
    """Of all threads of this process, by their numbers."""
    found = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # It has ended since.
            found[thread] = os.sched_getaffinity(thread)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system doesn't tell of threads")
def test_what_lanes_compute_with_runs_anywhere(pool_of: Callable[..., LanePool], cores: set[int]) -> None:
    """All threads of a product on the one core of the lane that asks for it would take as many times as long."""
    torch.set_num_threads(2)
    before = set(affinities())
    pool = pool_of(lambda: min(cores), computes=True)
    for _ in range(NUM_FIRST_JOBS + 1):
        in_lane(pool, lambda: None)
    started = {thread: affinity for thread, affinity in affinities().items() if thread not in before}
    assert sorted(started.values(), key=len) == sorted([{min(cores)}, cores], key=len)
    in_lane(pool, lambda: torch.ones(512, 512) @ torch.ones(512, 512).sum(1))
    # A thread of another test may have ended meanwhile.
    assert set(affinities()) <= before | set(started)


def test_a_stream_that_a_lane_begins_runs_anywhere(shared: LanePool, cores: set[int]) -> None:
    """An update on the lanes' core, with all threads that torch computes it with, would take many times as long."""
    assert begun_in_lane(shared, HostStream("test")) == cores


def test_a_stream_leaves_the_core_of_the_lanes_to_them(shared: LanePool, cores: set[int]) -> None:
    """A thread of an update there took half of what lanes have to launch with, as long as it lasted."""
    spared = {min(cores)}
    assert begun_in_lane(shared, HostStream("test", spared)) == (cores - spared or cores)
    assert begun_in_lane(shared, HostStream("test", cores)) == cores


def test_memory_that_a_lane_asks_for_is_made_on_all_cores(
    shared: LanePool, cores: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[set[int]] = []
    memset = touched_memory.ctypes.memset

    def noted(*arguments: Any) -> Any:
        found.append(affinity())
        return memset(*arguments)

    monkeypatch.setattr(touched_memory.ctypes, "memset", noted)
    in_lane(shared, lambda: touched_memory.touched_buffer(3 * touched_memory.PIECE_BYTES))
    assert found == [cores] * 3

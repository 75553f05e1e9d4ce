"""Cores: lanes may share their caller's, and what else computes has all of them."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_harmony.engine import touched_memory
from lightning_harmony.engine.lane import NUM_FIRST_JOBS, LanePool
from lightning_harmony.engine.stream import HostStream

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads can't choose their cores here")


@pytest.fixture
def cores() -> Iterator[set[int]]:
    """Those of this process, which it has again afterwards."""
    cores = os.sched_getaffinity(0)
    yield cores
    os.sched_setaffinity(0, cores)


def in_lane(pool: LanePool, job: Callable[[], Any], core: int | None = None) -> Any:
    """What a job returns in a lane; its caller runs on a core, and gets its others back before the job begins."""
    results: list[Any] = []
    own = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    (lane,) = pool.lanes([lambda: results.append(job())])
    os.sched_setaffinity(0, own)
    turns = iter([lane])
    pool.drive(lambda previous: next(turns, None))
    return results[0]


@pytest.fixture
def shared() -> Iterator[LanePool]:
    """Lanes that share a core, their first jobs behind them."""
    pool = LanePool(on_one_core=True)
    for _ in range(NUM_FIRST_JOBS):
        in_lane(pool, lambda: None)
    yield pool
    pool.close()


def affinity() -> set[int]:
    return os.sched_getaffinity(0)


def test_lanes_run_on_the_core_of_their_caller(shared: LanePool, cores: set[int]) -> None:
    for core in sorted(cores):
        assert in_lane(shared, affinity, core) == {core}
    assert affinity() == cores


def test_in_their_first_jobs_lanes_run_anywhere(cores: set[int]) -> None:
    """Threads that a library starts in a lane, for good, may run where that may: they would all share its core."""
    pool = LanePool(on_one_core=True)
    assert in_lane(pool, affinity) == cores
    for _ in range(1, NUM_FIRST_JOBS):
        assert in_lane(pool, affinity, min(cores)) == cores
    assert in_lane(pool, affinity, min(cores)) == {min(cores)}
    pool.close()


def test_lanes_that_compute_on_the_host_run_anywhere(cores: set[int]) -> None:
    pool = LanePool()
    for _ in range(NUM_FIRST_JOBS + 1):
        in_lane(pool, lambda: None)
    assert in_lane(pool, affinity, min(cores)) == cores
    pool.close()


def test_a_stream_that_a_lane_begins_runs_anywhere(shared: LanePool, cores: set[int]) -> None:
    """An update on the lanes' core, with all threads that torch computes it with, would take many times as long."""
    stream = HostStream("test")
    found: list[set[int]] = []
    in_lane(shared, lambda: stream.submit(lambda: found.append(affinity())).synchronize(), min(cores))
    stream.close()
    assert found == [cores]


def test_memory_that_a_lane_asks_for_is_made_on_all_cores(
    shared: LanePool, cores: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[set[int]] = []
    memset = touched_memory.ctypes.memset

    def noted(*arguments: Any) -> Any:
        found.append(affinity())
        return memset(*arguments)

    monkeypatch.setattr(touched_memory.ctypes, "memset", noted)
    in_lane(shared, lambda: touched_memory.touched_buffer(3 * touched_memory.PIECE_BYTES), min(cores))
    assert found == [cores] * 3

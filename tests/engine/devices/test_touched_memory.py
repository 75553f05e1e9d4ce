"""Host buffers whose pages are there."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import resource
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_harmony.engine.devices import touched_memory
from lightning_harmony.engine.devices.touched_memory import PIECE_BYTES, SharedMemory, touched_buffer

linux = pytest.mark.skipif(sys.platform != "linux", reason="tells its mappings nowhere else")


def faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def mappings_of(address: int, num_bytes: int) -> list[str]:
    """The flags of the system's mappings that have a part of some memory."""
    found, inside = [], False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and ":" not in first:
                start, end = (int(each, 16) for each in first.split("-"))
                inside = start < address + num_bytes and address < end
            elif inside and first == "VmFlags:":
                found.append(line)
    return found


def in_a_fork(check: Callable[[], bool]) -> bool:
    """Whether a check holds in a process that is forked for it."""
    child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("num_bytes", [0, 1, 5000, 3 * PIECE_BYTES + 7])
def test_a_buffer_has_its_size_and_zeros(num_bytes: int) -> None:
    buffer = touched_buffer(num_bytes)
    assert buffer.shape == (num_bytes,)
    assert buffer.dtype is torch.uint8
    assert not buffer.any()


def test_a_buffer_has_all_its_pages_at_once() -> None:
    buffer = touched_buffer(16 * PIECE_BYTES)
    before = faults()
    buffer.fill_(1)
    # Those of 4 KiB that it would have are 16,384.
    assert faults() - before < 1000


def test_threads_that_begin_later_compute_with_as_many_threads_as_ever() -> None:
    """An update in a thread of its own used to run in one, after buffers had been made by threads that used one each."""
    torch.set_num_threads(2)
    touched_buffer(4 * PIECE_BYTES)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 2


def test_a_buffer_made_in_inference_mode_can_be_written() -> None:
    with torch.inference_mode():
        buffer = touched_buffer(100)
    buffer.fill_(1)


def test_a_buffer_gives_its_memory_back_when_it_ends() -> None:
    buffer = touched_buffer(100)
    storage = weakref.ref(buffer.untyped_storage())
    del buffer
    assert storage() is None


@linux
def test_workers_of_a_data_loader_do_not_copy_a_buffer() -> None:
    """To fork a process took 0.7 s for each GiB that a GPU had locked, and as much memory again."""
    buffer = touched_buffer(3 * PIECE_BYTES)
    assert all(" dc" in flags for flags in mappings_of(buffer.data_ptr(), buffer.numel()))


class TestSharedMemory:
    @pytest.fixture(autouse=True)
    def small_stripes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(touched_memory, "STRIPE_BYTES", 4 * mmap.PAGESIZE)
        monkeypatch.setattr(touched_memory, "_num_threads", lambda: 3)

    @pytest.mark.parametrize("num_bytes", [0, 1, 100, 4 * mmap.PAGESIZE, 50 * mmap.PAGESIZE + 7])
    def test_has_zeros_at_first(self, num_bytes: int) -> None:
        memory = SharedMemory(num_bytes)
        memory.reach(num_bytes)
        assert len(memory.mapping) == max(num_bytes, 1)
        assert not any(memory.mapping[:])

    @linux
    def test_is_many_mappings(self) -> None:
        memory = SharedMemory(10 * 4 * mmap.PAGESIZE)
        buffer = torch.frombuffer(memory.mapping, dtype=torch.uint8)
        found = mappings_of(buffer.data_ptr(), buffer.numel())
        assert len(found) == 10
        assert all(" sh" in flags for flags in found)

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_is_that_of_workers_too(self) -> None:
        """What is written to private memory after a fork goes to a copy, which a GPU that had locked it does not see."""
        memory = SharedMemory(50 * mmap.PAGESIZE)
        marks = range(0, len(memory.mapping), mmap.PAGESIZE)

        def written_there() -> bool:
            for at in marks:
                memory.mapping[at + 1] = 7
            return True

        assert in_a_fork(written_there)
        assert all(memory.mapping[at + 1] == 7 for at in marks)

    def test_makes_pages_as_far_as_asked_and_what_threads_make_meanwhile(self) -> None:
        memory = SharedMemory(1000 * mmap.PAGESIZE)
        pages = torch.frombuffer(memory.mapping, dtype=torch.uint8)[:: mmap.PAGESIZE]
        memory.reach(1)
        # The code of this operation is paged in by the first who runs it.
        torch.zeros(12 * mmap.PAGESIZE, dtype=torch.uint8)[:: mmap.PAGESIZE].fill_(1)
        before = faults()
        # Three stripes are made at a time.
        pages[:12].fill_(1)
        assert faults() - before < 12
        memory.reach(300 * mmap.PAGESIZE)
        before = faults()
        pages[:300].fill_(2)
        assert faults() - before < 100
        assert (pages[:300] == 2).all()
        memory.reach(1000 * mmap.PAGESIZE)
        assert (pages[:300] == 2).all()
        assert (pages[300:] == 0).all()

    @linux
    def test_goes_with_the_last_that_uses_it(self) -> None:
        memory = SharedMemory(50 * mmap.PAGESIZE)
        buffer = torch.frombuffer(memory.mapping, dtype=torch.uint8)[mmap.PAGESIZE :]
        address, num_bytes = buffer.data_ptr(), buffer.numel()
        del memory
        gc.collect()
        assert mappings_of(address, num_bytes)
        buffer.fill_(1)
        del buffer
        assert not any(" sh" in flags for flags in mappings_of(address, num_bytes))

    @linux
    def test_more_than_the_system_has_room_for_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Full:
            def __init__(self, *args: object, **kwargs: object) -> None:
                self.mmap = lambda *args: -1

        monkeypatch.setattr(touched_memory.ctypes, "CDLL", Full)
        monkeypatch.setattr(touched_memory.ctypes, "get_errno", lambda: errno.ENOMEM)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            SharedMemory(50 * mmap.PAGESIZE)

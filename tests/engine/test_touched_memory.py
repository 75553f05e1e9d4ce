"""Host buffers whose pages are there."""

from __future__ import annotations

import resource
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_harmony.engine.touched_memory import PIECE_BYTES, touched_buffer


@pytest.mark.parametrize("num_bytes", [0, 1, 5000, 3 * PIECE_BYTES + 7])
def test_a_buffer_has_its_size_and_zeros(num_bytes: int) -> None:
    buffer = touched_buffer(num_bytes)
    assert buffer.shape == (num_bytes,)
    assert buffer.dtype is torch.uint8
    assert not buffer.any()


def test_its_pages_are_there() -> None:
    def faults() -> int:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_minflt + usage.ru_majflt

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


def test_it_can_be_written_wherever_it_was_made() -> None:
    with torch.inference_mode():
        buffer = touched_buffer(100)
    buffer.fill_(1)


def test_its_memory_goes_with_it() -> None:
    buffer = touched_buffer(100)
    storage = weakref.ref(buffer.untyped_storage())
    del buffer
    assert storage() is None

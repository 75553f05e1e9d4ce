"""Host buffers whose pages are there."""

from __future__ import annotations

import resource
import weakref

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


def test_it_can_be_written_wherever_it_was_made() -> None:
    with torch.inference_mode():
        buffer = touched_buffer(100)
    buffer.fill_(1)


def test_its_memory_goes_with_it() -> None:
    buffer = touched_buffer(100)
    storage = weakref.ref(buffer.untyped_storage())
    del buffer
    assert storage() is None

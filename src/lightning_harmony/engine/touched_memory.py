"""Touched memory: the system makes pages as they are first written to, as fast as threads ask for them."""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from lightning_harmony.engine.cores import run_anywhere

# A thread for each piece of this size, up to so many: to start one takes as long as to make some hundred pages.
PIECE_BYTES = 4 * 1024 * 1024
MOST_THREADS = 16


def touched_buffer(num_bytes: int) -> Tensor:
    """A flat uint8 buffer of zeros all of whose pages are there, huge ones where the system has them.

    To page-lock memory makes its pages, too, but in one thread: on a virtual machine at 4 GB/s, where this came to 20.
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes:
        # A system without huge pages refuses.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    # Buffers are used again: one made in inference mode could never be written outside of it.
    with torch.inference_mode(False):
        buffer = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
    _touch(buffer.data_ptr(), num_bytes)
    return buffer


def _touch(address: int, num_bytes: int) -> None:
    """Write to all pages. Not by torch: how many threads it uses here, it would use in all threads that begin later."""
    starts = range(0, num_bytes, PIECE_BYTES)
    num_threads = min(len(starts), MOST_THREADS, os.cpu_count() or 1)
    if num_threads == 0:
        return
    with ThreadPoolExecutor(num_threads, initializer=run_anywhere) as pool:
        list(pool.map(lambda at: ctypes.memset(address + at, 0, min(PIECE_BYTES, num_bytes - at)), starts))

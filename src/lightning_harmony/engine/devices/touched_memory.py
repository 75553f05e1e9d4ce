"""Touched memory: the system makes pages as they are first written to, as fast as threads ask for them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from lightning_harmony.engine.devices.cores import run_anywhere

# A thread for each piece of this size, up to so many: to start one takes as long as to make some hundred pages.
PIECE_BYTES = 4 * 1024 * 1024
MOST_THREADS = 16
# Of shared memory: a piece that one thread makes while others make the next ones.
STRIPE_BYTES = 64 * 1024 * 1024
# Of sys/mman.h of Linux; Python's module has none.
_MAP_FIXED = 0x10


def touched_buffer(num_bytes: int) -> Tensor:
    """A flat uint8 buffer of zeros all of whose pages are there, huge ones where the system has them.

    To page-lock memory makes its pages, too, but in one thread: on a virtual machine at 4 GB/s, where this came to 20.

    Processes that are forked do not have it: of what a GPU has locked, the system would copy all at once for each of them.
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # A system without huge pages refuses.
        with suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))
    # Buffers are used again: one made in inference mode could never be written outside of it.
    with torch.inference_mode(False):
        buffer = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
    _touch(buffer.data_ptr(), num_bytes, PIECE_BYTES)
    return buffer


class SharedMemory:
    """Memory of zeros that processes which are forked share; its pages are made as it is filled.

    The system makes pages of one shared mapping hardly faster for many threads than for one (measured: 1.5 and 5 GB/s; of
    16 mappings 20). So this is many mappings, one behind the other.

    Args:
        num_bytes: its size.

    Attributes:
        mapping: all of it.

    Raises:
        OSError: if the system has no room for it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.mapping = mmap.mmap(-1, max(num_bytes, 1))
        self._num_bytes = num_bytes
        self._address = torch.frombuffer(self.mapping, dtype=torch.uint8).data_ptr()
        self._touched = 0
        if sys.platform == "linux":
            for start in range(STRIPE_BYTES, num_bytes, STRIPE_BYTES):
                _map_anew(self._address + start, min(STRIPE_BYTES, num_bytes - start))

    def reach(self, end: int) -> None:
        """Make its pages up to a byte, and beyond it as many as keep all threads busy."""
        if end > self._touched:
            ahead = min(_num_threads() * STRIPE_BYTES, self._num_bytes - self._touched)
            num_bytes = max(end - self._touched, ahead)
            _touch(self._address + self._touched, num_bytes, STRIPE_BYTES)
            self._touched += num_bytes


def _map_anew(address: int, num_bytes: int) -> None:
    """Put a shared mapping of its own where another one has been."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if call(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _num_threads() -> int:
    return min(MOST_THREADS, os.cpu_count() or 1)


def _touch(address: int, num_bytes: int, piece_bytes: int) -> None:
    """Write to all pages. Not by torch: how many threads it uses here, it would use in all threads that begin later."""
    starts = range(0, num_bytes, piece_bytes)
    if not starts:
        return
    with ThreadPoolExecutor(min(len(starts), _num_threads()), initializer=run_anywhere) as pool:
        list(pool.map(lambda at: ctypes.memset(address + at, 0, min(piece_bytes, num_bytes - at)), starts))

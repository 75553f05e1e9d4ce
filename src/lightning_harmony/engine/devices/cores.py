"""Cores of the processor: lanes, which wait for each other, share one, and what computes beside them leaves that to them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import torch

_GRAIN_SIZE = 32768
_CAN_CHOOSE = hasattr(os, "sched_setaffinity")
# A library whose calls let no other thread run meanwhile.
_libc = ctypes.PyDLL(None) if _CAN_CHOOSE else None


def core_of_caller() -> int | None:
    """The core that the calling thread runs on; None where the system doesn't tell, or doesn't let threads choose."""
    tell = getattr(_libc, "sched_getcpu", None)
    return None if tell is None else int(tell())


def keep_to(core: int, thread: threading.Thread) -> None:
    """Let a thread run on one core alone, and those that it starts from now on."""
    # The core may have been taken from this process.
    with suppress(OSError):
        os.sched_setaffinity(thread.native_id or 0, {core})


def siblings_of(core: int) -> frozenset[int]:
    """The cores that share a core's units, and itself: hardware threads, as far as the system tells."""
    found = {core}
    with suppress(OSError, ValueError):
        listed = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        for part in listed.strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def run_anywhere(besides: Collection[int] = ()) -> None:
    """Let the calling thread run where the process's first one may, whichever has started it, and those that it starts.

    Args:
        besides: cores to leave to others, unless no other is left.
    """
    if _CAN_CHOOSE:
        with suppress(OSError):
            cores = os.sched_getaffinity(os.getpid())
            os.sched_setaffinity(0, cores.difference(besides) or cores)


def start_computing_threads() -> None:
    """Let torch start the threads that it computes with for the calling one: where that may run when they start, they may.

    It starts as many as there is work for, one for each so many elements (at::internal::GRAIN_SIZE).
    """
    torch.zeros(torch.get_num_threads() * _GRAIN_SIZE, dtype=torch.uint8, device="cpu").add_(1)

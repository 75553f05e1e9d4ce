"""Cores of the processor: lanes, which wait for each other, share one; the engine's threads that begin in a lane do not."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress

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


def run_anywhere() -> None:
    """Let the calling thread run where the process's first one may, whichever has started it."""
    if _CAN_CHOOSE:
        with suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))

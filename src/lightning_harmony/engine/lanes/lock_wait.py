"""Whether a thread waits for a lock that another one may hold until it is done."""

from __future__ import annotations

import dis
import inspect
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torch import nn

LOCKS = (type(threading.Lock()), type(threading.RLock()))
# Containers of more are data.
_FEW = 64


class LockWatch:
    """Looks at a thread now and then, whether it waits for a lock, or for anything.

    Nobody can ask a thread what it waits for. But one that computes nothing and stays in a line that names a lock that is
    held waits for that; so does one within a semaphore or a condition that it wants to have. What waits to be told something,
    as at a queue or for the end of a thread, waits for no lock, nor does what is ours.

    Attributes:
        times: how often in a row it was seen to wait for the same lock.
        still: how often in a row it was seen where it had been, and had computed nothing.
        where: the line of code, in words.
    """

    def __init__(self) -> None:
        self.times = self.still = 0
        self.where = ""
        self._seen: tuple[int, int, float] | None = None

    def look(self, thread: threading.Thread) -> None:
        """Look at a thread, at the same one as before or at another."""
        frame = None if thread.ident is None else sys._current_frames().get(thread.ident)
        if frame is None or thread.ident is None:
            return
        computed = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        before, self._seen = self._seen, (id(frame), frame.f_lasti, computed)
        # The rest takes longer, and most threads that are looked at compute.
        if before != self._seen:
            self.times = self.still = 0
            return
        self.still += 1
        self.times = self.times + 1 if _waits_for_lock(frame) else 0
        while frame.f_back is not None and _module_of(frame) == "threading":
            frame = frame.f_back
        code = frame.f_code
        self.where = f'in {code.co_name}, file "{code.co_filename}", line {frame.f_lineno}'


def _waits_for_lock(frame: FrameType) -> bool:
    if _module_of(frame) == "threading":
        return _wants_to_have(frame)
    if _module_of(frame).startswith("lightning_harmony."):
        return False
    return any(repr(lock).startswith("<locked") for lock in _locks_named(frame))


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _wants_to_have(frame: FrameType | None) -> bool:
    """Whether a frame of `threading` is within a semaphore or a condition that is wanted, and not told something by it."""
    while frame is not None and _module_of(frame) == "threading":
        owner = frame.f_locals.get("self")
        if isinstance(owner, threading.Semaphore) and frame.f_code.co_name == "acquire":
            return True
        if isinstance(owner, threading.Condition) and frame.f_code.co_name == "__enter__":
            return True
        frame = frame.f_back
    return False


def _locks_named(frame: FrameType) -> Iterator[Any]:
    """The locks that the line that a frame is in names, as variables or as attributes of such."""
    code, line = frame.f_code, frame.f_lineno
    spans = [range(start, end) for start, end, number in code.co_lines() if number == line]
    names: set[str] = set()
    for instruction in dis.get_instructions(code):
        if any(instruction.offset in span for span in spans):
            named = instruction.argval
            names.update(name for name in (named if isinstance(named, tuple) else (named,)) if isinstance(name, str))
    variables = {**frame.f_globals, **frame.f_locals}
    found = {id(variables[name]): variables[name] for name in names if name in variables}
    # Attributes of attributes: each is named, too.
    for _ in names:
        attributes = [_attribute(owner, name) for owner in found.values() for name in names]
        found |= {id(attribute): attribute for attribute in attributes if attribute is not None}
    for value in found.values():
        yield from (each for each in _items(value) if isinstance(each, LOCKS))


def _items(value: Any) -> Iterable[Any]:
    """A value, or what a container of few has."""
    if isinstance(value, dict):
        value = tuple(value.values())
    return value if isinstance(value, list | tuple) and len(value) <= _FEW else (value,)


def _attribute(owner: Any, name: str) -> Any:
    """An attribute, without running anybody's code."""
    if isinstance(owner, nn.Module) and name in owner._modules:
        return owner._modules[name]
    return inspect.getattr_static(owner, name, None)

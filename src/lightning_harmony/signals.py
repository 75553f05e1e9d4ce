"""Signals whose handlers save a checkpoint, as those that queue a job again do: they wait until a step is over.

In the middle of a step no state is whole: some packs are updated and others not, and lanes see stand-ins for parameters.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: SLURM and its like send these before they end a job. Ctrl-C and SIGTERM are heard at once: Lightning saves nothing then.
_HELD = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class HeldSignals:
    """Holds back signals that somebody handles in Python, and delivers them later."""

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, Any] = {}
        self._arrived: dict[signal.Signals, None] = {}

    def hold(self) -> None:
        """From now on, only note them. Outside of the main thread nothing can be held, nor handled."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        for number in _HELD:
            if callable(handler := signal.getsignal(number)):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def release(self) -> None:
        """Deliver those that arrived, each once, and hold no more."""
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        arrived, self._arrived = self._arrived, {}
        for number in arrived:
            signal.raise_signal(number)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which they are held, unless they are held anyway."""
        if self._handlers:
            yield
            return
        self.hold()
        try:
            yield
        finally:
            self.release()

    def _note(self, number: int, frame: Any) -> None:
        self._arrived[signal.Signals(number)] = None

"""Signals that somebody handles in Python wait until a step is over, so that their handlers find a whole state to save.

In the middle of a step no state is whole: some packs are updated and others not, and lanes see stand-ins for parameters.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class HeldSignals:
    """Holds back signals that somebody handles in Python, and delivers them later.

    Ctrl-C is heard at once where it raises KeyboardInterrupt, as it does unless somebody handles it otherwise. Python passes
    over what is raised while it runs the callback of a weak reference: such a Ctrl-C is delivered again when the step ends.
    """

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, Any] = {}
        self._arrived: dict[signal.Signals, None] = {}

    def hold(self) -> None:
        """From now on, only note them. Outside of the main thread nothing can be held, nor handled."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        for number in signal.Signals:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def release(self) -> None:
        """Deliver those that arrived, each once, and hold no more. What handlers raise is raised when all have run."""
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            # The step may have set another one meanwhile.
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        arrived, self._arrived = self._arrived, {}
        with ExitStack() as stack:
            for number in reversed(arrived):
                stack.callback(signal.raise_signal, number)

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
        if self._handlers.get(signal.Signals(number)) is signal.default_int_handler:
            # Who catches it ends the fit, and ignores further ones: Lightning does.
            raise KeyboardInterrupt

"""The end of an epoch, before anybody is told: Lightning asks its strategy for nothing there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class EpochEnd:
    """Calls back when the last batch of an epoch is done with, also where nobody could foresee that it was the last."""

    def __init__(self) -> None:
        self._loop: Any = None

    def begin(self, trainer: Any, call_back: Callable[[], None]) -> None:
        """Watch a Trainer's fit, until `end`."""
        self.end()
        self._loop = trainer.fit_loop
        on_advance_end = self._loop.on_advance_end

        def after_call_back() -> None:
            call_back()
            on_advance_end()

        self._loop.on_advance_end = after_call_back

    def end(self) -> None:
        """Leave the Trainer as it was."""
        loop, self._loop = self._loop, None
        if loop is not None:
            del loop.on_advance_end

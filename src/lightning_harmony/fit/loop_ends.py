"""The end of a batch and of an epoch, before Lightning tells anybody: it calls no hook of its strategy there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class LoopEnds:
    """Calls back when a training batch is done with, and when the last one of an epoch is, also where nobody expected it."""

    def __init__(self) -> None:
        self._loops: list[Any] = []

    def begin(self, trainer: Any, *, after_batch: Callable[[], None], after_epoch: Callable[[], None]) -> None:
        """Watch a Trainer's fit, until `end`.

        Args:
            trainer: whose loops are watched.
            after_batch: called when a batch is counted as completed, before a validation that follows it.
            after_epoch: called before the hooks of an epoch's end.
        """
        self.end()
        for loop, call_back in ((trainer.fit_loop, after_epoch), (trainer.fit_loop.epoch_loop, after_batch)):
            loop.on_advance_end = partial(_call_both, call_back, loop.on_advance_end)
            self._loops.append(loop)

    def end(self) -> None:
        """Leave the Trainer as it was."""
        for loop in self._loops:
            del loop.on_advance_end
        self._loops.clear()


def _call_both(first: Callable[[], None], then: Callable[..., None], *args: Any) -> None:
    first()
    then(*args)

"""Python's garbage collector in a long fit."""

from __future__ import annotations

import gc

# Fits of fewer steps end before a full collection would come. After so many, what lasts as long as the fit is there.
NUM_FIRST_STEPS = 5

# A full collection of Python 3.12 spares objects that never end, some hundred; who froze a program's has many times as many.
MOST_IMMORTAL = 10_000


class LastingObjects:
    """Spares full collections the objects that last as long as a fit: those of the libraries alone are half a million.

    Every few steps a collection would look at all of them. That takes some 0.3 s in which no lane launches any work.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._spares = False

    def begin_step(self) -> None:
        """A training step begins."""
        self._num_steps += 1
        # Who turned the collector off, or froze objects, has plans of their own.
        if self._num_steps == NUM_FIRST_STEPS and gc.isenabled() and gc.get_freeze_count() < MOST_IMMORTAL:
            # What is garbage by now must not be spared.
            gc.collect()
            gc.freeze()
            self._spares = True

    def end(self) -> None:
        """The fit is over: collections look at everything again."""
        if self._spares:
            gc.unfreeze()
        self._num_steps, self._spares = 0, False

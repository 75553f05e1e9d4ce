"""What autocast does in a thread, found again in another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lightning_harmony.engine.lanes.ambient import AUTOCAST, apply


class Autocast:
    """What autocast does in the calling thread at one moment, for work that another thread does in its stead."""

    def __init__(self) -> None:
        self._values = [kind.get() for kind in AUTOCAST]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The context in which it does the same."""
        with ExitStack() as stack:
            apply(stack, AUTOCAST, self._values)
            yield

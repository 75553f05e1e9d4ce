"""The stream of updates just in time: in which order they run, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush


class UpdateStream:
    """One update at a time: of what has arrived, that first which the next forward needs first.

    Args:
        ranks: by pack, when the next forward needs it.
        seconds: by pack, what its update takes.

    Attributes:
        done: packs that have been updated, with beginning and end.
    """

    def __init__(self, ranks: Mapping[int, int], seconds: Sequence[float]) -> None:
        self.done: list[tuple[int, float, float]] = []
        self._ranks, self._seconds = ranks, seconds
        self._added: set[int] = set()
        self._coming: list[tuple[float, int, int]] = []
        self._waiting: list[tuple[int, int]] = []
        self._free = 0.0

    def __contains__(self, pack: int) -> bool:
        return pack in self._added

    def add(self, pack: int, seconds: float) -> None:
        """The gradients of a pack are there from that moment on."""
        self._added.add(pack)
        heappush(self._coming, (seconds, self._ranks[pack], pack))

    def room_at(self, most: int) -> float:
        """When fewer packs than so many are there, or on their way there."""
        while len(self._coming) + len(self._waiting) >= most:
            self._run_next()
        return self._free

    def run_all(self) -> None:
        """Update what has not been."""
        self.room_at(1)

    def _run_next(self) -> None:
        if not self._waiting:
            self._free = max(self._free, self._coming[0][0])
        while self._coming and self._coming[0][0] <= self._free:
            heappush(self._waiting, heappop(self._coming)[1:])
        _, pack = heappop(self._waiting)
        start, self._free = self._free, self._free + self._seconds[pack]
        self.done.append((pack, start, self._free))

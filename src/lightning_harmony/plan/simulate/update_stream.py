"""The stream of updates just in time: in which order they run, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf


class UpdateStream:
    """One update at a time: of what has arrived, that first which the next forward needs first.

    Args:
        ranks: by pack, when the next forward needs it.
        seconds: by pack, what its update takes.
        on_end: told each pack that has been updated, and when.

    Attributes:
        done: packs that have been updated, with beginning and end.
    """

    def __init__(
        self, ranks: Mapping[int, int], seconds: Sequence[float], on_end: Callable[[int, float], None]
    ) -> None:
        self.done: list[tuple[int, float, float]] = []
        self._ranks, self._seconds, self._on_end = ranks, seconds, on_end
        self._added: set[int] = set()
        self._on_host: set[int] = set()
        self._coming: list[tuple[float, int, int]] = []
        self._waiting: list[tuple[int, int]] = []
        self._free = 0.0

    def __contains__(self, pack: int) -> bool:
        return pack in self._added

    def add(self, pack: int, seconds: float, *, is_on_host: bool = True) -> None:
        """The gradients of a pack are there from that moment on: on the host, or where they were summed."""
        self._added.add(pack)
        if is_on_host:
            self._on_host.add(pack)
        heappush(self._coming, (seconds, self._ranks[pack], pack))

    def room_at(self, most: int) -> float:
        """When the gradients of fewer packs than so many are on the host, or on their way there."""
        while len(self._on_host) >= most:
            self.run_next()
        return self._free

    def run_all(self) -> None:
        """Update what has not been."""
        while self.run_next():
            pass

    def run_until(self, seconds: float) -> None:
        """Update what an update begins with by then."""
        while (self._free if self._waiting else max(self._free, self._next_arrival)) < seconds:
            self.run_next()

    @property
    def _next_arrival(self) -> float:
        return self._coming[0][0] if self._coming else inf

    def run_next(self) -> bool:
        """Update the pack that comes next; whether there was one."""
        if not self._waiting:
            if not self._coming:
                return False
            self._free = max(self._free, self._next_arrival)
        while self._coming and self._coming[0][0] <= self._free:
            heappush(self._waiting, heappop(self._coming)[1:])
        _, pack = heappop(self._waiting)
        start, self._free = self._free, self._free + self._seconds[pack]
        self._on_host.discard(pack)
        self.done.append((pack, start, self._free))
        self._on_end(pack, self._free)
        return True

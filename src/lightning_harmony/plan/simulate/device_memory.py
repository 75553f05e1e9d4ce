"""The memory of a device while a step is replayed: what is there when, and when there is room."""

from collections import deque
from heapq import heappop, heappush
from itertools import accumulate

# How many turns the host is ahead of the copies of what leaves a device, at most.
LATE_TURNS = 3


class DeviceMemory:
    """What is on a device, in the order of its tasks.

    What leaves counts until a task needs its room, which then begins behind that. So in no order of times is more there.

    Args:
        capacity_bytes: how much there is; None for no limit.
        occupied_bytes: how much of it is taken all the time.

    Attributes:
        most_bytes: the most in the order of tasks, what leaves counted in the turns after it, `LATE_TURNS` of them: the host
            asks for room so far ahead of the copy.
        bound_bytes: the same where copies are so slow that nothing has left before its room is needed.
    """

    def __init__(self, capacity_bytes: int | None, occupied_bytes: int = 0) -> None:
        self._capacity_bytes = capacity_bytes
        self._num_bytes = occupied_bytes
        self._changes: list[tuple[float, int]] = [(0.0, occupied_bytes)] if occupied_bytes else []
        self.most_bytes = self.bound_bytes = occupied_bytes
        self._leaving: list[tuple[float, int]] = []
        self._leaving_bytes = 0
        # Since the last turn, and before each of the last ones.
        self._lingering_bytes, self._late_bytes = 0, deque[int](maxlen=LATE_TURNS)
        # Of all tasks so far.
        self._all_lingering_bytes = 0
        self._after = 0.0

    def short_bytes(self, num_bytes: int) -> int:
        """How much is missing even when all that leaves is gone."""
        if self._capacity_bytes is None:
            return 0
        return self._lasting_bytes + num_bytes - self._capacity_bytes

    def room_at(self, num_bytes: int) -> float | None:
        """When there is room; None if there never is, as far as is known by now."""
        if self._capacity_bytes is not None and self._num_bytes + num_bytes > self._capacity_bytes:
            if self.short_bytes(num_bytes) > 0:
                return None
            while self._num_bytes + num_bytes > self._capacity_bytes:
                end, leaving = heappop(self._leaving)
                self._num_bytes -= leaving
                self._leaving_bytes -= leaving
                self._after = max(self._after, end)
        return self._after

    def take(self, num_bytes: int, start: float) -> None:
        """Something is there from ``start`` on."""
        if num_bytes:
            self._num_bytes += num_bytes
            self._changes.append((start, num_bytes))
            self.bound_bytes = max(self.bound_bytes, self._within(self._lasting_bytes + self._all_lingering_bytes))

    def give(self, num_bytes: int, end: float, *, lingers: bool = False) -> None:
        """Something is gone from ``end`` on; what lingers is copied until then."""
        if num_bytes:
            heappush(self._leaving, (end, num_bytes))
            self._leaving_bytes += num_bytes
            self._lingering_bytes += num_bytes if lingers else 0
            self._all_lingering_bytes += num_bytes if lingers else 0
            self._changes.append((end, -num_bytes))

    def note_turn(self) -> None:
        """A lane has its turn, and has taken what it takes."""
        self._late_bytes.append(self._lingering_bytes)
        self.most_bytes = max(self.most_bytes, self._within(self._lasting_bytes + sum(self._late_bytes)))
        self._lingering_bytes = 0

    @property
    def _lasting_bytes(self) -> int:
        """What is there and not about to leave."""
        return self._num_bytes - self._leaving_bytes

    def _within(self, num_bytes: int) -> int:
        """No more than the capacity: beyond it, tasks wait for what leaves."""
        return num_bytes if self._capacity_bytes is None else min(num_bytes, self._capacity_bytes)

    def curve(self) -> tuple[tuple[float, int], ...]:
        """Each moment at which it changes, and what is there from then on."""
        changes: dict[float, int] = {}
        # What begins when something ends takes its place.
        for moment, change in sorted(self._changes):
            changes[moment] = changes.get(moment, 0) + change
        return tuple(zip(changes, accumulate(changes.values()), strict=True))

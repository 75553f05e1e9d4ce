"""The streams of updates just in time, one for each device: in which order they run, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import inf

from lightning_harmony.plan.simulate.device_memory import DeviceMemory


class UpdateStream:
    """One update at a time: in order of arrival, what is on the host behind what stays on devices.

    When all have arrived, that comes first which the next forward needs first.

    Args:
        ranks: by pack, when the next forward needs it.
        seconds: by pack, what its update takes.
        memories: of the device, with what updates use up that stays there.

    Attributes:
        done: packs that have been updated, with beginning and end.
        free: when the last of these has ended.
    """

    def __init__(
        self, ranks: Mapping[int, int], seconds: Sequence[float], memories: Sequence[DeviceMemory] = ()
    ) -> None:
        self.done: list[tuple[int, float, float]] = []
        self._ranks, self._seconds, self._memories = ranks, seconds, memories
        self._added: set[int] = set()
        self._on_host: set[int] = set()
        self._staying: dict[int, int] = {}
        self._coming: list[tuple[float, int, int]] = []
        self._waiting: list[tuple[int, int]] = []
        self._goes_by_rank = False
        self.free = 0.0

    def __contains__(self, pack: int) -> bool:
        return pack in self._added

    def add(self, pack: int, seconds: float, staying_bytes: int | None = None) -> None:
        """The gradients of a pack are there from that moment on: on the host, or where they were summed.

        Args:
            pack: which one.
            seconds: the moment.
            staying_bytes: what its update uses up where they were summed; None where they are on the host.
        """
        self._added.add(pack)
        if staying_bytes is None:
            self._on_host.add(pack)
        else:
            self._staying[pack] = staying_bytes
        heappush(self._coming, (seconds, self._ranks[pack], pack))

    @property
    def num_on_host(self) -> int:
        """Of how many packs the gradients are on the host, or on their way there."""
        return len(self._on_host)

    @property
    def next_start(self) -> float:
        """When the next update begins; infinite if there is none."""
        return self.free if self._waiting else max(self.free, self._next_arrival)

    def run_all(self) -> None:
        """All have arrived: update what has not been."""
        self._goes_by_rank = True
        while self.run_next():
            pass

    def run_until(self, seconds: float) -> None:
        """Update what an update begins with by then."""
        while self.next_start < seconds:
            self.run_next()

    @property
    def _next_arrival(self) -> float:
        return self._coming[0][0] if self._coming else inf

    def run_next(self) -> bool:
        """Update the pack that comes next; whether there was one."""
        if not self._waiting:
            if not self._coming:
                return False
            self.free = max(self.free, self._next_arrival)
        while self._coming and self._coming[0][0] <= self.free:
            self._waiting.append(heappop(self._coming)[1:])
        _, pack = chosen = min(self._waiting, key=self._order_of)
        self._waiting.remove(chosen)
        start, self.free = self.free, self.free + self._seconds[pack]
        self._on_host.discard(pack)
        self.done.append((pack, start, self.free))
        for memory in self._memories:
            memory.give(self._staying.get(pack, 0), self.free, lingers=True)
        return True

    def _order_of(self, waiting: tuple[int, int]) -> int:
        rank, pack = waiting
        return rank if self._goes_by_rank else pack in self._on_host

    def left_behind(self, seconds: float) -> list[tuple[int, float]]:
        """The gradients that updates still use up after so many seconds: their bytes, and until when."""
        ends = {pack: end - seconds for pack, _, end in self.done}
        return [(num_bytes, ends[pack]) for pack, num_bytes in self._staying.items() if ends[pack] > 0.0]


def room_on_host_at(own: UpdateStream, streams: Sequence[UpdateStream], most: int) -> float:
    """When the gradients of fewer packs than so many are on the host, or on their way there.

    Args:
        own: of the device that asks.
        streams: of all devices.
        most: how many may not be reached.
    """
    seconds = own.free
    while sum(stream.num_on_host for stream in streams) >= most:
        stream = min((each for each in streams if each.num_on_host), key=lambda each: each.next_start)
        stream.run_next()
        seconds = max(seconds, stream.free)
    return seconds

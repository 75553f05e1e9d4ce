"""What is on its way off a device: buffers that are copied, and gradients that updates use up."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from lightning_harmony.engine.devices.stream import Event, HostEvent, wait_for_one


class Leaving:
    """Memory of a device that can be had by waiting."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Event, Tensor]] = deque()
        self._updates: list[tuple[HostEvent, int]] = []

    def keep(self, event: Event, buffer: Tensor) -> None:
        """Keep a buffer alive until a copy of it is done."""
        self._kept.append((event, buffer))

    def note_update(self, updated: HostEvent, num_bytes: int) -> None:
        """Gradients of so many bytes stay until an update has used them up."""
        self._updates.append((updated, num_bytes))

    def updating_bytes(self) -> int:
        """The bytes of gradients that updates use up, and have not yet."""
        return sum(num_bytes for updated, num_bytes in self._updates if not updated.done())

    def retire(self, *, wait: bool = False) -> bool:
        """Let go of buffers whose copy is done; with ``wait``, of the oldest in any case, or of one update's gradients.

        Returns:
            Whether there was one to let go.
        """
        if not self._kept and not self._updates:
            return False
        retired = self._let_go(wait=wait)
        if wait and not retired and self._updates:
            wait_for_one([updated for updated, _ in self._updates])
        under_way = [each for each in self._updates if not each[0].done()]
        retired = retired or len(under_way) < len(self._updates)
        self._updates = under_way
        return retired

    def drain(self) -> None:
        """Let go of all buffers."""
        while self._let_go(wait=True):
            pass

    def _let_go(self, *, wait: bool) -> bool:
        gone = False
        while self._kept and (wait or self._kept[0][0].done()):
            event, _ = self._kept.popleft()
            event.synchronize()
            wait, gone = False, True
        return gone

"""The host pool: buffers for gradients, the stash and what else comes and goes, which are used again."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from lightning_harmony.engine.devices.stream import Event
from lightning_harmony.engine.model.disk_store import DiskBuffers
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.values.memory_size import format_bytes

# A buffer that no training step took for so long is given back: another plan has packs of other sizes. Of a size that had to
# be made again, buffers stay twice as long: evaluations and other steps that come now and then must not make them each time.
KEPT_STEPS = 4


@dataclass(eq=False)
class _Free:
    """A buffer that nobody uses.

    Attributes:
        buffer: the buffer.
        last_use: the event of the last copy that reads it.
        age: the training steps since.
    """

    buffer: Tensor
    last_use: Event | None
    age: int = 0


class _Existing:
    """The bytes of all buffers of a pool that exist, in the pool or in use.

    Its buffers' ends are told to this, and not to the pool: what waits for the end of a buffer must not be what keeps it.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.peak_bytes = 0
        # Storages end in whatever thread drops the last reference.
        self._lock = threading.RLock()

    def count(self, num_bytes: int) -> None:
        """So many more; or fewer, of what has ended."""
        with self._lock:
            self.num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)


class HostPool:
    """Host buffers that are used again, each of the exact size asked for, and given back to the system when they are not.

    Any thread may call it: updates give buffers back while a step takes others.

    Args:
        allocate: makes a flat uint8 buffer of a size.
        overflow: where those are that have no room, which are not used again; None where none may be elsewhere.

    Attributes:
        making_seconds: how long it has taken to make buffers.
        limit: the most bytes that all buffers may take; None for no limit.
        reserved_bytes: what the stash leaves of these to gradients.
    """

    def __init__(self, allocate: Callable[[int], Tensor], overflow: DiskBuffers | None = None) -> None:
        self.making_seconds = 0.0
        self.limit: int | None = None
        self.reserved_bytes = 0
        self._allocate, self._overflow = allocate, overflow
        # Of those that are on disk.
        self._elsewhere = weakref.WeakSet[torch.UntypedStorage]()
        self._lock = threading.Lock()
        self._free: dict[int, list[_Free]] = defaultdict(list)
        self._existing = _Existing()
        self._missed: Counter[int] = Counter()
        # For how many steps unused buffers of a size stay, and which sizes have lost one.
        self._kept_steps: dict[int, int] = {}
        self._trimmed: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers that exist, in the pool or in use."""
        return self._existing.num_bytes

    def take_peak_bytes(self) -> int:
        """The most bytes that buffers took together since the last call."""
        peak, self._existing.peak_bytes = self._existing.peak_bytes, self._existing.num_bytes
        return peak

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes can be taken, if need be in place of buffers that nobody uses."""
        return self._short_bytes(num_bytes) <= 0

    def has_room_for_stash(self, num_bytes: int) -> bool:
        """Whether the stash may take so many bytes."""
        needed = num_bytes + self.reserved_bytes
        return self._fits_beside(needed) or self.has_room(needed)

    def take(self, num_bytes: int, *, may_overflow: bool = False) -> tuple[Tensor, list[Event]]:
        """A buffer, and the events after which it may be written.

        Args:
            num_bytes: its size.
            may_overflow: whether it may be on disk, where the host has no room.

        Raises:
            CapacityError: if it would exceed the limit.
        """
        with self._lock:
            if self._free[num_bytes]:
                # The newest: what many steps do not need shows in the age of the others.
                free = self._free[num_bytes].pop()
                return free.buffer, [] if free.last_use is None else [free.last_use]
            self._missed[num_bytes] += 1
        if not self._fits_beside(num_bytes):
            # Those of other sizes, which another plan needed.
            self.release()
            if not self.has_room(num_bytes):
                # Below zero, all else has more than there is: the system may have no room for pages of the file.
                if self._overflow is None or not may_overflow or (self.limit or 0) < 0:
                    raise self.shortage(num_bytes)
                buffer = self._overflow.take(num_bytes)
                self._elsewhere.add(buffer.untyped_storage())
                return buffer, []
        return self._make(num_bytes), []

    def shortage(self, num_bytes: int) -> CapacityError:
        """What to raise where so many bytes would exceed the limit."""
        return CapacityError(
            f"the host is at least {format_bytes(self._short_bytes(num_bytes))} short: gradients and the stash may take "
            f"{format_bytes(self.limit or 0)} there, beside weights and optimizer state. Add host memory, use smaller "
            'batches, train fewer parameters, choose an optimizer with less state, or Trainer(precision="bf16-true")'
        )

    def _short_bytes(self, num_bytes: int) -> int:
        """By how much so many bytes exceed the limit, beside the buffers that somebody uses."""
        if self.limit is None:
            return 0
        with self._lock:
            unused = sum(size * len(several) for size, several in self._free.items())
        return max(self.num_bytes - unused + num_bytes - self.limit, 0)

    def _fits_beside(self, num_bytes: int) -> bool:
        """Whether a buffer can be made beside all that exist."""
        return self.limit is None or self.num_bytes + num_bytes <= self.limit

    def take_missed(self) -> Counter[int]:
        """How many buffers of each size had to be made, as none was free, since the last call."""
        with self._lock:
            missed, self._missed = self._missed, Counter()
        return missed

    def provide(self, num_bytes: int, number: int = 1) -> None:
        """Make buffers of a size until so many are free, within the limit: who takes them need not wait for that."""
        while len(self._free[num_bytes]) < number and self._fits_beside(num_bytes):
            self.give(self._make(num_bytes), None)

    def _make(self, num_bytes: int) -> Tensor:
        start = perf_counter()
        # Without the lock: to page-lock a large buffer takes a tenth of a second.
        buffer = self._allocate(num_bytes)
        with self._lock:
            self.making_seconds += perf_counter() - start
            if num_bytes in self._trimmed:
                self._trimmed.discard(num_bytes)
                self._kept_steps[num_bytes] = 2 * self._kept_steps.get(num_bytes, KEPT_STEPS)
        self._existing.count(num_bytes)
        weakref.finalize(buffer.untyped_storage(), self._existing.count, -num_bytes)
        return buffer

    def give(self, buffer: Tensor, last_use: Event | None) -> None:
        """Return a buffer, with the event of the last copy that reads it."""
        if buffer.untyped_storage() in self._elsewhere:
            # Its place goes to another when nobody has it.
            if last_use is not None:
                last_use.synchronize()
            return
        with self._lock:
            self._free[buffer.numel()].append(_Free(buffer, last_use))

    def release(self) -> None:
        """Let all buffers go that nobody uses."""
        with self._lock:
            free, self._free = self._free, defaultdict(list)
        for several in free.values():
            for each in several:
                if each.last_use is not None:
                    each.last_use.synchronize()
        # Without the lock: to unregister memory takes long.
        free.clear()

    def trim(self) -> None:
        """After a training step: let buffers go that the last ones did not take."""
        unused: list[_Free] = []
        with self._lock:
            for num_bytes, several in self._free.items():
                most = self._kept_steps.get(num_bytes, KEPT_STEPS)
                for free in several:
                    free.age += 1
                old = [free for free in several if free.age > most and _is_over(free.last_use)]
                if old:
                    self._trimmed.add(num_bytes)
                    self._free[num_bytes] = [free for free in several if free not in old]
                    unused += old
        # Without the lock: to unregister memory takes long.
        unused.clear()


def _is_over(event: Event | None) -> bool:
    return event is None or event.done()

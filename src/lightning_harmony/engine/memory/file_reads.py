"""File reads: weights that lie in files come to a device beside the lanes, by way of a little page-locked memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial

from torch import Tensor

from lightning_harmony.engine.devices.cores import run_anywhere
from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Event, Happened
from lightning_harmony.engine.updates.disk_home import Buffer, DiskHome, memory_for_direct_copies
from lightning_harmony.plan.values.memory_size import format_bytes

# A piece is read while the one before it is on its way to the device.
_PIECE_BYTES, _NUM_PIECES = 32 << 20, 3
# Of sys/mman.h of Linux since 5.14; Python's module has none. It fails where a mere look would end the process.
_MADV_POPULATE_READ = 22


class FileReads:
    """Brings weights to a device that the system has to read from files first.

    Args:
        device: where they come to.
        disk: the home of those that are trained and lie in a file.
    """

    def __init__(self, device: Device, disk: DiskHome) -> None:
        self._device, self._disk = device, disk
        # Its thread begins with the first work.
        self._thread = ThreadPoolExecutor(1, "harmony-file-read", initializer=run_anywhere)
        self._last: Future[Event] | None = None
        # What it was filled with has left each.
        self._pieces: deque[tuple[Buffer, Event]] = deque()

    def start(self, launch: Callable[[], Event]) -> Event:
        """Launch a copy of which files are a source.

        A GPU cannot be told to copy what is still to be read: where the device is one, a thread launches as it reads.

        Args:
            launch: launches it, and gives its event. It copies by `copy`.

        Returns:
            The event of the copy.
        """
        if not self._device.computes_apart:
            return launch()
        self._last = self._thread.submit(launch)
        return _Launched(self._last)

    def finish(self) -> None:
        """Wait until all copies are launched."""
        if self._last is not None:
            wait([self._last])

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Copy a tensor to the device, as its type is there, on the current stream.

        Args:
            destination: on the device, contiguous.
            source: lies in a file, contiguous.

        Raises:
            OSError: if the file cannot be read.
        """
        to, flat = destination.view(-1), source.detach().view(-1)
        lives_here = self._disk.holds(flat)
        if not lives_here:
            _will_need(flat)
        step = _PIECE_BYTES // max(flat.element_size(), to.element_size())
        for start in range(0, flat.numel(), step):
            piece, place = flat[start : start + step], to[start : start + step]
            used: list[Buffer] = []
            if lives_here:
                used.append(self._take_piece())
                piece = self._disk.read(piece, used[0])
            else:
                _read(piece)
            if self._device.computes_apart and not (used and piece.dtype == place.dtype):
                used.append(self._take_piece())
                piece = used[-1].memory(place.nbytes)[: place.nbytes].view(place.dtype).copy_(piece)
            place.copy_(piece, non_blocking=True)
            self._pieces.extend((buffer, self._device.record()) for buffer in used)

    def _take_piece(self) -> Buffer:
        """Memory that what was in it has left."""
        if not self._pieces:
            allocate = partial(memory_for_direct_copies, self._device)
            self._pieces.extend((Buffer(allocate, _PIECE_BYTES), Happened()) for _ in range(_NUM_PIECES))
        buffer, free = self._pieces.popleft()
        free.synchronize()
        return buffer

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True)


class _Launched:
    """The event of a copy that a thread launches."""

    def __init__(self, launched: Future[Event]) -> None:
        self._launched = launched

    def wait(self) -> None:
        """Block until it is launched, and order what the caller computes next after it; raise what kept it from that."""
        self._launched.result().wait()

    def synchronize(self) -> None:
        """Block until it is done; raise what kept it from that."""
        self._launched.result().synchronize()

    def done(self) -> bool:
        """Whether it is done, or has failed."""
        if not self._launched.done():
            return False
        return self._launched.exception() is not None or self._launched.result().done()


def _will_need(tensor: Tensor) -> None:
    """Let the system begin to read all of a tensor."""
    _advise(tensor, mmap.MADV_WILLNEED)


def _read(tensor: Tensor) -> None:
    """Wait until a tensor is in memory.

    Raises:
        OSError: if its file cannot be read.
    """
    number = _advise(tensor, _MADV_POPULATE_READ)
    # An older system does not know the advice, and reads as the tensor is copied.
    if number not in (0, errno.EINVAL):
        raise OSError(
            number,
            f"{format_bytes(tensor.nbytes)} of frozen weights could not be read from the file that they lie in "
            f"({errno.errorcode.get(number, '?')}: {os.strerror(number)}): it was cut off or replaced, or its disk fails. "
            "Load the model again, and go on from the last checkpoint",
        )


def _advise(tensor: Tensor, advice: int) -> int:
    """Advise the system of a tensor's memory; the number of the error, if there is one."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - begin
    return ctypes.get_errno() if _madvise()(begin, size, advice) else 0


@cache
def _madvise() -> Callable[[int, int, int], int]:
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call

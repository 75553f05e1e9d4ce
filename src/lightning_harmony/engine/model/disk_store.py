"""The disk store: tensors in a file without a name, mapped into memory to be read, and copied past the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_harmony.engine.structures.strides import is_dense
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.values.memory_size import format_bytes

# Direct I/O copies whole blocks between addresses and places that are multiples of this, whatever a disk's own size of block.
BLOCK = 4096
_WHAT = "optimizer state, weights or gradients"
# All memory in which files of stores are mapped, with its address and their folder. It may outlast its store.
_MAPPED: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, Path]] = weakref.WeakKeyDictionary()


def whole_blocks(num_bytes: int) -> int:
    """So many bytes, rounded up."""
    return -(-num_bytes // BLOCK) * BLOCK


def folder_of(tensor: Tensor) -> Path | None:
    """The folder in which the file of a tensor of any store is; None if it is of none."""
    address = tensor.data_ptr()
    folders = (folder for memory, (start, folder) in _MAPPED.items() if start <= address < start + len(memory))
    return next(folders, None)


@dataclass(frozen=True)
class _Extent:
    """A part of the file that was reserved at once.

    Attributes:
        start: its place in the file.
        memory: where it is mapped.
        address: of that.
    """

    start: int
    memory: mmap.mmap
    address: int


class DiskStore:
    """Tensors in one file. Its name is gone as soon as it is there, so its space is given back when the process ends.

    A tensor of it is an ordinary one of the host, in memory that the system reads from the file when somebody looks, and may
    forget. Who copies much calls `read` and `write`, which leave the page cache alone where the file system can do that. The
    system keeps both views the same: what is written past the cache is dropped from it, and what was changed there is written
    before it is read past it.

    Args:
        folder: where the file is made.

    Raises:
        CapacityError: if there can be none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._extents: list[_Extent] = []
        self._end = 0
        # By size, the places that nobody has, and those that have come back since somebody took one.
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._returned: list[tuple[int, int]] = []
        self._live: dict[int, int] = {}
        try:
            # By the system's own means without a name from the start, where it has them.
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise CapacityError(f"{_argument(folder)}: no file can be made there ({error})") from error
        try:
            self._direct = self._open_direct()
        except CapacityError:
            self._file.close()
            raise

    @property
    def used_bytes(self) -> int:
        """What the tensors take that somebody still has."""
        return sum(list(self._live.values()))

    @property
    def is_direct(self) -> bool:
        """Whether copies leave the page cache alone."""
        return self._direct != self._file.fileno()

    def _open_direct(self) -> int:
        """The file once more, past the page cache; as it is open already where the file system cannot do that."""
        self.reserve(BLOCK)
        with suppress(OSError):
            direct = os.open(f"/proc/self/fd/{self._file.fileno()}", os.O_RDWR | os.O_DIRECT)
            try:
                # Some file systems refuse only then.
                os.preadv(direct, [mmap.mmap(-1, BLOCK)], 0)
            except OSError:
                os.close(direct)
                raise
            return direct
        return self._file.fileno()

    def reserve(self, num_bytes: int) -> None:
        """Have room for so many bytes more.

        Raises:
            CapacityError: saying how many bytes the disk has not.
        """
        size = whole_blocks(num_bytes)
        try:
            os.posix_fallocate(self._file.fileno(), self._end, size)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), self._end)
            raise CapacityError(
                f"{_argument(self.folder)}: {format_bytes(size)} of {_WHAT} do not fit there ({error.strerror}; "
                f"{format_bytes(_free_bytes(self.folder))} are free): give a folder on a larger disk, or make room on this one"
            ) from error
        memory = mmap.mmap(self._file.fileno(), size, offset=self._end)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._extents.append(_Extent(self._end, memory, address))
        _MAPPED[memory] = address, self.folder
        self._free[size].append(self._end)
        self._end += size

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A dense tensor, whose storage is its own: who saves it saves no more. It keeps its place as long as it is there.

        Raises:
            CapacityError: if what was reserved is used up, and there is no more room.
        """
        place = self._take(whole_blocks(shape.numel() * dtype.itemsize))
        extent = next(each for each in reversed(self._extents) if each.start <= place)
        flat = torch.frombuffer(extent.memory, dtype=dtype, count=shape.numel(), offset=place - extent.start)
        end = weakref.finalize(flat.untyped_storage(), self._give, place)
        end.atexit = False
        return flat.as_strided(shape, stride)

    def _take(self, num_bytes: int) -> int:
        while self._returned:
            place, size = self._returned.pop()
            self._free[size].append(place)
        if not any(places and size >= num_bytes for size, places in self._free.items()):
            self.reserve(num_bytes)
        # Of the largest, unless others have left just that: what comes in their place is as large.
        size = num_bytes if self._free[num_bytes] else max(size for size, places in self._free.items() if places)
        place = self._free[size].pop()
        if size > num_bytes:
            self._free[size - num_bytes].append(place + num_bytes)
        self._live[place] = num_bytes
        return place

    def _give(self, place: int) -> None:
        """Nobody has a tensor any more. Any thread may come to this, in the middle of anything."""
        self._returned.append((place, self._live.pop(place)))

    def place_of(self, tensor: Tensor) -> int:
        """Where the bytes of a tensor that lies there, or of a part of one, begin in the file."""
        place = self.find(tensor)
        assert place is not None
        return place

    def find(self, tensor: Any) -> int | None:
        """Where the bytes of a tensor begin in the file; None if it is not there in one piece."""
        if type(tensor) is not Tensor or tensor.device.type != "cpu" or not is_dense(tensor):
            return None
        address = tensor.data_ptr()
        for extent in self._extents:
            if extent.address <= address < extent.address + len(extent.memory):
                return extent.start + address - extent.address
        return None

    def read(self, into: memoryview, place: int) -> None:
        """Fill memory from a place in the file, both of whole blocks.

        Raises:
            OSError: with what could not be read, and why.
        """
        with self._explained("read", len(into)):
            while into:
                done = os.preadv(self._direct, [into], place)
                if done <= 0:
                    raise OSError(errno.EIO, "the file has been cut off")
                into, place = into[done:], place + done

    def write(self, source: memoryview, place: int) -> None:
        """Write memory to a place in the file. A place in its block that is the source's own lets it go past the page cache.

        Args:
            source: the bytes, `place % BLOCK` beyond a multiple of `BLOCK`.
            place: where they go.

        Raises:
            OSError: with what could not be written, and why.
        """
        head = min(-place % BLOCK, len(source))
        body = (len(source) - head) // BLOCK * BLOCK
        with self._explained("written", len(source)):
            # What shares a block with something else goes by way of the page cache, which has the rest of the block.
            _write(self._file.fileno(), source[:head], place)
            _write(self._direct, source[head : head + body], place + head)
            _write(self._file.fileno(), source[head + body :], place + head + body)

    @contextmanager
    def _explained(self, done: str, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno,
                f"{_argument(self.folder)}: {format_bytes(num_bytes)} of {_WHAT} could not be {done} "
                f"({errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}). Go on from the last checkpoint, with a "
                "folder on another disk",
            ) from error

    def flush(self) -> None:
        """Wait until all is on the disk that went there by way of memory, so that the system may forget it.

        Raises:
            OSError: if something could not be written.
        """
        with self._explained("written", self._end):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Copy no more. Tensors stay as they are, and the file's space is given back when the last of them has gone."""
        if self.is_direct:
            os.close(self._direct)
        self._file.close()


class DiskBuffers:
    """Buffers for what the host has no room for, in memory that the system may let go. Each is there until nobody has it.

    They are in a file of their own, whose space is given back while others are still needed.

    Args:
        folder: where the file is made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store: DiskStore | None = None

    def reserve(self, num_bytes: int) -> None:
        """Have room for so many bytes, if there are no buffers.

        Raises:
            CapacityError: if the disk has too little room.
        """
        if self._store is None:
            self._store = DiskStore(self._folder)
            self._store.reserve(num_bytes)

    def take(self, num_bytes: int) -> Tensor:
        """A flat buffer.

        Raises:
            CapacityError: if the disk has too little room.
        """
        self._store = self._store or DiskStore(self._folder)
        return self._store.empty(torch.Size([num_bytes]), (1,), torch.uint8)

    def close(self) -> None:
        """Give the space back, with the last buffer that somebody has."""
        store, self._store = self._store, None
        if store is not None:
            store.close()


def _write(file: int, source: memoryview, place: int) -> None:
    while source:
        done = os.pwritev(file, [source], place)
        if done <= 0:
            raise OSError(errno.EIO, "nothing more was written")
        source, place = source[done:], place + done


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _argument(folder: Path) -> str:
    return f"HarmonyStrategy(offload_dir={str(folder)!r})"

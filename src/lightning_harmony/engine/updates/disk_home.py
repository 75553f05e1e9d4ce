"""The disk as a home of optimizer state and of weights: whose it is, and the host buffers through which they come and go."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, RLock
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.cores import run_anywhere
from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Event, Happened
from lightning_harmony.engine.devices.touched_memory import touched_buffer
from lightning_harmony.engine.model.disk_store import BLOCK, DiskBuffers, DiskStore, whole_blocks
from lightning_harmony.engine.model.host_store import Slot, lay_out

# How many pieces of state may be in host memory: two that are read ahead, two on a device, and others on their way to disk.
NUM_BUFFERS = 6
# A piece that is stepped may need two buffers: for state that it brings, and for state that its step makes.
_OF_ONE_PIECE = 2
# A disk is busy with several large requests: 4 threads that read 4 MiB at a time came to 2.6 GB/s, one that read 1 MiB to 1.4.
_NUM_THREADS, _REQUEST_BYTES = 4, 8 << 20
# What is copied to find out how fast the disk is, both ways at once: at most so much, so often.
_MOST_TRIED_BYTES, _NUM_TRIED = 64 << 20, 3
# Tensors that an optimizer may have for a parameter, each of whole blocks.
_MOST_TENSORS = 4


class DiskHome:
    """Where optimizer state lives, and weights do, that the host has no room for.

    Args:
        folder: where its file is made, when the first of them gets its home there. None where none may.

    Attributes:
        folder: the same.
        overflow: buffers for gradients that the host has no room for; None where none may be there.
        bytes_per_second: of what is read and written again; None before that was measured.
        one_update: held while an update uses the buffers. Several devices would wait for each other's.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.one_update = RLock()
        self._read_bytes = self._written_bytes = 0
        self._waited_seconds = 0.0
        self.bytes_per_second: float | None = None
        self._counting = Lock()
        self._state_bytes: dict[nn.Parameter, int] = {}
        self._weights: list[nn.Parameter] = []
        self._store: DiskStore | None = None
        self.overflow = None if folder is None else DiskBuffers(folder)
        self._ring: deque[Buffer] = deque()
        self._readers = ThreadPoolExecutor(_NUM_THREADS, "harmony-disk-read", initializer=run_anywhere)
        # What layers wait for is not to queue behind what updates read ahead.
        self._urgent_readers = ThreadPoolExecutor(_NUM_THREADS, "harmony-weight-read", initializer=run_anywhere)
        self._writers = ThreadPoolExecutor(_NUM_THREADS, "harmony-disk-write", initializer=run_anywhere)

    # ---- whose home it is ----------------------------------------------------------------------------------------------

    def take(self, state_bytes: Mapping[nn.Parameter, int]) -> None:
        """From now on, be the home of the state of some parameters.

        Args:
            state_bytes: of each, what its state will take.

        Raises:
            CapacityError: if the disk has too little room.
        """
        self._reserve(sum(whole_blocks(each) + _MOST_TENSORS * BLOCK for each in state_bytes.values()))
        self._state_bytes.update(state_bytes)

    def take_weights(self, parameters: Sequence[nn.Parameter]) -> None:
        """From now on, be the home of some parameters, dense ones on the host. They stay the user's, in mapped memory.

        Raises:
            CapacityError: if the disk has too little room. Then nothing has moved.
            OSError: if something could not be written.
        """
        store = self._reserve(sum(whole_blocks(parameter.nbytes) for parameter in parameters))
        with torch.inference_mode(False), torch.no_grad():
            for parameter in parameters:
                place = store.empty(parameter.shape, parameter.stride(), parameter.dtype)
                parameter.data = place.copy_(parameter)
        store.flush()
        self._weights += parameters

    def _reserve(self, num_bytes: int) -> DiskStore:
        assert self.folder is not None
        self._store = self._store or DiskStore(self.folder)
        self._store.reserve(num_bytes)
        return self._store

    @property
    def has_buffers(self) -> bool:
        """Whether it was opened."""
        return bool(self._ring)

    def open(self, allocate: Callable[[int], Tensor], buffer_bytes: int) -> None:
        """Take the buffers through which updates read and write, if there are none.

        Args:
            allocate: makes a flat buffer of bytes on the host, from which devices copy at full speed.
            buffer_bytes: what a piece takes.
        """
        if self._store is not None and not self._ring:
            self._ring.extend(Buffer(allocate, buffer_bytes) for _ in range(NUM_BUFFERS))
            self._measure(self._store, buffer_bytes)

    def _measure(self, store: DiskStore, buffer_bytes: int) -> None:
        """Read and write some of the file at once, as updates do."""
        shape = torch.Size([min(buffer_bytes, _MOST_TRIED_BYTES)])
        tried = [store.empty(shape, (1,), torch.uint8) for _ in range(_NUM_TRIED)]
        # The first writing has the file system find blocks.
        self._write(tried)
        start = perf_counter()
        loans = [self.borrow([tensor], reads=True) for tensor in tried]
        self._write(tried)
        for loan in loans:
            loan.arrive()
            loan.drop()
        self.bytes_per_second = _NUM_TRIED * shape.numel() / (perf_counter() - start)
        self.take_moved_bytes()
        self.take_waited_seconds()

    def _write(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.borrow([tensor], reads=False).write_after(Happened())
        self.settle()

    @property
    def is_in_use(self) -> bool:
        """Whether it is the home of anything."""
        return self._store is not None

    def is_home_of(self, parameter: nn.Parameter) -> bool:
        """Whether the state of a parameter lives here."""
        return parameter in self._state_bytes

    def bytes_of(self, parameters: Sequence[nn.Parameter]) -> int:
        """What an update of some parameters reads and writes, or will as far as that is known."""
        return sum(self._state_bytes.get(p, 0) + (p.nbytes if self.holds(p.detach()) else 0) for p in parameters)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters that live here."""
        return [parameter for parameter in self._weights if self.holds(parameter.detach())]

    @property
    def weight_bytes(self) -> int:
        """What these are."""
        return sum(parameter.nbytes for parameter in self.weights)

    @property
    def used_bytes(self) -> int:
        """What there is of state on the disk."""
        used = 0 if self._store is None else self._store.used_bytes
        return used - sum(whole_blocks(parameter.nbytes) for parameter in self.weights)

    def holds(self, value: Any) -> bool:
        """Whether a tensor, or what a part is of, lies here."""
        return self._store is not None and self._store.find(value) is not None

    def place_for(self, parameter: nn.Parameter, slot: Slot) -> Tensor | None:
        """A place for new state of a parameter; None if it lives on the host, as does what is smaller than a block."""
        if self._store is None or not self.is_home_of(parameter) or slot.num_bytes < BLOCK or slot.tensor is not None:
            return None
        return self._store.empty(slot.shape, slot.stride, slot.dtype)

    def bring(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """Bring what there is of a parameter's state, if it lives here, as when a checkpoint was loaded."""
        if not state or not self.is_home_of(parameter):
            return
        for name, value in state.items():
            if type(value) is Tensor and not self.holds(value):
                place = self.place_for(parameter, lay_out([value])[0][0])
                if place is not None:
                    state[name] = place.copy_(value)
        self._state_bytes[parameter] = sum(value.nbytes for value in state.values() if self.holds(value))

    # ---- how state comes and goes ----------------------------------------------------------------------------------------

    @property
    def may_read_ahead(self) -> bool:
        """Whether a buffer is free that nothing else will wait for."""
        return len(self._ring) > _OF_ONE_PIECE

    def borrow(self, tensors: Sequence[Tensor], *, reads: bool) -> Loan:
        """Take a buffer for tensors of the disk, in which they are on the host meanwhile.

        Args:
            tensors: of the disk, or parts of them.
            reads: whether to begin to read them.

        Raises:
            OSError: if what the buffer had before could not be written.
        """
        buffer = self._ring[0]
        with self.waiting():
            buffer.settle()
        self._ring.popleft()
        return self._lend(buffer, tensors, self._readers if reads else None)

    def read(self, tensor: Tensor, buffer: Buffer) -> Tensor:
        """Read a tensor of the disk, or a part of one, into a buffer that is not of the ring. Any thread may.

        Raises:
            OSError: if it could not be read, or what it is could not be written before.
        """
        loan = self._lend(buffer, [tensor], self._urgent_readers)
        wait(loan.reads)
        for read in loan.reads:
            read.result()
        return loan.there[0]

    def _lend(self, buffer: Buffer, tensors: Sequence[Tensor], readers: ThreadPoolExecutor | None) -> Loan:
        assert self._store is not None
        store = self._store
        loan = Loan(self, buffer, [(tensor, store.place_of(tensor)) for tensor in tensors])
        if readers is not None:
            with self._counting:
                self._read_bytes += loan.num_bytes
            # What is still on its way to these places has gone back to the ring by now.
            for other in list(self._ring):
                if other.writes_to(loan):
                    other.settle()
            loan.reads = [readers.submit(store.read, *request) for request in loan.requests(whole=True)]
        return loan

    def give_back(self, loan: Loan, buffer: Buffer, after: Event | None) -> None:
        """Take a buffer back.

        Args:
            loan: what it was for.
            buffer: which one.
            after: when this has happened, what is in it is written; None to write nothing.
        """
        store = self._store
        if after is not None and store is not None:
            self._written_bytes += loan.num_bytes

            # One thread waits: for an event of a GPU, that may keep a core busy.
            filled = self._writers.submit(after.synchronize)

            def write(source: memoryview, place: int) -> None:
                filled.result()
                store.write(source, place)

            buffer.written = loan
            buffer.writes = [self._writers.submit(write, *request) for request in loan.requests(whole=False)]
        self._ring.append(buffer)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The context in which an update waits for the disk."""
        start = perf_counter()
        yield
        self._waited_seconds += perf_counter() - start

    def settle(self) -> None:
        """Wait until all is on the disk that was sent there.

        Raises:
            OSError: if something could not be written.
        """
        for buffer in list(self._ring):
            buffer.settle()

    def take_moved_bytes(self) -> tuple[int, int]:
        """Bytes that were read, and that updates have written, since the last call."""
        with self._counting:
            moved, self._read_bytes, self._written_bytes = (self._read_bytes, self._written_bytes), 0, 0
        return moved

    def take_waited_seconds(self) -> float:
        """Seconds for which updates have waited for the disk since the last call."""
        seconds, self._waited_seconds = self._waited_seconds, 0.0
        return seconds

    def close(self) -> None:
        """End the threads, and let the buffers go. What lives here stays readable; its space goes with the last of it."""
        for threads in (self._readers, self._urgent_readers, self._writers):
            threads.shutdown(wait=True)
        self._ring.clear()
        if self.overflow is not None:
            self.overflow.close()
        if self._store is not None:
            self._store.close()


def memory_for_direct_copies(device: Device, num_bytes: int) -> Tensor:
    """Memory on the host, locked if possible, and not copied for processes that are forked while the disk fills it."""
    buffer = touched_buffer(num_bytes)
    # Where the system locks no more memory, copies are slower.
    with suppress(RuntimeError, OSError):
        weakref.finalize(buffer.untyped_storage(), device.register_host(buffer))
    return buffer


class Buffer:
    """A buffer of the host, such as those of the ring.

    Args:
        allocate: makes a flat buffer of bytes.
        num_bytes: what it has at least, once it is used.

    Attributes:
        writes: what is still written from it, or was.
        written: what that is.
    """

    def __init__(self, allocate: Callable[[int], Tensor], num_bytes: int) -> None:
        self.writes: list[Future[None]] = []
        self.written: Loan | None = None
        self._allocate, self._least_bytes = allocate, num_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)

    def memory(self, num_bytes: int) -> Tensor:
        """So many bytes, from the beginning of a block on. They stay, until more are needed."""
        if self._memory.numel() < num_bytes:
            # What there was goes first.
            self._memory = torch.empty(0, dtype=torch.uint8)
            memory = self._allocate(max(num_bytes, self._least_bytes) + BLOCK)
            self._memory = memory[-memory.data_ptr() % BLOCK :]
        return self._memory

    def settle(self) -> None:
        """Wait until nothing is written from it. What has failed is raised each time: the fit cannot go on.

        Raises:
            OSError: if something could not be written.
        """
        # They stay: another thread may have given others meanwhile.
        for write in self.writes:
            write.result()

    def writes_to(self, loan: Loan) -> bool:
        """Whether places of a loan were written from it last."""
        return self.written is not None and self.written.meets(loan)


class Loan:
    """Tensors of the disk in a buffer of the ring.

    Args:
        home: lends it.
        buffer: where they are.
        tensors: on the disk, each with its place there.

    Attributes:
        there: the tensors in the buffer.
        num_bytes: theirs.
        reads: what is still read.
    """

    def __init__(self, home: DiskHome, buffer: Buffer, tensors: Sequence[tuple[Tensor, int]]) -> None:
        self.reads: list[Future[None]] = []
        self.num_bytes = sum(tensor.nbytes for tensor, _ in tensors)
        self._home, self._buffer = home, buffer
        self._is_over = False
        # By tensor, where it begins in the buffer, where it does on the disk, and its bytes. It begins equally far from the
        # beginning of a block in both.
        self._places: list[tuple[int, int, int]] = []
        end = 0
        for tensor, place in tensors:
            self._places.append((end + place % BLOCK, place, tensor.nbytes))
            end += whole_blocks(place % BLOCK + tensor.nbytes)
        memory = buffer.memory(end)
        self._bytes: memoryview = memory.numpy().data
        self.there = [
            memory[offset : offset + num_bytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
            for (tensor, _), (offset, _, num_bytes) in zip(tensors, self._places, strict=True)
        ]

    def meets(self, other: Loan) -> bool:
        """Whether some of its bytes on the disk are also the other's."""
        return any(
            place < end and begin < place + num_bytes
            for _, place, num_bytes in self._places
            for begin, end in ((begin, begin + size) for _, begin, size in other._places)
        )

    def requests(self, *, whole: bool) -> Iterator[tuple[memoryview, int]]:
        """What is to be copied at once: parts of the buffer, each with its place on the disk.

        Args:
            whole: whether with all of the blocks at both ends, in which there may be something else.
        """
        for offset, place, num_bytes in self._places:
            before = place % BLOCK if whole else 0
            start, begin = place - before, offset - before
            end = start + (whole_blocks(before + num_bytes) if whole else num_bytes)
            while start < end:
                length = min(_REQUEST_BYTES - start % BLOCK, end - start)
                yield self._bytes[begin : begin + length], start
                start, begin = start + length, begin + length

    def arrive(self) -> None:
        """Wait until all has been read.

        Raises:
            OSError: if something could not be.
        """
        with self._home.waiting():
            for read in self.reads:
                read.result()

    def write_after(self, event: Event) -> None:
        """When an event has happened, write all that is in the buffer, and give that back."""
        self._is_over = True
        self._home.give_back(self, self._buffer, event)

    def drop(self) -> None:
        """Give the buffer back, unless that has been done."""
        if not self._is_over:
            self._is_over = True
            # Nobody else may have it before.
            wait(self.reads)
            self._home.give_back(self, self._buffer, None)

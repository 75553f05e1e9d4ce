"""Devices with a capacity: a CUDA device, or a virtual one in host memory with real copies and real limits."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._dynamo.eval_frame import skip_code
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.operations import run_as_without_mode
from lightning_harmony.engine.stream import (
    CudaEvent,
    CudaMoment,
    CudaStream,
    Event,
    Happened,
    HostMoment,
    HostStream,
    Moment,
    OnCudaStream,
    Stream,
    current_cuda_stream,
)
from lightning_harmony.engine.touched_memory import touched_buffer
from lightning_harmony.plan.streams import STREAM_OF
from lightning_harmony.plan.task import Errand, Task

# To copy so much on the host takes less than to wake the thread that copies: 10 microseconds instead of 50.
BRIEFLY_COPIED_BYTES = 64 * 1024


class DeviceOutOfMemoryError(torch.OutOfMemoryError):
    """An allocation would exceed the capacity of a virtual device."""

    def __init__(self, short_bytes: int) -> None:
        # Lightning's batch size finder knows by the last words that a smaller batch may help.
        super().__init__(f"virtual device out of memory: {short_bytes} bytes short (on a GPU: CUDA out of memory)")
        self.short_bytes = short_bytes


class Recorder(Protocol):
    """What keeps when devices worked."""

    def copying(
        self, device: Device, kind: Errand, what: str, num_bytes: int, work: Callable[[], None], pack: int | None
    ) -> Callable[[], None]:
        """The work of a copy between host and device, with a note of when it runs."""

    def transferring(
        self, source: Device, target: Device, num_bytes: int, task: Task | None
    ) -> AbstractContextManager[None]:
        """The context in which a tensor is copied from device to device."""

    def waiting(self) -> AbstractContextManager[None]:
        """The context in which what computes waits for a copy."""


class Device(ABC):
    """Where packs run: its memory, its capacity and its streams.

    Attributes:
        torch_device: where its tensors live.
        capacity_bytes: what may be allocated on it; None for no limit.
        swap_in: the stream of host-to-device copies. Separate, so that a copy runs under compute.
        swap_out: the stream of device-to-host copies: both directions of the bus work at once.
        stash_in: the stream on which the stash comes back, which a lane needs at once: it is not to queue behind a pack.
        uncounted_bytes: what is allocated in a step besides all that is counted: for libraries, and by rounding up.
        recorder: keeps when this device works, while somebody wants to know.
    """

    torch_device: torch.device
    capacity_bytes: int | None
    swap_in: Stream
    swap_out: Stream
    stash_in: Stream
    uncounted_bytes: int = 0

    def __init__(self, torch_device: torch.device, capacity_bytes: int | None) -> None:
        self.torch_device = torch_device
        self.capacity_bytes = capacity_bytes
        self.recorder: Recorder | None = None
        self._kept: deque[tuple[Event, Tensor]] = deque()

    @abstractmethod
    def empty(self, num_bytes: int, stream: Stream | None = None) -> Tensor:
        """A flat uint8 buffer, to be filled by a stream, `swap_in` if none is given."""

    @abstractmethod
    def scratch(self, num_bytes: int) -> Tensor:
        """A flat uint8 buffer, to be filled by compute."""

    @abstractmethod
    def allocated_bytes(self) -> int:
        """What is allocated now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most that was allocated since the device was opened."""

    @abstractmethod
    def watch_peak(self) -> Callable[[], int]:
        """Start to watch a peak; calling the result gives the most that was allocated since."""

    @abstractmethod
    def record(self) -> Event:
        """The event of all that the caller has computed so far on this device."""

    def record_all(self) -> list[Event]:
        """The events of all that has been computed so far on this device, whoever launched it."""
        return [self.record()]

    @abstractmethod
    def moment(self) -> Moment:
        """The moment at which all that the caller has computed so far on this device is done."""

    @abstractmethod
    def lane_moment(self) -> Moment:
        """The moment at which the running lane's own work on this device is done so far."""

    @abstractmethod
    def free(self, buffer: Tensor, uses: Sequence[Event]) -> None:
        """Called before the last reference to a buffer from `empty` goes: its memory is reused only after ``uses``."""

    @abstractmethod
    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is in this device's memory."""

    @abstractmethod
    def computing(self) -> AbstractContextManager[None]:
        """The context of all code that computes on this device: in order, whichever lane it is for."""

    def scheduling(self) -> AbstractContextManager[None]:
        """The context of what goes on between the turns of lanes: it is ordered with computing, after no lane's own work."""
        return nullcontext()

    def selected(self) -> AbstractContextManager[None]:
        """The context of a lane's own work on this device, between the layers."""
        return self.computing()

    def lane(self, number: int) -> AbstractContextManager[None]:
        """The context of all that a lane does, of which this device may see a part."""
        return nullcontext()

    @abstractmethod
    def hand_out(self, tensors: Iterable[Tensor]) -> None:
        """Called after computing: what it made goes to the lane."""

    @abstractmethod
    def begin_lanes(self) -> None:
        """From here on, lanes may work: after what the caller has launched."""

    @abstractmethod
    def catch_up(self) -> None:
        """Order the running lane's own work after what had been launched when lanes last began."""

    @abstractmethod
    def await_lane(self, number: int) -> None:
        """Order the running lane's own work after all that another one has launched here."""

    @abstractmethod
    def join_lanes(self) -> None:
        """Order what the caller computes next after all that lanes have launched."""

    def on_host(self) -> AbstractContextManager[None]:
        """The context of host work in the middle of code that computes on this device."""
        return nullcontext()

    def run_compiled(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call compiled code that computes on this device."""
        return function(*args, **kwargs)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """A flat uint8 buffer on the host that this device copies from and to at full speed."""
        return _flat(num_bytes, torch.device("cpu"))

    def register_host(self, buffer: Tensor) -> Callable[[], None]:
        """Make an existing host buffer fast to copy; calling the result undoes it."""
        return lambda: None

    def start_copy(
        self,
        kind: Errand,
        what: str,
        num_bytes: int,
        copy: Callable[[], None],
        after: Sequence[Event] = (),
        pack: int | None = None,
    ) -> Event:
        """Start a copy between host and device, and let it be known when it runs, if somebody records that.

        Args:
            kind: the kind of its task, which has a stream.
            what: the kind of what is copied.
            num_bytes: how much of that.
            copy: copies.
            after: the events that have to happen before.
            pack: which one's; None for what belongs to the running lane.
        """
        if self.recorder is not None:
            copy = self.recorder.copying(self, kind, what, num_bytes, copy, pack)
        stream = self.stream_of(kind)
        submit = stream.submit_brief if num_bytes <= BRIEFLY_COPIED_BYTES else stream.submit
        return submit(copy, after)

    def stream_of(self, kind: Errand) -> Stream:
        """Where a kind of copy between host and device runs."""
        return {"swap-in": self.swap_in, "stash-in": self.stash_in, "swap-out": self.swap_out}[STREAM_OF[kind]]

    def receiving(self, source: Device, num_bytes: int, task: Task | None) -> AbstractContextManager[None]:
        """The context of a copy from another device; the task is None for what belongs to the running lane."""
        return nullcontext() if self.recorder is None else self.recorder.transferring(source, self, num_bytes, task)

    def waiting(self) -> AbstractContextManager[None]:
        """The context in which what computes on this device waits for a copy."""
        return nullcontext() if self.recorder is None else self.recorder.waiting()

    def keep_until(self, event: Event, buffer: Tensor) -> None:
        """Keep a buffer from `scratch` alive until a copy of it is done."""
        self._kept.append((event, buffer))

    def retire(self, *, wait: bool = False) -> bool:
        """Let go of kept buffers whose copy is done; with ``wait``, of the oldest in any case.

        Returns:
            Whether there was one to let go.
        """
        retired = False
        while self._kept and (wait or self._kept[0][0].done()):
            event, _ = self._kept.popleft()
            event.synchronize()
            wait, retired = False, True
        return retired

    def room_for(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more stay within the capacity."""
        return self.capacity_bytes is None or self.allocated_bytes() + num_bytes <= self.capacity_bytes

    def close(self) -> None:
        """Finish all copies and release the streams."""
        for stream in (self.swap_in, self.swap_out, self.stash_in):
            stream.close()


class CudaDevice(Device):
    """One GPU.

    Args:
        torch_device: which one.
        capacity_bytes: what may be allocated on it.
        is_one_of_several: whether lanes go from device to device. Each then has a stream of its own on each, on which
            its glue, its copies from device to device and the autograd engine run. On one stream, a lane that waits for
            another device would hold up those behind it.
    """

    # Of GPTs of 1 and 5 B parameters 1.06 and 0.04 MB, whatever the capacity.
    uncounted_bytes = 2 << 20

    def __init__(
        self, torch_device: torch.device, capacity_bytes: int | None, *, is_one_of_several: bool = False
    ) -> None:
        super().__init__(torch_device, capacity_bytes)
        self._is_one_of_several = is_one_of_several
        if is_one_of_several and hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
            # Gradients come from other devices, whose streams autograd waits for: there is nothing to warn of.
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        self._compute = current_cuda_stream(self._index)
        self._lane_streams: dict[int, torch.cuda.Stream] = {}
        self._began: torch.cuda.Event | None = None
        self.swap_in = CudaStream(torch_device)
        self.swap_out = CudaStream(torch_device)
        self.stash_in = CudaStream(torch_device)
        self._peak_bytes = 0

    @property
    def _index(self) -> int:
        # Torch's functions take a number at once, and a device after a long look at it.
        return self.torch_device.index

    def empty(self, num_bytes: int, stream: Stream | None = None) -> Tensor:
        """Allocate in the pool of the stream, so that the copies into it need no further event."""
        stream = stream or self.swap_in
        assert isinstance(stream, CudaStream)
        with stream.selected():
            return _flat(num_bytes, self.torch_device)

    def scratch(self, num_bytes: int) -> Tensor:
        """Allocate in the pool of the compute stream."""
        return _flat(num_bytes, self.torch_device)

    def allocated_bytes(self) -> int:
        """What torch's allocator has handed out."""
        # Asked for at every visit: to flatten all statistics, as memory_allocated does, takes ten times as long.
        statistics = torch.cuda.memory_stats_as_nested_dict(self._index)
        return int(statistics["allocated_bytes"]["all"]["current"]) if statistics else 0

    def peak_bytes(self) -> int:
        """The most that torch's allocator has handed out."""
        return max(self._peak_bytes, torch.cuda.max_memory_allocated(self.torch_device))

    def watch_peak(self) -> Callable[[], int]:
        """Watch through the allocator's own peak, which has to be reset for it."""
        self._peak_bytes = self.peak_bytes()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        return lambda: torch.cuda.max_memory_allocated(self.torch_device)

    def record(self) -> Event:
        """An event on the current stream."""
        return CudaEvent(current_cuda_stream(self._index))

    def record_all(self) -> list[Event]:
        """An event on the compute stream, and one on that of each lane."""
        return [CudaEvent(stream) for stream in (self._compute, *self._lane_streams.values())]

    def moment(self) -> Moment:
        """A timed event on the compute stream."""
        return CudaMoment(self._compute)

    def lane_moment(self) -> Moment:
        """A timed event on the current stream."""
        return CudaMoment(current_cuda_stream(self._index))

    def free(self, buffer: Tensor, uses: Sequence[Event]) -> None:
        """Order later copies, which may reuse the memory, after its uses."""
        self.swap_in.submit(lambda: None, after=uses)

    def owns(self, tensor: Tensor) -> bool:
        """Whether it is on this GPU."""
        return tensor.device == self.torch_device

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Make this device current; the lane hands over to the compute stream, and takes over from it."""
        lane = current_cuda_stream(self._index)
        if lane == self._compute:
            with torch.cuda.device(self._index):
                yield
            return
        self._compute.wait_stream(lane)
        with OnCudaStream(self._compute):
            yield
        lane.wait_stream(self._compute)

    def scheduling(self) -> AbstractContextManager[None]:
        """On the compute stream, from whichever lane it is done."""
        return OnCudaStream(self._compute) if self._is_one_of_several else nullcontext()

    def selected(self) -> AbstractContextManager[None]:
        """Make this device current, with the lane's own stream."""
        return torch.cuda.device(self._index)

    @contextmanager
    def lane(self, number: int) -> Iterator[None]:
        """Give the lane its stream, and make this device current."""
        if not self._is_one_of_several:
            with self.computing():
                yield
            return
        if number not in self._lane_streams:
            self._lane_streams[number] = torch.cuda.Stream(self.torch_device)
        with OnCudaStream(self._lane_streams[number]):
            self.catch_up()
            yield

    def hand_out(self, tensors: Iterable[Tensor]) -> None:
        """Tell the allocator that the lane's stream uses them, too."""
        if self._is_one_of_several:
            stream = current_cuda_stream(self._index)
            for tensor in tensors:
                if tensor.device == self.torch_device:
                    tensor.record_stream(stream)

    def begin_lanes(self) -> None:
        """Record what lanes begin after."""
        self._began = self._compute.record_event()

    def catch_up(self) -> None:
        """Let the lane's stream wait for that."""
        assert self._began is not None
        current_cuda_stream(self._index).wait_event(self._began)

    def await_lane(self, number: int) -> None:
        """Let the one's stream wait for the other's."""
        if number in self._lane_streams:
            current_cuda_stream(self._index).wait_stream(self._lane_streams[number])

    def join_lanes(self) -> None:
        """Let the compute stream wait for all lanes."""
        for stream in self._lane_streams.values():
            self._compute.wait_stream(stream)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """A registered buffer of exact size: torch's pinned allocator rounds up to powers of two."""
        buffer = touched_buffer(num_bytes)
        weakref.finalize(buffer.untyped_storage(), self.register_host(buffer))
        return buffer

    def register_host(self, buffer: Tensor) -> Callable[[], None]:
        """Page-lock the buffer."""
        if buffer.numel() == 0:
            return lambda: None
        runtime = torch.cuda.cudart()
        address = buffer.data_ptr()
        status = int(runtime.cudaHostRegister(address, buffer.numel(), 0))
        if status != 0:
            raise RuntimeError(
                f"cudaHostRegister failed with status {status} for {buffer.numel()} bytes of host memory"
            )
        return lambda: runtime.cudaHostUnregister(address)


class VirtualDevice(Device):
    """A device in host memory: every storage that is allocated on it counts against its capacity."""

    def __init__(self, capacity_bytes: int | None) -> None:
        super().__init__(torch.device("cpu"), capacity_bytes)
        self.swap_in = HostStream("swap-in")
        self.swap_out = HostStream("swap-out")
        self.stash_in = HostStream("stash-in")
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._allocated_bytes = 0
        self._peak_bytes = 0
        self._watched_bytes = 0
        # Asked for memory when an allocation would fail, as CUDA's allocator asks its cache: whether it freed some.
        self.relieve: Callable[[], bool] = lambda: False
        # Storages end in whatever thread drops the last reference.
        self._lock = threading.RLock()

    def empty(self, num_bytes: int, stream: Stream | None = None) -> Tensor:
        """Allocate and count."""
        buffer = _flat(num_bytes, torch.device("cpu"))
        self.count(buffer)
        return buffer

    def scratch(self, num_bytes: int) -> Tensor:
        """Allocate and count."""
        return self.empty(num_bytes)

    def count(self, tensor: Tensor) -> None:
        """Count the storage of a tensor that was made on this device.

        Raises:
            DeviceOutOfMemoryError: if it doesn't fit.
        """
        if tensor.layout is not torch.strided:
            for part in _parts_of_sparse(tensor):
                self.count(part)
        elif tensor.device == self.torch_device:
            self._count_storage(tensor.untyped_storage())

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        owner = _owners.setdefault(key, self)
        if owner is not self:
            # An alias: the memory stays where it is, whoever looks at it.
            owner._count_storage(storage)
            return
        num_bytes = storage.nbytes()
        # An operation may have resized a storage that is counted already.
        before, end = self._live.get(key) or (0, None)
        if before == num_bytes and end is not None:
            return
        # Without the lock: what makes way may end in another thread.
        while not self.room_for(num_bytes - before) and self.relieve():
            pass
        with self._lock:
            self._live[key] = num_bytes, end or weakref.ref(storage, lambda _: self._forget(key))
            self._allocated_bytes += num_bytes - before
            if self.capacity_bytes is not None and self._allocated_bytes > self.capacity_bytes:
                raise DeviceOutOfMemoryError(self._allocated_bytes - self.capacity_bytes)
            self._peak_bytes = max(self._peak_bytes, self._allocated_bytes)
            self._watched_bytes = max(self._watched_bytes, self._allocated_bytes)

    def _forget(self, key: int) -> None:
        with self._lock:
            _owners.pop(key, None)
            self._allocated_bytes -= self._live.pop(key)[0]

    def allocated_bytes(self) -> int:
        """The bytes of all storages alive."""
        return self._allocated_bytes

    def peak_bytes(self) -> int:
        """The most bytes that were alive together."""
        return self._peak_bytes

    def watch_peak(self) -> Callable[[], int]:
        """Watch from what is allocated now."""
        self._watched_bytes = self._allocated_bytes
        return lambda: self._watched_bytes

    def record(self) -> Event:
        """The host computes in the calling thread: what it has computed has happened."""
        return Happened()

    def moment(self) -> Moment:
        """The host computes in the calling thread."""
        return HostMoment()

    lane_moment = moment

    def free(self, buffer: Tensor, uses: Sequence[Event]) -> None:
        """Nothing to do: a copy that is under way holds a reference of its own."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether its storage is counted here."""
        return tensor.layout is torch.strided and _owners.get(tensor.untyped_storage()._cdata) is self

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count whatever is allocated: here, and no longer on the device that counted before."""
        meter: _Meter | None = getattr(_meters, "active", None)
        if meter is None:
            with _Meter(self) as meter:
                _meters.active = meter
                try:
                    yield
                finally:
                    _meters.active = None
            return
        before, meter.device = meter.device, self
        try:
            yield
        finally:
            meter.device = before

    def lane(self, number: int) -> AbstractContextManager[None]:
        """Count what it allocates."""
        return self.computing()

    def hand_out(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do: there is one order of all."""

    def begin_lanes(self) -> None:
        """Nothing to do."""

    def catch_up(self) -> None:
        """Nothing to do."""

    def await_lane(self, number: int) -> None:
        """One lane computes at a time."""

    def join_lanes(self) -> None:
        """Nothing to do."""

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count nothing: host and device memory are the same here, but what is on the host takes no capacity."""
        meter: _Meter | None = getattr(_meters, "active", None)
        if meter is None:
            yield
            return
        before, meter.device = meter.device, None
        try:
            yield
        finally:
            meter.device = before

    def run_compiled(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call it out of sight of what counts, where it would not be compiled; only what it returns counts."""
        with _disable_current_modes():
            result = function(*args, **kwargs)
        self.count_results(result)
        return result

    def count_results(self, result: Any) -> None:
        """Count the tensors that an operation returned."""
        if isinstance(result, Tensor):
            self.count(result)
        elif result is not None:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.count(leaf)


class _Meter(TorchDispatchMode):
    """Counts the storages of all results on a virtual device, or on none."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self.device: VirtualDevice | None = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # There is nothing to compile in it, and to tell so takes twice as long as to count.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = run_as_without_mode(func, args, kwargs or {})
        if self.device is not None:
            self.device.count_results(result)
        return result


# What compiled glue calls is looked at by the compiler, too: a switch for this code, where a wrapper would cost each call.
for _counting in (
    _Meter.__torch_dispatch__,
    run_as_without_mode,
    VirtualDevice.count_results,
    VirtualDevice.count,
    VirtualDevice._count_storage,
    VirtualDevice._forget,
    VirtualDevice.room_for,
    VirtualDevice.allocated_bytes,
):
    skip_code(_counting.__code__)
# On which virtual device each storage is counted.
_owners: dict[int, VirtualDevice] = {}
# Nested modes would each see an operation: a thread has one meter, which counts for one device at a time.
_meters = threading.local()


def _parts_of_sparse(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that a sparse one consists of, as far as they can be had."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def _flat(num_bytes: int, device: torch.device) -> Tensor:
    # Buffers are used again: one made in inference mode could never be written outside of it.
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def free_device_bytes(device: torch.device) -> int:
    """What this process may still allocate on a GPU, less a tenth for fragmentation and libraries' work space."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(0.9 * (free + cached))


def free_host_bytes() -> int | None:
    """Host memory that can still be taken without swapping to disk; None where the system doesn't tell."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
    except OSError:
        return None
    return int(fields["MemAvailable"].split()[0]) * 1024

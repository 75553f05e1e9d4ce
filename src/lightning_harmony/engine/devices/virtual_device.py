"""A virtual device: host memory with real copies and real limits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._dynamo.eval_frame import skip_code
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.devices.device import Device, flat_buffer
from lightning_harmony.engine.devices.stream import (
    CallingThread,
    Event,
    Happened,
    HostMoment,
    HostStream,
    Moment,
    Stream,
)
from lightning_harmony.engine.structures.operations import WITHOUT_MODE, run_as_without_mode
from lightning_harmony.engine.structures.parts import have_composed, is_composed, storages_of


class DeviceOutOfMemoryError(torch.OutOfMemoryError):
    """An allocation would exceed the capacity of a virtual device.

    Attributes:
        newest: by how many bytes, the last time.
    """

    newest: ClassVar[int | None] = None

    def __init__(self, short_bytes: int) -> None:
        # Lightning's batch size finder knows by the last words that a smaller batch may help.
        super().__init__(f"virtual device out of memory: {short_bytes} bytes short (on a GPU: CUDA out of memory)")
        self.short_bytes = short_bytes
        DeviceOutOfMemoryError.newest = short_bytes


class VirtualDevice(Device):
    """A device in host memory: every storage that is allocated on it counts against its capacity."""

    def __init__(self, capacity_bytes: int | None) -> None:
        super().__init__(torch.device("cpu"), capacity_bytes)
        self.swap_in = HostStream("swap-in")
        self.swap_out = HostStream("swap-out")
        self.stash_in = HostStream("stash-in")
        self.gather = HostStream("gather")
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
        buffer = flat_buffer(num_bytes, torch.device("cpu"))
        self.count(buffer)
        return buffer

    def scratch(self, num_bytes: int) -> Tensor:
        """Allocate and count."""
        return self.empty(num_bytes)

    sums = scratch

    def side_stream(self, *, is_urgent: bool = False) -> Stream:
        """The thread that updates."""
        return CallingThread()

    def prepare_thread(self) -> None:
        """No library keeps anything."""

    def staging(self, num_bytes: int, stream: Stream) -> Tensor:
        """Not counted: small networks' capacities have no room for what is a small part of a GPU's."""
        return flat_buffer(num_bytes, torch.device("cpu"))

    def count(self, tensor: Tensor) -> None:
        """Count the storage of a tensor that was made on this device.

        Raises:
            DeviceOutOfMemoryError: if it doesn't fit.
        """
        if tensor.layout is not torch.strided or is_composed(tensor):
            for part in storages_of(tensor):
                self.count(part)
        elif tensor.device == self.torch_device:
            self._count_storage(tensor.untyped_storage())

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        owner = _owners.setdefault(key, self)
        if owner is not self:
            # An alias: the memory stays where it is.
            owner._count_storage(storage)
            return
        num_bytes = storage.nbytes()
        # An operation may have resized a storage that is counted already.
        before, end = self._live.get(key) or (0, None)
        if before == num_bytes and end is not None:
            return
        # Without the lock: what makes way may end in another thread.
        capacity = self.capacity_bytes
        while capacity is not None and self._allocated_bytes + num_bytes - before > capacity and self.relieve():
            pass
        with self._lock:
            self._live[key] = num_bytes, end or weakref.ref(storage, partial(self._forget, key))
            self._allocated_bytes += num_bytes - before
            allocated = self._allocated_bytes
            if capacity is not None and allocated > capacity:
                raise DeviceOutOfMemoryError(allocated - capacity)
            if allocated > self._watched_bytes:
                self._watched_bytes = allocated
                self._peak_bytes = max(self._peak_bytes, allocated)

    def _forget(self, key: int, ended: object) -> None:
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

    def free(self, buffer: Tensor, uses: Sequence[Event], *, is_kept: bool = False) -> None:
        """Nothing to do: a copy that is under way holds a reference of its own."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether its storage is counted here."""
        return any(_owners.get(part.untyped_storage()._cdata) is self for part in storages_of(tensor))

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

    def differentiating(self) -> AbstractContextManager[None]:
        """Count what nodes allocate. On a GPU, each runs on the stream on which it was made."""
        return self.computing()

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
        if types and have_composed(types):
            # Its own code allocates.
            return NotImplemented
        # On a GPU nothing calls this: modes of torch functions see nothing of it, such as the one of glue on several devices.
        with torch._C.DisableTorchFunction():
            result = run_as_without_mode(func, args, kwargs or {})
            device = self.device
            if device is None or result is None:
                return result
            if type(result) is Tensor and result.is_cpu and result.layout is torch.strided:
                storage = result.untyped_storage()
                # Most are aliases of what is counted here already.
                counted = device._live.get(storage._cdata)
                if counted is None or counted[0] != storage.nbytes():
                    device._count_storage(storage)
            else:
                device.count_results(result)
        return result


# What compiled glue calls is looked at by the compiler, too: a switch for this code, where a wrapper would cost each call.
for _counting in (
    _Meter.__torch_dispatch__,
    *WITHOUT_MODE,
    VirtualDevice.count_results,
    VirtualDevice.count,
    VirtualDevice._count_storage,
    VirtualDevice._forget,
    VirtualDevice.room_for,
    VirtualDevice.allocated_bytes,
    have_composed,
    is_composed,
    storages_of,
):
    skip_code(_counting.__code__)
# On which virtual device each storage is counted.
_owners: dict[int, VirtualDevice] = {}
# Nested modes would each see an operation: a thread has one meter, which counts for one device at a time.
_meters = threading.local()

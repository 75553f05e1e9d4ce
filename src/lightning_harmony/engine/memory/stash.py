"""The stash: tensors of the forward that the backward needs, kept on the host in the meantime."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from functools import partial

from torch import Tensor

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Event, current_cuda_stream
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.structures.operations import detached, version_of, viewed
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.engine.structures.strides import compact, copied, has_strides, restore
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.plan.values.task import Errand

# Below this, a round trip costs more than the memory is worth.
SMALLEST_BYTES = 16 * 1024


class Stashed(ABC):
    """A tensor that is kept for the backward."""

    @abstractmethod
    def load(self) -> Tensor:
        """The tensor on its device, as it was."""

    def read(self) -> Tensor:
        """The same for who does not change it in place."""
        return self.load()

    @abstractmethod
    def settle(self) -> None:
        """From here on, the tensor may be changed in place, or freed."""

    def share(self, tensor: Tensor) -> None:
        """Another layer takes the tensor, too: nothing to do for one that is on the device."""
        return


class Alias(Stashed):
    """A tensor that stays where it is.

    Args:
        tensor: what is kept, with its later changes: those are refused.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._keep(tensor.detach())

    @classmethod
    def of_copy(cls, tensor: Tensor) -> Alias:
        """A copy of a tensor in its place: code between layers may change the tensor itself afterwards."""
        alias = cls.__new__(cls)
        alias._keep(copied(detached(tensor)))
        return alias

    def _keep(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, version_of(tensor)

    def load(self) -> Tensor:
        """The tensor itself.

        Raises:
            UnsupportedModelError: if it was modified in place.
        """
        if version_of(self._tensor) != self._version:
            raise _modified(self._tensor)
        return self._tensor

    def settle(self) -> None:
        """Keep a copy."""
        self._keep(copied(self._tensor))


class HostCopy(Stashed):
    """A tensor in the stash, gone from the device. Its host buffer is free again when the last reference ends."""

    def __init__(self, stash: Stash, tensor: Tensor) -> None:
        self._stash = stash
        self._shared: Tensor | None = None
        self._size, self._stride, self._dtype = tensor.size(), tensor.stride(), tensor.dtype
        compacted = compact(tensor)
        self._compact_size, self._compact_stride = compacted.size(), compacted.stride()
        num_bytes = compacted.numel() * compacted.element_size()
        self._loaded: Event | None = None
        device = stash.device
        with device.on_host():
            self._buffer, free = stash.pool.take(num_bytes)
            host = self._compact_view(self._buffer)
        store, after = partial(copy_to, host, compacted), [device.record(), *free]
        self._stored = device.start_copy(Errand.STASH_OUT, "stash", num_bytes, store, after)
        stash.traffic.count_out("stash", num_bytes)
        # The device copy must live until it is copied, and must not change before.
        stash.pending.append((self._stored, tensor, tensor._version, compacted))

    def share(self, tensor: Tensor) -> None:
        """Have a copy of it on the device, if that may be, for the backwards of all of them."""
        if self._shared is None and self._stash.may_share(self, self._buffer.numel()):
            self._shared = copied(detached(tensor))

    def read(self) -> Tensor:
        """That copy, or one that comes from the host."""
        return self.load() if self._shared is None else self._shared

    def load(self) -> Tensor:
        """A copy on the device with the strides that the tensor had."""
        if self._shared is not None:
            return copied(self._shared)
        device = self._stash.device
        num_bytes = self._buffer.numel()
        buffer = device.empty(num_bytes, device.stash_in)
        load = partial(copy_to, buffer, self._buffer)
        self._loaded = device.start_copy(Errand.STASH_IN, "stash", num_bytes, load, [self._stored])
        self._stash.traffic.count_in("stash", num_bytes)
        with device.selected():
            with device.waiting():
                self._loaded.wait()
            _keep_until_computed(buffer, device)
            return restore(self._compact_view(buffer), self._size, self._stride)

    def _compact_view(self, buffer: Tensor) -> Tensor:
        return viewed(buffer, self._viewed)

    def _viewed(self, buffer: Tensor) -> Tensor:
        return buffer.view(self._dtype).as_strided(self._compact_size, self._compact_stride)

    def settle(self) -> None:
        """Wait until it is in the host buffer."""
        self._stored.synchronize()
        self._stash.retire()

    def __del__(self) -> None:
        # Where there was no room to begin with, there is nothing to give back.
        if hasattr(self, "_stored"):
            self._stash.pool.give(self._buffer, self._loaded or self._stored)


class DeviceCopy(Stashed):
    """A tensor that the host has no room for. Like one that comes from there, each that is loaded may be changed in place."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = copied(tensor)

    def load(self) -> Tensor:
        """Another copy."""
        return copied(self._tensor)

    def settle(self) -> None:
        """It is a copy already."""


class Stash:
    """Swaps tensors of one step out to the host and back in.

    Args:
        device: where the tensors are.
        pool: host buffers.
        traffic: counts the copies.

    Attributes:
        shares: whether a tensor that several layers take is swapped out once: not where one was changed meanwhile in a way
            that torch does not count.
    """

    shares = True

    def __init__(self, device: Device, pool: HostPool, traffic: Traffic) -> None:
        self.device = device
        self.pool = pool
        self.traffic = traffic
        self.pending: deque[tuple[Event, Tensor, int, Tensor]] = deque()
        self._kept: weakref.WeakKeyDictionary[DeviceCopy, int] = weakref.WeakKeyDictionary()
        self._shared: weakref.WeakKeyDictionary[HostCopy, int] = weakref.WeakKeyDictionary()

    @property
    def kept_bytes(self) -> int:
        """What stays on the device, as the host has no room for it."""
        return sum(self._kept.values())

    def put(self, tensor: Tensor) -> Stashed | None:
        """Start to swap a tensor out; None for one that is better kept where it is.

        Where the host has no room for it, a copy stays on the device: of the last layers, whose backward comes first.
        """
        # A sparse or jagged one has no strides that a copy could bring back, and a composed one no memory of its own.
        is_kept = is_small(tensor) or not has_strides(tensor) or is_composed(tensor)
        if is_kept or tensor.device != self.device.torch_device:
            return None
        num_bytes = tensor.numel() * tensor.element_size()
        if not self.pool.has_room_for_stash(num_bytes):
            kept = DeviceCopy(detached(tensor))
            self._kept[kept] = num_bytes
            return kept
        return HostCopy(self, detached(tensor))

    def may_share(self, shared: HostCopy, num_bytes: int) -> bool:
        """Whether a tensor of so many bytes may stay on the device as well, which several layers take. It is counted then."""
        is_within = sum(self._shared.values()) + num_bytes <= self.device.shared_stash_bytes
        # Plans leave room for it, but what they predict may be wrong.
        may_stay = is_within and self.device.room_for(num_bytes)
        if may_stay:
            self._shared[shared] = num_bytes
        return may_stay

    def retire(self, *, wait: bool = False) -> bool:
        """Let go of the device copies whose swap-out is done; with ``wait``, of the oldest in any case.

        Returns:
            Whether there was one to let go.

        Raises:
            UnsupportedModelError: if a tensor was modified in place before it was swapped out.
        """
        retired = False
        while self.pending and (wait or self.pending[0][0].done()):
            event, tensor, version, _ = self.pending.popleft()
            event.synchronize()
            wait, retired = False, True
            if tensor._version != version:
                raise _modified(tensor)
        return retired

    def drain(self) -> None:
        """Let go of all device copies, each once it is swapped out."""
        while self.retire(wait=True):
            pass

    def clear(self) -> None:
        """Forget what is under way after an error."""
        while self.pending:
            event, *_ = self.pending.popleft()
            # The error may be what a copy raised, which raises it whenever it is waited for.
            with suppress(Exception):
                event.synchronize()


class LaneStash:
    """The stash as one lane sees it: a tensor that several layers take is swapped out once.

    A small one stays on the device as well.
    """

    def __init__(self, stash: Stash) -> None:
        self._stash = stash
        self._known: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Stashed]]] = {}

    def put(self, tensor: Tensor) -> Stashed | None:
        """Like `Stash.put`."""
        known = self._known.get(id(tensor)) if self._stash.shares else None
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            stashed = known[2]()
            if stashed is not None:
                stashed.share(tensor)
                return stashed
        stashed = self._stash.put(tensor)
        if stashed is not None:
            self._known[id(tensor)] = weakref.ref(tensor), tensor._version, weakref.ref(stashed)
        return stashed


def is_small(tensor: Tensor) -> bool:
    """Whether a tensor takes so little that it stays on its device."""
    return tensor.numel() * tensor.element_size() < SMALLEST_BYTES


def _modified(tensor: Tensor) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a tensor of shape {tuple(tensor.shape)} that a layer had taken as input, or that the backward needs, was modified "
        "in place afterwards; make that operation out of place"
    )


def copy_to(destination: Tensor, source: Tensor) -> None:
    """Copy, and let the host go on."""
    destination.copy_(source, non_blocking=True)


def _keep_until_computed(buffer: Tensor, device: Device) -> None:
    """Tell CUDA's allocator that the compute stream uses a buffer that another stream allocated."""
    if buffer.is_cuda:
        buffer.record_stream(current_cuda_stream(device.torch_device.index))

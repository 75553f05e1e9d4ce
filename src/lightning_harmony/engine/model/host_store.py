"""The host store: all parameters in one arena."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.cores import run_anywhere
from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.touched_memory import SharedMemory
from lightning_harmony.engine.model.companions import Companions, beside_parameters
from lightning_harmony.engine.structures.memory_users import ALONE, has_other_users, num_users, with_others
from lightning_harmony.engine.structures.operations import viewed
from lightning_harmony.engine.structures.parts import is_composed, made_of, parts_of
from lightning_harmony.engine.structures.strides import is_dense

# CUDA's allocator aligns to 512 bytes and kernels are chosen by alignment: a swapped parameter keeps what it had.
ALIGNMENT = 512


Key = TypeVar("Key")


def aligned(num_bytes: int) -> int:
    """Bytes rounded up, so that what comes behind them is aligned."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def lies_in(tensor: Tensor, buffer: Tensor) -> bool:
    """Whether a tensor, or a part of it, has the memory of a buffer."""
    if is_composed(tensor):
        return any(lies_in(part, buffer) for part in parts_of(tensor))
    if tensor.layout is not torch.strided or tensor.device != buffer.device:
        return False
    # By identity: tensors without data have no address.
    return bool(tensor.untyped_storage()._cdata == buffer.untyped_storage()._cdata)


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in a flat buffer.

    Attributes:
        offset: of its first byte.
        shape: its shape.
        stride: its strides.
        dtype: its type.
        tensor: one that is composed of others; None for one that lies here itself.
        slots_of_parts: where those others lie.
        beside: where its companions lie, as far as they have memory of their own.
    """

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None = field(default=None, compare=False)
    slots_of_parts: tuple[Slot, ...] = ()
    beside: tuple[Slot, ...] = ()

    @property
    def parts(self) -> tuple[Slot, ...]:
        """Where its parts lie: its own slot, if it is not composed of others."""
        return (self,) if self.tensor is None else self.slots_of_parts

    @property
    def all(self) -> tuple[Slot, ...]:
        """Where its parts and its companions lie."""
        return (*self.parts, *self.beside)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of its elements, or of those of its parts."""
        return sum(part.shape.numel() * part.dtype.itemsize for part in self.parts)

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor in a flat uint8 buffer."""
        return views_in(buffer, {None: self})[None]

    def apart(self, memory: Any) -> Tensor:
        """The tensor in memory that others are in, too, with a storage of its own: who saves it saves no more."""
        if self.num_bytes == 0:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=self.shape.numel(), offset=self.offset)
        return flat.as_strided(self.shape, self.stride)

    def flat(self, buffer: Tensor) -> Tensor:
        """Its elements in the order in which they lie in the buffer."""
        return viewed(buffer, self._flat)

    def _flat(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.offset + self.num_bytes].view(self.dtype)


def views_in(buffer: Tensor, slots: Mapping[Key, Slot]) -> dict[Key, Tensor]:
    """The tensors of some slots in a flat uint8 buffer that was laid out for them."""
    views = iter(
        viewed(buffer, _views_of, [part for slot in slots.values() for part in slot.slots_of_parts or (slot,)])
    )
    return {
        key: next(views) if slot.tensor is None else made_of(slot.tensor, [next(views) for _ in slot.slots_of_parts])
        for key, slot in slots.items()
    }


def _views_of(buffer: Tensor, parts: Sequence[Slot]) -> list[Tensor]:
    begin, size, typed = buffer.storage_offset(), buffer.numel(), {}
    for dtype in {part.dtype for part in parts}:
        # A buffer for empty tensors alone may have a byte.
        typed[dtype] = buffer[: size // dtype.itemsize * dtype.itemsize].view(dtype)
    return [
        typed[part.dtype].as_strided(part.shape, part.stride, (begin + part.offset) // part.dtype.itemsize)
        for part in parts
    ]


def lay_out(
    tensors: Sequence[Tensor],
    dtypes: Sequence[torch.dtype] | None = None,
    beside: Mapping[Any, Sequence[Tensor]] | None = None,
) -> tuple[list[Slot], int]:
    """Slots one behind the other, and the bytes of the whole buffer. Dense strides are kept, others made contiguous.

    Args:
        tensors: what is laid out.
        dtypes: the types in which they are, where those aren't their own.
        beside: what lies behind some of them.
    """
    slots: list[Slot] = []
    offset = 0
    # Several tensors may be composed of the same one, or have one beside them.
    of_parts: dict[Tensor, Slot] = {}

    def place(tensor: Tensor, dtype: torch.dtype) -> Slot:
        nonlocal offset
        stride = tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        slot = Slot(offset, tensor.shape, stride, dtype)
        offset += aligned(slot.num_bytes)
        return slot

    for tensor, dtype in zip(tensors, dtypes or [tensor.dtype for tensor in tensors], strict=True):
        if not is_composed(tensor):
            slot, others = place(tensor, dtype), () if beside is None else beside.get(tensor, ())
            of_parts.update({other: place(other, other.dtype) for other in others if other not in of_parts})
            slots.append(replace(slot, beside=tuple(of_parts[other] for other in others)) if others else slot)
            continue
        begin, parts = offset, parts_of(tensor)
        of_parts.update({part: place(part, part.dtype) for part in parts if part not in of_parts})
        places = tuple(of_parts[part] for part in parts)
        slots.append(Slot(begin, tensor.shape, tensor.stride(), tensor.dtype, tensor, places))
    return slots, offset


class HostStore:
    """Moves parameters into one host arena and keeps the user's Parameter objects as views of it.

    Each parameter's storage covers its own bytes only, so that saving one doesn't save the arena. The arena is shared
    memory: after a data loader forks, writing to it copies no page that a device reads from.

    Args:
        parameters: in execution order, as far as it is known; each once.
        device: the device that will copy from the arena.
        progress: told after each parameter how many bytes are there.
        companions: of frozen ones, as layers have them, which move with these.
        in_files: those that stay where they are: in files, mapped into memory.

    Attributes:
        num_bytes: of the arena.
        in_files: the same.
        elsewhere: the parameters whose data lies outside of the arena for now, those in files included.
        beside: of each parameter, the companions that have memory of their own.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        device: Device,
        progress: Callable[[int], None] = lambda done: None,
        companions: Sequence[Companions] = (),
        in_files: Collection[nn.Parameter] = (),
    ) -> None:
        self.beside = beside_parameters(companions)
        self._companions = companions
        # Of the memory of each slot, by its offset: who uses it.
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.in_files = frozenset(in_files)
        self.elsewhere: set[nn.Parameter] = set(in_files)
        if device.torch_device.type == "cpu":
            own = {tensor for each in companions for tensor in each.tensors()}.union(parameters)
            with_views = {parameter for each in companions for parameter in each.with_views}
            # Elsewhere plain Lightning has moved parameters away from such tensors.
            self.elsewhere |= with_others([p for p in parameters if p not in self.in_files | with_views], own)
        parameters, others = [p for p in parameters if p not in self.in_files], list(in_files)
        slots, self.num_bytes = lay_out(parameters, beside=self.beside)
        # As if they lay behind the arena.
        behind = [replace(slot, offset=self.num_bytes + slot.offset) for slot in lay_out(others)[0]]
        self._slots = dict(zip([*parameters, *others], [*slots, *behind], strict=True))
        memory = SharedMemory(self.num_bytes)
        self._map = memory.mapping
        self.arena = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = self.arena.data_ptr()
        done = 0
        with ThreadPoolExecutor(1, initializer=run_anywhere) as pool:
            freed: Future[None] | None = None
            for parameter, slot in zip(parameters, slots, strict=True):
                if parameter in self.elsewhere:
                    continue
                parts = list(zip(self._all(parameter), slot.all, strict=True))
                before = [part.data for part, _ in parts]
                for part, place in parts:
                    memory.reach(place.offset + place.num_bytes)
                    self._adopt(part, place)
                for each in companions:
                    each.follow(parameter)
                if freed is not None:
                    # No second copy of the model comes to be.
                    freed.result()
                # The system takes longer to free memory than it takes to copy the next parameter meanwhile.
                freed = pool.submit(before.clear)
                done += slot.num_bytes
                progress(done)
        self._unregister = device.register_host(self.arena)

    def _all(self, parameter: nn.Parameter) -> list[Tensor]:
        return [*parts_of(parameter), *self.beside.get(parameter, ())]

    def _adopt(self, part: Tensor, slot: Slot) -> None:
        if slot.num_bytes == 0:
            return
        # Parameters outlive an evaluation in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            view = slot.apart(self._map).copy_(part)
            part.data = view
        self._storages[slot.offset] = weakref.ref(view.untyped_storage())

    def follow(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """See where parameters are now: code that averages or restores weights assigns to their ``data``.

        What was assigned goes into the arena, unless somebody keeps that, or what was there before, such as a backup: then
        the parameter is `elsewhere`, and tensors that share its memory are trained with it.

        Args:
            parameters: those to look at.

        Returns:
            Those that have another type or shape than they had, or other data than the companions in their memory.
        """
        misfits = []
        with_views = {parameter for each in self._companions for parameter in each.with_views}
        for parameter in parameters:
            parts, places = self._all(parameter), self._slots[parameter].all
            has_moved = parameter in with_views and not self._is_at_home(parameter, self._slots[parameter])
            if has_moved or list(map(_kind_of, parts)) != list(map(_kind_of, places)):
                misfits.append(parameter)
                continue
            if parameter in self.in_files:
                continue
            for companion, place in zip(self.beside.get(parameter, ()), self._slots[parameter].beside, strict=True):
                if not self._is_at_home(companion, place):
                    self._adopt(companion, place)
            if all(map(self._brings_home, parts_of(parameter), self._slots[parameter].parts)):
                self.elsewhere.discard(parameter)
            else:
                self.elsewhere.add(parameter)
        return misfits

    def shares_memory(self) -> bool:
        """Whether others have the memory of parameters, too, where no update has begun."""
        return any(map(has_other_users, self._slots.keys() - self.in_files))

    def _brings_home(self, part: Tensor, slot: Slot) -> bool:
        """Whether a tensor lies in its slot, into which it is brought if nobody keeps it elsewhere."""
        if self._is_at_home(part, slot):
            return True
        was_here = self._storages.get(slot.offset)
        is_free = (was_here is None or was_here() is None) and num_users(part) <= ALONE
        if is_free:
            self._adopt(part, slot)
        return is_free

    def _is_at_home(self, part: Tensor, slot: Slot) -> bool:
        is_there = part.data_ptr() == self._address + slot.offset and part.stride() == slot.stride
        return slot.num_bytes == 0 or is_there

    def slot(self, parameter: nn.Parameter) -> Slot:
        """Where a parameter lies in the arena, or would lie behind it."""
        return self._slots[parameter]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._slots

    def reopened(self, device: Device, companions: Sequence[Companions]) -> HostStore:
        """Itself, after `close`, with another device that will copy from it, and companions as other layers have them."""
        self._companions = companions
        for each in companions:
            each.restrict(self.beside)
        self._unregister = device.register_host(self.arena)
        return self

    def close(self) -> None:
        """Unregister the arena. Parameters stay views of it, ordinary host tensors."""
        self._unregister()


def _kind_of(tensor: Tensor | Slot) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape

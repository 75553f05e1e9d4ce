"""Fixed memory: where recorded work finds what changes from call to call, weights, buffers, inputs and gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.recording import RecordingError
from lightning_harmony.engine.memory.tensor_class import parameter_like
from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.model.resident_weight import make_resident
from lightning_harmony.engine.structures.operations import Unseen, viewed
from lightning_harmony.engine.structures.strides import compact, restore

# Where tensors of a layer lie in the memory of their pack, and what they are.
Signature = tuple[Any, ...]


class FixedMemory:
    """The fixed memory of one device, for all that is recorded there: one call runs at a time.

    Args:
        device: which one.
        make_room: lets what isn't needed make way for so many bytes.
    """

    def __init__(self, device: Device, make_room: Callable[[int], None]) -> None:
        self._device, self._make_room = device, make_room
        # By what it is of and its size, and whose content each has.
        self._packs: dict[tuple[int, int], tuple[Tensor, list[weakref.ref[Tensor]]]] = {}
        self._tensors: dict[tuple[Any, ...], Tensor] = {}
        self._is_gone = False

    def hold(self, residency: Residency) -> None:
        """Have the weights and buffers of a pack, as they are where it resides."""
        for number, source in enumerate(_memories(residency)):
            place, content = self._place_of(number, source)
            if content and content[0]() is source:
                continue
            with Unseen():
                place.copy_(source)
            content[:] = [weakref.ref(source)]

    def twin(self, residency: Residency) -> Residency:
        """The same pack in fixed memory."""
        weights, buffers = residency.weights, residency.staging
        place = self._place_of(0, weights)[0]
        # As `data`, each counts its own changes.
        leaves = {p: _twin(p, leaf, place) for p, leaf in residency.leaves.items()}
        companions = {tensor: _moved(there, place) for tensor, there in residency.companions.items()}
        moved = {}
        if buffers is not None:
            there = self._place_of(1, buffers.on_device)[0]
            moved = {key: _moved(buffer, there) for key, buffer in residency.buffers.items()}
        return replace(residency, weights=place, leaves=leaves, buffers=moved, shown={}, companions=companions)

    def tensors(self, role: str, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Tensors in fixed memory: a place for each number, type and layout.

        Args:
            role: what they are. Those of one role are overwritten by the next.
            tensors: what is to be there.
        """
        found: list[Tensor | None] = []
        for number, tensor in enumerate(tensors):
            if tensor is None:
                found.append(None)
                continue
            dense = compact(tensor.detach())
            key = role, number, dense.dtype, dense.size(), dense.stride()
            place = self._tensors.get(key)
            if place is None:
                flat = self._allocated(dense.numel() * dense.element_size()).view(dense.dtype)
                place = self._tensors[key] = flat.as_strided(dense.size(), dense.stride())
            with Unseen():
                place.copy_(dense)
                found.append(restore(place, tensor.size(), tensor.stride()))
        return found

    def clear(self) -> None:
        """Let it go, for good."""
        self._packs, self._tensors, self._is_gone = {}, {}, True

    def refuse_gone(self) -> None:
        """Refuse what was recorded with memory that has gone meanwhile.

        Raises:
            RecordingError: if it has.
        """
        if self._is_gone:
            raise RecordingError("its memory was needed otherwise")

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies here."""
        memories = [place for place, _ in self._packs.values()] + list(self._tensors.values())
        return any(tensor.untyped_storage()._cdata == each.untyped_storage()._cdata for each in memories)

    def _place_of(self, number: int, source: Tensor) -> tuple[Tensor, list[weakref.ref[Tensor]]]:
        key = number, source.numel()
        if key not in self._packs:
            self._packs[key] = self._allocated(source.numel()), []
        return self._packs[key]

    def _allocated(self, num_bytes: int) -> Tensor:
        device = self._device
        if device.recorded_bytes + num_bytes > device.set_aside_bytes:
            raise RecordingError("what is set aside for it is taken")
        self._make_room(num_bytes)
        device.recorded_bytes += num_bytes
        return device.scratch(max(num_bytes, 1))


def signature(layer: SwappedLayer, residency: Residency) -> Signature | None:
    """Where weights of a layer, companions and buffers lie in the memory of its pack; None where some have other memory."""
    found: list[Any] = [memory.numel() for memory in _memories(residency)]
    memories = [memory.untyped_storage()._cdata for memory in _memories(residency)]
    tensors: list[tuple[nn.Parameter | BufferKey, Tensor]] = [(p, residency.leaves[p]) for p in layer.parameters]
    tensors += [(key, residency.buffers[key]) for key in layer.buffers]
    tensors += [(p, residency.companions[each]) for p, several in layer.companions.apart.items() for each in several]
    for key, tensor in tensors:
        if tensor.layout is not torch.strided or tensor.untyped_storage()._cdata not in memories:
            return None
        needs = isinstance(key, nn.Parameter) and key.requires_grad
        found.append((tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride(), needs))
    return tuple(found)


def _twin(parameter: nn.Parameter, leaf: nn.Parameter, memory: Tensor) -> nn.Parameter:
    """A parameter in other memory, on which all is set that is set on the one there is."""
    twin = parameter_like(parameter, _moved(leaf, memory), lambda tensor: tensor)
    vars(twin).update(vars(leaf))
    return make_resident(twin)


def _memories(residency: Residency) -> list[Tensor]:
    return [residency.weights] if residency.staging is None else [residency.weights, residency.staging.on_device]


def _moved(tensor: Tensor, memory: Tensor) -> Tensor:
    """The tensor that lies where another one does, in other memory."""

    def view(flat: Tensor) -> Tensor:
        whole = flat.numel() // tensor.element_size() * tensor.element_size()
        typed = flat[:whole].view(tensor.dtype)
        return typed.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    return viewed(memory, view)

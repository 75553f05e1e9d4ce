"""Swapping: the copies that bring packs to a device and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Event
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.memory.file_reads import FileReads
from lightning_harmony.engine.memory.tensor_class import parameter_like, share_attributes
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import HostStore, Slot, lay_out, views_in
from lightning_harmony.engine.model.layer import BufferKey, buffer_of, set_host_buffer
from lightning_harmony.engine.model.pack import (
    LeavingBuffers,
    Masters,
    Residency,
    Staging,
    SwappedPack,
)
from lightning_harmony.engine.model.resident_weight import make_resident
from lightning_harmony.engine.structures.memory_users import ALONE, begins_in, num_users, plain_tensors_in
from lightning_harmony.engine.structures.operations import Unseen
from lightning_harmony.engine.structures.parts import (
    are_alike,
    data_of,
    is_composed,
    made_of,
    num_bytes_of,
    parts_of,
)
from lightning_harmony.engine.structures.strides import is_expanded
from lightning_harmony.engine.updates.disk_home import DiskHome
from lightning_harmony.engine.updates.postponed import PostponedUpdate
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.plan.values.task import Errand


class Swapper:
    """Moves packs between the host store and one device.

    Args:
        device: where packs run.
        store: where parameters live.
        pool: host buffers for gradients.
        traffic: counts the copies.
        update: of the step before; a parameter that it has not come to yet is swapped in afterwards.
        disk: where weights may live; None if they may not.
    """

    def __init__(
        self,
        device: Device,
        store: HostStore,
        pool: HostPool,
        traffic: Traffic,
        update: PostponedUpdate,
        disk: DiskHome | None = None,
    ) -> None:
        self._device = device
        self._store = store
        self._pool = pool
        self._traffic = traffic
        self._update = update
        # Of packs whose memory others had than Python code: how many.
        self._others = WeakKeyDictionary[SwappedPack, int]()
        self._file_reads = FileReads(device, DiskHome() if disk is None else disk)

    def swap_in(self, pack: SwappedPack, *, keeps_masters: bool = False) -> None:
        """Start to copy a pack's weights and buffers to the device, if they aren't there.

        Args:
            pack: the pack.
            keeps_masters: whether parameters stay there as they are on the host, too, for an update.
        """
        if pack.residency is None:
            self._update.wait_for(pack.parameters)
            # Views made in inference mode could not be written by a copy outside of it.
            with torch.inference_mode(False):
                self._start_swap_in(pack, keeps_masters=keeps_masters)

    def await_update(self, pack: SwappedPack, meanwhile: Callable[[], bool] = lambda: False) -> None:
        """Wait until a pack is updated.

        Args:
            pack: the pack.
            meanwhile: called again and again, until it says that there is nothing left to do meanwhile.
        """
        self._update.wait_for(pack.parameters, meanwhile)

    def is_current(self, pack: SwappedPack) -> bool:
        """Whether a swap-in would not have to wait for an update."""
        return not self._update.is_under_way(pack.parameters)

    def close(self) -> None:
        """End the thread that reads files."""
        self._file_reads.close()

    def finish_reading(self) -> None:
        """Wait until all that was to be copied to the device has left the host: from here on, anyone may write there."""
        self._file_reads.finish()
        self._device.swap_in.submit_brief(lambda: None).synchronize()

    def _start_swap_in(self, pack: SwappedPack, *, keeps_masters: bool) -> None:
        device, arena, layout = self._device, self._store.arena, pack.layout
        self.finish_write_back(pack)
        for layer in pack.layers:
            layer.refuse_changed_buffers()
            layer.note_host_buffers(layer.buffers)
        as_of = pack.num_buffer_writes
        weights = device.empty(layout.num_bytes)
        uncast = device.empty(layout.master_bytes if keeps_masters else layout.staging_bytes)
        slots, num_bytes = pack.buffer_layout()
        staging = self._stage(slots, num_bytes) if slots else None
        elsewhere = self._store.elsewhere.intersection(pack.parameters)
        in_files = self._store.in_files & elsewhere

        def copy() -> None:
            for run in layout.runs:
                source = arena[run.arena_offset : run.arena_offset + run.num_bytes]
                weights[run.device_offset : run.device_offset + run.num_bytes].copy_(source, non_blocking=True)
            for parameter in layout.casts:
                space = layout.masters[parameter].flat(uncast) if keeps_masters else uncast.view(parameter.dtype)
                _cast(self._store.slot(parameter).flat(arena), layout.slots[parameter].flat(weights), space)
            for parameter in elsewhere:
                copied_by = self._file_reads.copy if parameter in in_files else _copy
                copied_by(layout.slots[parameter].view(weights), parameter)
            if staging is not None:
                _copy(staging.on_device, staging.memory)

        # First: what the copy runs beside should not wait for the thread that copies.
        exchange = partial(_attribute_at, weights.device, pack)
        views = views_in(weights, layout.slots)
        leaves = {p: make_resident(parameter_like(p, view, exchange)) for p, view in views.items()}
        for parameter, leaf in leaves.items():
            share_attributes(parameter, leaf)
        companions = views_in(weights, layout.companions)
        copied = pack.buffer_bytes + layout.copied_bytes
        launch = partial(device.start_copy, Errand.SWAP_IN, "weights", copied, copy, pack=pack.index)
        ready = self._file_reads.start(launch) if in_files else launch()
        self._traffic.count_in("weights", copied)
        # As `data`, each counts its own changes.
        buffers = {}
        if staging is not None:
            buffers = {key: data_of(view) for key, view in views_in(staging.on_device, slots).items()}
        masters = None
        if keeps_masters:
            # What is elsewhere has come as it was cast there.
            there = {parameter: slot for parameter, slot in layout.masters.items() if parameter not in elsewhere}
            masters = Masters.of(uncast, there) if layout.types else Masters.of(weights, layout.slots)
        elif layout.casts:
            device.free(uncast, [ready])
        pack.residency = Residency(device, weights, ready, leaves, buffers, companions, staging, as_of, masters)

    def _stage(self, slots: Mapping[BufferKey, Slot], num_bytes: int) -> Staging:
        with self._device.on_host():
            memory, free = self._pool.take(num_bytes)
            for event in free:
                event.synchronize()
            buffers = views_in(memory, slots)
            for key, tensor in buffers.items():
                _copy(tensor, buffer_of(key), non_blocking=False)
        return Staging(memory, buffers, self._device.empty(num_bytes))

    def evict(self, pack: SwappedPack) -> None:
        """Drop a pack's weights, after starting to write back the buffers that its layers changed."""
        residency, pack.residency = pack.residency, None
        if residency is None:
            return
        uses = [self._device.record()] if residency.last_use is None else [residency.last_use]
        self._start_write_back(pack, residency, uses)
        uses += [residency.ready, *residency.beside]
        residency.leaves, residency.leaves_by_layer, residency.shown, residency.companions = {}, {}, {}, {}
        if not residency.is_handed_over:
            users = num_users(residency.weights)
            if users > ALONE and users != self._others.get(pack):
                self._others[pack] = users
                if self._copy_kept(pack, residency):
                    uses.append(self._device.record())
                    del self._others[pack]
            # An autograd function may keep weights beside what autograd saves, as that of a quantized product does.
            self._device.free(residency.weights, uses, is_kept=num_users(residency.weights) > ALONE)
        if residency.masters is not None and residency.masters.buffer is not residency.weights:
            self._device.free(residency.masters.buffer, [residency.ready])
        staging, leaving = residency.staging, pack.leaving
        if staging is not None:
            self._device.free(staging.on_device, uses if leaving is None else [*uses, leaving.event])
            if leaving is None:
                self._pool.give(staging.memory, residency.ready)

    def _copy_kept(self, pack: SwappedPack, residency: Residency) -> bool:
        """Let what code keeps in the memory of trained weights have memory of its own; whether it keeps anything."""
        weights, places = residency.weights, {p: s for p, s in pack.layout.slots.items() if p.requires_grad}
        leaves = {p: view for p, view in views_in(weights, places).items() if not is_composed(view)}
        weights_themselves = {id(weights), *map(id, leaves.values())}
        found = [
            (tensor, parameter)
            for tensor in plain_tensors_in({weights.untyped_storage()._cdata})
            if id(tensor) not in weights_themselves and not tensor.requires_grad
            for parameter, leaf in leaves.items()
            if begins_in(tensor, leaf)
        ]
        if found and not weights.untyped_storage().resizable():
            # An array would go on in memory that is freed. torch lets no storage be resized that has been one.
            raise UnsupportedModelError(
                f"code of {pack.name!r} keeps an array in the memory of a weight, which would not change with it when layers "
                "are swapped: keep a copy, as of weight.detach().clone().numpy()"
            )
        for tensor, parameter in found:
            layer = next(layer for layer in pack.layers if any(each is parameter for each in layer.parameters))
            with torch.inference_mode(tensor.is_inference()), Unseen(), self._device.computing():
                original = tensor.detach()
                tensor.data = tensor.clone()
                layer.copies.note(tensor, original, parameter, leaves[parameter], counts=False)
        return bool(found)

    def _start_write_back(self, pack: SwappedPack, residency: Residency, after: Sequence[Event]) -> None:
        """Start to copy the buffers that layers changed to the host."""
        staging = residency.staging
        if not residency.dirty_buffers:
            return
        changed = {key: residency.buffers[key] for key in pack.buffers if key in residency.dirty_buffers}
        residency.dirty_buffers.clear()
        for layer in pack.layers:
            layer.refuse_changed_buffers()
        for tensor in changed.values():
            self._traffic.count_out("weights", num_bytes_of(tensor))
        staged = {} if staging is None else staging.buffers
        # The user's own one that is expanded cannot be written to; others have become buffers since the pack came.
        replaced = {
            key: changed.pop(key)
            for key in list(changed)
            if key not in staged or not are_alike(changed[key], staged[key]) or is_expanded(buffer_of(key))
        }
        with torch.no_grad(), self._device.on_host():
            for key, tensor in replaced.items():
                home = buffer_of(key).device
                set_host_buffer(key, made_of(tensor, [part.to(home, copy=True) for part in parts_of(tensor)]))
        for layer in pack.layers:
            layer.note_written_buffers(replaced)
        if staging is None:
            return

        def copy() -> None:
            for key, tensor in changed.items():
                _copy(staging.buffers[key], tensor)

        event = self._device.swap_out.submit_brief(copy, after)
        for tensor in changed.values():
            self._device.leaving.keep(event, tensor)
        pack.leaving = LeavingBuffers(staging, list(changed), event)

    def finish_write_back(self, pack: SwappedPack) -> None:
        """Wait for buffers that are on their way to the host, and let the user's own be what they are."""
        leaving, pack.leaving = pack.leaving, None
        if leaving is None:
            return
        leaving.event.synchronize()
        for layer in pack.layers:
            layer.refuse_changed_buffers()
        with torch.no_grad(), self._device.on_host():
            for key in leaving.changed:
                buffer = buffer_of(key)
                # One that was made in inference mode may be written there only.
                with torch.inference_mode(buffer.is_inference()):
                    _copy(buffer, leaving.staging.buffers[key], non_blocking=False)
        for layer in pack.layers:
            layer.note_written_buffers(leaving.changed)
        if pack.residency is None:
            self._pool.give(leaving.staging.memory, leaving.event)

    def write_back(self, pack: SwappedPack) -> None:
        """Copy the buffers that layers changed to the user's own tensors."""
        if pack.residency is not None:
            self._start_write_back(pack, pack.residency, [self._device.record()])
        self.finish_write_back(pack)

    def read_again(self, pack: SwappedPack) -> None:
        """Copy a pack's buffers to the device once more, if the host's were written since."""
        residency = pack.residency
        assert residency is not None
        is_newest = residency.as_of == pack.num_buffer_writes
        if is_newest and not any(layer.buffers_that_others_changed() for layer in pack.layers):
            return
        residency.as_of = pack.num_buffer_writes
        for layer in pack.layers:
            layer.note_host_buffers(layer.buffers)
        for key in residency.buffers:
            host = buffer_of(key)
            (slot,), num_bytes = lay_out([host])
            # Not in place: a graph that is kept may have saved the one from before.
            residency.buffers[key] = slot.view(self._device.scratch(num_bytes))
            _copy(residency.buffers[key], host, non_blocking=False)
        self._traffic.count_in("weights", pack.buffer_bytes)


def _attribute_at(device: torch.device, pack: SwappedPack, tensor: Tensor) -> Tensor:
    """What takes the place of a tensor that is an attribute of a parameter. Companions are bound when a layer is called."""
    stays = tensor.is_meta or any(tensor in layer.companions for layer in pack.layers)
    return tensor if stays else tensor.to(device)


def _cast(source: Tensor, destination: Tensor, space: Tensor) -> None:
    """Copy a parameter and cast it on the device: a narrow copy on the host would have to be kept up to date."""
    for start in range(0, source.numel(), space.numel()):
        piece = source[start : start + space.numel()]
        staged = space[: piece.numel()]
        staged.copy_(piece, non_blocking=True)
        destination[start : start + piece.numel()].copy_(staged)


def _copy(destination: Tensor, source: Tensor, *, non_blocking: bool = True) -> None:
    # Part by part: not every class that composes tensors can be copied to.
    for part, given in zip(parts_of(destination), parts_of(source), strict=True):
        part.copy_(given.detach(), non_blocking=non_blocking)

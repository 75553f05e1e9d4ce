"""Swapping: the copies that bring packs to a device and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.utils._mode_utils import no_dispatch

from lightning_harmony.engine.devices.device import Device, flat_buffer
from lightning_harmony.engine.devices.stream import Event
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.memory.tensor_class import parameter_like
from lightning_harmony.engine.model.host_store import ALONE, HostPool, HostStore, Slot, lay_out, num_users
from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer, make_resident, set_host_buffer
from lightning_harmony.engine.model.pack import (
    Accumulator,
    GradientKey,
    LeavingBuffers,
    Masters,
    Residency,
    Staging,
    SummedGradients,
    SwappedPack,
    buffer_of,
)
from lightning_harmony.engine.structures.parts import are_alike, data_of, made_of, num_bytes_of, parts_of
from lightning_harmony.engine.updates.norms import norms_of
from lightning_harmony.engine.updates.postponed import PostponedUpdate
from lightning_harmony.plan.values.task import Errand


class Swapper:
    """Moves packs between the host store and one device.

    Args:
        device: where packs run.
        store: where parameters live.
        pool: host buffers for gradients.
        traffic: counts the copies.
        is_shared: whether several layers own a parameter.
        update: of the step before; a parameter that it has not come to yet is swapped in afterwards.
    """

    def __init__(
        self,
        device: Device,
        store: HostStore,
        pool: HostPool,
        traffic: Traffic,
        is_shared: Callable[[nn.Parameter], bool],
        update: PostponedUpdate,
    ) -> None:
        self._device = device
        self._store = store
        self._pool = pool
        self._traffic = traffic
        self._update = update
        self.is_shared = is_shared

    def swap_in(self, pack: SwappedPack, *, keeps_masters: bool = False) -> None:
        """Start to copy a pack's weights and buffers to the device, if they aren't there.

        Args:
            pack: the pack.
            keeps_masters: whether parameters that are cast on their way stay as they were, too, for an update there.
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

    def finish_reading(self) -> None:
        """Wait until all that was to be copied to the device has left the host: from here on, anyone may write there."""
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

        def copy() -> None:
            for run in layout.runs:
                source = arena[run.arena_offset : run.arena_offset + run.num_bytes]
                weights[run.device_offset : run.device_offset + run.num_bytes].copy_(source, non_blocking=True)
            for parameter in layout.casts:
                space = layout.masters[parameter].flat(uncast) if keeps_masters else uncast.view(parameter.dtype)
                _cast(self._store.slot(parameter).flat(arena), layout.slots[parameter].flat(weights), space)
            for parameter in elsewhere:
                _copy(layout.slots[parameter].view(weights), parameter)
            if staging is not None:
                _copy(staging.on_device, staging.memory)

        # First: what the copy runs beside should not wait for the thread that copies.
        leaves = {p: make_resident(parameter_like(p, slot.view(weights))) for p, slot in layout.slots.items()}
        copied = pack.buffer_bytes + layout.copied_bytes
        ready = device.start_copy(Errand.SWAP_IN, "weights", copied, copy, pack=pack.index)
        self._traffic.count_in("weights", copied)
        # As `data`, each counts its own changes.
        buffers = {} if staging is None else {key: data_of(slot.view(staging.on_device)) for key, slot in slots.items()}
        masters = None
        if not layout.casts:
            masters = Masters.of(weights, layout.slots)
        elif keeps_masters:
            masters = Masters.of(uncast, layout.masters)
        else:
            device.free(uncast, [ready])
        pack.residency = Residency(device, weights, ready, leaves, buffers, staging, as_of, masters)

    def _stage(self, slots: Mapping[BufferKey, Slot], num_bytes: int) -> Staging:
        with self._device.on_host():
            memory, free = self._pool.take(num_bytes)
            for event in free:
                event.synchronize()
            buffers = {key: slot.view(memory) for key, slot in slots.items()}
            for key, tensor in buffers.items():
                _copy(tensor, buffer_of(key), non_blocking=False)
        return Staging(memory, buffers, self._device.empty(num_bytes))

    def evict(self, pack: SwappedPack) -> None:
        """Drop a pack's weights, after starting to write back the buffers that its layers changed."""
        residency, pack.residency = pack.residency, None
        if residency is None:
            return
        uses = self._device.record_all() if residency.last_use is None else [residency.last_use]
        self._start_write_back(pack, residency, uses)
        uses.append(residency.ready)
        residency.leaves = {}
        # An autograd function may keep weights beside what autograd saves, as that of a quantized product does.
        if not residency.is_handed_over:
            self._device.free(residency.weights, uses, is_kept=num_users(residency.weights) > ALONE)
        if residency.masters is not None and residency.masters.buffer is not residency.weights:
            self._device.free(residency.masters.buffer, [residency.ready])
        staging, leaving = residency.staging, pack.leaving
        if staging is not None:
            self._device.free(staging.on_device, uses if leaving is None else [*uses, leaving.event])
            if leaving is None:
                self._pool.give(staging.memory, residency.ready)

    def _start_write_back(self, pack: SwappedPack, residency: Residency, after: Sequence[Event]) -> None:
        """Start to copy the buffers that layers changed to the host."""
        staging = residency.staging
        if staging is None or not residency.dirty_buffers:
            return
        changed = {key: residency.buffers[key] for key in pack.buffers if key in residency.dirty_buffers}
        residency.dirty_buffers.clear()
        for layer in pack.layers:
            layer.refuse_changed_buffers()
        for tensor in changed.values():
            self._traffic.count_out("weights", num_bytes_of(tensor))
        replaced = {key: changed.pop(key) for key in list(changed) if not are_alike(changed[key], staging.buffers[key])}
        with torch.no_grad(), self._device.on_host():
            for key, tensor in replaced.items():
                home = buffer_of(key).device
                set_host_buffer(key, made_of(tensor, [part.to(home, copy=True) for part in parts_of(tensor)]))
        for layer in pack.layers:
            layer.note_written_buffers(replaced)

        def copy() -> None:
            for key, tensor in changed.items():
                _copy(staging.buffers[key], tensor)

        event = self._device.swap_out.submit_brief(copy, after)
        for tensor in changed.values():
            self._device.keep_until(event, tensor)
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
                _copy(buffer_of(key), leaving.staging.buffers[key], non_blocking=False)
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
        if residency.as_of == pack.num_buffer_writes:
            return
        residency.as_of = pack.num_buffer_writes
        for key in residency.buffers:
            host = buffer_of(key)
            (slot,), num_bytes = lay_out([host])
            # Not in place: a graph that is kept may have saved the one from before.
            residency.buffers[key] = slot.view(flat_buffer(num_bytes, self._device.torch_device))
            _copy(residency.buffers[key], host, non_blocking=False)
        self._traffic.count_in("weights", pack.buffer_bytes)

    def accumulate(
        self,
        pack: SwappedPack,
        layer: SwappedLayer,
        use: int,
        gradients: Sequence[tuple[nn.Parameter, Tensor]],
        *,
        add_to_earlier: bool,
    ) -> None:
        """Add the gradients of one microbatch to the sums on the device, in the parameters' own precision.

        Args:
            pack: the pack.
            layer: the layer of the pack that the gradients are of.
            use: which call of the layer they are of.
            gradients: of each parameter that has one.
            add_to_earlier: whether sums begin with the parameters' `grad`, as accumulation over batches does.
        """
        accumulator = pack.accumulators.get(use) or self._open(pack, use, add_to_earlier=add_to_earlier)
        accumulator.adding(layer, gradients)()

    def gather(
        self,
        pack: SwappedPack,
        layer: SwappedLayer,
        use: int,
        gradients: Sequence[tuple[nn.Parameter, Tensor]],
        source: Device,
        *,
        add_to_earlier: bool,
    ) -> None:
        """Start to add the gradients of one microbatch, as `accumulate` does, from whichever device has them.

        They are added in the order of these calls, beside all that computes.

        Args:
            pack: the pack, as it is on this device.
            layer: the layer of the pack that the gradients are of.
            use: which call of the layer they are of.
            gradients: of each parameter that has one.
            source: the device that has made them, in whose computing this is called.
            add_to_earlier: whether sums begin with the parameters' `grad`, as accumulation over batches does.
        """
        device, after = self._device, [source.record()]
        arriving, num_bytes = gradients, 0
        with DisableTorchFunction(), no_dispatch(), device.scheduling():
            if source is not device:
                slots, num_bytes = lay_out([gradient for _, gradient in gradients])
                # In the pool of the stream: only what it does later finds this memory again.
                buffer = device.empty(num_bytes, device.gather)
                arriving = [(p, slot.view(buffer)) for (p, _), slot in zip(gradients, slots, strict=True)]
            accumulator = pack.accumulators.get(use)
            if accumulator is None:
                accumulator = self._open(pack, use, add_to_earlier=add_to_earlier)
                after.append(device.record())
            add = accumulator.adding(layer, arriving)

            def bring_and_add() -> None:
                if source is not device:
                    with source.sending():
                        for (_, copy), (_, gradient) in zip(arriving, gradients, strict=True):
                            _copy(copy, gradient)
                add()

            event = device.start_copy(Errand.GATHER, "gradients", num_bytes, bring_and_add, after, pack.index)
        accumulator.gathered = event
        for _, gradient in gradients:
            source.keep_until(event, gradient)
        self._traffic.transferred += num_bytes

    def finish_gathering(self) -> None:
        """Wait until all that was to be added here has been: sums may go, and so may what is added to them."""
        self._device.gather.submit_brief(lambda: None).synchronize()

    def _open(self, pack: SwappedPack, use: int, *, add_to_earlier: bool) -> Accumulator:
        """A new accumulator. It begins with what the host has: parked sums, or the `grad` of earlier batches."""
        slots, num_bytes = pack.gradient_layout()
        buffer = self._device.sums(num_bytes)
        accumulator = Accumulator(buffer, {key: slot.view(buffer) for key, slot in slots.items()})
        pack.accumulators[use] = accumulator
        parked = pack.parked.pop(use, None)
        if parked is not None:
            self._unpark(pack, accumulator, parked)
        elif use == 0 and add_to_earlier:
            earlier = {(layer, p): p.grad for layer, p in slots if p.grad is not None and not self.is_shared(p)}
            accumulator.includes_earlier = {p for _, p in earlier}
            self._load(pack, accumulator, earlier)
        return accumulator

    def _unpark(self, pack: SwappedPack, accumulator: Accumulator, parked: SummedGradients) -> None:
        """Bring sums back, in one copy. Nothing but the device waits for it."""
        accumulator.includes_earlier = parked.includes_earlier
        accumulator.touched.update(parked.sums)
        num_bytes = parked.buffer.numel()
        copy = partial(_copy, accumulator.buffer, parked.buffer)
        after = [self._device.record(), parked.event]
        loaded = self._device.start_copy(Errand.UNPARK, "gradients", num_bytes, copy, after, pack.index)
        loaded.wait()
        self._pool.give(parked.buffer, loaded)
        self._traffic.count_in("gradients", num_bytes)

    def _load(self, pack: SwappedPack, accumulator: Accumulator, earlier: dict[GradientKey, Tensor]) -> None:
        if not earlier:
            return
        sums = accumulator.sums
        num_bytes = sum(g.numel() * g.element_size() for g in earlier.values())

        def copy() -> None:
            for key, gradient in earlier.items():
                sums[key].copy_(gradient)

        after = [self._device.record()]
        loaded = self._device.start_copy(Errand.SWAP_IN, "gradients", num_bytes, copy, after, pack.index)
        # The host buffers of `earlier` may be used again from here on.
        loaded.synchronize()
        accumulator.touched.update(earlier)
        self._traffic.count_in("gradients", num_bytes)

    def add(self, pack: SwappedPack, use: int, accumulator: Accumulator, buffer: Tensor) -> None:
        """Add the sums of another device.

        Args:
            pack: the pack, which has sums of the same use, or none.
            use: which call of its layers they are of.
            accumulator: the other device's.
            buffer: its buffer, on this device.
        """
        slots, _ = pack.gradient_layout()
        arrived = {key: slots[key].view(buffer) for key in accumulator.touched}
        own = pack.accumulators.get(use)
        if own is None:
            sums = {key: slot.view(buffer) for key, slot in slots.items()}
            pack.accumulators[use] = Accumulator(buffer, sums, accumulator.touched, accumulator.includes_earlier)
            return
        for key, gradient in arrived.items():
            if key in own.touched:
                own.sums[key].add_(gradient)
            else:
                own.sums[key].copy_(gradient)
        own.touched |= accumulator.touched
        own.includes_earlier |= accumulator.includes_earlier

    def provide_buffers(self, pack: SwappedPack) -> None:
        """Make the host buffers that a pack's gradients will be copied to."""
        with self._device.on_host():
            for accumulator in pack.accumulators.values():
                self._pool.provide(accumulator.buffer.numel())

    def swap_out_gradients(
        self, pack: SwappedPack, kind: Errand = Errand.SWAP_OUT, *, with_norms: bool = False
    ) -> list[SummedGradients]:
        """Start to copy a pack's gradients to the host, and close its accumulators. Norms are computed before."""
        gradients = list(pack.parked.values())
        for use, accumulator in pack.accumulators.items():
            num_bytes = accumulator.buffer.numel()
            slots, _ = pack.gradient_layout()
            with self._device.on_host():
                host, free = self._pool.take(num_bytes)
                sums = {key: slots[key].view(host) for key in slots if key in accumulator.touched}
                if with_norms and accumulator.gathered is not None:
                    accumulator.gathered.wait()
                norms = norms_of([accumulator.sums[key] for key in sums]) if with_norms else ()
            copy = partial(_copy, host, accumulator.buffer)
            after = [self._device.record(), *free]
            if accumulator.gathered is not None:
                after.append(accumulator.gathered)
            event = self._device.start_copy(kind, "gradients", num_bytes, copy, after, pack.index)
            self._device.keep_until(event, accumulator.buffer)
            self._traffic.count_out("gradients", num_bytes)
            norm_of = dict(zip(sums, norms, strict=False))
            gradients.append(SummedGradients(use, host, event, sums, accumulator.includes_earlier, norm_of))
        pack.accumulators, pack.parked = {}, {}
        return gradients

    def may_leave_gradients(self, pack: SwappedPack) -> bool:
        """Whether the sums that a pack has here are all of its gradients, so that it can be updated with them as they are."""
        if len(pack.accumulators) != 1 or pack.parked:
            return False
        (accumulator,) = pack.accumulators.values()
        return not any(
            self.is_shared(p) or (p.grad is not None and p not in accumulator.includes_earlier)
            for _, p in accumulator.touched
        )

    def leave_gradients(self, pack: SwappedPack) -> list[SummedGradients]:
        """Close the accumulator of a pack, and leave its sums where they are, for an update there."""
        gradients: list[SummedGradients] = []
        for use, accumulator in pack.accumulators.items():
            if accumulator.gathered is not None:
                accumulator.gathered.wait()
            sums = {key: gradient for key, gradient in accumulator.sums.items() if key in accumulator.touched}
            masters = None
            if pack.residency is not None:
                pack.residency.ready.wait()
                masters = pack.residency.hand_over()
            event, earlier = self._device.record(), accumulator.includes_earlier
            gradients.append(
                SummedGradients(use, accumulator.buffer, event, sums, earlier, is_on_host=False, masters=masters)
            )
        pack.accumulators = {}
        return gradients

    def park_gradients(self, pack: SwappedPack) -> None:
        """Make room: keep the sums that are not final yet on the host."""
        pack.parked = {gradients.use: gradients for gradients in self.swap_out_gradients(pack, Errand.PARK)}

    def drop_gradients(self, pack: SwappedPack) -> None:
        """Forget the sums that a pack has, here and on the host, where a copy may still write to them."""
        for accumulator in pack.accumulators.values():
            self.free_sums(accumulator)
        for parked in pack.parked.values():
            self._device.keep_until(parked.event, parked.buffer)
        pack.accumulators, pack.parked = {}, {}

    def free_sums(self, accumulator: Accumulator) -> None:
        """Called before sums are dropped that something may still be added to, or read of."""
        gathered = [] if accumulator.gathered is None else [accumulator.gathered]
        self._device.free(accumulator.buffer, [*self._device.record_all(), *gathered])

    def unpark_gradients(self, pack: SwappedPack) -> None:
        """Bring sums back that made room before."""
        for use in list(pack.parked):
            self._open(pack, use, add_to_earlier=False)

    def scale_gradients(self, pack: SwappedPack, factor: float) -> None:
        """Multiply the sums that a pack has."""
        for accumulator in pack.accumulators.values():
            if accumulator.gathered is not None:
                accumulator.gathered.wait()
            torch._foreach_mul_([accumulator.sums[key] for key in accumulator.touched], factor)
        for parked in pack.parked.values():
            parked.event.synchronize()
            torch._foreach_mul_(list(parked.sums.values()), factor)


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

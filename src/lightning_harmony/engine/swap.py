"""Swapping: which packs reside on a device, and the copies that bring them there and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_harmony.engine.device import Device
from lightning_harmony.engine.hollow_graph import edge_of, empty
from lightning_harmony.engine.host_store import HostPool, HostStore, Slot, lay_out
from lightning_harmony.engine.layer import BufferKey, SwappedLayer, refuse_accumulation
from lightning_harmony.engine.postponed import PostponedUpdate
from lightning_harmony.engine.report import Traffic
from lightning_harmony.engine.stream import Event
from lightning_harmony.plan.task import Errand


@dataclass(frozen=True)
class Run:
    """A range of the arena that is copied at once."""

    arena_offset: int
    device_offset: int
    num_bytes: int


# A layer that is used twice sums the gradients of each use apart, and so do layers that share a parameter: the sums are
# then added in an order that no plan changes.
GradientKey = tuple[SwappedLayer, nn.Parameter]


@dataclass
class HostGradients:
    """Gradients of one use of a pack's layers on their way to the host, or there.

    Attributes:
        use: which call of its layer they belong to, counted within a microbatch.
        buffer: host buffer that holds all of them.
        event: the end of the copy.
        sums: the gradients, as views of the buffer.
        includes_earlier: the parameters whose earlier `grad` is part of the sum.
    """

    use: int
    buffer: Tensor
    event: Event
    sums: dict[GradientKey, Tensor]
    includes_earlier: set[nn.Parameter]


@dataclass(frozen=True)
class Staging:
    """Page-locked memory that a pack's buffers pass through.

    To copy them from or to the user's own tensors would stop the host until the device has come there.

    Attributes:
        memory: all of it.
        buffers: each of them, as a view of it.
        on_device: the memory that they come to.
    """

    memory: Tensor
    buffers: dict[BufferKey, Tensor]
    on_device: Tensor


@dataclass(frozen=True)
class LeavingBuffers:
    """Buffers that layers changed, on their way to the host.

    Attributes:
        staging: where they come to.
        changed: which ones.
        event: the end of the copies.
    """

    staging: Staging
    changed: list[BufferKey]
    event: Event


@dataclass
class Residency:
    """The weights and buffers of a pack on a device.

    Attributes:
        device: which one.
        weights: the buffer that holds all weights.
        ready: the end of the copies that bring them.
        leaves: each parameter, as a view of the buffer.
        buffers: the layers' buffers.
        staging: what they pass through on the host; None where there are none.
        last_use: the end of the last work that used them, if it is known. What is evicted makes way for the next pack, which
            would otherwise wait for all that was launched since.
        dirty_buffers: those that layers changed.
        as_of: how often the host's buffers had been written when these were copied.
    """

    device: Device
    weights: Tensor
    ready: Event
    leaves: dict[nn.Parameter, nn.Parameter]
    buffers: dict[BufferKey, Tensor]
    staging: Staging | None = None
    as_of: int = 0
    last_use: Event | None = None
    dirty_buffers: set[BufferKey] = field(default_factory=set)
    _edges: dict[nn.Parameter, GradientEdge] = field(default_factory=dict)

    def edges(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, GradientEdge]:
        """Where the gradients of parameters leave the graphs that are made here, even when the weights have gone."""
        for parameter in parameters:
            if parameter not in self._edges:
                self._edges[parameter] = edge_of(self.leaves[parameter])
        return {parameter: self._edges[parameter] for parameter in parameters}

    def empty_leaves(self) -> None:
        """Let no graph keep the weights."""
        for parameter in self._edges:
            empty(self.leaves[parameter])


@dataclass
class Accumulator:
    """The gradients of one use of a pack's layers on a device, summed over microbatches.

    Attributes:
        buffer: device buffer that holds all of them.
        sums: a place for each, as views of the buffer.
        touched: those that exist.
        includes_earlier: the parameters whose earlier `grad` is part of the sum.
    """

    buffer: Tensor
    sums: dict[GradientKey, Tensor]
    touched: set[GradientKey] = field(default_factory=set)
    includes_earlier: set[nn.Parameter] = field(default_factory=set)


@dataclass(frozen=True)
class Layout:
    """How a pack's weights lie on a device.

    Attributes:
        slots: where each parameter lies.
        num_bytes: of all of them.
        runs: the ranges of the arena that are copied as they are.
        casts: the parameters that are cast to a narrower type on their way.
        staging_bytes: what is needed on the device besides while they come.
        copied_bytes: what crosses from the host: more than lies there where they are cast, or where one copy takes what is
            between them along.
    """

    slots: dict[nn.Parameter, Slot]
    num_bytes: int
    runs: list[Run]
    casts: list[nn.Parameter]
    staging_bytes: int
    copied_bytes: int


class SwappedPack:
    """Consecutive layers that are swapped together.

    Attributes:
        index: number in the plan.
        layers: in execution order.
        parameters: of all its layers, each once.
        is_narrow: whether it is swapped in narrow, as far as its layers allow.
        leaving: buffers of its last stay that the host doesn't have yet.
    """

    def __init__(self, index: int, layers: Sequence[SwappedLayer], store: HostStore) -> None:
        self.index = index
        self.layers = list(layers)
        self.parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters))
        # Layers may share modules.
        self.buffers = list(dict.fromkeys(key for layer in layers for key in layer.buffers))
        self.is_narrow = False
        self._store = store
        self._layouts: dict[bool, Layout] = {}
        self.residency: Residency | None = None
        self.leaving: LeavingBuffers | None = None
        self.accumulators: dict[int, Accumulator] = {}
        self.parked: dict[int, HostGradients] = {}
        self._gradient_layouts: dict[tuple[bool, ...], tuple[dict[GradientKey, Slot], int]] = {}

    @property
    def name(self) -> str:
        """Its first and last layer."""
        first, last = self.layers[0].name, self.layers[-1].name
        return first if first == last else f"{first} … {last}"

    @property
    def layout(self) -> Layout:
        """How its weights lie on the device when it is swapped in."""
        # With a type to compute in, at all times.
        is_narrow = self.is_narrow or self.layers[0].compute_dtype is not None
        if is_narrow not in self._layouts:
            narrow = self.narrow_parameters() if is_narrow else {}
            self._layouts[is_narrow] = _layout(self.parameters, narrow, self._store)
        return self._layouts[is_narrow]

    def narrow_parameters(self) -> dict[nn.Parameter, torch.dtype]:
        """The parameters that all of its layers may have narrow, and how narrow."""
        owners: dict[nn.Parameter, list[SwappedLayer]] = {}
        for layer in self.layers:
            for parameter in layer.parameters:
                owners.setdefault(parameter, []).append(layer)
        return {p: layers[0].narrow[p] for p, layers in owners.items() if all(p in layer.narrow for layer in layers)}

    def widen(self) -> None:
        """From now on, swap all of its parameters in as they are."""
        for layer in self.layers:
            layer.narrow = {}
        self._layouts.pop(True, None)

    @property
    def swap_in_bytes(self) -> int:
        """What swapping it in takes on the device: weights, buffers, and for a moment the staging of casts."""
        return self.layout.num_bytes + self.buffer_bytes + self.layout.staging_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of its layers' buffers."""
        buffers = [owner._buffers[name] for owner, name in self.buffers]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers if buffer is not None)

    def buffer_layout(self) -> tuple[dict[BufferKey, Slot], int]:
        """A slot for each of its layers' buffers, and the bytes of the whole."""
        slots, num_bytes = lay_out([_buffer(key) for key in self.buffers])
        return dict(zip(self.buffers, slots, strict=True)), num_bytes

    def gradient_layout(self) -> tuple[dict[GradientKey, Slot], int]:
        """A slot for the gradient of each trainable parameter of each layer, and the bytes of the whole."""
        trainable = tuple(parameter.requires_grad for parameter in self.parameters)
        known = self._gradient_layouts.get(trainable)
        if known is None:
            keys = [(layer, p) for layer in self.layers for p in layer.parameters if p.requires_grad]
            slots, num_bytes = lay_out([parameter for _, parameter in keys])
            known = self._gradient_layouts[trainable] = dict(zip(keys, slots, strict=True)), num_bytes
        return known


# A parameter that is cast on its way comes in pieces of this size.
STAGING_BYTES = 64 * 1024 * 1024


def _layout(parameters: Iterable[nn.Parameter], narrow: Mapping[nn.Parameter, torch.dtype], store: HostStore) -> Layout:
    ordered = sorted(parameters, key=lambda parameter: store.slot(parameter).offset)
    placed, num_bytes = lay_out(ordered, [narrow.get(parameter, parameter.dtype) for parameter in ordered])
    runs: list[Run] = []
    for parameter, slot in zip(ordered, placed, strict=True):
        if parameter in narrow:
            continue
        offset, size = store.slot(parameter).offset, slot.num_bytes
        last = runs[-1] if runs else None
        if last is not None and offset - last.arena_offset == slot.offset - last.device_offset:
            runs[-1] = Run(last.arena_offset, last.device_offset, slot.offset + size - last.device_offset)
        else:
            runs.append(Run(offset, slot.offset, size))
    casts = [parameter for parameter in ordered if parameter in narrow]
    staging = max((min(store.slot(parameter).num_bytes, STAGING_BYTES) for parameter in casts), default=0)
    copied = sum(run.num_bytes for run in runs) + sum(store.slot(parameter).num_bytes for parameter in casts)
    return Layout(dict(zip(ordered, placed, strict=True)), num_bytes, runs, casts, staging, copied)


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

    def swap_in(self, pack: SwappedPack) -> None:
        """Start to copy a pack's weights and buffers to the device, if they aren't there."""
        if pack.residency is None:
            self._update.wait_for(pack.parameters)
            # Views made in inference mode could not be written by a copy outside of it.
            with torch.inference_mode(False):
                self._start_swap_in(pack)

    def await_update(self, pack: SwappedPack, meanwhile: Callable[[], bool]) -> None:
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

    def _start_swap_in(self, pack: SwappedPack) -> None:
        device, arena, layout = self._device, self._store.arena, pack.layout
        self.finish_write_back(pack)
        for layer in pack.layers:
            layer.refuse_changed_buffers()
            layer.note_host_buffers(layer.buffers)
        as_of = _num_writes(pack)
        weights = device.empty(layout.num_bytes)
        uncast = device.empty(layout.staging_bytes)
        slots, num_bytes = pack.buffer_layout()
        staging = self._stage(slots, num_bytes) if slots else None
        elsewhere = self._store.elsewhere.intersection(pack.parameters)

        def copy() -> None:
            for run in layout.runs:
                source = arena[run.arena_offset : run.arena_offset + run.num_bytes]
                weights[run.device_offset : run.device_offset + run.num_bytes].copy_(source, non_blocking=True)
            for parameter in layout.casts:
                _cast(self._store.slot(parameter).flat(arena), layout.slots[parameter], weights, uncast)
            for parameter in elsewhere:
                layout.slots[parameter].view(weights).copy_(parameter.detach())
            if staging is not None:
                _copy(staging.on_device, staging.memory)

        # First: what the copy runs beside should not wait for the thread that copies.
        leaves = {p: nn.Parameter(slot.view(weights), p.requires_grad) for p, slot in layout.slots.items()}
        for leaf in leaves.values():
            refuse_accumulation(leaf)
        copied = layout.copied_bytes + pack.buffer_bytes
        ready = device.start_copy(Errand.SWAP_IN, "weights", copied, copy, pack=pack.index)
        self._traffic.count_in("weights", copied)
        # As `data`, each counts its own changes.
        buffers = {} if staging is None else {key: slot.view(staging.on_device).data for key, slot in slots.items()}
        pack.residency = Residency(device, weights, ready, leaves, buffers, staging, as_of)

    def _stage(self, slots: Mapping[BufferKey, Slot], num_bytes: int) -> Staging:
        with self._device.on_host():
            memory, free = self._pool.take(num_bytes)
            for event in free:
                event.synchronize()
            buffers = {key: slot.view(memory) for key, slot in slots.items()}
            for key, tensor in buffers.items():
                tensor.copy_(_buffer(key))
        return Staging(memory, buffers, self._device.empty(num_bytes))

    def evict(self, pack: SwappedPack) -> None:
        """Drop a pack's weights, after starting to write back the buffers that its layers changed."""
        residency, pack.residency = pack.residency, None
        if residency is None:
            return
        uses = self._device.record_all() if residency.last_use is None else [residency.last_use]
        self._start_write_back(pack, residency, uses)
        uses.append(residency.ready)
        self._device.free(residency.weights, uses)
        staging, leaving = residency.staging, pack.leaving
        if staging is not None:
            self._device.free(staging.on_device, uses if leaving is None else [*uses, leaving.event])
            if leaving is None:
                self._pool.give(staging.memory, residency.ready)
        residency.empty_leaves()

    def _start_write_back(self, pack: SwappedPack, residency: Residency, after: Sequence[Event]) -> None:
        """Start to copy the buffers that layers changed to the host."""
        changed = {key: residency.buffers[key] for key in pack.buffers if key in residency.dirty_buffers}
        residency.dirty_buffers.clear()
        staging = residency.staging
        if not changed or staging is None:
            return
        for layer in pack.layers:
            layer.refuse_changed_buffers()
        for tensor in changed.values():
            self._traffic.count_out("weights", tensor.numel() * tensor.element_size())
        replaced = {key: changed.pop(key) for key in list(changed) if not _is_alike(changed[key], staging.buffers[key])}
        with torch.no_grad(), self._device.on_host():
            for key, tensor in replaced.items():
                key[0]._buffers[key[1]] = tensor.to(_buffer(key).device, copy=True)
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
                _buffer(key).copy_(leaving.staging.buffers[key])
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
        if residency.as_of == _num_writes(pack):
            return
        residency.as_of = _num_writes(pack)
        for key in residency.buffers:
            host = _buffer(key)
            (slot,), num_bytes = lay_out([host])
            # Not in place: a graph that is kept may have saved the one from before.
            residency.buffers[key] = slot.view(self._device.scratch(num_bytes)).copy_(host)
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
        sums, touched = accumulator.sums, accumulator.touched
        first = [(sums[layer, p], gradient) for p, gradient in gradients if (layer, p) not in touched]
        further = [(sums[layer, p], gradient) for p, gradient in gradients if (layer, p) in touched]
        if first:
            # Copied, not added to zeros: nothing to clear, and the sign of a zero survives.
            torch._foreach_copy_([total for total, _ in first], [gradient for _, gradient in first])
        if further:
            torch._foreach_add_([total for total, _ in further], [gradient for _, gradient in further])
        touched.update((layer, p) for p, _ in gradients)

    def _open(self, pack: SwappedPack, use: int, *, add_to_earlier: bool) -> Accumulator:
        """A new accumulator. It begins with what the host has: parked sums, or the `grad` of earlier batches."""
        slots, num_bytes = pack.gradient_layout()
        buffer = self._device.scratch(num_bytes)
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

    def _unpark(self, pack: SwappedPack, accumulator: Accumulator, parked: HostGradients) -> None:
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

    def swap_out_gradients(self, pack: SwappedPack, kind: Errand = Errand.SWAP_OUT) -> list[HostGradients]:
        """Start to copy a pack's gradients to the host, and close its accumulators."""
        gradients = list(pack.parked.values())
        for use, accumulator in pack.accumulators.items():
            num_bytes = accumulator.buffer.numel()
            slots, _ = pack.gradient_layout()
            with self._device.on_host():
                host, free = self._pool.take(num_bytes)
                sums = {key: slots[key].view(host) for key in slots if key in accumulator.touched}
            copy = partial(_copy, host, accumulator.buffer)
            after = [self._device.record(), *free]
            event = self._device.start_copy(kind, "gradients", num_bytes, copy, after, pack.index)
            self._device.keep_until(event, accumulator.buffer)
            self._traffic.count_out("gradients", num_bytes)
            gradients.append(HostGradients(use, host, event, sums, accumulator.includes_earlier))
        pack.accumulators, pack.parked = {}, {}
        return gradients

    def park_gradients(self, pack: SwappedPack) -> None:
        """Make room: keep the sums that are not final yet on the host."""
        pack.parked = {gradients.use: gradients for gradients in self.swap_out_gradients(pack, Errand.PARK)}

    def scale_gradients(self, pack: SwappedPack, factor: float) -> None:
        """Multiply the sums that a pack has."""
        for accumulator in pack.accumulators.values():
            torch._foreach_mul_([accumulator.sums[key] for key in accumulator.touched], factor)
        for parked in pack.parked.values():
            parked.event.synchronize()
            torch._foreach_mul_(list(parked.sums.values()), factor)


def _num_writes(pack: SwappedPack) -> int:
    return sum(layer.num_buffer_writes for layer in pack.layers)


def _buffer(key: BufferKey) -> Tensor:
    buffer = key[0]._buffers[key[1]]
    assert buffer is not None
    return buffer


def _cast(source: Tensor, slot: Slot, weights: Tensor, staging: Tensor) -> None:
    """Copy a parameter and cast it on the device: a narrow copy on the host would have to be kept up to date."""
    destination, space = slot.flat(weights), staging.view(source.dtype)
    for start in range(0, source.numel(), space.numel()):
        piece = source[start : start + space.numel()]
        staged = space[: piece.numel()]
        staged.copy_(piece, non_blocking=True)
        destination[start : start + piece.numel()].copy_(staged)


def _copy(destination: Tensor, source: Tensor) -> None:
    destination.copy_(source, non_blocking=True)


def _is_alike(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype

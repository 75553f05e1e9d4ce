"""Packs: the layers that are swapped together, and what there is of them on a device and on its way."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Event
from lightning_harmony.engine.model.host_store import HostStore, Slot, lay_out
from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer, buffer_of, bytes_of
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.memory_users import ALONE, num_users
from lightning_harmony.engine.structures.operations import Unseen
from lightning_harmony.engine.structures.parts import is_composed, parts_of


@dataclass(frozen=True)
class Run:
    """A range of the arena that is copied at once."""

    arena_offset: int
    device_offset: int
    num_bytes: int


# A layer that is used twice sums the gradients of each use apart, and so do layers that share a parameter: the sums are
# then added in an order that no plan changes.
GradientKey = tuple[SwappedLayer, nn.Parameter]


@dataclass(frozen=True)
class Masters:
    """Parameters on a device as they are on the host, for an update there: masters, where layers compute with casts.

    Attributes:
        buffer: holds them.
        slots: where in it each of them lies.
        versions: of those on the host, when they were copied.
    """

    buffer: Tensor
    slots: Mapping[nn.Parameter, Slot]
    versions: Mapping[nn.Parameter, int]

    @classmethod
    def of(cls, buffer: Tensor, slots: Mapping[nn.Parameter, Slot]) -> Masters:
        """Of parameters as they are now."""
        return cls(buffer, slots, {parameter: parameter._version for parameter in slots})

    def find(self, parameter: nn.Parameter) -> Tensor | None:
        """A parameter, if it is there as it is on the host. A hook of its own may write it there in any way."""
        slot = self.slots.get(parameter)
        if slot is None or parameter._backward_hooks or parameter._version != self.versions[parameter]:
            return None
        return slot.view(self.buffer)


@dataclass
class SummedGradients:
    """Gradients of one use of a pack's layers that nothing more is added to: on their way to the host, or where they were.

    Attributes:
        use: which call of its layer they belong to, counted within a microbatch.
        buffer: holds all of them, where they come to.
        event: when they are there.
        sums: the gradients, as views of the buffer.
        includes_earlier: the parameters whose earlier `grad` is part of the sum.
        norms: of the gradients, computed on their device, where somebody will ask for them.
        is_on_host: whether they come to the host.
        masters: where gradients stay, what else stays with them for the update.
    """

    use: int
    buffer: Tensor
    event: Event
    sums: dict[GradientKey, Tensor]
    includes_earlier: set[nn.Parameter]
    norms: dict[GradientKey, Tensor] = field(default_factory=dict)
    is_on_host: bool = True
    masters: Masters | None = None

    @property
    def num_bytes(self) -> int:
        """Of the gradients, and of what stays with them."""
        return self.buffer.numel() + (0 if self.masters is None else self.masters.buffer.numel())


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


class HasGraph(Protocol):
    """A call that keeps its graph, and with it the weights that it was computed with."""

    def forget(self) -> None:
        """Let the graph go."""


@dataclass
class Residency:
    """The weights and buffers of a pack on a device.

    Attributes:
        device: which one.
        weights: the buffer that holds all weights.
        ready: the end of the copies that bring them.
        leaves: each parameter, as a view of the buffer.
        buffers: the layers' buffers.
        companions: those of frozen parameters that have memory of their own.
        staging: what they pass through on the host; None where there are none.
        shown: what the code of each layer finds in the places of weights that are narrow.
        last_use: the end of the last work that used them, if it is known. What is evicted makes way for the next pack, which
            would otherwise wait for all that was launched since.
        beside: the ends of what has used them beside what computes.
        graphs: calls of the layers that need no recompute, as they keep theirs as long as the weights stay.
        dirty_buffers: those that layers changed.
        leaves_by_layer: those of each layer that was called, in the order of its parameters.
        as_of: how often the host's buffers had been written when these were copied.
        masters: the parameters as they are on the host, as far as they are there. An update takes them over.
        is_handed_over: whether an update has the weights themselves, and is the last to use them.
        checksum: of the weights before layers ran; None if they are not compared.
    """

    device: Device
    weights: Tensor
    ready: Event
    leaves: dict[nn.Parameter, nn.Parameter]
    buffers: dict[BufferKey, Tensor]
    companions: dict[Tensor, Tensor] = field(default_factory=dict)
    staging: Staging | None = None
    as_of: int = 0
    masters: Masters | None = None
    is_handed_over: bool = False
    checksum: Tensor | None = None
    shown: dict[SwappedLayer, Any] = field(default_factory=dict)
    last_use: Event | None = None
    beside: list[Event] = field(default_factory=list)
    graphs: weakref.WeakSet[HasGraph] = field(default_factory=weakref.WeakSet)
    dirty_buffers: set[BufferKey] = field(default_factory=set)
    leaves_by_layer: dict[SwappedLayer, list[nn.Parameter]] = field(default_factory=dict)

    @property
    def cuda_index(self) -> int | None:
        """Which GPU it is on; None for a device of another kind."""
        return self.device.torch_device.index

    def has_staged(self, buffer: Tensor) -> bool:
        """Whether a buffer, or a part of one, lies in the memory to which the pack's buffers came."""
        memory = None if self.staging is None else self.staging.on_device.untyped_storage()._cdata
        parts = (part for part in parts_of(buffer) if part.layout is torch.strided)
        return any(part.untyped_storage()._cdata == memory for part in parts)

    def parameter_at(self, tensor: Tensor) -> nn.Parameter | None:
        """The parameter in whose memory a strided tensor begins; None if it does in none's, or in one composed of others."""
        within = self._ranges.get(tensor.untyped_storage()._cdata)
        if within is None:
            return None
        begin = tensor.storage_offset() * tensor.element_size()
        number = bisect_right(within, begin, key=_begin) - 1
        _, end, parameter = within[number]
        return parameter if number >= 0 and begin < end else None

    @cached_property
    def _ranges(self) -> dict[int, list[tuple[int, int, nn.Parameter]]]:
        """Of each memory, by its identity, the bytes that parameters have of it, in their order."""
        ranges: defaultdict[int, list[tuple[int, int, nn.Parameter]]] = defaultdict(list)
        for parameter, leaf in self.leaves.items():
            if not is_composed(leaf):
                begin = int(leaf.storage_offset()) * leaf.element_size()
                ranges[leaf.untyped_storage()._cdata].append((begin, begin + max(int(leaf.nbytes), 1), parameter))
        return {memory: sorted(within, key=_begin) for memory, within in ranges.items()}

    def is_as_it_came(self) -> bool:
        """Whether weights that were written to are what they were, as by `weight.set_(weight)`, as far as that is known."""
        if self.checksum is None:
            return False
        with torch.inference_mode(False), Unseen(), self.device.on_host():
            return torch.equal(checksum(self.weights), self.checksum)

    def hand_over(self) -> Masters | None:
        """The parameters as they are on the host, for an update that lets them go; None if they are not there, or kept."""
        masters, self.masters = self.masters, None
        if masters is not None and masters.buffer is self.weights:
            own = len(self.leaves) + len(self.companions)
            self.is_handed_over = num_users(self.weights) <= ALONE + own
            return masters if self.is_handed_over else None
        return masters


_begin: Callable[[tuple[int, int, nn.Parameter]], int] = itemgetter(0)


@dataclass
class Accumulator:
    """The gradients of one use of a pack's layers on a device, summed over microbatches.

    Attributes:
        buffer: device buffer that holds all of them.
        sums: a place for each, as views of the buffer.
        touched: those that exist.
        includes_earlier: the parameters whose earlier `grad` is part of the sum.
        gathered: the end of the last addition that was made beside what computes; None if there was none.
    """

    buffer: Tensor
    sums: dict[GradientKey, Tensor]
    touched: set[GradientKey] = field(default_factory=set)
    includes_earlier: set[nn.Parameter] = field(default_factory=set)
    gathered: Event | None = None

    def adding(self, gradients: Mapping[GradientKey, Tensor]) -> Callable[[], None]:
        """Note that gradients are added. What adds them."""
        first: tuple[list[Tensor], list[Tensor]] = [], []
        further: tuple[list[Tensor], list[Tensor]] = [], []
        for key, gradient in gradients.items():
            totals, added = further if key in self.touched else first
            totals.append(self.sums[key])
            added.append(gradient)
        self.touched.update(gradients)

        def add() -> None:
            if first[0]:
                # Copied, not added to zeros: nothing to clear, and the sign of a zero survives.
                torch._foreach_copy_(*first)
            if further[0]:
                torch._foreach_add_(*further)

        return add


@dataclass(frozen=True)
class Layout:
    """How a pack's weights lie on a device.

    Attributes:
        slots: where each parameter lies.
        companions: where the companions of frozen parameters lie that have memory of their own.
        num_bytes: of all of them.
        runs: the ranges of the arena that are copied as they are.
        casts: the parameters that are cast to a narrower type on their way.
        types: the types to which they are.
        staging_bytes: what is needed on the device besides while they come.
        masters: where each parameter that is cast lies before, if it stays as it was.
        master_bytes: of all of these.
        copied_bytes: what crosses from the host: more than lies there where they are cast, or where one copy takes what is
            between them along.
    """

    slots: dict[nn.Parameter, Slot]
    companions: dict[Tensor, Slot]
    num_bytes: int
    runs: list[Run]
    casts: list[nn.Parameter]
    types: frozenset[torch.dtype]
    staging_bytes: int
    masters: dict[nn.Parameter, Slot]
    master_bytes: int
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
        self.is_narrow = False
        self._store = store
        self._layouts: dict[bool, Layout] = {}
        self.residency: Residency | None = None
        self.leaving: LeavingBuffers | None = None
        self.accumulators: dict[int, Accumulator] = {}
        self.parked: dict[int, SummedGradients] = {}
        self._gradient_layouts: dict[tuple[bool, ...], tuple[dict[GradientKey, Slot], int]] = {}
        self._layout_of_sums: tuple[dict[GradientKey, Slot], int] = {}, 0

    @property
    def name(self) -> str:
        """Its first and last layer."""
        first, last = self.layers[0].name, self.layers[-1].name
        return first if first == last else f"{first} … {last}"

    @property
    def buffers(self) -> list[BufferKey]:
        """Those of its layers, which may share modules."""
        return list(dict.fromkeys(key for layer in self.layers for key in layer.buffers))

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

    def lay_out_anew(self) -> None:
        """Its layers have shown since which of their parameters may be narrow. It is not on a device."""
        self._layouts.pop(True, None)

    def widen(self, parameters: Collection[nn.Parameter] | None = None) -> None:
        """From now on, swap parameters in as they are: some, or all."""
        for layer in self.layers:
            kept = {} if parameters is None else {p: d for p, d in layer.narrow.items() if p not in parameters}
            layer.narrow = kept
        self._layouts.pop(True, None)

    def swap_in_bytes(self, *, keeps_masters: bool) -> int:
        """What swapping it in takes on the device: weights, buffers, and what is cast, for a moment or to stay."""
        uncast = self.layout.master_bytes if keeps_masters else self.layout.staging_bytes
        return self.layout.num_bytes + self.buffer_bytes + uncast

    @property
    def has_changed_buffers(self) -> bool:
        """Whether its layers changed buffers on the device that the host doesn't have yet."""
        return self.leaving is not None or (self.residency is not None and bool(self.residency.dirty_buffers))

    @property
    def num_buffer_writes(self) -> int:
        """How often the host's buffers were written by what layers changed on a device."""
        return sum(layer.buffer_writes[key] for layer in self.layers for key in layer.buffers)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of its layers' buffers."""
        return bytes_of(self.buffers)

    def buffer_layout(self) -> tuple[dict[BufferKey, Slot], int]:
        """A slot for each of its layers' buffers, and the bytes of the whole."""
        buffers = self.buffers
        slots, num_bytes = lay_out([buffer_of(key) for key in buffers])
        return dict(zip(buffers, slots, strict=True)), num_bytes

    def gradient_layout(self) -> tuple[dict[GradientKey, Slot], int]:
        """A slot for the gradient of each trainable parameter of each layer, and the bytes of the whole.

        While it has sums, it is theirs: a step may say for a while that parameters need no gradients.
        """
        if self.accumulators or self.parked:
            return self._layout_of_sums
        trainable = tuple([parameter.requires_grad for parameter in self.parameters])
        known = self._gradient_layouts.get(trainable)
        if known is None:
            keys = [(layer, p) for layer in self.layers for p in layer.parameters if p.requires_grad]
            slots, num_bytes = lay_out([parameter for _, parameter in keys])
            known = self._gradient_layouts[trainable] = dict(zip(keys, slots, strict=True)), num_bytes
        self._layout_of_sums = known
        return known


# A parameter that is cast on its way comes in pieces of this size.
STAGING_BYTES = 64 * 1024 * 1024


def _layout(parameters: Iterable[nn.Parameter], narrow: Mapping[nn.Parameter, torch.dtype], store: HostStore) -> Layout:
    ordered = sorted(parameters, key=lambda parameter: store.slot(parameter).offset)
    dtypes = [narrow.get(parameter, parameter.dtype) for parameter in ordered]
    placed, num_bytes = lay_out(ordered, dtypes, store.beside)
    slots = dict(zip(ordered, placed, strict=True))
    runs: list[Run] = []
    # Several weights may be composed of the same tensor.
    as_they_are = dict.fromkeys(
        pair
        for parameter, slot in slots.items()
        if parameter not in narrow and parameter not in store.in_files
        for pair in zip(store.slot(parameter).all, slot.all, strict=True)
    )
    for source, slot in as_they_are:
        offset, size = source.offset, slot.num_bytes
        last = runs[-1] if runs else None
        if last is not None and offset - last.arena_offset == slot.offset - last.device_offset:
            runs[-1] = Run(last.arena_offset, last.device_offset, slot.offset + size - last.device_offset)
        else:
            runs.append(Run(offset, slot.offset, size))
    casts = [parameter for parameter in ordered if parameter in narrow and parameter not in store.in_files]
    staging = max((min(store.slot(parameter).num_bytes, STAGING_BYTES) for parameter in casts), default=0)
    copied = sum(run.num_bytes for run in runs) + sum(store.slot(parameter).num_bytes for parameter in casts)
    copied += sum(slot.num_bytes for parameter, slot in slots.items() if parameter in store.in_files)
    masters, master_bytes = lay_out(casts)
    beside = ((store.beside.get(parameter, ()), slot.beside) for parameter, slot in slots.items())
    companions = {tensor: place for tensors, places in beside for tensor, place in zip(tensors, places, strict=True)}
    return Layout(
        slots,
        companions,
        num_bytes,
        runs,
        casts,
        frozenset(narrow.values()),
        staging,
        dict(zip(casts, masters, strict=True)),
        master_bytes,
        copied,
    )

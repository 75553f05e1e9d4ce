"""An optimizer's step as a whole, on a device: what the step works with is there for as long as its code runs.

For optimizers that cannot step some parameters by themselves: they look at all of them together, or nobody knows whether they
do. Every tensor stays the object that it is, so that code which has it finds it where the step does. Tensors that share memory
share it there, too.
"""

from __future__ import annotations

import dis
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.model.host_store import aligned
from lightning_harmony.engine.nodes.division import parameters_of
from lightning_harmony.engine.structures.nested import open_node, reachable
from lightning_harmony.engine.structures.packages import LIGHTNING
from lightning_harmony.engine.structures.parts import are_alike, is_composed
from lightning_harmony.engine.structures.strides import spanned_bytes
from lightning_harmony.engine.updates.device_step import ASSUMED_STATE_COPIES, copy_all, is_on_device
from lightning_harmony.errors import CapacityError

# Bytes for each byte of a parameter, of what a step makes meanwhile.
_PASSING_COPIES = 1
# What an optimizer may hold, and is not looked into.
_CLOSED = (Tensor, str, bytes, type, ModuleType, FunctionType, MethodType, nn.Module, *weakref.ProxyTypes)


@dataclass
class _Region:
    """Memory of the host that comes to the device: of one storage, as far as tensors lie in it.

    Attributes:
        storage: all bytes of it.
        start: where it begins in that.
        stop: where it ends.
        offset: where it begins in the buffer on the device.
    """

    storage: Tensor
    start: int
    stop: int
    offset: int = 0

    @property
    def host(self) -> Tensor:
        """Its bytes on the host."""
        return self.storage[self.start : self.stop]


class _Come(NamedTuple):
    """A tensor that has come to the device, as it is on the host, and there."""

    tensor: Tensor
    home: Tensor
    there: Tensor


class WholeStep:
    """Steps optimizers as they are, with all that they work with on a device meanwhile.

    Args:
        device: which one.
        is_swapped: whether the host is the home of a parameter because layers are swapped. Any other stays where it is.
        on_host: gives memory of the host for tensors like some, which the device copies from and to at full speed.
        traffic: counts what comes and goes.

    Attributes:
        why_on_host: why an optimizer has stepped there; None if none has.
    """

    def __init__(
        self,
        device: Device,
        is_swapped: Callable[[nn.Parameter], bool],
        on_host: Callable[[Sequence[Tensor]], list[Tensor]],
        traffic: Traffic,
    ) -> None:
        self.why_on_host: str | None = None
        self._device, self._is_swapped = device, is_swapped
        self._on_host, self._traffic = on_host, traffic
        # Of what optimizers hold, whether a step has left it on the device.
        self._known: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        self._buffer: Tensor | None = None
        self._regions: list[_Region] = []
        self._come: list[_Come] = []
        # What was on the device before.
        self._stays: frozenset[int] = frozenset()

    def make(self, optimizer: Optimizer, step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Have an optimizer step on the device, if that has room for all of it at once; else on the host.

        Args:
            optimizer: which one. Nothing of it is under way.
            step: its step.
            closure: of the step. Meanwhile everything is on the host.

        Raises:
            CapacityError: if there is no room behind a closure, where there was some before.
        """
        if closure is None:
            if not self._begin(optimizer):
                return step()
        elif not (waits := _asks_first(step)) and not self._begin(optimizer):
            return step(closure)

        def apart() -> Any:
            assert closure is not None
            self._end(optimizer)
            result = closure()
            if not self._begin(optimizer) and not waits:
                raise CapacityError(
                    f"{type(optimizer).__name__} steps on the device as a whole, which has less room behind the closure of a "
                    'step than before: let it step on the host, with HarmonyStrategy(update_on="host")'
                )
            return result

        try:
            return step() if closure is None else step(apart)
        finally:
            self._end(optimizer)

    # ---- on the way there ----------------------------------------------------------------------------------------------

    def _begin(self, optimizer: Optimizer) -> bool:
        """Bring all of it to the device, if it can come, and there is room; whether it has come."""
        parameters = [each for each in parameters_of(optimizer) if self._is_swapped(each)]
        gradients = [each.grad for each in parameters if each.grad is not None]
        held = list(_held_by(optimizer))
        state = self._state_to_come(optimizer, held, frozenset(parameters))
        wanted = {id(each): each for each in [*parameters, *gradients, *state]}
        tensors = [each for each in wanted.values() if each.numel() and _is_on_host(each)]
        if not tensors:
            return False
        regions = _regions_of(tensors) if all(map(_is_plain, tensors)) else None
        if regions is None or _overlap(regions.items()):
            self.why_on_host = "some of what it works with is sparse, or composed of several tensors"
            return False
        copies = _PASSING_COPIES + (0 if optimizer.state else ASSUMED_STATE_COPIES)
        # Gradients that a closure makes come, too.
        to_come = sum(each.nbytes for each in parameters if each.requires_grad and each.grad is None)
        if not self._take_memory(regions.values(), to_come + copies * sum(each.nbytes for each in parameters)):
            return False
        assert self._buffer is not None
        self._stays = frozenset(id(each) for each in held if not _is_on_host(each))
        self._regions = list(regions.values())
        copy_all([(self._there(region), region.host) for region in self._regions])
        for tensor in tensors:
            region = regions[_address(tensor)]
            come = _Come(tensor, tensor.detach(), _view(self._buffer, region.offset - region.start, tensor))
            self._come.append(come)
            tensor.data = come.there
        self._traffic.count_in("optimizer", sum(region.stop - region.start for region in self._regions))
        return True

    def _state_to_come(
        self, optimizer: Optimizer, held: Iterable[Tensor], parameters: frozenset[Tensor]
    ) -> Iterator[Tensor]:
        """What of an optimizer plain training has on the device, beside parameters and gradients.

        That is what steps have left there. What no step has seen yet is where torch loads it to.
        """
        loaded: set[int] = set()
        groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, state in list(optimizer.state.items()):
            if isinstance(parameter, Tensor) and parameter in parameters:
                group = groups[parameter]
                loaded.update(id(value) for name, value in _named(state) if is_on_device(name, value, group))
        for tensor in held:
            known, was_there = self._known.get(id(tensor), (None, False))
            is_known = known is not None and known() is tensor
            if tensor not in parameters and (was_there if is_known else id(tensor) in loaded):
                yield tensor

    def _take_memory(self, regions: Iterable[_Region], beside: int) -> bool:
        num_bytes = 0
        for region in regions:
            region.offset = num_bytes
            num_bytes += aligned(region.stop - region.start)
        if self._device.room_for(num_bytes + beside):
            with suppress(torch.OutOfMemoryError):
                self._buffer = self._device.scratch(num_bytes)
        if self._buffer is None:
            self.why_on_host = "the GPU has no room for its parameters, gradients and state together"
        return self._buffer is not None

    def _there(self, region: _Region) -> Tensor:
        assert self._buffer is not None
        return self._buffer[region.offset : region.offset + region.stop - region.start]

    # ---- on the way back -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _end(self, optimizer: Optimizer) -> None:
        """Bring back what has come, and what the step has made."""
        if self._buffer is None:
            return
        held = [*_held_by(optimizer), *(each.grad for each in parameters_of(optimizer) if each.grad is not None)]
        # Code may have given a tensor other memory, which then is as what it has made.
        homes = {
            id(tensor): (tensor, home)
            for tensor, home, there in self._come
            if tensor.data_ptr() == there.data_ptr() and are_alike(tensor, there)
        }
        copy_all([(region.host, self._there(region)) for region in self._regions])
        made = {id(each): each for each in [*held, *(come.tensor for come in self._come)]}
        left = [each for key, each in made.items() if key not in homes and key not in self._stays]
        homes.update((id(each), (each, self._alias(each))) for each in left if _address(each) == _address(self._buffer))
        homes.update(self._take_home([each for each in left if id(each) not in homes and not _is_on_host(each)]))
        self._device.record().synchronize()
        for tensor, home in homes.values():
            tensor.data = home
        increment_version([each for each in parameters_of(optimizer) if id(each) in homes])
        self._known = {key: value for key, value in self._known.items() if value[0]() is not None}
        self._known.update((id(each), (weakref.ref(each), id(each) in homes)) for each in held)
        self._traffic.count_out("optimizer", sum(region.stop - region.start for region in self._regions))
        self._buffer, self._regions, self._come = None, [], []

    def _alias(self, tensor: Tensor) -> Tensor:
        """The host's memory of a tensor that lies in what has come."""
        begin = tensor.storage_offset() * tensor.element_size()
        region = next(each for each in reversed(self._regions) if each.offset <= begin)
        return _view(region.storage, region.start - region.offset, tensor)

    def _take_home(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Begin to bring new tensors to the host: each, by its identity, with its memory there."""
        tensors = [each for each in tensors if each.numel() and _is_plain(each)]
        storages = {_address(each): _bytes_of(each) for each in tensors}
        homes = dict(zip(storages, self._on_host(list(storages.values())), strict=True))
        copy_all([(home, storages[address]) for address, home in homes.items()])
        self._traffic.count_out("optimizer", sum(home.nbytes for home in homes.values()))
        return ((id(each), (each, _view(homes[_address(each)], 0, each))) for each in tensors)


def _asks_first(step: Any) -> bool:
    """Whether the code of a step has its closure run before it looks at anything of the optimizer's."""
    code = getattr(inspect.unwrap(step), "__code__", None)
    return code is not None and _closure_comes_first(code)


@cache
def _closure_comes_first(code: CodeType) -> bool:
    if code.co_argcount < 2:
        return False
    own, closure = code.co_varnames[:2]
    names = [each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD_FAST")]
    loaded = [name for each in names for name in (each if isinstance(each, tuple) else (each,))]
    if closure not in loaded or {own, closure} & {*code.co_cellvars}:
        return False
    return own not in loaded[: len(loaded) - loaded[::-1].index(closure)]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_composed(tensor)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(flat: Tensor, shift: int, like: Tensor) -> Tensor:
    """A tensor's place in other bytes, which are shifted by some against those of its storage."""
    begin = shift + like.storage_offset() * like.element_size() + flat.storage_offset()
    place = torch.empty(0, dtype=like.dtype, device=flat.device)
    return place.set_(flat.untyped_storage(), begin // like.element_size(), like.shape, like.stride())


def _regions_of(tensors: Iterable[Tensor]) -> dict[int, _Region]:
    """The memory of tensors, by the addresses of their storages."""
    regions: dict[int, _Region] = {}
    for tensor in tensors:
        start = int(tensor.storage_offset()) * tensor.element_size()
        stop = start + spanned_bytes(tensor)
        region = regions.setdefault(_address(tensor), _Region(_bytes_of(tensor), start, stop))
        region.start, region.stop = min(region.start, start), max(region.stop, stop)
    return regions


def _overlap(regions: Iterable[tuple[int, _Region]]) -> bool:
    """Whether some memory is in several storages."""
    spans = sorted((address + region.start, address + region.stop) for address, region in regions)
    return any(stop > start for (_, stop), (start, _) in pairwise(spans))


def _named(value: Any, name: str | None = None) -> Iterator[tuple[str | None, Tensor]]:
    """The tensors of a state, by the names that torch goes by when it loads them: what is in a list has none."""
    node = open_node(value)
    if isinstance(value, Tensor):
        yield name, value
    elif node is not None:
        for key, child in zip(node.keys, node.children, strict=True):
            yield from _named(child, key if isinstance(value, Mapping) else None)


def _held_by(optimizer: Optimizer) -> Iterator[Tensor]:
    """The tensors that an optimizer holds: its parameters, its state, and what is in objects of its own."""
    return (each for each in reachable([vars(optimizer)], _parts_of) if issubclass(type(each), Tensor))


def _parts_of(value: Any) -> Iterable[Any]:
    if issubclass(type(value), _CLOSED) or type(value).__module__.partition(".")[0] in LIGHTNING:
        return ()
    node = open_node(value)
    return getattr(value, "__dict__", {}).values() if node is None else node.children

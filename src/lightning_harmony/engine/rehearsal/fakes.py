"""Fakes: what stands in for a device, for the host store and for weights where nothing is to be taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_harmony.engine.devices.stream import CallingThread, Event, Happened
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.layers.narrow import CastWatch, may_be_narrow
from lightning_harmony.engine.model.companions import Companions, beside_parameters
from lightning_harmony.engine.model.host_store import HostStore, Slot, lay_out
from lightning_harmony.engine.model.layer import SwappedLayer, buffers_of
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.structures.parts import is_composed, made_of, parts_of


def fake(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A fake tensor on the CPU of the shape of another; within a fake mode."""
    if is_composed(tensor):
        return made_of(tensor, map(fake, parts_of(tensor)))
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="cpu")
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")


class NoCopies(CallingThread):
    """A stream that does nothing: fake tensors hold nothing to copy."""

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Happened:
        """Leave it."""
        return Happened()

    submit_brief = submit


class FakeDevice(VirtualDevice):
    """Counts the storages of fake tensors."""

    def __init__(self) -> None:
        super().__init__(None)
        self.swap_in = self.swap_out = self.stash_in = NoCopies()
        self._is_counting = True

    @contextmanager
    def computing(self) -> Iterator[None]:
        """All operations are seen anyway."""
        yield

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count nothing."""
        before, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = before

    def run_compiled(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """In sight of what counts it runs uncompiled: fake tensors have nothing to compile for."""
        return function(*args, **kwargs)

    def count_results(self, result: Any) -> None:
        """Count the tensors that an operation returned."""
        if self._is_counting:
            super().count_results(result)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is allocated within the context does not count for the peak that is watched."""
        watched = self._watched_bytes
        yield
        self._watched_bytes = watched


class FakeStore(HostStore):
    """Where parameters would lie in the arena."""

    def __init__(self, parameters: Sequence[nn.Parameter], companions: Sequence[Companions]) -> None:
        self.beside, self.in_files = beside_parameters(companions), frozenset()
        slots, self.num_bytes = lay_out(parameters, beside=self.beside)
        self._slots: dict[nn.Parameter, Slot] = dict(zip(parameters, slots, strict=True))


class FakeWatch(CastWatch):
    """Watches fake weights, which have no addresses, and lets nobody try them."""

    def __init__(self, residency: Residency, dtype: torch.dtype) -> None:
        TorchDispatchMode.__init__(self)
        self.dtype = dtype
        self._owners = {
            leaf.untyped_storage()._cdata: parameter
            for parameter, leaf in residency.leaves.items()
            if may_be_narrow(leaf, dtype)
        }
        self._num_casts = Counter()
        self._used = set()

    def narrow(self) -> set[nn.Parameter]:
        """None to be tried: on fake tensors, nothing could come of it."""
        return set()

    def found(self) -> set[nn.Parameter]:
        """The parameters that would be tried."""
        return super().narrow()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Fake tensors are even asked for their device in this way.
        if func is torch.ops.prim.device.default:
            return func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _parameter(self, tensor: Tensor) -> nn.Parameter | None:
        if tensor.layout is not torch.strided:
            return None
        return self._owners.get(tensor.untyped_storage()._cdata)


@contextmanager
def faked_companions(layers: Sequence[SwappedLayer]) -> Iterator[None]:
    """Fakes take the place of what layers keep of their weights."""
    companions = [layer.companions for layer in layers]
    before = [each.exchange({id(tensor): fake(tensor) for tensor in each.tensors()}) for each in companions]
    try:
        yield
    finally:
        for each, others in zip(companions, before, strict=True):
            each.exchange(others)


@contextmanager
def faked_others(model: nn.Module, layers: Sequence[SwappedLayer], count: Callable[[Tensor], None]) -> Iterator[None]:
    """Fakes take the place of the tensors that no layer owns: buffers, and what modules refer to by an attribute.

    Args:
        model: whose they are.
        layers: its layers.
        count: told of each.
    """
    owned = {key for layer in layers for key in layer.buffers}
    places: list[tuple[Any, str, Tensor]] = [
        (owner._buffers, name, tensor)
        for owner, name in buffers_of(model)
        if (owner, name) not in owned and (tensor := owner._buffers[name]) is not None
    ]
    for module in model.modules():
        places += [
            (vars(module), name, value)
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            if not any(value in layer.companions for layer in layers)
        ]
    for container, name, tensor in places:
        container[name] = fake(tensor)
        count(container[name])
    try:
        yield
    finally:
        for container, name, tensor in places:
            container[name] = tensor

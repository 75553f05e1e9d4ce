"""Transfers: copies from device to device, and the mode that makes several devices one to the user's code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_harmony.engine.device import Device
from lightning_harmony.engine.glue import StandIn
from lightning_harmony.engine.report import Traffic
from lightning_harmony.engine.shared import SharedTensors, storage_of
from lightning_harmony.engine.strides import compact, restore
from lightning_harmony.engine.tree import tensors_of
from lightning_harmony.plan.task import Task


class Transfers:
    """Knows where tensors are, and copies them from device to device.

    Attributes:
        shared: what lanes use together.

    Args:
        devices: all of them, the root first: where what belongs to none is taken to be.
        traffic: counts the copies.
        admit: called with the number of a device and the bytes that are about to arrive there.
        timing: called with where a copy comes from, where it goes and its bytes: the context of the copy itself.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        traffic: Traffic,
        admit: Callable[[int, int], None],
        timing: Callable[[Device, Device, int], AbstractContextManager[None]],
    ) -> None:
        self.devices = devices
        self.shared = SharedTensors(devices)
        self._traffic = traffic
        self._admit = admit
        self._timing = timing

    def home(self, tensor: Tensor) -> int | None:
        """The number of the device where a tensor is; None for one on a GPU machine's host."""
        if len(self.devices) > 1:
            for number, device in enumerate(self.devices):
                if device.owns(tensor):
                    return number
        return 0 if tensor.device.type == self.devices[0].torch_device.type else None

    def copy(self, tensor: Tensor, to: int, task: Task | None = None) -> Tensor:
        """A copy of a tensor on a device, without its graph; the tensor itself if it is there.

        Args:
            tensor: the tensor.
            to: the number of the device.
            task: what the copy is; None for one that the running lane needs.
        """
        home = self.home(tensor)
        return tensor if home is None or home == to else self.copy_from(home, tensor, to, task)

    def copy_from(self, home: int, tensor: Tensor, to: int, task: Task | None = None) -> Tensor:
        """A copy on another device of a tensor that is on one."""
        came_from, target = self.devices[home], self.devices[to]
        # Not through the mode below: its choice of a device is not the one that is asked for here.
        with torch._C.DisableTorchFunction(), target.selected(), torch.no_grad():
            source = compact(tensor.detach())
            num_bytes = source.numel() * source.element_size()
            self._admit(to, num_bytes)
            copied = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device=target.torch_device)
            with self._timing(came_from, target, num_bytes), target.receiving(came_from, num_bytes, task):
                copied.copy_(source, non_blocking=True)
            self._traffic.transferred += num_bytes
            return restore(copied, tensor.size(), tensor.stride())


class LaneTransfers:
    """Transfers of one lane: what several layers or operations on a device take is copied there once.

    Args:
        transfers: makes the copies.
        lane: the lane's number.
    """

    def __init__(self, transfers: Transfers, lane: int) -> None:
        self._transfers = transfers
        self._lane = lane
        self._copies: dict[tuple[int, int], tuple[weakref.ref[Tensor], int, Tensor, int]] = {}

    def copy(self, tensor: Tensor, to: int) -> Tensor:
        """Like `Transfers.copy`. The copy is kept for as long as the tensor lives."""
        home = self._transfers.home(tensor)
        if home is None:
            return tensor
        self._transfers.shared.reading(self._lane, tensor, home)
        if home == to:
            return tensor
        key = id(tensor), to
        known = self._copies.get(key)
        if known is not None:
            original, version, copied, copied_version = known
            if original() is tensor and (version, copied_version) == (_version(tensor), _version(copied)):
                return copied
        copied = self._transfers.copy_from(home, tensor, to)
        forget = weakref.ref(tensor, lambda _: self._copies.pop(key, None))
        self._copies[key] = forget, _version(tensor), copied, _version(copied)
        return copied

    def made(self, tensors: Iterable[Tensor]) -> None:
        """The lane has made these."""
        for tensor in tensors:
            self._transfers.shared.made(self._lane, tensor)

    def use(self, tensors: Iterable[Tensor], home: int, changed: Iterable[Tensor]) -> None:
        """The lane is about to use these on a device, and to change some."""
        for tensor in tensors:
            self._transfers.shared.reading(self._lane, tensor, home)
        for tensor in changed:
            self._transfers.shared.writing(self._lane, tensor, home)

    @contextmanager
    def using(self, tensors: Sequence[Tensor], home: int) -> Iterator[None]:
        """The context of code of the lane's that may use these, and change them."""
        self.use(tensors, home, ())
        versions = [_version(tensor) for tensor in tensors]
        yield
        self.made(_changed_since(tensors, versions))

    def moved(self, tensor: Tensor, to: int) -> Tensor:
        """The tensor on a device, differentiable: each use brings its own gradient back, in the order of one device."""
        copied = self.copy(tensor, to)
        if copied is tensor or not (torch.is_grad_enabled() and tensor.requires_grad):
            return copied
        moved: Tensor = _Moved.apply(tensor, copied, self._transfers)
        return moved


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _changed_since(tensors: Sequence[Tensor], versions: Sequence[int]) -> list[Tensor]:
    return [tensor for tensor, version in zip(tensors, versions, strict=True) if _version(tensor) != version]


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copied: Tensor, transfers: Transfers) -> Tensor:
        ctx.transfers, ctx.home = transfers, transfers.home(tensor)
        return copied.view_as(copied)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transfers.copy(gradient, ctx.home), None, None


class OneDevice(TorchFunctionMode):
    """Runs each operation of a lane's glue on one device: that of its largest operand, or of the one that it changes.

    Args:
        lane: the lane's transfers.
        transfers: all lanes'.
        follow: called with the number of the device that an operation runs on, where its random numbers come from.
    """

    def __init__(self, lane: LaneTransfers, transfers: Transfers, follow: Callable[[int], None]) -> None:
        super().__init__()
        self._lane = lane
        self._transfers = transfers
        self._follow = follow
        self._is_off = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within a layer all is on the layer's device, and the engine's own operations are no glue."""
        # A mode that is on costs some microseconds an operation even if it does nothing.
        on_top = _get_current_function_mode() is self
        before, self._is_off = self._is_off, True
        if on_top:
            _pop_mode()
        try:
            yield
        finally:
            self._is_off = before
            if on_top:
                _push_mode(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Bring the operands to one device."""
        kwargs = kwargs or {}
        # What a tensor is, such as its shape, is asked often and needs no device.
        if self._is_off or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation."""
        tensors = tensors_of(*args, *kwargs.values())
        if any(isinstance(tensor, StandIn) for tensor in tensors):
            # It comes again, with the parameters in their stand-ins' places.
            return func(*args, **kwargs)
        if func in _DIFFERENTIATING:
            return self._differentiate(func, args, kwargs)
        homes = {id(tensor): self._transfers.home(tensor) for tensor in tensors}
        places = {home for home in homes.values() if home is not None}
        if len(places) > 1:
            target = self._target(func, args, kwargs, tensors)
            moved = {key: self._lane.moved for key, home in homes.items() if home not in (None, target)}
            args, kwargs = tree_map_only(
                Tensor,
                lambda tensor: moved[id(tensor)](tensor, target) if id(tensor) in moved else tensor,
                (args, kwargs),
            )
            tensors = [tensor for tensor in tensors if id(tensor) not in moved]
        else:
            target = places.pop() if places else 0
        self._follow(target)
        # Those that were moved are the lane's own.
        used = [tensor for tensor in tensors if homes[id(tensor)] is not None]
        with self._transfers.devices[target].selected():
            self._lane.use(used, target, _changed(func, args, kwargs))
            versions = [_version(tensor) for tensor in used]
            result = func(*args, **kwargs)
        views = {storage_of(tensor) for tensor in used}
        made = [tensor for tensor in tensors_of(result) if storage_of(tensor) not in views]
        # What changes its operands does not always look like it.
        self._lane.made([*_changed_since(used, versions), *made])
        return result

    def _differentiate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Bring the gradients that a backward begins with to where its outputs are. All else stays: it is in the graph."""
        name = _DIFFERENTIATING[func]
        outputs, gradients = tree_leaves(args[0]), tree_leaves(kwargs.get(name))
        if len(gradients) == len(outputs):
            homes = [self._transfers.home(output) if isinstance(output, Tensor) else None for output in outputs]
            kwargs[name] = [
                gradient if home is None or not isinstance(gradient, Tensor) else self._lane.moved(gradient, home)
                for gradient, home in zip(gradients, homes, strict=True)
            ]
            if func is Tensor.backward:
                (kwargs[name],) = kwargs[name]
        return func(*args, **kwargs)

    def _target(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> int:
        chosen = max(tensors, key=lambda tensor: (self._transfers.home(tensor) is not None, tensor.numel()))
        if changes_first(getattr(func, "__name__", "")) and isinstance(args[0], Tensor):
            chosen = args[0]
        if isinstance(kwargs.get("out"), Tensor):
            chosen = kwargs["out"]
        home = self._transfers.home(chosen)
        return 0 if home is None else home


# With the name of the gradients that they begin with, as torch passes them on to modes.
_DIFFERENTIATING = {
    torch.autograd.grad: "grad_outputs",
    torch.autograd.backward: "grad_tensors",
    Tensor.backward: "gradient",
}


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The operands that an operation changes, by its name."""
    operands = [args[0]] if changes_first(getattr(func, "__name__", "")) else []
    return tensors_of(*operands, kwargs.get("out"))


def changes_first(name: str) -> bool:
    """Whether an operation changes its first operand, by its name."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
    return name.endswith("_")

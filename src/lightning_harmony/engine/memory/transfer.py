"""Transfers: copies from device to device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Event
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.structures.operations import version_of
from lightning_harmony.engine.structures.parts import is_composed, made_of, parts_of, storages_of
from lightning_harmony.engine.structures.strides import compact, has_strides, restore
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.plan.values.task import Task


@dataclass(eq=False, repr=False)
class Transfers:
    """Knows where tensors are, and copies them from device to device.

    Args:
        devices: all of them, the root first: where what belongs to none is taken to be.
        traffic: counts the copies.
        admit: called with the number of a device and the bytes that are about to arrive there.
        timing: called with where a copy comes from, where it goes and its bytes: the context of the copy itself.
    """

    devices: Sequence[Device]
    _traffic: Traffic
    _admit: Callable[[int, int], None]
    _timing: Callable[[Device, Device, int], AbstractContextManager[None]]

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

    def copy_from(
        self, home: int, tensor: Tensor, to: int, task: Task | None = None, launched: Launched | None = None
    ) -> Tensor:
        """A copy on another device of a tensor that is on one.

        Args:
            home: the number of the device where it is.
            tensor: the tensor.
            to: the number of the other device.
            task: what the copy is; None for one that the running lane needs.
            launched: by that lane, which has made the tensor; None for one that anybody has made by now.
        """
        if is_composed(tensor):
            return made_of(tensor, [self.copy_from(home, part, to, task, launched) for part in parts_of(tensor)])
        came_from, target = self.devices[home], self.devices[to]
        # A weight is no tensor of inference mode, nor is its copy: views of the latter would not tell that it needs gradients.
        is_inference = torch.is_inference_mode_enabled() and tensor.is_inference()
        # Not through the mode below: its choice of a device is not the one that is asked for here.
        with torch._C.DisableTorchFunction(), torch.inference_mode(is_inference), torch.no_grad():
            is_strided = has_strides(tensor)
            # What is kept until it is copied must not keep its graph.
            source = compact(tensor.detach()) if is_strided else tensor.detach()
            # What has gaps is made dense now, behind all that was launched.
            is_now = is_strided and source.untyped_storage()._cdata != tensor.untyped_storage()._cdata
            after = None if launched is None or is_now else launched.until(home, tensor)
            num_bytes = sum(part.nbytes for part in storages_of(source))
            with target.selected():
                self._admit(to, num_bytes)
            copy = partial(self._copied, came_from, target, source, num_bytes, task)
            copied, event = came_from.send(copy, source, after)
            self._traffic.transferred += num_bytes
            if launched is not None and event is not None:
                launched.note_sent(home, event)
            elif event is not None:
                # Which code changes it later is not known.
                with came_from.scheduling():
                    event.wait()
            with target.selected():
                return restore(copied, tensor.size(), tensor.stride()) if is_strided else copied

    def _copied(self, came_from: Device, target: Device, source: Tensor, num_bytes: int, task: Task | None) -> Tensor:
        """The copy itself."""
        there, copied = target.torch_device, None
        with target.selected():
            if has_strides(source):
                copied = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device=there)
            with self._timing(came_from, target, num_bytes), target.receiving(came_from, num_bytes, task):
                # Torch makes what a sparse or jagged tensor consists of as it copies it.
                return source.to(there, copy=True) if copied is None else copied.copy_(source, non_blocking=True)


class Launched:
    """How far the work goes that a lane has launched on each device, behind which others have launched theirs.

    What it sends from there waits for its own work alone, and what it launches there later waits for what it has sent.

    Args:
        transfers: makes the copies.
        go_over: called in a backward before a gradient goes to a device, by its number: others may have their turns before.

    Attributes:
        transfers: the same.
    """

    def __init__(self, transfers: Transfers, go_over: Callable[[int], None] = lambda to: None) -> None:
        self.transfers, self._devices, self._go_over = transfers, transfers.devices, go_over
        # By their identities, tensors that the lane has made, with their versions and the turns in which it has.
        self._made: dict[int, tuple[weakref.ref[Tensor], int | None, int]] = {}
        self._until: dict[int, Event] = {}
        self._sent: dict[int, list[Event]] = {}
        # Where the lane's turn has launched anything, and which turn that is.
        self._in_turn: set[int] = set()
        self._turn = 0

    def note_made(self, tensors: Iterable[Tensor]) -> None:
        """Work that the lane has launched in this turn, where it has begun to, makes these."""
        for tensor in tensors:
            key = id(tensor)
            forget = weakref.ref(tensor, lambda _, key=key: self._made.pop(key, None))  # type: ignore[misc]
            self._made[key] = forget, version_of(tensor), self._turn

    def returned(self, gradient: Tensor, to: int | None) -> Tensor:
        """A gradient on the device where what it is of came from, in the lane's next turn there if that comes next.

        At once, the device would wait for it before it does what others launch there until that turn.
        """
        home = self.transfers.home(gradient)
        if home is None or to is None or home == to:
            return gradient
        # Its backward has made it in this turn, if it has come to the device in it at all.
        if home in self._in_turn:
            self.note_made([gradient])
        self._go_over(to)
        # Where the next node runs.
        with self._devices[to].computing():
            return _moved(gradient, self.transfers.copy_from(home, gradient, to, launched=self), self)

    def until(self, number: int, tensor: Tensor) -> Event | None:
        """Behind what has made a tensor on a device; None for all that was launched there so far."""
        made, version, turn = self._made.get(id(tensor), (None, 0, 0))
        is_known = made is not None and made() is tensor and version == version_of(tensor) and turn < self._turn
        return self._until.get(number) if is_known else None

    def forget(self, tensor: Tensor) -> None:
        """Others may have changed a tensor since it was made."""
        self._made.pop(id(tensor), None)

    def note_sent(self, number: int, event: Event) -> None:
        """Something is sent from a device."""
        self._sent.setdefault(number, []).append(event)

    def begin(self, number: int) -> None:
        """The lane launches work on a device in its turn."""
        if len(self._devices) == 1:
            return
        self._in_turn.add(number)
        if number in self._sent:
            with self._devices[number].scheduling():
                for event in self._sent.pop(number):
                    event.wait()

    def end_turn(self) -> None:
        """Others launch work from now on."""
        for number in self._in_turn:
            with self._devices[number].scheduling():
                self._until[number] = self._devices[number].record()
        self._in_turn.clear()
        self._turn += 1


class LaneTransfers:
    """Transfers of one lane: what several layers or operations on a device take is copied there once.

    Args:
        launched: what the lane has launched, and by whom copies are made.

    Attributes:
        launched: the same.
    """

    def __init__(self, launched: Launched) -> None:
        self.launched, self._transfers = launched, launched.transfers
        self._copies: dict[tuple[int, int], tuple[weakref.ref[Tensor], int | None, Tensor, int | None]] = {}
        # By their identities, what the lane's layers were called with that needs gradients.
        self._inputs: dict[int, _Input] = {}
        # The memory that is changed, if it is, without a version that tells so.
        self._uncounted: set[int] = set()

    def give(self, layer: SwappedLayer, tensors: Sequence[Tensor], to: int, *, whole: bool) -> None:
        """A layer is about to be called with these.

        Args:
            layer: the layer.
            tensors: what it is called with, and needs gradients.
            to: the number of the layer's device.
            whole: whether what is on another device comes with one node for all of its uses, and not with one for each.
        """
        self.note_uses(tensors)
        for tensor in tensors:
            has_node = whole and self._transfers.home(tensor) not in (None, to)
            self._inputs[id(tensor)] = _Input(weakref.ref(tensor, self._forget(id(tensor))), layer, has_node)

    def _forget(self, key: int) -> Callable[[object], object]:
        return lambda _: self._inputs.pop(key, None)

    def note_uses(self, tensors: Iterable[Tensor]) -> None:
        """The lane uses these: where a layer was called with one, gradients come to it in another order if it came as a whole.

        Raises:
            UnsupportedModelError: if it has.
        """
        for tensor in tensors if self._inputs else ():
            known = self._inputs.get(id(tensor))
            # A backward computes with what layers were called with, too.
            if known is not None and known.tensor() is tensor and torch._C._current_graph_task_id() == -1:
                known.layer.shares_inputs = True
                if known.whole:
                    raise UnsupportedModelError(
                        f"an input of layer {known.layer.name!r} is used once more after it, a tensor of shape "
                        f"{tuple(tensor.shape)}, for the first time in this step, and its gradient would be summed in another "
                        "order than on one device: use it from the first step on, or Trainer(devices=1)"
                    )

    def note_data(self, data: Tensor) -> None:
        """No version tells of changes to this, such as the data of a tensor: of what has its memory, no copy is kept."""
        self._uncounted.update(map(_memory, storages_of(data)))

    def copy(self, tensor: Tensor, to: int) -> Tensor:
        """Like `Transfers.copy`. The copy is kept for as long as the tensor lives."""
        # Most are there already.
        home = to if self._transfers.devices[to].owns(tensor) else self._transfers.home(tensor)
        if home is None or home == to:
            return tensor
        if self._uncounted and not self._uncounted.isdisjoint(map(_memory, storages_of(tensor))):
            self.launched.forget(tensor)
            return self._transfers.copy_from(home, tensor, to, launched=self.launched)
        key = id(tensor), to
        known = self._copies.get(key)
        if known is not None:
            original, version, copied, _ = known
            if original() is tensor and version == version_of(tensor):
                _refuse_changed(*known)
                return copied
        copied = self._transfers.copy_from(home, tensor, to, launched=self.launched)
        forget = weakref.ref(tensor, lambda _: self._copies.pop(key, None))
        self._copies[key] = forget, version_of(tensor), copied, version_of(copied)
        return copied

    def within(self, tensors: Iterable[Tensor], to: int) -> LaneTransfers:
        """The transfers within a layer of the lane: its copies are not for work outside. Those of some tensors are there."""
        transfers = LaneTransfers(self.launched)
        transfers._inputs, transfers._uncounted = self._inputs, self._uncounted
        for key in [(id(tensor), to) for tensor in tensors]:
            if key in self._copies:
                transfers._copies[key] = self._copies[key]
        return transfers

    def refuse_changed(self) -> None:
        """Refuse that a layer has changed a copy, and not what it is of.

        Raises:
            UnsupportedModelError: if it has.
        """
        for known in self._copies.values():
            _refuse_changed(*known)

    def moved(self, tensor: Tensor, to: int) -> Tensor:
        """The tensor on a device, differentiable: each use brings its own gradient back, in the order of one device."""
        return _moved(tensor, self.copy(tensor, to), self.launched)


def _memory(tensor: Tensor) -> int:
    """What tells memory apart."""
    return int(tensor.untyped_storage()._cdata)


class _Input(NamedTuple):
    """What a layer was called with.

    Attributes:
        tensor: it.
        layer: the last one that was.
        whole: whether one node brings the gradients of all of its uses there.
    """

    tensor: weakref.ref[Tensor]
    layer: SwappedLayer
    whole: bool


def _refuse_changed(
    original: weakref.ref[Tensor], version: int | None, copied: Tensor, copied_version: int | None
) -> None:
    tensor = original()
    if tensor is not None and version_of(tensor) == version and version_of(copied) != copied_version:
        raise UnsupportedModelError(
            f"a layer changes a view of one of its inputs in place, a tensor of shape {tuple(tensor.shape)} that is on "
            "another device: make that operation out of place, or use Trainer(devices=1)"
        )


def _moved(tensor: Tensor, copied: Tensor, launched: Launched) -> Tensor:
    """A copy of a tensor that is differentiated to it, if it needs gradients: also where that is itself a gradient."""
    if copied is tensor or not tensor.requires_grad:
        return copied
    if not torch.is_grad_enabled():
        # Without a graph, too, kernels choose by whether a weight needs gradients.
        with torch.inference_mode(copied.is_inference()):
            return copied.detach().requires_grad_()
    if tensor.is_nested and tensor.layout is torch.strided:
        raise UnsupportedModelError(
            "a nested tensor that needs gradients goes from one device to another, for which torch's autograd has no function "
            "of its own where its layout is torch.strided: make it with layout=torch.jagged, or use Trainer(devices=1)"
        )
    if tensor.layout is torch.jagged and tensor.is_cuda:
        raise UnsupportedModelError(
            "a jagged tensor that needs gradients goes from one GPU to another, where torch's autograd knows no order for its "
            "gradient: use Trainer(devices=1), or pad it between layers"
        )
    crossing = _Crossing(launched, launched.transfers.home(tensor))
    moved: Tensor = _There.apply(_Here.apply(tensor, crossing), copied, crossing)
    return moved


class _Crossing:
    """What two nodes know of each other: one where a tensor comes from, and one where its copy is.

    For autograd each node has one stream, and what uses a gradient waits for all that was launched on the stream of the node
    that returns it. One node would be of the copy's device: there, other microbatches have launched their work meanwhile.
    Between these two goes a number on the host, for which nothing waits.

    Args:
        launched: by the lane. Not the lane's copies: they would last as long as the graph.
        home: the number of the device that the tensor comes from, if that is one.
    """

    def __init__(self, launched: Launched, home: int | None) -> None:
        self._launched, self._home = launched, home
        self._gradient: Tensor | None = None

    def keep(self, gradient: Tensor) -> None:
        """The gradient of the copy has come."""
        self._gradient = gradient

    def returned(self) -> Tensor:
        """That gradient where the tensor comes from."""
        gradient, self._gradient = self._gradient, None
        assert gradient is not None
        return self._launched.returned(gradient, self._home)


def _number() -> Tensor:
    with torch._C.DisableTorchFunction():
        return torch.zeros((), device="cpu")


class _Here(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, crossing: _Crossing) -> Tensor:
        ctx.crossing = crossing
        return _number()

    @staticmethod
    def backward(ctx: Any, number: Tensor) -> tuple[Tensor, None]:
        return ctx.crossing.returned(), None


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: Tensor, copied: Tensor, crossing: _Crossing) -> Tensor:
        ctx.crossing = crossing
        # No view: a layer may change it in place.
        return copied.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.crossing.keep(gradient)
        return _number(), None, None

"""The contexts of a layer's own code, on any of several devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_harmony.engine.glue.one_device import OneDevice
from lightning_harmony.engine.measure.step_recorder import StepRecorder
from lightning_harmony.engine.memory.transfer import LaneTransfers, Transfers
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import Residency


class Surroundings:
    """Those of layers on any of several devices: what they find elsewhere comes to theirs.

    Args:
        current: tells how far the calling lane has come in its step; None outside of lanes.
        transfers: between devices.
        recorder: notes when layers compute.
    """

    def __init__(self, current: Callable[[], Any], transfers: Transfers, recorder: StepRecorder) -> None:
        self._current, self._transfers, self._recorder = current, transfers, recorder
        self._devices = transfers.devices

    def takes_whole(
        self, layer: SwappedLayer, residency: Residency, tensors: Sequence[Tensor], *, has_objects: bool
    ) -> bool:
        """Whether the inputs of a call that are on other devices come as a whole, and not for each use.

        With a node for each use, gradients are summed one by one in the order of one device. One node for all sums those of
        the layer's own uses first. That is the same where the backward comes to these first: nobody uses the input once more
        behind the layer.

        Args:
            layer: what is called.
            residency: of its pack.
            tensors: what it is called with.
            has_objects: whether tensors may hide among the arguments.
        """
        progress = self._current()
        if len(self._devices) == 1 or progress is None or not torch.is_grad_enabled():
            return True
        # A checkpoint that runs layers again in a backward has a graph of its own there.
        is_known = layer.changes_inputs is False and not (progress.differentiating or layer.shares_inputs)
        whole = (
            is_known and not (has_objects or _may_reach(layer)) and torch._C._functorch.peek_interpreter_stack() is None
        )
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        progress.transfers.give(layer, trained, self._devices.index(residency.device), whole=whole)
        return whole

    def running(self, residency: Residency) -> AbstractContextManager[None]:
        """The context of a layer's own code."""
        if self._current() is None:
            return residency.device.computing()
        if len(self._devices) == 1:
            return nullcontext()
        return self._recorder.computing(residency.device)

    def differentiating(self, residency: Residency) -> AbstractContextManager[None]:
        """The context in which a backward runs through a layer, from node to node."""
        if self._current() is None or len(self._devices) == 1:
            # Modes that one node enters, torch leaves before the next.
            return nullcontext()
        return self._recorder.differentiating(residency.device)

    def reaching(
        self,
        layer: SwappedLayer,
        residency: Residency,
        given: Sequence[Tensor],
        *,
        takes_objects: bool,
        is_compiled: bool,
    ) -> AbstractContextManager[None]:
        """The context of a layer's forward: it may use tensors of its own wherever they are.

        Args:
            layer: the layer.
            residency: of its pack.
            given: what it is called with, if it does not run again.
            takes_objects: whether it is called with objects, in which tensors may be.
            is_compiled: whether its code is.
        """
        progress = self._current()
        if len(self._devices) == 1 or progress is None:
            return nullcontext()
        number = self._devices.index(residency.device)
        away = [tensor for tensor in given if self._transfers.home(tensor) not in (None, number)]
        if not (takes_objects or away or _may_reach(layer)):
            return nullcontext()
        watches = layer.attributes.are_first_calls and not is_compiled
        if takes_objects or away or layer.reaches_elsewhere or watches:
            # What is in objects is not looked at: a layer may put more there.
            return self._mixing(layer, progress.transfers, number, given)
        tensors = layer.attributes.read().tensors().values()
        if all(self._transfers.home(tensor) in (None, number) for tensor in tensors):
            progress.transfers.note_uses(tensor for tensor in tensors if tensor.requires_grad)
            return nullcontext()
        return self._mixing(layer, progress.transfers, number, given)

    @contextmanager
    def _mixing(
        self, layer: SwappedLayer, transfers: LaneTransfers, number: int, given: Sequence[Tensor]
    ) -> Iterator[None]:
        """A layer's operations find tensors of all devices, as those of the glue do."""
        within = transfers.within(given, number)
        with OneDevice(within, self._transfers, number, given) as mode:
            yield
        layer.reaches_elsewhere |= mode.has_found
        within.refuse_changed()

    def compiling(self) -> AbstractContextManager[None]:
        """The context of a compiled layer, whatever becomes of compiled code around it."""
        return torch.compiler.set_stance("default") if len(self._devices) > 1 else nullcontext()


def _may_reach(layer: SwappedLayer) -> bool:
    """Whether a layer's code may use tensors that it was not given: its first calls tell."""
    return layer.attributes.may_hold_tensors or layer.reaches_elsewhere or layer.attributes.are_first_calls

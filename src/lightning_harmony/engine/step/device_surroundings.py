"""The contexts of layers' own code in a step, on one of several devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from typing_extensions import override

from lightning_harmony.engine.glue.one_device import OneDevice
from lightning_harmony.engine.layers.surroundings import Surroundings
from lightning_harmony.engine.measure.step_recorder import StepRecorder
from lightning_harmony.engine.memory.transfer import LaneTransfers, Transfers
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.step.step import Step


class DeviceSurroundings(Surroundings):
    """Those of layers on any of several devices: what they find elsewhere comes to theirs.

    Args:
        step: the step that runs.
        transfers: between devices.
        recorder: notes when layers compute.
    """

    def __init__(self, step: Step, transfers: Transfers, recorder: StepRecorder) -> None:
        self._step, self._transfers, self._recorder = step, transfers, recorder
        self._devices = transfers.devices

    @override
    def takes_whole(
        self, layer: SwappedLayer, residency: Residency, tensors: Sequence[Tensor], *, has_objects: bool
    ) -> bool:
        """Whether the inputs of a call that are on other devices come as a whole, and not for each use.

        With a node for each use, gradients are summed one by one in the order of one device. One node for all sums those of
        the layer's own uses first. That is the same where the backward comes to these first: nobody uses the input once more
        behind the layer.
        """
        progress = self._step.current()
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

    @override
    def running(self, residency: Residency) -> AbstractContextManager[None]:
        """The context of a layer's own code."""
        if self._step.current() is None:
            return residency.device.computing()
        if len(self._devices) == 1:
            return nullcontext()
        return self._recorder.computing(residency.device)

    @override
    def differentiating(self, residency: Residency) -> AbstractContextManager[None]:
        """The context in which a backward runs through a layer, from node to node."""
        if self._step.current() is None or len(self._devices) == 1:
            # Modes that one node enters, torch leaves before the next.
            return nullcontext()
        return self._recorder.differentiating(residency.device)

    @override
    def reaching(
        self,
        layer: SwappedLayer,
        residency: Residency,
        given: Sequence[Tensor],
        *,
        takes_objects: bool,
        is_compiled: bool,
    ) -> AbstractContextManager[None]:
        """The context of a layer's forward: it may use tensors of its own wherever they are."""
        progress = self._step.current()
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

    @override
    def compiling(self) -> AbstractContextManager[None]:
        """The context of a compiled layer, whatever becomes of compiled code around it."""
        return torch.compiler.set_stance("default") if len(self._devices) > 1 else nullcontext()


def _may_reach(layer: SwappedLayer) -> bool:
    """Whether a layer's code may use tensors that it was not given: its first calls tell."""
    return layer.attributes.may_hold_tensors or layer.reaches_elsewhere or layer.attributes.are_first_calls

"""Recordings of layers: which calls run recorded work instead of a layer's code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.recording import OtherBitsError, RecordingChangedError, RecordingError
from lightning_harmony.engine.devices.stream import Event, Happened
from lightning_harmony.engine.lanes.rng import RandomState
from lightning_harmony.engine.layers.call_arguments import CallArguments
from lightning_harmony.engine.layers.fixed_memory import FixedMemory
from lightning_harmony.engine.layers.recordable import has_drawn, hooks_within
from lightning_harmony.engine.layers.recorded_layer import Backward, CallKey, Gradients, RecordedLayer
from lightning_harmony.engine.layers.runtime import Runtime
from lightning_harmony.engine.model.attributes import Attributes
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import Residency

# Two shapes of batches, the last one of an epoch among them.
_MOST_KEYS = 2
# A backward whose kernels add in any order differs from itself now and then, and memory becomes free: it is tried so often.
_MOST_TRIES = 3
# Of a device, for what is recorded.
_LARGEST_SHARE = 0.25


class _Compared(NamedTuple):
    """A comparison of recorded work with code.

    Attributes:
        differs: a flag on the host.
        when: it is known.
    """

    differs: Tensor
    when: Event


class Before(NamedTuple):
    """What a call finds whose work will be recorded.

    Attributes:
        random: the generators' state.
        attributes: of the layer's modules.
        changes: tells afterwards what it has changed that is not the layer's.
    """

    random: RandomState
    attributes: Attributes
    changes: Callable[[], str | None]


class Recordings:
    """Records the work of layers, and tells which calls may run it in the place of their code.

    In each step, the code runs once more for the first call that something recorded stands for, and is compared with it:
    where code has come to do something else since, it makes other bits or another graph, or changes what is not the layer's.

    Args:
        devices: where layers run.
        make_room: lets what isn't needed on a device make way there for so many bytes.

    Attributes:
        is_on: whether calls of the step may run what is recorded.
        refused: the layers of which nothing is recorded any more, and why.
    """

    def __init__(self, devices: Sequence[Device], make_room: Callable[[Device, int], None]) -> None:
        self._memories = {d: FixedMemory(d, partial(make_room, d)) for d in devices if d.records}
        self._has_several = len(devices) > 1
        self._of_layers: dict[tuple[SwappedLayer, Device], list[RecordedLayer]] = {}
        self._num_bytes: dict[SwappedLayer, int] = {}
        self._num_tries: Counter[SwappedLayer] = Counter()
        self._seen: set[tuple[SwappedLayer, Device]] = set()
        self._compared: dict[RecordedLayer, _Compared] = {}
        self._num_told = 0
        self.is_on = False
        self.refused: dict[SwappedLayer, str] = {}

    def set_aside(self, layers: Iterable[SwappedLayer], work_bytes: Callable[[SwappedLayer], int]) -> None:
        """Have plans leave room for what is recorded. Layers share it; half of them, those that take most, may be too large.

        Args:
            layers: all that are called.
            work_bytes: what each allocates in its backward.
        """
        # Weights in fixed places, and gradients of them to compare; work in memory that is that of recordings alone.
        num_bytes = self._num_bytes = {
            layer: 2 * sum(p.numel() * layer.narrow.get(p, p.dtype).itemsize for p in layer.parameters)
            + work_bytes(layer) * 3 // 2
            for layer in layers
            if layer.module is not None
        }
        # Those that are alike differ by a little.
        needed = sorted(num_bytes.values())[len(num_bytes) // 2] * 5 // 4 if num_bytes else 0
        for device in self._memories:
            limit = None if device.capacity_bytes is None else int(device.capacity_bytes * _LARGEST_SHARE)
            wanted = needed + device.library_bytes
            device.set_aside_bytes = wanted if limit is None or wanted <= limit else 0

    def begin_step(self, *, is_on: bool) -> None:
        """A step begins.

        Args:
            is_on: whether microbatches take turns in it, and the work of layers is known.
        """
        self.is_on = is_on and bool(self._memories)
        self._seen.clear()
        self._compared = {}

    def find(self, layer: SwappedLayer, arguments: CallArguments, residency: Residency) -> RecordedLayer | None:
        """What runs in the place of the layer's code; None for that."""
        known = self._of_layers.get((layer, residency.device))
        key = CallKey.of(arguments, residency.device.torch_device) if known else None
        return None if known is None or key is None else next((r for r in known if r.is_for(key, residency)), None)

    def has_compared(self, recorded: RecordedLayer) -> bool:
        """Whether what is recorded has been compared with the layer's code in this step."""
        return recorded in self._compared

    def compare(
        self,
        recorded: RecordedLayer,
        residency: Residency,
        tensors: Sequence[Tensor],
        random: RandomState,
        made: Sequence[Tensor],
    ) -> None:
        """Compare a call that has run what is recorded with the layer's code.

        Args:
            recorded: what has run.
            residency: of the layer's pack.
            tensors: the call's.
            random: the generators' state, as the call found it.
            made: the tensors that it returns.
        """
        differs = recorded.differs(residency, tensors, random, made).to("cpu", non_blocking=True)
        self._compared[recorded] = _Compared(differs, residency.device.record())

    def begin_call(self, layer: SwappedLayer, residency: Residency, runtime: Runtime) -> Before | None:
        """The layer's code is about to run: what it finds, if the call will be recorded."""
        if (layer, residency.device) in self._seen or layer in self.refused:
            return None
        random, attributes = RandomState.capture(residency.cuda_index), layer.attributes.read()
        return Before(random, attributes, runtime.listeners.elsewhere())

    def end_call(
        self,
        layer: SwappedLayer,
        own: Callable[..., object],
        runtime: Runtime,
        arguments: CallArguments,
        residency: Residency,
        before: Before,
        result: object,
    ) -> None:
        """The layer's code has run, for the first time in the step: record it."""
        place = layer, residency.device
        self._seen.add(place)
        key = CallKey.of(arguments, residency.device.torch_device)
        memory = self._memories.get(residency.device)
        if key is None or memory is None or layer in self.refused or not residency.device.records:
            return
        random, now = before.random, RandomState.capture(residency.cuda_index)
        try:
            self._refuse(layer, residency, before, now)
            draws = has_drawn(random, now)
            recorded = RecordedLayer(layer, own, runtime, memory, key, arguments, residency, draws=draws)
            with random.entered(residency.cuda_index):
                recorded.record_forward(residency, arguments.tensors, result)
        except (RecordingError, torch.OutOfMemoryError) as error:
            self._note(layer, residency.device, error)
        else:
            self._of_layers.setdefault(place, []).append(recorded)
            self._compared[recorded] = _Compared(torch.zeros((), dtype=torch.bool), Happened())

    def note_backward(self, recorded: RecordedLayer, coming: Backward, found: Gradients) -> None:
        """A backward of a recorded call has run: record it, if it is not."""
        device = coming.residency.device
        if not recorded.lacks_backward or recorded.layer in self.refused or not device.records:
            return
        try:
            recorded.record_backward(coming, found)
        except (RecordingError, torch.OutOfMemoryError) as error:
            self._note(recorded.layer, device, error)

    def _note(self, layer: SwappedLayer, device: Device, error: Exception) -> None:
        """A recording has failed."""
        self._num_tries[layer] += 1
        if isinstance(error, torch.OutOfMemoryError):
            # It may be there, but kept for what is not recorded.
            device.release_cached()
        may_succeed = isinstance(error, OtherBitsError | torch.OutOfMemoryError)
        if not may_succeed or self._num_tries[layer] == _MOST_TRIES:
            self._give_up(layer, error)

    def _refuse(self, layer: SwappedLayer, residency: Residency, before: Before, after: RandomState) -> None:
        """Refuse layers whose calls do more than to compute what they return."""
        module = layer.whole
        if module is None or len(self._of_layers.get((layer, residency.device), ())) == _MOST_KEYS:
            raise RecordingError("it is called in many ways")
        if self._num_bytes.get(layer, 0) + residency.device.library_bytes > residency.device.set_aside_bytes:
            raise RecordingError("it takes more memory than most, or than a quarter of the device")
        if layer.composed or layer.gathered or layer.is_parametrized or layer.derived:
            raise RecordingError("its weights are made of others")
        if layer.differentiates:
            raise RecordingError("it computes gradients in its forward")
        if layer.num_changes:
            raise RecordingError("it changes its weights")
        if layer.changes_inputs is not False or layer.changed_buffers.intersection(layer.buffers):
            raise RecordingError("it changes inputs or buffers")
        if layer.unversioned_buffers or layer.has_unknown_buffers():
            raise RecordingError("it may change buffers")
        if any(hooks_within(module)):
            raise RecordingError("modules of it have hooks")
        if layer.attributes.read() is not before.attributes:
            raise RecordingError("it sets attributes")
        changed = before.changes()
        if changed is not None:
            raise RecordingError(f"it changes {changed!r}")
        if self._has_several and has_drawn(before.random, after):
            raise RecordingError("it draws random numbers, which several devices have in common")

    def _give_up(self, layer: SwappedLayer, error: Exception) -> None:
        self._drop([place for place in self._of_layers if place[0] is layer])
        self.refused[layer] = str(error).splitlines()[0]

    def _drop(self, places: Iterable[tuple[SwappedLayer, Device]]) -> None:
        for place in places:
            for each in self._of_layers.pop(place):
                each.forget()

    def news(self) -> list[tuple[str, str]]:
        """What has been refused since this was last asked for: layers, and why."""
        told, self._num_told = self._num_told, len(self.refused)
        return [(layer.name, why) for layer, why in list(self.refused.items())[told:]]

    def let_go(self, device: Device) -> bool:
        """Let the memory go of all that is recorded on a device: there is too little of it. Whether there was any."""
        memory = self._memories.pop(device, None)
        if memory is None:
            return False
        device.forget_recorded()
        places = [place for place in self._of_layers if place[1] is device]
        self.refused.update((layer, "its memory was needed otherwise") for layer, _ in places)
        self._drop(places)
        memory.clear()
        device.set_aside_bytes = 0
        return True

    def end_forward(self) -> None:
        """All forwards of the step have been launched: see whether layers still do what is recorded.

        Raises:
            RecordingChangedError: if one does not. Nothing is recorded of it any more.
        """
        changed: list[SwappedLayer] = []
        for recorded, (differs, when) in self._compared.items():
            # Not for what has been launched since.
            when.synchronize()
            if differs:
                changed.append(recorded.layer)
        for layer in changed:
            self._give_up(layer, RecordingError("its code has come to do something else"))
        if changed:
            raise RecordingChangedError(
                f"layer {changed[0].name!r} does something else than what was recorded of it: its code depends on more than "
                "its arguments, parameters, buffers and attributes, or changes more"
            )

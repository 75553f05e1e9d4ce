"""Updates of packs whose gradients are still on the device, and whose weights stay there for the next forward.

A device updates the packs that the next forward begins with behind their last backward. The host remains the home of
parameters and optimizer state: both come for the update, and go back behind it. Whoever looks at them waits for that, as for
any other update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Event
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.model.host_store import lay_out
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.engine.updates.device_step import (
    Part,
    Pieces,
    copy_all,
    is_on_device,
    make_step,
    may_be_cut,
    own_of,
)
from lightning_harmony.engine.updates.optimizer_twin import Clip, Share
from lightning_harmony.engine.updates.postponed import PostponedUpdate
from lightning_harmony.plan.values.task import Errand

# Of parameters that are stepped together: what a step makes meanwhile is as large.
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class _OnDevice:
    """What an update of a pack changes, where it is on the device or comes to.

    Attributes:
        buffers: one for the parameters, which stay, and one for the optimizer's state.
        hosts: what lies there, in order, where it is on the host.
        places: where it is in them.
        parameters: the pack's, on the device.
        states: of each parameter, the optimizer's state, its tensors on the device.
    """

    buffers: tuple[Tensor, Tensor]
    hosts: list[Tensor]
    places: list[Tensor]
    parameters: dict[nn.Parameter, Tensor]
    states: dict[nn.Parameter, dict[str, Any]]

    @property
    def num_bytes(self) -> int:
        """Of both buffers."""
        return sum(buffer.numel() for buffer in self.buffers)


class _Arrived(NamedTuple):
    """What an update of a pack needs beside its gradients, there at the end of a copy."""

    there: _OnDevice
    ready: Event


@dataclass(frozen=True)
class Stayed:
    """Parameters that a device has updated, and still has.

    Attributes:
        parameters: each of them on the device.
        updated: the end of their update.
        on_host: the end of the copy to the host.
    """

    parameters: dict[nn.Parameter, Tensor]
    updated: Event
    on_host: Event


class DeviceUpdates:
    """Updates packs on one device.

    Args:
        device: which one.
        traffic: counts the copies.
        is_shared: whether several layers own a parameter.
        postponed: knows which updates nobody has waited for yet.
    """

    def __init__(
        self,
        device: Device,
        traffic: Traffic,
        is_shared: Callable[[nn.Parameter], bool],
        postponed: PostponedUpdate,
    ) -> None:
        self._device = device
        self._traffic = traffic
        self._is_shared = is_shared
        self._postponed = postponed
        self._optimizer: Optimizer | None = None
        self._clip: Clip | None = None
        self._groups: dict[nn.Parameter, Mapping[str, Any]] = {}
        self._may_update = False
        self._arrived: dict[int, _Arrived] = {}
        # Packs for whose state the host has no memory that copies are fast from.
        self._crowded: set[int] = set()
        self._stayed: dict[int, Stayed] = {}
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []
        # Of an optimizer whose state has so many parameters.
        self._copies: tuple[Optimizer, int, float] | None = None

    # ---- the step ------------------------------------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer | None, clip: Clip | None, *, may_update: bool) -> None:
        """The backward of a step begins.

        Args:
            optimizer: the one to step just in time; None if gradients are only collected.
            clip: changes gradients before they are used.
            may_update: whether anything may change before the step is over.
        """
        self._optimizer, self._clip, self._may_update = optimizer, clip, may_update
        groups = [] if optimizer is None else optimizer.param_groups
        self._groups = {parameter: group for group in groups for parameter in group["params"]}

    def end(self) -> None:
        """The step is over: what came and was not used goes."""
        self._arrived.clear()

    def state_copies(self) -> float | None:
        """Bytes of the optimizer's state for each byte of its parameters; None where this device does not update them."""
        optimizer = self._optimizer
        if optimizer is None:
            return None
        state = optimizer.state
        # It is asked after each step, and models have thousands of parameters.
        if self._copies is not None and self._copies[0] is optimizer and self._copies[1] == len(state):
            return self._copies[2]
        # A list is made at once: an update that outlasts its step may add to the dictionary meanwhile.
        having = [(parameter, dict(values)) for parameter, values in list(state.items()) if values]
        if not having:
            return None
        tensors = [value for _, values in having for value in values.values() if isinstance(value, Tensor)]
        num_bytes = sum(value.nbytes for value in tensors if value.dim() > 0)
        copies = num_bytes / max(sum(parameter.nbytes for parameter, _ in having), 1)
        self._copies = optimizer, len(having), copies
        return copies

    def passing_bytes(self) -> int:
        """What of updates is on the device between steps: it leaves under the next one, or is what that begins with."""
        alive = [(reference, storage) for reference in self._storages if (storage := reference()) is not None]
        self._storages = [reference for reference, _ in alive]
        return sum(storage.nbytes() for _, storage in alive)

    # ---- what comes ----------------------------------------------------------------------------------------------------

    def needed_bytes(self, pack: SwappedPack) -> int | None:
        """What an update of a pack takes on the device beside its gradients; None if the device does not update it."""
        if self._optimizer is None or not self._may_update:
            return None
        if pack.index in self._arrived or pack.index in self._crowded:
            return None
        trained = [parameter for parameter in pack.parameters if parameter.requires_grad]
        if not trained or not all(map(self._can_update, trained)):
            return None
        values = [value for parameter in trained for _, value in self._tensors(parameter)]
        return lay_out(trained)[1] + lay_out(values)[1]

    def _can_update(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is of one pack alone, and has all of its state: none is made here."""
        state = self._state(parameter)
        is_known = parameter in self._groups and bool(state) and all(value is not None for value in state.values())
        return is_known and not self._is_shared(parameter)

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        assert self._optimizer is not None
        state: dict[str, Any] = self._optimizer.state.get(parameter, {})
        return state

    def _tensors(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """What of a parameter's state is on the device for an update."""
        for name, value in self._state(parameter).items():
            if is_on_device(name, value, self._groups[parameter]):
                yield name, value

    def bring(self, pack: SwappedPack) -> None:
        """Start to copy what an update of a pack needs to the device, where there is room for it."""
        trained = [parameter for parameter in pack.parameters if parameter.requires_grad]
        self._postponed.wait_for(trained)
        there = self._allocate(pack, trained)
        if there is None:
            return
        copy = partial(copy_all, list(zip(there.places, there.hosts, strict=True)))
        ready = self._device.start_copy(Errand.STATE_IN, "optimizer", there.num_bytes, copy, pack=pack.index)
        self._traffic.count_in("optimizer", there.num_bytes)
        self._arrived[pack.index] = _Arrived(there, ready)

    def _allocate(self, pack: SwappedPack, trained: Sequence[nn.Parameter]) -> _OnDevice | None:
        """Memory for parameters of a pack and their state; None where the host has none to copy it from at full speed."""
        with torch.inference_mode(False), torch.no_grad():
            if not self._make_fast(pack, trained):
                return None
            values = [(parameter, name, value) for parameter in trained for name, value in self._tensors(parameter)]
            of_parameters, here = self._placed(trained)
            of_state, values_here = self._placed([value for _, _, value in values])
        states = {parameter: dict(self._state(parameter)) for parameter in trained}
        for (parameter, name, _), value in zip(values, values_here, strict=True):
            states[parameter][name] = value
        hosts = [*(parameter.detach() for parameter in trained), *(value for _, _, value in values)]
        places = [*here, *values_here]
        return _OnDevice((of_parameters, of_state), hosts, places, dict(zip(trained, here, strict=True)), states)

    def _placed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """A buffer on the device for tensors, and where each of them is in it."""
        slots, num_bytes = lay_out(tensors)
        buffer = self._device.empty(num_bytes)
        self._storages.append(weakref.ref(buffer.untyped_storage()))
        return buffer, [slot.view(buffer) for slot in slots]

    def _make_fast(self, pack: SwappedPack, trained: Iterable[nn.Parameter]) -> bool:
        """Let the optimizer have its state where copies are fast; whether that could be had."""
        try:
            with self._device.on_host():
                for parameter in trained:
                    for name, value in self._tensors(parameter):
                        if not self._device.copies_fast(value):
                            (slot,), num_bytes = lay_out([value])
                            home = slot.view(self._device.host_buffer(num_bytes))
                            self._state(parameter)[name] = home.copy_(value)
        except (RuntimeError, OSError, MemoryError):
            self._crowded.add(pack.index)
            return False
        return True

    def forget(self) -> bool:
        """Make room: give up updates whose gradients are not there yet; whether there were any."""
        had_some = bool(self._arrived)
        self._arrived.clear()
        return had_some

    # ---- the update ----------------------------------------------------------------------------------------------------

    def update(self, pack: SwappedPack) -> Event | None:
        """Update a pack with the sums of its gradients, which then are used up.

        Returns:
            The end of the copy to the host; None if it is to be updated from the host.
        """
        arrived = self._arrived.pop(pack.index, None)
        accumulator = pack.accumulators.get(0)
        if arrived is None or accumulator is None or len(pack.accumulators) > 1 or pack.parked:
            return None
        if accumulator.includes_earlier or any(sums.dtype != p.dtype for (_, p), sums in accumulator.sums.items()):
            return None
        there, optimizer = arrived.there, self._optimizer
        assert optimizer is not None
        gradients = {parameter: accumulator.sums[layer, parameter] for layer, parameter in accumulator.touched}
        numbers = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        share = Share(optimizer, {p: number for p, number in numbers.items() if p in gradients})
        arrived.ready.wait()
        # As on a GPU, nothing of what a step makes meanwhile is there afterwards.
        with self._device.on_host():
            for piece in Pieces(gradients, _MOST_BYTES, partial(may_be_cut, share)):
                self._make_step(share, piece, there, gradients)
        pack.accumulators = {}
        updated = self._device.record()
        on_host = self._send(pack, there, updated)
        self._stayed[pack.index] = Stayed(there.parameters, updated, on_host)
        return on_host

    def _make_step(
        self, share: Share, piece: Sequence[Part], there: _OnDevice, gradients: Mapping[nn.Parameter, Tensor]
    ) -> None:
        parameters = {part.parameter: part.of(there.parameters[part.parameter]) for part in piece}
        sums = {part.parameter: part.of(gradients[part.parameter]) for part in piece}
        states = {
            part.parameter: {
                name: own_of(part, value) if isinstance(value, Tensor) else value
                for name, value in there.states[part.parameter].items()
            }
            for part in piece
        }
        make_step(share, self._clip, parameters, sums, states)
        for parameter in (part.parameter for part in piece if part.is_last):
            # Tensors come back otherwise.
            numbers = states[parameter].items()
            self._state(parameter).update(
                {name: value for name, value in numbers if not is_on_device(name, value, self._groups[parameter])}
            )

    def _send(self, pack: SwappedPack, there: _OnDevice, updated: Event) -> Event:
        """Start to copy what an update has changed to the host."""
        copy = partial(copy_all, list(zip(there.hosts, there.places, strict=True)))
        on_host = self._device.start_copy(Errand.STATE_OUT, "optimizer", there.num_bytes, copy, [updated], pack.index)
        for buffer in there.buffers:
            self._device.keep_past_step(on_host, buffer)
        self._traffic.count_out("optimizer", there.num_bytes)
        return on_host

    # ---- what stays ----------------------------------------------------------------------------------------------------

    def has(self, pack: SwappedPack) -> bool:
        """Whether the weights of a pack are here as the update has left them, and nobody has looked at them since."""
        stayed = self._stayed.get(pack.index)
        return stayed is not None and self._postponed.is_of(stayed.parameters, stayed.on_host)

    def take(self, pack: SwappedPack) -> Stayed | None:
        """The weights of a pack as the update has left them, once; None if they must come from the host."""
        stayed = self._stayed.pop(pack.index, None)
        return stayed if stayed is not None and self._postponed.is_of(stayed.parameters, stayed.on_host) else None

    def forget_stayed(self, *, stale_alone: bool = False) -> None:
        """Let weights go that stayed; or those alone which somebody may have changed on the host since."""
        if not stale_alone:
            self._stayed.clear()
            # The numbers of packs are those of a plan.
            self._crowded.clear()
        for index, stayed in list(self._stayed.items()):
            if not self._postponed.is_of(stayed.parameters, stayed.on_host):
                del self._stayed[index]

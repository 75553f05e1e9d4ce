"""Updates on a device, whose weights then stay for the forward.

Just in time, a device updates the packs that the next forward begins with, behind their last backward. Of a postponed update,
it makes what is left to it as a pack comes for its forward. The host remains where parameters and the optimizer's state live:
both come for the update, and go back behind it. Whoever looks at them waits for that as for an update of the host's.
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
from lightning_harmony.engine.updates.device_step import Step, step_on
from lightning_harmony.engine.updates.postponed import Clip, OpenUpdate, PostponedUpdate, Share
from lightning_harmony.plan.values.task import Errand


@dataclass(frozen=True)
class _OnDevice:
    """What an update of a pack changes, where it is on the device or comes to.

    Attributes:
        buffers: one for the parameters, which stay, and one for the optimizer's state.
        pairs: each tensor on the host, and where it is in them.
        parameters: the pack's, on the device.
        states: of each parameter, the optimizer's state, its tensors on the device.
    """

    buffers: tuple[Tensor, Tensor]
    pairs: list[tuple[Tensor, Tensor]]
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
    """Updates packs on one device, where the optimizer's step has the bits there that it has on the host.

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
        self._step: Step | None = None
        self._may_update = False
        # How the postponed update is made here; None where this device makes none of it.
        self._postponed_step: Step | None = None
        self._arrived: dict[int, _Arrived] = {}
        # What it takes to update a pack as it comes, of those that could be.
        self._open_bytes: dict[int, int] = {}
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
        self._step = None if optimizer is None else step_on(self._device, optimizer)

    def end(self) -> None:
        """The step is over: what came and was not used goes."""
        self._arrived.clear()

    def state_copies(self) -> float | None:
        """Bytes of the optimizer's state for each byte of its parameters; None where this device does not update them."""
        optimizer = self._optimizer
        if optimizer is None or self._step is None:
            return None
        state = optimizer.state
        # It is asked after each step, and models have thousands of parameters.
        if self._copies is not None and self._copies[0] is optimizer and self._copies[1] == len(state):
            return self._copies[2]
        # A list is made at once: an update that outlasts its step may add to the dictionary meanwhile.
        having = [(parameter, dict(values)) for parameter, values in list(state.items()) if values]
        if not having:
            return None
        num_bytes = sum(value.nbytes for _, values in having for _, value in _tensors(values))
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
        if self._optimizer is None or self._step is None or not self._may_update:
            return None
        if pack.index in self._arrived or pack.index in self._crowded:
            return None
        state = self._optimizer.state
        trained = [parameter for parameter in pack.parameters if parameter.requires_grad]
        if not self._can_update(self._step, state, trained):
            return None
        return _changed_bytes(trained, state)

    def _can_update(self, step: Step, state: Mapping[Any, dict[str, Any]], trained: Sequence[nn.Parameter]) -> bool:
        """Whether a step here has the host's bits for parameters of one pack alone."""
        if not trained or any(self._is_shared(parameter) or not state.get(parameter) for parameter in trained):
            return False
        if not all(step.takes(parameter, state[parameter]) for parameter in trained):
            return False
        # A state that is not there yet would be made here.
        return all(value is not None for parameter in trained for value in state[parameter].values())

    def bring(self, pack: SwappedPack) -> None:
        """Start to copy what an update of a pack needs to the device, where there is room for it."""
        assert self._optimizer is not None
        state = self._optimizer.state
        trained = [parameter for parameter in pack.parameters if parameter.requires_grad]
        self._postponed.wait_for(trained)
        there = self._allocate(pack, trained, state)
        if there is None:
            return
        copy = partial(_copy_all, [(there, host) for host, there in there.pairs])
        ready = self._device.start_copy(Errand.STATE_IN, "optimizer", there.num_bytes, copy, pack=pack.index)
        self._traffic.count_in("optimizer", there.num_bytes)
        self._arrived[pack.index] = _Arrived(there, ready)

    def _allocate(
        self, pack: SwappedPack, trained: Sequence[nn.Parameter], state: Mapping[Any, dict[str, Any]]
    ) -> _OnDevice | None:
        """Memory for parameters of a pack and their state; None where the host has none to copy it from at full speed."""
        with torch.inference_mode(False), torch.no_grad():
            if not self._make_fast(pack, [state[parameter] for parameter in trained]):
                return None
            values = [(parameter, name, value) for parameter in trained for name, value in _tensors(state[parameter])]
            of_parameters, here = self._placed(trained)
            of_state, values_here = self._placed([value for _, _, value in values])
        states = {parameter: dict(state[parameter]) for parameter in trained}
        for (parameter, name, _), value in zip(values, values_here, strict=True):
            states[parameter][name] = value
        hosts = [*(parameter.detach() for parameter in trained), *(value for _, _, value in values)]
        pairs = list(zip(hosts, [*here, *values_here], strict=True))
        return _OnDevice((of_parameters, of_state), pairs, dict(zip(trained, here, strict=True)), states)

    def _placed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """A buffer on the device for tensors, and where each of them is in it."""
        slots, num_bytes = lay_out(tensors)
        buffer = self._device.empty(num_bytes)
        self._storages.append(weakref.ref(buffer.untyped_storage()))
        return buffer, [slot.view(buffer) for slot in slots]

    def _make_fast(self, pack: SwappedPack, states: Iterable[dict[str, Any]]) -> bool:
        """Let the optimizer have its state where this device copies from and to at full speed; whether it could be had there.

        Where the system locks no more memory for it, the host updates the pack, as it can anyway.
        """
        try:
            with self._device.on_host():
                for state in states:
                    for name, value in _tensors(state):
                        if not self._device.copies_fast(value):
                            (slot,), num_bytes = lay_out([value])
                            state[name] = slot.view(self._device.host_buffer(num_bytes)).copy_(value)
        except (RuntimeError, OSError, MemoryError):
            self.give_up(pack)
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
            The end of the copy to the host; None if the host has to update it.
        """
        arrived = self._arrived.pop(pack.index, None)
        accumulator = pack.accumulators.get(0)
        if arrived is None or accumulator is None or len(pack.accumulators) > 1 or pack.parked:
            return None
        if accumulator.includes_earlier or any(sums.dtype != p.dtype for (_, p), sums in accumulator.sums.items()):
            return None
        there, optimizer, step = arrived.there, self._optimizer, self._step
        assert optimizer is not None
        assert step is not None
        gradients = {parameter: accumulator.sums[layer, parameter] for layer, parameter in accumulator.touched}
        numbers = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        share = Share(optimizer, {p: number for p, number in numbers.items() if p in gradients})
        arrived.ready.wait()
        _updating(step, share, self._clip, there, gradients)()
        pack.accumulators = {}
        updated = self._device.record()
        on_host = self._send(pack, there.buffers, there.pairs, updated)
        self._stayed[pack.index] = Stayed(there.parameters, updated, on_host)
        return on_host

    def _send(
        self, pack: SwappedPack, buffers: Sequence[Tensor], pairs: Sequence[tuple[Tensor, Tensor]], updated: Event
    ) -> Event:
        """Start to copy what an update has changed to the host."""
        num_bytes = sum(buffer.numel() for buffer in buffers)
        copy = partial(_copy_all, pairs)
        on_host = self._device.start_copy(Errand.STATE_OUT, "optimizer", num_bytes, copy, [updated], pack.index)
        for buffer in buffers:
            self._device.keep_past_step(on_host, buffer)
        self._traffic.count_out("optimizer", num_bytes)
        return on_host

    # ---- the postponed update ------------------------------------------------------------------------------------------

    def postpone(self, optimizer: Optimizer, packs: Iterable[SwappedPack]) -> dict[int, int]:
        """An update is postponed.

        Args:
            optimizer: the one that steps.
            packs: those that come to this device alone.

        Returns:
            Of the packs that it could update as well as the host, what that brings here.
        """
        self._postponed_step, self._open_bytes = step_on(self._device, optimizer), {}
        if self._postponed_step is None:
            return {}
        for pack in packs:
            trained = [parameter for parameter in pack.parameters if parameter.grad is not None]
            if pack.index in self._crowded or not all(map(self._can_bring_gradient, trained)):
                continue
            if self._can_update(self._postponed_step, optimizer.state, trained):
                # Gradients are as large as what they are of.
                self._open_bytes[pack.index] = _changed_bytes(trained, optimizer.state) + lay_out(trained)[1]
        return self._open_bytes

    def _can_bring_gradient(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient lies in memory as its parameter does, and comes while the host goes on."""
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided or gradient.dtype is not parameter.dtype:
            return False
        return gradient.stride() == parameter.stride() and self._device.copies_fast(gradient)

    def open_bytes(self, pack: SwappedPack) -> int | None:
        """What it takes to update a pack as it comes; None if that is not left to this device."""
        return None if self._left(pack) is None else self._open_bytes[pack.index]

    def _left(self, pack: SwappedPack) -> OpenUpdate | None:
        return self._postponed.open_for(pack.parameters) if pack.index in self._open_bytes else None

    def give_up(self, pack: SwappedPack) -> None:
        """There is no room here, or on the host, for what an update of a pack takes: the host does it, from now on."""
        self._crowded.add(pack.index)

    def take_over(self, pack: SwappedPack) -> bool:
        """Start to bring what the postponed update of a pack needs, to make it, and to send back what it changes.

        The weights are then here for the forward. All of it goes on beside what computes.

        Returns:
            Whether it is made here.
        """
        left, step = self._left(pack), self._postponed_step
        if left is None or step is None or not self._device.room_for(self._open_bytes[pack.index] + pack.swap_in_bytes):
            return False
        share, clip, num_bytes = left.share, left.clip, self._open_bytes[pack.index]
        there = self._allocate(pack, list(share.stand_ins), share.states)
        if there is None:
            return False
        with torch.inference_mode(False), torch.no_grad():
            of_gradients, sums = self._placed(list(share.gradients.values()))
        coming = [*there.pairs, *zip(share.gradients.values(), sums, strict=True)]
        update = _updating(step, share, clip, there, dict(zip(share.gradients, sums, strict=True)))

        def bring_and_update() -> None:
            _copy_all([(on_device, host) for host, on_device in coming])
            update()

        updated = self._device.start_copy(Errand.STATE_IN, "optimizer", num_bytes, bring_and_update, pack=pack.index)
        self._traffic.count_in("optimizer", num_bytes)
        # Whoever looks at gradients finds them as the clip leaves them.
        leaving = there.pairs if clip is None else coming
        buffers = there.buffers if clip is None else (*there.buffers, of_gradients)
        left.made_by(self._send(pack, buffers, leaving, updated))
        self._stayed[pack.index] = Stayed(there.parameters, updated, left)
        return True

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
            self._open_bytes = {}
            self._crowded.clear()
        for index, stayed in list(self._stayed.items()):
            if not self._postponed.is_of(stayed.parameters, stayed.on_host):
                del self._stayed[index]


def _tensors(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """What of a parameter's state is on the device for an update: all but single numbers."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            yield name, value


def _changed_bytes(trained: Sequence[nn.Parameter], state: Mapping[Any, dict[str, Any]]) -> int:
    """What of an update comes to a device and goes back: parameters, and their state."""
    values = [value for parameter in trained for _, value in _tensors(state[parameter])]
    return lay_out(trained)[1] + lay_out(values)[1]


def _updating(
    step: Step, share: Share, clip: Clip | None, there: _OnDevice, gradients: Mapping[nn.Parameter, Tensor]
) -> Callable[[], None]:
    """What clips gradients, and makes a share of an update on a device."""
    twin, states = share.elsewhere(there.parameters, gradients, there.states), share.states

    def update() -> None:
        if clip is not None:
            clip([parameter for group in twin.param_groups for parameter in group["params"]])
        step.run(twin)
        for parameter, state in states.items():
            _take_numbers(state, there.states[parameter])

    return update


def _take_numbers(state: dict[str, Any], changed: dict[str, Any]) -> None:
    """Let a state have the numbers that a step has counted anew; its tensors come back otherwise."""
    of_device = dict(_tensors(state))
    state.update({name: value for name, value in changed.items() if name not in of_device})


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for destination, source in pairs:
        destination.copy_(source, non_blocking=True)

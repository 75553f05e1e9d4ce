"""A device as a place for pieces of an update: what comes, the user's optimizer steps, and goes back to where it lives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_harmony.engine.devices.device import Device, flat_buffer
from lightning_harmony.engine.devices.stream import Event, Happened
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.model.host_store import lay_out, views_in
from lightning_harmony.engine.structures.parts import are_alike
from lightning_harmony.engine.updates.device_home import DeviceHome, Key
from lightning_harmony.engine.updates.device_step import Part, copy_all, is_on_device, make_step, own_of
from lightning_harmony.engine.updates.disk_home import DiskHome, Loan, memory_for_direct_copies
from lightning_harmony.engine.updates.optimizer_twin import Clip, Share
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.values.memory_size import format_bytes

# What a piece may take on a device: a share of its capacity, at least, and at most. Two are there at a time.
_SHARE_OF_CAPACITY, _LEAST_BYTES, _MOST_BYTES = 32, 8 << 10, 128 << 20
# As many times that where one thread launches the work of several devices: to launch a piece takes as long whatever its size,
# and keeps that thread waiting.
_OF_SEVERAL = 2
# Of parameters and the names in their states.
Values = dict[Key, Tensor]


@dataclass
class Piece:
    """What is stepped at once.

    Attributes:
        parts: of parameters.
        weights: these parts, on the host.
        values: of their state, on the host.
        loans: buffers in which those are that live on disk.
    """

    parts: Sequence[Part]
    weights: dict[nn.Parameter, Tensor]
    values: Values
    loans: list[Loan]

    def drop(self) -> None:
        """It will not be stepped."""
        for loan in self.loans:
            loan.drop()


class Stage:
    """The memory and the streams of one device in which pieces are stepped.

    Attributes:
        device: which one.
        num_bytes: what a piece has there.
        home: keeps optimizer state there from update to update.
    """

    def __init__(self, device: Device, traffic: Traffic, disk: DiskHome) -> None:
        self.device = device
        self._traffic, self._disk = traffic, disk
        self.num_bytes = _MOST_BYTES * (_OF_SEVERAL if device.is_one_of_several else 1)
        if device.capacity_bytes is not None:
            self.num_bytes = max(min(device.capacity_bytes // _SHARE_OF_CAPACITY, self.num_bytes), _LEAST_BYTES)
        # Of what comes, of steps, and of what goes back.
        # Steps are short, and hold up all of the three where they wait for what computes.
        self._streams = [device.side_stream(), device.side_stream(is_urgent=True), device.side_stream()]
        self.home = DeviceHome(self._allocate_lasting)
        # Two, the one that is used next first, each with the event after which it may be written.
        self._buffers: list[tuple[Tensor, Event]] = []
        self._large: Tensor | None = None

    def open(self) -> None:
        """Take the memory for two pieces."""
        if not self._buffers:
            self._buffers = [(self._allocate(self.num_bytes), Happened()) for _ in range(2)]

    def _allocate(self, num_bytes: int) -> Tensor:
        return self.device.staging(num_bytes, self._streams[0])

    def _allocate_lasting(self, num_bytes: int) -> Tensor | None:
        """Memory for state that stays; None if there is no room for it."""
        with suppress(torch.OutOfMemoryError):
            return self.device.empty(num_bytes, self._streams[0]) if self.device.room_for(num_bytes) else None
        return None

    def _large_buffer(self, num_bytes: int) -> Tensor:
        """One for a piece that is too large for the others. It stays: the next step needs it again.

        Raises:
            CapacityError: if there is no room for it.
        """
        if self._large is None or self._large.numel() < num_bytes:
            self._large = None
            try:
                self._large = self._allocate(num_bytes)
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"the update of a parameter takes {format_bytes(num_bytes)} on the device with its gradient and its "
                    f"state, as its optimizer updates it as a whole: use an optimizer that updates each element by itself, "
                    f"such as AdamW, or more memory with HarmonyStrategy(device_memory=...). ({error})"
                ) from error
        return self._large

    def call_for(self, share: Share, parts: Sequence[Part]) -> Piece:
        """Have a piece and its state come from disk, as far as they live there.

        Args:
            share: whose piece it is.
            parts: of it.
        """
        with self.device.on_host():
            self._bring_home(share, parts)
            values = {
                (part.parameter, name): own_of(part, value)
                for part in parts
                for name, value in share.state(part.parameter).items()
                if is_on_device(name, value, share.group_of(part.parameter))
            }
            weights = {part.parameter: part.of(part.parameter.detach()) for part in parts}
            own = [parameter for parameter, weight in weights.items() if self._disk.holds(weight)]
            # Their memory will be other, of which they know nothing.
            increment_version(own)
            # Those that are on the device already need not be read.
            own = [parameter for parameter in own if parameter not in share.masters]
            state = [key for key, value in values.items() if self._disk.holds(value)]
            if not own and not state:
                return Piece(parts, weights, values, [])
            coming = [*(weights[parameter] for parameter in own), *(values[key] for key in state)]
            loan = self._disk.borrow(coming, reads=True)
            weights.update(zip(own, loan.there[: len(own)], strict=True))
            values.update(zip(state, loan.there[len(own) :], strict=True))
            return Piece(parts, weights, values, [loan])

    def launch(
        self,
        share: Share,
        piece: Piece,
        clip: Clip | None,
        homes: Values,
        *,
        keeps_gradients: bool,
    ) -> None:
        """Start to bring a piece, to step it, and to send back what that changes.

        Args:
            share: whose piece it is.
            piece: what is stepped.
            clip: changes gradients before.
            homes: on the host, of the state that steps have made of a parameter whose last part is yet to come.
            keeps_gradients: whether gradients go back if they are clipped.
        """
        coming, stepping, leaving = self._streams
        parts, values = piece.parts, piece.values
        parameters = piece.weights
        masters = {
            part.parameter: part.of(share.masters[part.parameter])
            if part.parameter in share.masters
            else parameters[part.parameter]
            for part in parts
        }
        gradients = {part.parameter: part.of(share.gradients[part.parameter]) for part in parts}
        coming_gradients = {p: gradient for p, gradient in gradients.items() if not self.device.owns(gradient)}
        with self.device.on_host():
            kept, first = self._kept(share, piece)
        passing = {key: value for key, value in values.items() if key not in kept}
        sources = [*masters.values(), *coming_gradients.values(), *passing.values()]
        slots, num_bytes = lay_out(sources)
        fits = num_bytes <= self.num_bytes
        buffer, left = self._buffers[0] if fits else (self._large_buffer(num_bytes), Happened())
        there = list(views_in(buffer, dict(enumerate(slots))).values())
        # Copies that wait in the engine's queue would hold up all behind them.
        left.synchronize()
        for loan in piece.loans:
            loan.arrive()
        arrived = coming.submit(partial(copy_all, [*zip(there, sources, strict=True), *first]))
        rest = iter(there)
        parameters_there = {parameter: next(rest) for parameter in parameters}
        gradients_there = gradients | {parameter: next(rest) for parameter in coming_gradients}
        values_there = kept | {key: next(rest) for key in passing}
        with self.device.on_host():
            states = {part.parameter: _state_of(share, part, values_there) for part in parts}
        step = partial(make_step, share, clip, parameters_there, gradients_there, states)
        stepped = stepping.submit(step, [arrived])
        changed = [(parameters[parameter], value) for parameter, value in parameters_there.items()]
        if clip is not None and keeps_gradients:
            changed += [(gradient, gradients_there[parameter]) for parameter, gradient in coming_gradients.items()]
        with self.device.on_host():
            made = self._made(share, parts, states, values | kept, homes)
            leaves = self._by_way_of_buffer(piece, changed + made)
        left = leaving.submit(partial(copy_all, leaves), [stepped])
        for loan in piece.loans:
            loan.write_after(left)
        come = [*sources, *(value for _, value in first)]
        self._traffic.count_in("optimizer", sum(each.nbytes for each in come if not self.device.owns(each)))
        self._traffic.count_out("optimizer", sum(value.nbytes for _, value in leaves))
        if fits:
            self._buffers = [*self._buffers[1:], (buffer, left)]
        if not fits or any(value.untyped_storage()._cdata != buffer.untyped_storage()._cdata for _, value in made):
            # The next piece may use the memory of what is not in one of the two buffers.
            left.synchronize()

    def _kept(self, share: Share, piece: Piece) -> tuple[Values, list[tuple[Tensor, Tensor]]]:
        """Where state is that stays on the device: places for the parts of a piece, and what has to come there first.

        State comes as a whole with the first part of its parameter: none of it is stepped before.
        """
        states = {key: share.state(key[0])[key[1]] for key in piece.values}
        on_host = {key: state for key, state in states.items() if not self._disk.holds(state)}
        first = self.home.make_room(piece.parts, on_host)
        part_of = {part.parameter: part for part in piece.parts}
        return {key: part_of[key[0]].of(place) for key, place in self.home.places_of(on_host).items()}, first

    def bring_back(self) -> None:
        """Bring optimizer state that stays on the device to its places on the host. Nothing is under way."""
        leaves = self.home.to_host()
        self._streams[2].submit(partial(copy_all, leaves)).synchronize()
        self._traffic.count_out("optimizer", sum(value.nbytes for _, value in leaves))
        self.home.clear()

    def _by_way_of_buffer(self, piece: Piece, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Copies from the device, those of what lives on disk, and has not come from there, to a buffer instead."""
        to_disk = [home for home, _ in pairs if self._disk.holds(home)]
        if not to_disk:
            return pairs
        piece.loans.append(self._disk.borrow(to_disk, reads=False))
        there = iter(piece.loans[-1].there)
        return [(next(there) if self._disk.holds(home) else home, value) for home, value in pairs]

    def _made(
        self,
        share: Share,
        parts: Sequence[Part],
        states: Mapping[nn.Parameter, Mapping[str, Any]],
        values: Values,
        homes: Values,
    ) -> list[tuple[Tensor, Tensor]]:
        """What a step has left in its states on the device, each with the place on the host where it goes."""
        pairs: list[tuple[Tensor, Tensor]] = []
        new: list[tuple[Part, str, Tensor]] = []
        for part in parts:
            own = share.state(part.parameter)
            for name, value in states[part.parameter].items():
                key = part.parameter, name
                is_here = isinstance(value, Tensor) and (value.dim() > 0 or key in values or self.device.owns(value))
                if not is_here:
                    if part.is_last:
                        own[name] = value
                elif value.dim() == 0 and not part.is_last:
                    # All parts count the same, and those to come begin with what was.
                    pass
                elif key in values and are_alike(values[key], value):
                    if value is not values[key]:
                        pairs.append((values[key], value))
                else:
                    self.home.drop(key)
                    new.append((part, name, value))
            if part.is_last and not self.home.is_open:
                pairs += self.home.leave(part.parameter, own)
        without = [each for each in new if (each[0].parameter, each[1]) not in homes]
        likes = [
            part.parameter if value.dim() > 0 and part.elements is not None else value for part, _, value in without
        ]
        owners, dtypes = [part.parameter for part, _, _ in without], [value.dtype for _, _, value in without]
        for (part, name, _), home in zip(without, self._homes(owners, likes, dtypes), strict=True):
            homes[part.parameter, name] = home
        for part, name, value in new:
            home = homes[part.parameter, name]
            pairs.append((part.of(home), value))
            if part.is_last:
                share.state(part.parameter)[name] = home
        _sort_states(share, states, {part.parameter for part, _, _ in new if part.is_last})
        return pairs

    def _bring_home(self, share: Share, parts: Sequence[Part]) -> None:
        """Let state lie where it lives: on disk, or where this device copies from and to at full speed."""
        slow: list[tuple[dict[str, Any], str, Tensor]] = []
        for part in parts:
            if not part.is_first:
                continue
            state = share.state(part.parameter)
            self._disk.bring(part.parameter, state)
            slow += [
                (state, name, value)
                for name, value in state.items()
                if is_on_device(name, value, share.group_of(part.parameter))
                and not self.device.copies_fast(value)
                and not self._disk.holds(value)
                # What is newer on the device goes back there.
                and not self.home.holds((part.parameter, name), value)
            ]
        homes = self.on_host([value for _, _, value in slow])
        for (state, name, value), home in zip(slow, homes, strict=True):
            state[name] = home.copy_(value)

    def _homes(
        self, parameters: Sequence[nn.Parameter], likes: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """Places where new state of some parameters lives, for tensors like these."""
        on_disk = list(map(self._disk.place_for, parameters, lay_out(likes, dtypes)[0]))
        rest = [number for number, place in enumerate(on_disk) if place is None]
        on_host = iter(self.on_host([likes[number] for number in rest], [dtypes[number] for number in rest]))
        return [next(on_host) if place is None else place for place in on_disk]

    def on_host(self, likes: Sequence[Tensor], dtypes: Sequence[torch.dtype] | None = None) -> list[Tensor]:
        """Memory on the host for tensors like these, one behind the other, of other types if these are given."""
        slots, num_bytes = lay_out(likes, dtypes)
        if not slots:
            return []
        memory = self._memory_on_host(num_bytes).numpy()
        return [slot.apart(memory) for slot in slots]

    def _memory_on_host(self, num_bytes: int) -> Tensor:
        """A flat uint8 buffer on the host that the device copies from and to, at full speed if possible."""
        buffers: list[Tensor] = []
        try:
            # As work of this GPU: in a thread that has chosen none, the first one would lock the memory.
            self._streams[0].submit(lambda: buffers.append(self.device.host_buffer(num_bytes)))
        except (RuntimeError, OSError, MemoryError):
            # The system locks no more memory: copies are slower.
            buffers.append(flat_buffer(num_bytes, torch.device("cpu")))
        return buffers[0]

    def memory_for_direct_copies(self, num_bytes: int) -> Tensor:
        """What the disk's buffers are made of. As above, it is locked as work of this GPU."""
        buffers: list[Tensor] = []
        self._streams[0].submit(lambda: buffers.append(memory_for_direct_copies(self.device, num_bytes)))
        return buffers[0]

    def finish(self) -> None:
        """Wait until all is back on the host that was launched: for state that lives on disk, in buffers."""
        for stream in self._streams:
            stream.submit(lambda: None).synchronize()

    def close(self) -> None:
        """Finish what is under way, and let the memory go."""
        for stream in self._streams:
            stream.close()
        self._buffers, self._large = [], None


def _sort_states(
    share: Share, made: Mapping[nn.Parameter, Mapping[str, Any]], parameters: Iterable[nn.Parameter]
) -> None:
    """Bring the states of some parameters into the order in which a step has made them."""
    for parameter in parameters:
        state = share.state(parameter)
        for name in [name for name in made[parameter] if name in state]:
            state[name] = state.pop(name)


def _state_of(share: Share, part: Part, there: Values) -> dict[str, Any]:
    """The state of a part, its tensors where they are on the device."""
    state: dict[str, Any] = {}
    for name, value in share.state(part.parameter).items():
        if (part.parameter, name) in there:
            state[name] = there[part.parameter, name]
        else:
            state[name] = own_of(part, value) if isinstance(value, Tensor) else value
    return state

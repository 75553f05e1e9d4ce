"""Updates on a device of what lives on the host: parameters and optimizer state come in pieces, and go back.

Gradients come with them, or are used where they are, if this device has summed them.

Each piece is stepped by the user's own optimizer, so that results have the bits of plain training on that device. Two pieces
are under way at a time: one comes, or is stepped, while the other goes back. No more are asked for: all copies to a device
queue for one engine, and what lanes need at once would wait behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.device import Device, flat_buffer
from lightning_harmony.engine.devices.stream import Event, Happened
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.model.host_store import Slot, lay_out
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
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.values.memory_size import format_bytes

# What a piece may take on a device: a share of its capacity, and at most. Two are there at a time.
_SHARE_OF_CAPACITY, _LEAST_BYTES, _MOST_BYTES = 32, 8 << 10, 128 << 20
# Bytes of state for each byte of a parameter, where there is none yet: the two moments of Adam.
_ASSUMED_COPIES = 2


class StreamedUpdate:
    """Updates what lives on the host, piece by piece on a device.

    Args:
        device: where pieces are stepped.
        is_swapped: whether the host is the home of a parameter because layers are swapped. Any other is stepped where it is.
        on_host: whether all parameters are stepped where they are.
        traffic: counts what comes and goes.
    """

    def __init__(
        self,
        device: Device,
        is_swapped: Callable[[nn.Parameter], bool] = lambda parameter: True,
        *,
        on_host: bool = False,
        traffic: Traffic | None = None,
    ) -> None:
        self.device = device
        self._is_swapped = is_swapped
        self._on_host = on_host
        self._stage = _Stage(device, traffic or Traffic())

    @property
    def is_on_device(self) -> bool:
        """Whether what is swapped is updated on the device."""
        return not self._on_host

    @property
    def spares_the_bus(self) -> bool:
        """Whether there is one, which gradients need not cross where they stay on their device."""
        return self.is_on_device and self.device.computes_apart

    def open(self) -> None:
        """Take the memory on the device, before anybody plans with what is left."""
        if not self._on_host:
            self._stage.open()

    def update(
        self,
        share: Share,
        clip: Clip | None = None,
        *,
        keeps_gradients: bool = False,
        between: Callable[[], None] | None = None,
    ) -> None:
        """Clip gradients and step, and return when the host has what has changed.

        Args:
            share: what is updated.
            clip: changes gradients before they are used; None if they are used as they are.
            keeps_gradients: whether somebody may look at gradients afterwards.
            between: called between pieces. It may make another update.
        """
        gradients = share.gradients
        streamed = [] if self._on_host else [parameter for parameter in gradients if self._is_swapped(parameter)]
        comes = frozenset(streamed)
        elsewhere = {parameter: parameter.detach() for parameter in gradients if parameter not in comes}
        if elsewhere:
            make_step(share, clip, elsewhere, gradients, {parameter: share.state(parameter) for parameter in elsewhere})
        if streamed:
            self._stream(share, streamed, gradients, clip, between or (lambda: None), keeps_gradients=keeps_gradients)
        share.keep_states()

    def _stream(
        self,
        share: Share,
        streamed: Sequence[nn.Parameter],
        gradients: Mapping[nn.Parameter, Tensor],
        clip: Clip | None,
        between: Callable[[], None],
        *,
        keeps_gradients: bool,
    ) -> None:
        self.open()
        homes: _Values = {}
        there = [parameter for parameter in streamed if self.device.owns(gradients[parameter])]
        coming = [parameter for parameter in streamed if not self.device.owns(gradients[parameter])]
        try:
            for parameters in (coming, there):
                num_copies = _state_copies(share, parameters) + (2 if parameters is coming else 1)
                pieces = Pieces(parameters, self._stage.num_bytes // num_copies, partial(may_be_cut, share))
                for number, piece in enumerate(pieces):
                    if number > 0:
                        between()
                    self._stage.launch(share, piece, gradients, clip, homes, keeps_gradients=keeps_gradients)
        finally:
            self._stage.finish()

    def close(self) -> None:
        """Finish what is under way, and let the memory on the device go."""
        self._stage.close()


def _state_copies(share: Share, parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of optimizer state that come to a device for each byte of some parameters, rounded up."""
    num_bytes: int = sum(
        value.nbytes
        for parameter in parameters
        for name, value in share.state(parameter).items()
        if is_on_device(name, value, share.group_of(parameter))
    )
    if not num_bytes:
        return _ASSUMED_COPIES
    return -(-num_bytes // max(sum(parameter.nbytes for parameter in parameters), 1))


# Of parameters and the names in their states.
_Values = dict[tuple[nn.Parameter, str], Tensor]


class _Stage:
    """The memory and the streams of a device in which pieces are stepped.

    Attributes:
        device: which one.
        num_bytes: what a piece has there.
    """

    def __init__(self, device: Device, traffic: Traffic) -> None:
        self.device = device
        self._traffic = traffic
        self.num_bytes = _MOST_BYTES
        if device.capacity_bytes is not None:
            self.num_bytes = max(min(device.capacity_bytes // _SHARE_OF_CAPACITY, _MOST_BYTES), _LEAST_BYTES)
        # Of what comes, of steps, and of what goes back.
        # Steps are short, and hold up all of the three where they wait for what computes.
        self._streams = [device.side_stream(), device.side_stream(is_urgent=True), device.side_stream()]
        # Two, the one that is used next first, each with the event after which it may be written.
        self._buffers: list[tuple[Tensor, Event]] = []
        self._large: Tensor | None = None

    def open(self) -> None:
        """Take the memory for two pieces."""
        if not self._buffers:
            self._buffers = [(self._allocate(self.num_bytes), Happened()) for _ in range(2)]

    def _allocate(self, num_bytes: int) -> Tensor:
        return self.device.staging(num_bytes, self._streams[0])

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

    def launch(
        self,
        share: Share,
        piece: Sequence[Part],
        gradients: Mapping[nn.Parameter, Tensor],
        clip: Clip | None,
        homes: _Values,
        *,
        keeps_gradients: bool,
    ) -> None:
        """Start to bring a piece, to step it, and to send back what that changes.

        Args:
            share: whose piece it is.
            piece: what is stepped.
            gradients: of the share.
            clip: changes gradients before.
            homes: on the host, of the state that steps have made of a parameter whose last part is yet to come.
            keeps_gradients: whether gradients go back if they are clipped.
        """
        coming, stepping, leaving = self._streams
        with self.device.on_host():
            self._make_fast(share, piece)
            values = {
                (part.parameter, name): own_of(part, value)
                for part in piece
                for name, value in share.state(part.parameter).items()
                if is_on_device(name, value, share.group_of(part.parameter))
            }
        parameters = {part.parameter: part.of(part.parameter.detach()) for part in piece}
        masters = {
            part.parameter: part.of(share.masters.get(part.parameter, part.parameter.detach())) for part in piece
        }
        gradients = {part.parameter: part.of(gradients[part.parameter]) for part in piece}
        coming_gradients = {p: gradient for p, gradient in gradients.items() if not self.device.owns(gradient)}
        sources = [*masters.values(), *coming_gradients.values(), *values.values()]
        slots, num_bytes = lay_out(sources)
        fits = num_bytes <= self.num_bytes
        buffer, left = self._buffers[0] if fits else (self._large_buffer(num_bytes), Happened())
        there = [slot.view(buffer) for slot in slots]
        # Copies that wait in the engine's queue would hold up all behind them.
        left.synchronize()
        arrived = coming.submit(partial(copy_all, list(zip(there, sources, strict=True))))
        rest = iter(there)
        parameters_there = {parameter: next(rest) for parameter in parameters}
        gradients_there = gradients | {parameter: next(rest) for parameter in coming_gradients}
        values_there = {key: next(rest) for key in values}
        with self.device.on_host():
            states = {part.parameter: _state_of(share, part, values_there) for part in piece}
        step = partial(make_step, share, clip, parameters_there, gradients_there, states)
        stepped = stepping.submit(step, [arrived])
        changed = [(parameters[parameter], value) for parameter, value in parameters_there.items()]
        if clip is not None and keeps_gradients:
            changed += [(gradient, gradients_there[parameter]) for parameter, gradient in coming_gradients.items()]
        with self.device.on_host():
            made = self._made(share, piece, states, values, homes)
        left = leaving.submit(partial(copy_all, changed + made), [stepped])
        self._traffic.count_in("optimizer", sum(each.nbytes for each in sources if not self.device.owns(each)))
        self._traffic.count_out("optimizer", sum(value.nbytes for _, value in changed + made))
        if fits:
            self._buffers = [*self._buffers[1:], (buffer, left)]
        if not fits or any(value.untyped_storage()._cdata != buffer.untyped_storage()._cdata for _, value in made):
            # The next piece may use the memory of what is not in one of the two buffers.
            left.synchronize()

    def _made(
        self,
        share: Share,
        piece: Sequence[Part],
        states: Mapping[nn.Parameter, Mapping[str, Any]],
        values: _Values,
        homes: _Values,
    ) -> list[tuple[Tensor, Tensor]]:
        """What a step has left in its states on the device, each with the place on the host where it goes."""
        pairs: list[tuple[Tensor, Tensor]] = []
        new: list[tuple[Part, str, Tensor]] = []
        for part in piece:
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
                elif key in values and _is_alike(values[key], value):
                    pairs.append((values[key], value))
                else:
                    new.append((part, name, value))
        without = [each for each in new if (each[0].parameter, each[1]) not in homes]
        likes = [
            part.parameter if value.dim() > 0 and part.elements is not None else value for part, _, value in without
        ]
        for (part, name, _), home in zip(
            without, self._homes(likes, [value.dtype for _, _, value in without]), strict=True
        ):
            homes[part.parameter, name] = home
        for part, name, value in new:
            home = homes[part.parameter, name]
            pairs.append((part.of(home), value))
            if part.is_last:
                share.state(part.parameter)[name] = home
        return pairs

    def _make_fast(self, share: Share, piece: Sequence[Part]) -> None:
        """Let optimizer state lie where this device copies from and to at full speed."""
        slow = [
            (share.state(part.parameter), name, value)
            for part in piece
            for name, value in share.state(part.parameter).items()
            if part.is_first
            and is_on_device(name, value, share.group_of(part.parameter))
            and not self.device.copies_fast(value)
        ]
        homes = self._homes([value for _, _, value in slow], [value.dtype for _, _, value in slow])
        for (state, name, value), home in zip(slow, homes, strict=True):
            state[name] = home.copy_(value)

    def _homes(self, likes: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Memory on the host for tensors like these, one behind the other."""
        slots, num_bytes = lay_out(likes, dtypes)
        if not slots:
            return []
        buffers: list[Tensor] = []
        try:
            # As work of this GPU: in a thread that has chosen none, the first one would lock the memory.
            self._streams[0].submit(lambda: buffers.append(self.device.host_buffer(num_bytes)))
        except (RuntimeError, OSError, MemoryError):
            # The system locks no more memory: copies are slower.
            buffers.append(flat_buffer(num_bytes, torch.device("cpu")))
        memory = buffers[0].numpy()
        return [_with_own_storage(slot, memory) for slot in slots]

    def finish(self) -> None:
        """Wait until all is back on the host that was launched."""
        for stream in self._streams:
            stream.submit(lambda: None).synchronize()

    def close(self) -> None:
        """Finish what is under way, and let the memory go."""
        for stream in self._streams:
            stream.close()
        self._buffers, self._large = [], None


def _with_own_storage(slot: Slot, memory: Any) -> Tensor:
    """A place in memory that others are in, too, as a tensor whose storage is that place: who saves it saves no more."""
    if slot.num_bytes == 0:
        return torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype)
    flat = torch.frombuffer(memory, dtype=slot.dtype, count=slot.shape.numel(), offset=slot.offset)
    return flat.as_strided(slot.shape, slot.stride)


def _state_of(share: Share, part: Part, there: _Values) -> dict[str, Any]:
    """The state of a part, its tensors where they are on the device."""
    state: dict[str, Any] = {}
    for name, value in share.state(part.parameter).items():
        if (part.parameter, name) in there:
            state[name] = there[part.parameter, name]
        else:
            state[name] = own_of(part, value) if isinstance(value, Tensor) else value
    return state


def _is_alike(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype

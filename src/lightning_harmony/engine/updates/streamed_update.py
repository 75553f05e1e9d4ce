"""Updates on a device of what lives on the host: parameters and optimizer state come in pieces, and go back.

Gradients come with them, or are used where they are, if this device has summed them. State stays between updates where there
is room for it, and nobody looks.

Each piece is stepped by the user's own optimizer, so that results have the bits of plain training on that device. Two pieces
are under way at a time: one comes, or is stepped, while the other goes back. No more are asked for: all copies to a device
queue for one engine, and what lanes need at once would wait behind them. State that lives on disk is read some pieces ahead,
and is written while the next pieces are stepped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.updates.device_step import (
    ASSUMED_STATE_COPIES,
    Part,
    Pieces,
    is_on_device,
    make_step,
    may_be_cut,
)
from lightning_harmony.engine.updates.disk_home import NUM_BUFFERS, DiskHome
from lightning_harmony.engine.updates.optimizer_twin import Clip, Share
from lightning_harmony.engine.updates.update_stage import Piece, Stage, Values
from lightning_harmony.engine.updates.whole_step import WholeStep

# How many pieces' state is read from disk before its turn.
PIECES_AHEAD = 2


class StreamedUpdate:
    """Updates what lives on the host, piece by piece on a device.

    Args:
        device: where pieces are stepped.
        is_swapped: whether the host is the home of a parameter because layers are swapped. Any other is stepped where it is.
        on_host: whether all parameters are stepped where they are.
        traffic: counts what comes and goes.
        disk: where optimizer state may live; None if it may not.

    Attributes:
        device: the same.
        disk: the same; one that is used for nothing if there is none.
        is_on_device: whether what is swapped is updated on the device.
        home: keeps optimizer state on the device from update to update.
        whole_step: steps there optimizers that look at all parameters together; None if they step on the host.
    """

    def __init__(
        self,
        device: Device,
        is_swapped: Callable[[nn.Parameter], bool] = lambda parameter: True,
        *,
        on_host: bool = False,
        traffic: Traffic | None = None,
        disk: DiskHome | None = None,
    ) -> None:
        self.device = device
        self.disk = DiskHome() if disk is None else disk
        self._is_swapped = is_swapped
        self.is_on_device = not on_host
        traffic = traffic or Traffic()
        self._stage = Stage(device, traffic, self.disk)
        self.home = self._stage.home
        self.whole_step = None if on_host else WholeStep(device, is_swapped, self._stage.on_host, traffic)

    @property
    def spares_the_bus(self) -> bool:
        """Whether gradients that stay on their device need not cross a bus for its updates."""
        return self.is_on_device and self.device.computes_apart

    def open(self) -> None:
        """Take the memory on the device, before anybody plans with what is left."""
        if self.is_on_device:
            self._stage.open()
            self.disk.open(self._stage.memory_for_direct_copies, self._stage.num_bytes)

    @property
    def disk_buffer_bytes(self) -> int:
        """What the disk will take of the host as the home of some state, unless it has that."""
        return 0 if self.disk.has_buffers else NUM_BUFFERS * self._stage.num_bytes

    def move_to_disk(
        self, state_bytes: Mapping[nn.Parameter, int], states: Mapping[nn.Parameter, dict[str, Any]]
    ) -> None:
        """Let the disk be the home of the state of some parameters, and bring what there is of it.

        Args:
            state_bytes: of each, what its state will take.
            states: of optimizers, which have nothing under way.

        Raises:
            CapacityError: if the disk has too little room.
        """
        self.disk.take(state_bytes)
        self.disk.open(self._stage.memory_for_direct_copies, self._stage.num_bytes)
        self.bring_to_disk(states)

    def bring_to_disk(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Bring what there is of optimizers' state that lives on disk, and is not there."""
        for parameter, state in states.items():
            self.disk.bring(parameter, state)

    def bring_back(self) -> None:
        """Bring optimizer state that stays on the device to the host. Nothing is under way."""
        self._stage.bring_back()

    # ---- updates -------------------------------------------------------------------------------------------------------

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
        streamed = [p for p in gradients if self._is_swapped(p)] if self.is_on_device else []
        comes = frozenset(streamed)
        elsewhere = {parameter: parameter.detach() for parameter in gradients if parameter not in comes}
        if elsewhere:
            make_step(share, clip, elsewhere, gradients, {parameter: share.state(parameter) for parameter in elsewhere})
        if streamed:
            with self.disk.one_update if self.disk.is_in_use else nullcontext():
                self._stream(share, streamed, clip, between or (lambda: None), keeps_gradients=keeps_gradients)
        share.keep_states()

    def _stream(
        self,
        share: Share,
        streamed: Sequence[nn.Parameter],
        clip: Clip | None,
        between: Callable[[], None],
        *,
        keeps_gradients: bool,
    ) -> None:
        self.open()
        homes: Values = {}
        there = [parameter for parameter in streamed if self.device.owns(share.gradients[parameter])]
        coming = [parameter for parameter in streamed if not self.device.owns(share.gradients[parameter])]
        called: deque[Piece] = deque()
        try:
            for parameters in (coming, there):
                num_copies = self._state_copies(share, parameters) + (2 if parameters is coming else 1)
                pieces = iter(Pieces(parameters, self._stage.num_bytes // num_copies, partial(may_be_cut, share)))
                is_first = True
                while self._call_for(share, pieces, called):
                    if not is_first:
                        between()
                    is_first = False
                    self._stage.launch(share, called[0], clip, homes, keeps_gradients=keeps_gradients)
                    called.popleft()
        finally:
            self._stage.finish()
            for piece in called:
                piece.drop()

    def _state_copies(self, share: Share, parameters: Sequence[nn.Parameter]) -> int:
        """Bytes of optimizer state that come to the device for each byte of some parameters, rounded up."""
        num_bytes: int = sum(
            value.nbytes
            for parameter in parameters
            for name, value in share.state(parameter).items()
            if is_on_device(name, value, share.group_of(parameter))
        )
        if not num_bytes:
            return ASSUMED_STATE_COPIES
        spared = sum(map(self.home.spared_bytes, parameters))
        return -(-(num_bytes - spared) // max(sum(parameter.nbytes for parameter in parameters), 1))

    def _call_for(self, share: Share, pieces: Iterator[list[Part]], called: deque[Piece]) -> bool:
        """Have the state of the next pieces come from disk; whether there is a next one."""
        while not called or (len(called) <= PIECES_AHEAD and self.disk.may_read_ahead):
            parts = next(pieces, None)
            if parts is None:
                break
            called.append(self._stage.call_for(share, parts))
        return bool(called)

    def close(self) -> None:
        """Finish what is under way, and let the memory on the device go."""
        self._stage.close()

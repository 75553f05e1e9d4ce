"""The device as a home of optimizer state: it stays there from one update to the next, until somebody may look at it.

Its place on the host stays its place, to which what has changed since goes back then. So code that reads optimizer state
finds it where the parameters are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from lightning_harmony.engine.model.host_store import lay_out
from lightning_harmony.engine.updates.device_step import Part

Key = tuple[nn.Parameter, str]


class _Held(NamedTuple):
    """A tensor that stays on the device.

    Attributes:
        on_host: its place there.
        there: the tensor.
    """

    on_host: Tensor
    there: Tensor


class DeviceHome:
    """Keeps optimizer state on one device.

    Args:
        allocate: makes a flat buffer of so many bytes there; None if there is no room.

    Attributes:
        parameters: whose state may stay.
        is_open: whether any may stay behind the updates that come.
        num_bytes: what is there.
    """

    def __init__(self, allocate: Callable[[int], Tensor | None]) -> None:
        self.parameters: frozenset[nn.Parameter] = frozenset()
        self.is_open = False
        self.num_bytes = 0
        self._allocate = allocate
        self._held: dict[Key, _Held] = {}
        self._spared: Counter[nn.Parameter] = Counter()

    def spared_bytes(self, parameter: nn.Parameter) -> int:
        """What of the state of a parameter need not come for its update, and need not go."""
        return self._spared[parameter]

    def keeps_others_than(self, parameters: frozenset[nn.Parameter]) -> bool:
        """Whether state is here that is of none of these parameters."""
        return bool(self.num_bytes) and not self.parameters <= parameters

    def moved_share(self, parameters: Iterable[nn.Parameter]) -> float:
        """What an update of some parameters sends back to the host, as a share of what it would if nothing stayed."""
        if not self.is_open:
            return 1.0
        num_bytes = sum(parameter.nbytes for parameter in parameters)
        return num_bytes / max(num_bytes + sum(map(self.spared_bytes, parameters)), 1)

    def make_room(self, parts: Sequence[Part], state: Mapping[Key, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Make places for the state of parameters whose update begins, as there is room.

        Args:
            parts: that are updated next.
            state: theirs, each tensor as a whole. Single numbers come and go with each update.

        Returns:
            The new places, each with what has to come there before anything else does.
        """
        begun = {part.parameter for part in parts if part.is_first and self.is_open} & self.parameters
        new = {
            key: tensor
            for key, tensor in state.items()
            if key[0] in begun and tensor.dim() > 0 and not self.holds(key, tensor)
        }
        for key in new:
            # It has another place on the host by now.
            self.drop(key)
        slots, num_bytes = lay_out(list(new.values()))
        buffer = self._allocate(num_bytes) if slots else None
        if buffer is None:
            return []
        for (key, tensor), slot in zip(new.items(), slots, strict=True):
            held = self._held[key] = _Held(tensor, slot.view(buffer))
            self.num_bytes += held.there.nbytes
            self._spared[key[0]] += held.there.nbytes
        return [(self._held[key].there, tensor) for key, tensor in new.items()]

    def places_of(self, state: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Where tensors of state are that stay, each as a whole."""
        return {key: self._held[key].there for key, tensor in state.items() if self.holds(key, tensor)}

    def holds(self, key: Key, tensor: Tensor) -> bool:
        """Whether a tensor on the host is the place of one that is here."""
        held = self._held.get(key)
        return held is not None and held.on_host is tensor

    def drop(self, key: Key) -> None:
        """A tensor has another place from now on, or is another one."""
        held = self._held.pop(key, None)
        if held is not None:
            self.num_bytes -= held.there.nbytes
            self._spared[key[0]] -= held.there.nbytes

    def leave(self, parameter: nn.Parameter, names: Iterable[str]) -> list[tuple[Tensor, Tensor]]:
        """The state of a parameter stays no longer: its places on the host, each with what goes there."""
        keys = [(parameter, name) for name in names if (parameter, name) in self._held]
        leaving: list[tuple[Tensor, Tensor]] = [self._held[key] for key in keys]
        for key in keys:
            self.drop(key)
        return leaving

    def to_host(self) -> Sequence[tuple[Tensor, Tensor]]:
        """The places on the host of all that is here, each with what goes there."""
        return list(self._held.values())

    def clear(self) -> None:
        """All is on the host."""
        self._held, self.num_bytes = {}, 0
        self._spared.clear()

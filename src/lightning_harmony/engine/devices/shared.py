"""What several lanes share: where each has streams of its own, one waits for another there, and only there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_harmony.engine.devices.device import Device


class SharedTensors:
    """Knows which lanes' own work wrote and read what in a step on several devices.

    Nearly all is one lane's alone. The state of metrics and what else a step changes on its modules is not: there a lane
    waits for those that used it before. That goes by storages, which views share.

    Args:
        devices: where tensors may be.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._writers: dict[int, int] = {}
        self._readers: dict[int, set[int]] = {}

    def clear(self) -> None:
        """No lane works any more."""
        self._writers.clear()
        self._readers.clear()

    def reading(self, lane: int, tensor: Tensor, home: int) -> None:
        """A lane is about to read a tensor on a device."""
        key = storage_of(tensor)
        if key is None or (writer := self._writers.get(key)) == lane:
            return
        readers = self._readers.setdefault(key, set())
        # Once for what was last written.
        if lane not in readers:
            readers.add(lane)
            self._wait_for([writer], lane, tensor, home)

    def writing(self, lane: int, tensor: Tensor, home: int) -> None:
        """A lane is about to write to a tensor on a device."""
        key = storage_of(tensor)
        if key is not None:
            self._wait_for([self._writers.get(key), *self._readers.pop(key, ())], lane, tensor, home)
            self._writers[key] = lane

    def made(self, lane: int, tensor: Tensor) -> None:
        """A lane has made a tensor."""
        key = storage_of(tensor)
        if key is not None:
            self._readers.pop(key, None)
            self._writers[key] = lane

    def _wait_for(self, users: Iterable[int | None], lane: int, tensor: Tensor, home: int) -> None:
        others = {user for user in users if user != lane}
        for other in others:
            if other is not None:
                self._devices[home].await_lane(other)
        if others:
            # Nor may its memory be used again before this lane is done with it, whoever made it, also in an earlier step.
            self._devices[home].hand_out([tensor])


def storage_of(tensor: Tensor) -> int | None:
    """What tells a tensor's storage from all others alive; None if it has none of its own."""
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    storage: int = tensor.untyped_storage()._cdata
    return storage

"""Weight checks: find what the code of layers does to weights on a device where no version tells."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Event
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.operations import Unseen
from lightning_harmony.errors import UnsupportedModelError


class _Compared(NamedTuple):
    """The weights of a pack, compared.

    Attributes:
        pack: its layers, in words.
        differ: whether they were changed, shape ().
        event: when it is known.
    """

    pack: str
    differ: Tensor
    event: Event


class WeightChecks:
    """Compares checksums of the weights of packs from before and after what layers do with them.

    A version tells of most changes, and the call of a layer looks at that. None tells of what is done to an alias in NumPy or
    through `.data` of a view, or by `torch._foreach_*`. Weights that are not written leave the device without a copy: the
    change would be lost. To read weights on a GPU takes a twentieth of their copy from the host.

    Args:
        device: where the weights are.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.side_stream()
        self._compared: list[_Compared] = []
        # Checksums from before, which last until they are compared.
        self._before = deque[tuple[Event, Tensor]]()
        # On the host: whether any differ, and when that is there.
        self._flag: Tensor | None = None
        self._told: Event | None = None

    def begin(self, pack: SwappedPack) -> None:
        """Layers of a pack, whose weights are there, are about to run."""
        residency = pack.residency
        if residency is not None and residency.checksum is None:
            # A small part of a GPU's memory: small networks' capacities have no room for it.
            with torch.inference_mode(False), Unseen(), self._device.on_host():
                residency.checksum = checksum(residency.weights)

    def end(self, pack: SwappedPack) -> None:
        """Layers of a pack have run: start to compare, if that was to be done. Beside what computes."""
        residency = pack.residency
        if residency is None or residency.checksum is None:
            return
        weights, before = residency.weights, residency.checksum
        residency.checksum = None
        found: list[Tensor] = []

        def compare() -> None:
            differ = (checksum(weights) != before).any()
            found.append(differ)

        after = [self._device.record()] if residency.last_use is None else [residency.last_use]
        with self._device.on_host():
            event = self._stream.submit_brief(compare, after)
        residency.beside.append(event)
        what = "layer" if len(pack.layers) == 1 else "one of the layers"
        self._compared.append(_Compared(f"{what} {pack.name!r}", found[0], event))
        self._before.append((event, before))
        while self._before and self._before[0][0].done():
            self._before.popleft()

    def conclude(self) -> None:
        """All that was to be compared is: start to let the host know, which may go on meanwhile."""
        if not self._compared:
            return
        with self._device.on_host():
            flag = self._flag = self._device.host_buffer(1) if self._flag is None else self._flag
            differ = [each.differ for each in self._compared]

            def tell() -> None:
                flag.copy_(torch.stack(differ).any().view(1), non_blocking=True)

            self._told = self._stream.submit_brief(tell)

    def refuse_changed(self) -> None:
        """Refuse a step in which layers have changed weights, as far as that was concluded.

        Raises:
            UnsupportedModelError: naming the pack.
        """
        told, self._told = self._told, None
        if told is None:
            return
        told.synchronize()
        compared, self._compared = self._compared, []
        self._before.clear()
        assert self._flag is not None
        if not self._flag[0]:
            return
        pack = next(each.pack for each in compared if each.differ)
        raise UnsupportedModelError(
            f"{pack} changes the data of a parameter in its forward, past autograd, such as in NumPy, through .data of "
            "a view or by torch._foreach_*, which swapping would lose; do that in a hook such as on_train_batch_start"
        )

    def forget(self) -> None:
        """What was compared does not matter any more."""
        for each in self._compared:
            each.event.synchronize()
        if self._told is not None:
            self._told.synchronize()
        self._compared, self._told = [], None
        self._before.clear()

    def close(self) -> None:
        """Let the stream go."""
        self._stream.close()

"""Recorded work of a virtual device, for tests of what is recorded on GPUs."""

from __future__ import annotations

import torch

from lightning_harmony.engine.devices.recording import Made, Work
from lightning_harmony.engine.devices.virtual_device import VirtualDevice


class HostRecording:
    """Work of the host, done again by running its code.

    Args:
        device: counts none of its memory, as that of a CUDA graph is its own.
        work: does it. It is run once at once.
    """

    def __init__(self, device: VirtualDevice, work: Work) -> None:
        self._work, self._apart = work, device.on_host
        with device.on_host():
            self.made: Made = list(work())

    def replay(self) -> None:
        """Run it, and let its results be where the first ones were."""
        with self._apart():
            for place, tensor in zip(self.made, self._work(), strict=True):
                if place is not None and tensor is not None:
                    with torch.no_grad():
                        place.copy_(tensor)


def recorded(device: VirtualDevice, work: Work) -> HostRecording:
    """Record work, as `Device.recorded`."""
    return HostRecording(device, work)

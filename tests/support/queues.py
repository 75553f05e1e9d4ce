"""Updates of a few devices, for tests of what waits for them."""

from collections.abc import Sequence

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.updates.postponed import PostponedUpdate
from lightning_harmony.engine.updates.queue import Overlap, UpdateQueue
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate


def queues_of(devices: Sequence[Device], overlap: Overlap | None = None) -> list[UpdateQueue]:
    """A queue for each device."""
    overlap = overlap or Overlap()
    return [UpdateQueue(StreamedUpdate(device), overlap) for device in devices]


def postponed_update(*devices: Device) -> PostponedUpdate:
    """One that nobody has asked for yet."""
    overlap = Overlap()
    return PostponedUpdate(queues_of(devices, overlap), overlap)

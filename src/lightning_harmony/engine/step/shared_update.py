"""The postponed update, shared out between the host and the devices."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.engine.updates.postponed import Clip, PostponedUpdate
from lightning_harmony.plan.search.device_updates import Postponed, left_to_devices


def start_postponed(
    update: PostponedUpdate,
    optimizer: Optimizer,
    clip: Clip | None,
    placement: Placement,
    swap_in_bytes_per_second: float | None,
) -> None:
    """Ask for an update of all packs before the next forward comes to each.

    Args:
        update: makes it.
        optimizer: the one to step.
        clip: changes gradients before they are used.
        placement: of the packs.
        swap_in_bytes_per_second: of copies to a device; None if that isn't known.
    """
    packs = placement.in_order()
    on_host = update.fastest.bytes_per_second
    places = _left_to_devices(optimizer, placement, packs, on_host, swap_in_bytes_per_second)
    update.start(optimizer, [pack.parameters for pack in packs], clip, places)


def _left_to_devices(
    optimizer: Optimizer,
    placement: Placement,
    packs: Sequence[SwappedPack],
    on_host: float | None,
    swap_in: float | None,
) -> frozenset[int]:
    """Which of these packs devices update as they come, by their places."""
    plan, devices = placement.plan, [residents.device for residents in placement.residents]
    # What computes with the host's own processor would not relieve it.
    if on_host is None or swap_in is None or not all(device.computes_apart for device in devices):
        return frozenset()
    # Layer by layer, a step has no room for it. Copies of a pack on several devices would have to be updated one by one.
    if plan.profile is None or not plan.just_in_time or (len(devices) > 1 and plan.parallel == "data"):
        return frozenset()
    device_of = {pack.index: plan.device_of(pack.index, 0) for pack in packs}
    able: dict[int, int] = {}
    for number, residents in enumerate(placement.residents):
        own = [index for index in device_of if device_of[index] == number and index not in plan.spread]
        able |= residents.swapper.updates.postpone(optimizer, [residents.packs[index] for index in own])
    shares = [
        Postponed(
            sum(parameter.nbytes for parameter in pack.parameters if parameter.grad is not None),
            pack.layout.copied_bytes,
            able.get(pack.index),
            device_of[pack.index],
        )
        for pack in packs
    ]
    return left_to_devices(shares, on_host, swap_in)

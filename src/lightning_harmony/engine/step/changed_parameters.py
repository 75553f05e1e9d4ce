"""Parameters that a step's own code changes on a device: behind that, the host has what they have become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.operations import Unseen, detached


@contextmanager
def changing(parameter: nn.Parameter, device: torch.device, placement: Placement) -> Iterator[Tensor]:
    """The context in which a copy of a parameter is on a device, to be changed there."""
    having = placement.packs_with(parameter)
    for residents, pack in having:
        residents.swapper.await_update(pack)
    with torch.inference_mode(False), torch.no_grad():
        there = detached(parameter).to(device, copy=True)
        yield there
        # The host's memory does not count on a device.
        with Unseen():
            for residents in placement.residents:
                residents.swapper.finish_reading()
            parameter.copy_(there)
    # What has come meanwhile is as it was.
    for residents, pack in having:
        residents.evict(pack)


def keep(
    changed: Mapping[nn.Parameter, Tensor], residency: Residency, placement: Placement
) -> dict[nn.Parameter, Tensor]:
    """Give the host what a layer's code has made of parameters on a device. What they were there.

    Args:
        changed: what they have become.
        residency: of the pack that has them.
        placement: of all packs.
    """
    with torch.inference_mode(False), Unseen():
        before = {parameter: parameter.detach().clone() for parameter in changed}
        for residents in placement.residents:
            residents.swapper.finish_reading()
        for parameter, value in changed.items():
            parameter.copy_(value.detach())
        if residency.checksum is not None:
            residency.checksum = checksum(residency.weights)
    for parameter in changed:
        for residents, pack in placement.packs_with(parameter):
            if pack.residency is not residency:
                residents.evict(pack)
    return before

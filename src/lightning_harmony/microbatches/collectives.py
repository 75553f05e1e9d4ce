"""Collectives: operations of several processes, which all of them must begin in the same order."""

from __future__ import annotations

from typing import Any

from torch import distributed

from lightning_harmony.engine.nodes.exchange import is_of_exchange


def num_collectives() -> int:
    """How many this process has begun, in all groups of which Lightning or users know; 0 where it is alone."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return 0
    # What exchanges gradients and weights goes on beside steps.
    groups = [group for group in distributed.distributed_c10d._world.pg_map if not is_of_exchange(group)]
    # Each type of device has a backend, which counts its own.
    backends: list[Any] = [group._get_backend(device) for group in groups for device in group._device_types]
    return sum(backend._get_sequence_number_for_group() for backend in backends)

"""How much of a GPU a fit may take, and how torch's allocator is kept to it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from lightning_harmony.plan.values.card_memory import CONTEXT_BYTES, SMALLEST_CARD_BYTES, allocatable_bytes

# The part of the context that comes after the context is there, of which more is found when kernels have run.
_LOADED_LATER_BYTES = 512 << 20
_CONFIGURATION = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class CudaBudget:
    """What a fit may take of a GPU.

    Attributes:
        capacity_bytes: what may be allocated, by which plans are made.
        reserved_bytes: what torch's allocator may have of the driver; None where it is not bounded.
        found_bytes: what it could have had when that was found.
    """

    capacity_bytes: int
    reserved_bytes: int | None
    found_bytes: int = 0

    @classmethod
    def of(cls, device: torch.device, limit_bytes: int | None) -> CudaBudget:
        """The budget on a GPU.

        Args:
            device: which one.
            limit_bytes: what the process may take of the card, its context included; None for all that is free. A limit of
                less than 4 GiB is one of what is allocated.
        """
        if limit_bytes is not None and limit_bytes < SMALLEST_CARD_BYTES:
            return cls(limit_bytes, None)
        found = _obtainable_bytes(device)
        reserved = found - _LOADED_LATER_BYTES
        if limit_bytes is not None:
            reserved = min(reserved, limit_bytes - CONTEXT_BYTES)
        reserved = max(reserved, 0)
        return cls(allocatable_bytes(reserved), reserved, found)

    def behind_kernels(self, device: torch.device) -> CudaBudget:
        """The budget when kernels of all kinds have run: their code, and what they spill, take of the card, too.

        Of a Llama in mixed precision, that is 1.4 GiB on an H100, which no allocator knows.
        """
        if self.reserved_bytes is None:
            return self
        more = self.found_bytes - _obtainable_bytes(device) - _LOADED_LATER_BYTES
        reserved = max(self.reserved_bytes - max(more, 0), 0)
        return replace(self, capacity_bytes=allocatable_bytes(reserved), reserved_bytes=reserved)


def _obtainable_bytes(device: torch.device) -> int:
    """What torch's allocator has of the driver, or could have."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def use_expandable_segments() -> None:
    """Let torch's allocator give memory of one size to another, unless the user has configured it.

    Without, what each stream has freed stays cut as it was: of 24 GiB, 13 were reserved and of no use when a fit ran out.
    """
    if any(name in os.environ for name in _CONFIGURATION):
        return
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (configure or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def bound_reserved_memory(device: torch.device, reserved_bytes: int | None) -> None:
    """Let torch's allocator free what it has cached before it takes more of the driver than this.

    Args:
        device: of which GPU.
        reserved_bytes: the bound; None for none.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    share = 1.0 if reserved_bytes is None else min(reserved_bytes / total, 1.0)
    torch.cuda.memory.set_per_process_memory_fraction(share, device)

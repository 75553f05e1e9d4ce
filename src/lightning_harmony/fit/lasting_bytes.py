"""What a model holds on its device from step to step, and whether that leaves room for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.structures.parts import parts_of
from lightning_harmony.updating.optimizer_state import ASSUMED_STATE_COPIES, expected_state_bytes


@dataclass(frozen=True)
class LastingBytes:
    """What a model holds on its device from step to step.

    Attributes:
        weights: parameters and buffers.
        gradients: of the parameters that are trained.
        state: of the optimizers.
    """

    weights: int
    gradients: int = 0
    state: int = 0

    @classmethod
    def of(cls, module: nn.Module, optimizers: Sequence[Optimizer] | None) -> LastingBytes:
        """Count, each storage once.

        Args:
            module: the model.
            optimizers: those that train it; None where nothing is trained.
        """
        tensors = [part for tensor in (*module.parameters(), *module.buffers()) for part in parts_of(tensor)]
        strided = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if _has_storage(t)}
        others = sum(t.numel() * t.element_size() for t in tensors if not _has_storage(t))
        weights = sum(strided.values()) + others
        if optimizers is None:
            return cls(weights)
        gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        state = expected_state_bytes(optimizers)
        return cls(weights, gradients, ASSUMED_STATE_COPIES * gradients if state is None else state)

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.state


def fits(lasting: LastingBytes, devices: Sequence[Device]) -> bool:
    """Whether what lasts leaves room for anything else; whether a batch finds room beside it, its first step shows.

    Of several devices, others than the first hold no optimizer state, but gradients twice while they are added up.
    """
    return all(device.capacity_bytes is None or lasting.total < device.capacity_bytes for device in devices)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta

"""Undoing a step in which microbatches took turns: buffers, and the states of metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_harmony.microbatches.snapshot import undo_of_tensor
from lightning_harmony.setup import compat

# Buffers up to this size are copied before each step in which microbatches take turns.
_SMALL_BYTES = 64 * 1024


class Versions:
    """Tells which buffers of a model change."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(buffer, _version(buffer)) for buffer in model.buffers()]

    def changed(self) -> set[int]:
        """Those that have changed since, by their identity."""
        return {id(buffer) for buffer, version in self._buffers if _version(buffer) != version}


class Undo:
    """What a step that microbatches take turns in changes beside attributes: buffers, and the states of metrics."""

    def __init__(self, model: nn.Module, changing: set[int]) -> None:
        self._versions = Versions(model)
        kept = [buffer for buffer in model.buffers() if _is_kept(buffer, changing)]
        self._kept, self._undo = set(map(id, kept)), [undo_of_tensor(buffer) for buffer in kept]
        self._metrics = [
            (
                vars(metric),
                dict(vars(metric)),
                {name: _state(vars(metric).get(name)) for name in compat.state_names(metric)},
            )
            for metric in model.modules()
            if isinstance(metric, Metric)
        ]

    def restore(self) -> bool:
        """Make all what it was; whether that is possible."""
        if not self._versions.changed() <= self._kept:
            return False
        with torch.no_grad():
            for undo in self._undo:
                undo()
        for attributes, before, states in self._metrics:
            attributes.clear()
            attributes.update(before, **states)
        return True


def _is_kept(buffer: Tensor, changing: set[int]) -> bool:
    """Whether a buffer is copied: of small ones no version tells that they change, as statistics of normalizations are."""
    return id(buffer) in changing or buffer.numel() * buffer.element_size() <= _SMALL_BYTES


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


def _state(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value

"""Metrics that a step reads: their states add up, whatever the order, but not for who computes or resets one meanwhile."""

from __future__ import annotations

from torch import nn
from torchmetrics import Metric

from lightning_harmony.held.walk import modules_of
from lightning_harmony.setup import compat


class ReadMetrics:
    """Tells whether microbatches that take turns would find something else in metrics.

    Args:
        model: whose metrics they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._metrics = [(name, module) for name, module in modules_of(model) if isinstance(module, Metric)]
        self._begun: list[tuple[int, object]] = []
        # Those that were updated before a layer was called.
        self._updated: set[str] = set()

    def begin(self) -> None:
        """A microbatch begins."""
        self._begun, self._updated = [_state_of(metric) for _, metric in self._metrics], set()

    def at_call(self) -> str | None:
        """It calls a layer: what speaks against taking turns."""
        for (name, metric), (count, computed) in zip(self._metrics, self._begun, strict=True):
            now, found = _state_of(metric)
            if now < count:
                return f"metric {name!r} is reset"
            if found is not None and found is not computed:
                return f"metric {name!r} is computed"
            if now != count:
                self._updated.add(name)
        return None

    def end(self) -> str | None:
        """It has come to its loss: what speaks against taking turns."""
        for (name, metric), (_, computed) in zip(self._metrics, self._begun, strict=True):
            found = compat.computed_value(metric)
            if name in self._updated and found is not None and found is not computed:
                return f"metric {name!r}, which is updated before a layer, is computed"
        return None


def _state_of(metric: Metric) -> tuple[int, object]:
    return metric.update_count, compat.computed_value(metric)

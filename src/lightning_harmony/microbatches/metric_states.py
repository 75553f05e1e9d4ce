"""The states of metrics: who reads them in a step, and what layers' code that runs again counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torchmetrics import Metric

from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.held.walk import modules_of
from lightning_harmony.microbatches.remembered import Remembered
from lightning_harmony.setup import compat


def metrics_of(model: nn.Module) -> Iterator[Metric]:
    """The metrics among the modules of a model."""
    return (module for module in model.modules() if isinstance(module, Metric))


class CountedOnce:
    """Lets metrics of no layer that a layer's code updates count each call once, though that code runs again.

    Args:
        metrics: all of no layer.

    Attributes:
        is_known: whether a step has shown which ones layers' code updates: of these alone states are copied from then on.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)
        self._updated: set[int] = set()
        self._is_late = self.is_known = False

    def refuse_late(self) -> None:
        """Refuse code that has updated one for the first time, of which no copy was made.

        Raises:
            UnsupportedModelError: if it has.
        """
        if self._is_late:
            raise UnsupportedModelError(
                "a metric is updated by a layer's code for the first time in this step, and once more as that runs again in "
                "the backward: update it in the step, outside of layers, or in each step"
            )

    @contextmanager
    def again(self) -> Iterator[None]:
        """The context of a layer's code that runs again."""
        counts = [metric.update_count for metric in self._metrics]
        then = Remembered()
        for each in self._metrics:
            if not self.is_known or id(each) in self._updated:
                then.add_attributes(each)
        try:
            yield
        finally:
            pairs = zip(self._metrics, counts, strict=True)
            updated = {id(metric) for metric, count in pairs if metric.update_count != count}
            self._is_late = self._is_late or (self.is_known and not updated <= self._updated)
            self._updated |= updated
            then.undo()


class ReadMetrics:
    """Tells whether microbatches that take turns would find something else in metrics.

    Their states add up, whatever the order, but not for who computes or resets one meanwhile.

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

"""The record of a model from one fit to the next: what earlier fits have seen of it, and what this one adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from lightning_harmony.engine.measure.profile_cache import ProfileCache
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.step.measurements import Measurements
from lightning_harmony.plan.values.profile import DeviceLimits
from lightning_harmony.plan.values.record import NarrowWeights, Origin, Record, SeenSize

# After how many steps a plan that rests on a record is held against them, of which the first ones warm up.
CHECKED_STEPS, WARM_UP_STEPS = 8, 3
# How many times as long, or as short, as predicted steps may be.
FAR_OFF = 2.0


class FitRecord:
    """The record that a fit may begin with, and leaves to later ones.

    Args:
        records: where it is kept; None to begin without one and keep nothing.
        layers: of the model. Parameters that glue uses come to it as they are found.
        measured: what training steps were seen to take.
    """

    def __init__(self, records: ProfileCache | None, layers: Sequence[SwappedLayer], measured: Measurements) -> None:
        self._records, self._layers, self._measured = records, layers, measured
        self._record: Record | None = None
        self._has_read = False
        # Whether all that is known of the model is known from there.
        self._is_relied_on = False
        self._seconds: list[float] = []

    def read(self, num_elements: int, find: Callable[[str], SwappedLayer | None]) -> Record | None:
        """What to rely on from now on; None if earlier fits have not seen as much.

        Args:
            num_elements: of the largest microbatch.
            find: makes a layer of a parameter, given by its name, that glue used in an earlier fit; None if there is none.
        """
        if not self._has_read and self._records is not None:
            self._record = self._records.read()
        self._has_read = True
        record = self._record
        # What a larger microbatch allocates is nobody's guess.
        if record is None or num_elements > record.most_elements:
            return None
        known = {layer.name for layer in self._layers}
        if any(find(cost.name) is None for cost in record.sizes[0].layers if cost.name not in known):
            return None
        self._is_relied_on = True
        self.recall(record, num_elements)
        return record

    def recall(self, record: Record, num_elements: int) -> None:
        """Take what layers cost from a record."""
        self._measured.recall(record, num_elements, {layer.name: layer for layer in self._layers})

    def confirmed(self, calls: Sequence[int], *, is_cast: bool) -> Record | None:
        """The record, if a first step that ran by it was like those that it is of; else it is relied on no more.

        Args:
            calls: the layers that the step called, by their indices.
            is_cast: whether autocast was seen at work in it.
        """
        record = self._record
        assert record is not None
        names = [self._layers[call].name for call in calls]
        called = set(names)
        # What is not called now may be called in other steps.
        if (
            names == [name for name in record.calls if name in called]
            and is_cast == record.is_cast
            and self._narrow() == record.narrow
        ):
            return record
        self._record, self._is_relied_on = None, False
        return None

    def set_aside(self) -> None:
        """Rely on the record no more."""
        self._is_relied_on = False

    def discard(self) -> str:
        """What did not fit was planned from the record: let no fit use it again. Return a word on it."""
        if not self._is_relied_on or self._records is None:
            return ""
        return f". The step was planned from {self._records.discard()}, which is discarded: run again to measure anew"

    def note_seconds(self, seconds: float, predicted: float | None) -> None:
        """How long a training step took, and was predicted to take.

        Where steps turn out to be far from what the record predicts, it is of a machine that was busy with something else, or
        has changed: later fits measure anew.
        """
        if not self._is_relied_on or self._records is None or predicted is None:
            return
        self._seconds.append(seconds)
        if len(self._seconds) == CHECKED_STEPS:
            ratio = median(self._seconds[WARM_UP_STEPS:]) / predicted if predicted else 1.0
            if not 1 / FAR_OFF <= ratio <= FAR_OFF:
                self._records.discard()

    def add(self, calls: Sequence[int], num_elements: int, *, is_cast: bool) -> None:
        """Let later fits know what a step that went layer by layer was seen to do.

        Args:
            calls: the layers that it called, by their indices.
            num_elements: of its largest microbatch.
            is_cast: whether autocast was seen at work.
        """
        self._is_relied_on = False
        size = SeenSize(num_elements, tuple(map(self._measured.cost, self._layers)))
        names = tuple(self._layers[call].name for call in calls)
        origin = Origin("", "", "") if self._records is None else self._records.origin
        record = Record(origin, names, is_cast, self._narrow(), (size,), DeviceLimits())
        known = self._record
        if known is not None and replace(known, sizes=record.sizes, machine=record.machine) == record:
            record = known.with_size(size)
        self._write(record)

    def renew_seconds(self, num_elements: int) -> None:
        """Let later fits know what layers take by now, if they were measured with so many elements."""
        record = self._record
        if record is None:
            return
        newest = {layer.name: self._measured.cost(layer) for layer in self._layers}
        sizes = [
            replace(size, layers=tuple(replace(cost, **newest[cost.name].seconds) for cost in size.layers))
            for size in record.sizes
            if size.num_elements == num_elements
        ]
        self._write(record.with_size(*sizes) if sizes else record)

    def _write(self, record: Record) -> None:
        self._record = replace(record, machine=replace(self._measured.machine(), capacity_bytes=None, occupied_bytes=0))
        if self._records is not None:
            self._records.write(self._record)

    def _narrow(self) -> tuple[NarrowWeights, ...]:
        """Which weights were found to be read through a cast alone."""
        return tuple(
            NarrowWeights(layer.name, tuple(n for n, p in enumerate(layer.parameters) if p in layer.narrow))
            for layer in self._layers
            if layer.narrow and layer.compute_dtype is None
        )

"""The record of a model from one fit to the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.profile import Profiler, UpdateSpeeds
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.measure.workspace import WorkSpace
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.step.fit_record import CHECKED_STEPS, WARM_UP_STEPS, FitRecord
from lightning_harmony.engine.step.measurements import Measurements
from lightning_harmony.engine.updates.disk_home import DiskHome
from lightning_harmony.plan.values.record import Origin, Record

ORIGIN = Origin("model", "machine", "versions")


@dataclass
class Folder:
    """Where records are kept, and what has become of them."""

    kept: Record | None = None
    num_reads: int = 0
    discarded: list[Record | None] = field(default_factory=list)

    @property
    def origin(self) -> Origin:
        return ORIGIN

    def read(self) -> Record | None:
        self.num_reads += 1
        return self.kept

    def write(self, record: Record) -> None:
        self.kept = record

    def discard(self) -> str:
        self.discarded.append(self.kept)
        self.kept = None
        return "the file"


@dataclass
class Fit:
    """A fit of a model of two layers."""

    layers: list[SwappedLayer]
    measured: Measurements

    def record(self, folder: Folder | None) -> FitRecord:
        return FitRecord(folder, self.layers, self.measured)

    def saw(self, folder: Folder, num_elements: int) -> None:
        """An earlier fit saw microbatches of a size."""
        self.record(folder).add([0, 1], num_elements, is_cast=False)


@pytest.fixture
def fit() -> Iterator[Fit]:
    device = VirtualDevice(1000)
    modules = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    layers = [
        SwappedLayer(index, f"layer {index}", each, list(each.parameters())) for index, each in enumerate(modules)
    ]
    store = HostStore([parameter for layer in layers for parameter in layer.parameters], device)
    updater: Any = SimpleNamespace(
        state_bytes=lambda parameters: 0,
        kept_bytes=lambda: [0],
        speeds=UpdateSpeeds(),
        streamed=SimpleNamespace(disk=DiskHome()),
    )
    yield Fit(layers, Measurements([device], store, Profiler(Traffic()), WorkSpace(), updater))
    store.close()
    device.close()


def nothing(name: str) -> None:
    """Finds no parameter of glue."""


class TestReading:
    def test_there_is_nothing_to_rely_on_at_first(self, fit: Fit) -> None:
        record = fit.record(Folder())
        assert record.read(4, nothing) is None
        assert fit.record(None).read(4, nothing) is None
        assert record.discard() == ""

    def test_what_earlier_fits_saw_is_read_once(self, fit: Fit) -> None:
        folder = Folder()
        fit.saw(folder, 4)
        record = fit.record(folder)
        found = record.read(4, nothing)
        assert found is not None
        assert found.calls == ("layer 0", "layer 1")
        assert record.read(4, nothing) == found
        assert folder.num_reads == 1

    def test_larger_microbatches_than_any_that_were_seen_are_measured(self, fit: Fit) -> None:
        folder = Folder()
        fit.saw(folder, 4)
        assert fit.record(folder).read(5, nothing) is None

    def test_a_layer_that_the_model_no_longer_has_is_looked_for_among_the_parameters_of_glue(self, fit: Fit) -> None:
        folder, asked = Folder(), list[str]()
        fit.saw(folder, 4)
        left = FitRecord(folder, fit.layers[:1], fit.measured)
        assert left.read(4, asked.append) is None
        assert asked == ["layer 1"]


class TestConfirming:
    @pytest.fixture
    def folder(self, fit: Fit) -> Folder:
        folder = Folder()
        fit.saw(folder, 4)
        return folder

    @pytest.mark.parametrize("calls", [[0, 1], [1], []], ids=str)
    def test_a_step_may_leave_layers_out(self, fit: Fit, folder: Folder, calls: list[int]) -> None:
        record = fit.record(folder)
        found = record.read(4, nothing)
        assert record.confirmed(calls, is_cast=False) == found
        assert "discarded" in record.discard()

    @pytest.mark.parametrize(("calls", "is_cast"), [([1, 0], False), ([0, 0, 1], False), ([0, 1], True)])
    def test_a_step_that_does_something_else_ends_the_reliance(
        self, fit: Fit, folder: Folder, calls: list[int], is_cast: bool
    ) -> None:
        record = fit.record(folder)
        record.read(4, nothing)
        assert record.confirmed(calls, is_cast=is_cast) is None
        assert record.discard() == ""
        assert record.read(4, nothing) is None

    def test_a_record_that_is_set_aside_is_not_discarded(self, fit: Fit, folder: Folder) -> None:
        record = fit.record(folder)
        record.read(4, nothing)
        record.set_aside()
        assert record.discard() == ""
        assert folder.kept is not None

    @pytest.mark.parametrize(("factor", "is_kept"), [(1.0, True), (1.9, True), (0.6, True), (2.1, False), (0.4, False)])
    def test_steps_far_from_the_prediction_discard_it(
        self, fit: Fit, folder: Folder, factor: float, is_kept: bool
    ) -> None:
        record = fit.record(folder)
        record.read(4, nothing)
        for _ in range(WARM_UP_STEPS):
            record.note_seconds(100.0, 1.0)
        for _ in range(CHECKED_STEPS - WARM_UP_STEPS):
            assert folder.kept is not None
            record.note_seconds(factor, 1.0)
        assert (folder.kept is not None) == is_kept


class TestAdding:
    def test_sizes_of_the_same_model_are_kept_together(self, fit: Fit) -> None:
        folder = Folder()
        fit.saw(folder, 4)
        record = fit.record(folder)
        assert record.read(8, nothing) is None
        record.add([0, 1], 8, is_cast=False)
        assert folder.kept is not None
        assert [size.num_elements for size in folder.kept.sizes] == [4, 8]
        assert folder.kept.origin == ORIGIN

    def test_steps_of_another_kind_take_the_place_of_what_was_known(self, fit: Fit) -> None:
        folder = Folder()
        fit.saw(folder, 4)
        record = fit.record(folder)
        record.read(8, nothing)
        record.add([1, 0], 8, is_cast=False)
        assert folder.kept is not None
        assert [size.num_elements for size in folder.kept.sizes] == [8]

    def test_what_layers_take_by_now_is_kept_of_the_size_that_runs(
        self, fit: Fit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = Folder()
        record = fit.record(folder)
        for num_elements in (4, 8):
            record.add([0, 1], num_elements, is_cast=False)
        before = fit.measured.profiler.complete

        def timed(*args: object) -> object:
            return replace(before(*args), forward_seconds=3.0)  # type: ignore[arg-type]

        monkeypatch.setattr(fit.measured.profiler, "complete", timed)
        record.renew_seconds(8)
        assert folder.kept is not None
        small, large = folder.kept.sizes
        assert all(cost.forward_seconds != 3.0 for cost in small.layers)
        assert all(cost.forward_seconds == 3.0 for cost in large.layers)

    def test_a_capacity_is_not_part_of_a_record(self, fit: Fit) -> None:
        folder = Folder()
        fit.saw(folder, 4)
        assert fit.measured.machine().capacity_bytes == 1000
        assert folder.kept is not None
        assert folder.kept.machine.capacity_bytes is None

"""Profiles that are kept from one fit to the next: the first step is planned, and no bit depends on it."""

from __future__ import annotations

import copy
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.profile_cache import ProfileCache
from lightning_harmony.engine.step import fit_record
from lightning_harmony.engine.step.fit_record import CHECKED_STEPS
from lightning_harmony.engine.step.observer import Observer
from lightning_harmony.engine.step.planning import TIMED_STEP, Planner
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.record import Record
from support import nets
from support.same_training import SEED, Net, Training, compare, room, train_harmony, train_plain
from support.sampling import combined

pytestmark = pytest.mark.filterwarnings("ignore:.*dataloader.*", "ignore:.*LeafSpec.*")

SAMPLES = nets.tokens(24)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "profiles"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, bool]]:
    """Of each training step, the plan that it begins with, and whether it is measured."""
    steps: list[tuple[Plan, bool]] = []
    begin_step = Observer.begin_step

    def spy(self: Any, *args: Any, is_training: bool, is_measuring: bool, **options: Any) -> None:
        if is_training:
            steps.append((self._placement.plan, is_measuring))
        begin_step(self, *args, is_training=is_training, is_measuring=is_measuring, **options)

    monkeypatch.setattr(Observer, "begin_step", spy)
    return steps


def build(net: Any = nets.Language) -> Net:
    torch.manual_seed(SEED)
    return Net(net())


def train(
    folder: Any, net: Any = nets.Language, samples: Any = SAMPLES, batch_size: int = 8, **options: Any
) -> Training:
    given = {name: options.pop(name) for name in ("device_memory", "num_microbatches", "update") if name in options}
    given = {"device_memory": "96KiB", "num_microbatches": 4, **given}
    strategy = HarmonyStrategy(**given | {"device_memory": room(given["device_memory"])}, profile_cache=folder)
    return train_harmony(build(net), samples, strategy, batch_size, with_gradients=False, **{"devices": 1, **options})


def file_in(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


@cache
def measured() -> tuple[str, bytes]:
    """The name and the content of the file that a fit leaves."""
    with TemporaryDirectory() as folder:
        train(folder)
        file = file_in(Path(folder))
        return file.name, file.read_bytes()


@cache
def without_profile() -> Training:
    """What a fit without a folder trains."""
    return train(False)


def file_of_a_fit(folder: Path) -> Path:
    """That file, in a folder that is made for it."""
    name, content = measured()
    folder.mkdir()
    (folder / name).write_bytes(content)
    return folder / name


class TestFirstStep:
    def test_runs_by_a_plan_and_measures_nothing(self, folder: Path, begun: list[tuple[Plan, bool]]) -> None:
        train(folder, device_memory="200KiB")
        assert [is_measured for _, is_measured in begun] == [True, False, False]
        assert begun[0][0].profile is None
        begun.clear()
        train(folder, device_memory="200KiB")
        assert [is_measured for _, is_measured in begun] == [False] * 3
        plan = begun[0][0]
        assert plan.profile is not None
        assert plan.num_microbatches == 4
        assert plan.fused

    @pytest.mark.cpu
    def test_later_ones_are_planned_with_what_kernels_have_left_of_the_device(
        self, folder: Path, begun: list[tuple[Plan, bool]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What kernels take of a card shows when they have run, whether that step was measured or planned."""
        left = 150 * 1024

        def shrink(device: VirtualDevice) -> bool:
            device.capacity_bytes = left
            return True

        monkeypatch.setattr(VirtualDevice, "note_kernels", shrink)
        fits = [train(folder, device_memory="200KiB") for _ in range(2)]
        assert [is_measured for _, is_measured in begun] == [True, *[False] * 5]
        later = [plan for plan, _ in (*begun[1:3], *begun[4:])]
        assert all(plan.profile is not None and plan.profile.machine.capacity_bytes == left for plan in later)
        plain = train_plain(build(), SAMPLES, 4, 8)
        for fit in fits:
            compare(plain, fit)

    @pytest.mark.cpu
    def test_knows_how_fast_copies_between_devices_were(self, folder: Path, begun: list[tuple[Plan, bool]]) -> None:
        train(folder, devices=2)
        known = Record.from_json(file_in(folder).read_text()).machine.transfer_bytes_per_second
        assert known is not None
        begun.clear()
        train(folder, devices=2)
        profile = begun[0][0].profile
        assert profile is not None
        assert profile.machine.transfer_bytes_per_second == int(known)

    @pytest.mark.cpu
    def test_of_another_capacity_is_planned_from_what_was_measured_in_another(
        self, folder: Path, begun: list[tuple[Plan, bool]]
    ) -> None:
        file_of_a_fit(folder)
        begun.clear()
        train(folder, device_memory=None)
        plan, is_measured = begun[0]
        assert not is_measured
        assert len(plan.packs) == 1

    def test_with_autocast_runs_in_packs_and_watches_again(self, folder: Path, begun: list[tuple[Plan, bool]]) -> None:
        options: Any = {"device_memory": "400KiB", "precision": "bf16-mixed"}
        train(folder, **options)
        assert [is_measured for _, is_measured in begun] == [True, False, False]
        begun.clear()
        train(folder, **options)
        assert [is_measured for _, is_measured in begun] == [True, False, False]
        assert begun[1][0].predicted is not None

    @pytest.mark.parametrize(
        ("net", "precision", "update"),
        combined(
            [
                (nets.Language, "32-true"),
                (nets.Language, "bf16-mixed"),
                (nets.SkipConnections, "32-true"),
                (nets.TiedByCode, "32-true"),
                (nets.Tied, "bf16-mixed"),
                (nets.OwnParameters, "bf16-mixed"),
                (nets.Repeated, "32-true"),
                (nets.RandomlySkipped, "32-true"),
                (nets.Frozen, "bf16-mixed"),
                (nets.Reordered, "bf16-mixed"),
            ],
            [("auto",), ("deferred",)],
        ),
    )
    def test_changes_no_bit(self, net: Any, precision: str, update: str, folder: Path) -> None:
        options: Any = {"device_memory": "128KiB", "precision": precision}
        expected = train(False, net, **options)
        compare(expected, train(folder, net, **options))
        compare(expected, train(folder, net, **{**options, "update": update}))

    def test_gives_what_plain_lightning_gives(self, folder: Path) -> None:
        plain = train_plain(build(), SAMPLES, 4, 8)
        file_of_a_fit(folder)
        compare(plain, train(folder))

    def test_with_larger_microbatches_than_ever_is_measured(self, folder: Path, begun: list[tuple[Plan, bool]]) -> None:
        file_of_a_fit(folder)
        begun.clear()
        train(folder, num_microbatches=2)
        assert begun[0][1]
        record = Record.from_json(file_in(folder).read_text())
        assert [size.num_elements for size in record.sizes] == [2 * SAMPLES.shape[1], 4 * SAMPLES.shape[1]]
        begun.clear()
        # Three samples: in between.
        train(folder, samples=SAMPLES[:12], batch_size=6, num_microbatches=2)
        assert not begun[0][1]


class TestOthers:
    def test_another_model_has_another_file(self, folder: Path) -> None:
        file_of_a_fit(folder)
        train(folder, lambda: nets.Language(num_blocks=5))
        assert len(list(folder.iterdir())) == 2

    def test_other_code_with_the_same_shapes_is_another_model(self, folder: Path) -> None:
        class Other(nets.Language):
            def forward(self, tokens: Any) -> Any:
                return super().forward(tokens) * 2

        file_of_a_fit(folder)
        train(folder, Other)
        assert len(list(folder.iterdir())) == 2

    def test_a_step_that_goes_another_way_than_recorded_is_measured_anew(
        self, folder: Path, begun: list[tuple[Plan, bool]]
    ) -> None:
        expected = without_profile()
        file = file_of_a_fit(folder)
        record = Record.from_json(file.read_text())
        file.write_text(replace(record, calls=record.calls[::-1]).to_json())
        begun.clear()
        compare(expected, train(folder))
        assert [is_measured for _, is_measured in begun] == [False, True, False]
        assert Record.from_json(file.read_text()).calls == record.calls

    def test_weights_are_not_taken_to_be_narrow_on_trust(self, folder: Path) -> None:
        options: Any = {"device_memory": "400KiB", "precision": "bf16-mixed"}
        expected = train(False, **options)
        train(folder, **options)
        file = file_in(folder)
        record = Record.from_json(file.read_text())
        every = tuple(replace(narrow, numbers=tuple(range(len(narrow.numbers) + 2))) for narrow in record.narrow)
        assert every
        file.write_text(replace(record, narrow=every).to_json())
        compare(expected, train(folder, **options))
        assert Record.from_json(file.read_text()).narrow == record.narrow

    @pytest.mark.cpu
    def test_what_does_not_fit_is_not_planned_from_it_again(self, folder: Path) -> None:
        file = file_of_a_fit(folder)
        record = Record.from_json(file.read_text())
        (size,) = record.sizes
        nothing = tuple(
            replace(cost, forward_work_bytes=0, backward_work_bytes=0, graph_bytes=0) for cost in size.layers
        )
        file.write_text(replace(record, sizes=(replace(size, layers=nothing),)).to_json())
        message = rf"planned from the cached profile '{file}', which is discarded: run again"
        with pytest.raises(CapacityError, match=message):
            train(folder, device_memory="38KiB")
        assert not file.exists()


class TestFiles:
    def test_nothing_is_written_where_it_is_switched_off(self, tmp_path: Path) -> None:
        train(False)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"", "it is not JSON"),
            (b"\xff\xfe\x00", "invalid start byte"),
            (b'{"format": "something else"}', 'it has no "format"'),
            (b'{"format": "lightning-harmony profile", "version": 0}', "version 0, but this release reads version"),
        ],
    )
    def test_what_is_no_profile_is_named_and_replaced(self, content: bytes, why: str, folder: Path) -> None:
        file = file_of_a_fit(folder)
        file.write_bytes(content)
        with pytest.warns(UserWarning, match=f"the cached profile '{file}' is not used, and measured anew: .*{why}"):
            train(folder)
        assert Record.from_json(file.read_text()).sizes

    def test_a_profile_that_is_cut_off_is_named_and_replaced(self, folder: Path) -> None:
        file = file_of_a_fit(folder)
        whole = file.read_text()
        file.write_text(whole[: len(whole) // 2])
        with pytest.warns(UserWarning, match="is not JSON"):
            train(folder)

    @pytest.mark.parametrize(
        "change", [{"model": "another"}, {"machine": "another"}, {"versions": "torch 1.0"}], ids=lambda c: next(iter(c))
    )
    def test_a_profile_of_another_model_or_machine_is_named_and_replaced(
        self, change: dict[str, str], folder: Path
    ) -> None:
        file = file_of_a_fit(folder)
        record = Record.from_json(file.read_text())
        file.write_text(replace(record, origin=replace(record.origin, **change)).to_json())
        with pytest.warns(UserWarning, match=f"is not used, and measured anew: it is of {next(iter(change))}"):
            train(folder)
        assert Record.from_json(file.read_text()).origin == record.origin

    def test_a_profile_that_contradicts_itself_is_named_and_replaced(self, folder: Path) -> None:
        file = file_of_a_fit(folder)
        data = json.loads(file.read_text())
        data["sizes"][0]["layers"][0]["forward_seconds"] = float("nan")
        file.write_text(json.dumps(data))
        with pytest.warns(UserWarning, match=r"layers\[0\].forward_seconds: Expected `float` >= 0"):
            train(folder)

    def test_no_half_file_is_left_where_writing_fails(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = file_of_a_fit(folder).read_text()

        def fail(*args: Any) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.warns(UserWarning, match="no profile is kept in .*: no space left on device"):
            train(folder, num_microbatches=2)
        assert file_in(folder).read_text() == before

    def test_what_is_read_while_others_write_is_whole(self, folder: Path) -> None:
        file = file_of_a_fit(folder)
        record = Record.from_json(file.read_text())
        caches = [ProfileCache(folder, record.origin, pytest.fail, is_chosen=True) for _ in range(3)]
        caches[0].file = caches[1].file = caches[2].file = file
        with ThreadPoolExecutor(2) as pool:
            written = [pool.submit(cache.write, record) for _ in range(25) for cache in caches[:2]]
            while not all(each.done() for each in written):
                assert caches[2].read() == record
        assert [each.result() for each in written] == [None] * 50
        assert list(folder.iterdir()) == [file]

    @pytest.mark.cpu
    def test_the_default_folder_is_the_users_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from lightning_harmony.engine.measure import profile_cache

        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert profile_cache.default_folder() == tmp_path / "lightning-harmony"
        train(True)
        assert file_in(tmp_path / "lightning-harmony").suffix == ".json"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert profile_cache.default_folder() == tmp_path / "home" / ".cache" / "lightning-harmony"

    @pytest.mark.parametrize("wrong", [3, None, ""])
    def test_what_is_no_folder_is_refused(self, wrong: Any) -> None:
        with pytest.raises(ValueError, match="True, False, or a folder"):
            HarmonyStrategy(profile_cache=wrong)

    def test_a_file_in_place_of_a_folder_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.touch()
        with pytest.raises(ValueError, match="this is not a folder"):
            HarmonyStrategy(profile_cache=file)


def test_a_strategy_with_a_folder_can_be_copied(folder: Path) -> None:
    strategy = copy.deepcopy(HarmonyStrategy(profile_cache=folder))
    assert strategy._settings.profile_cache == folder


class TestAnotherMachine:
    """A profile may be of a machine that was busy, or that has become so since."""

    def test_what_predicts_slow_steps_is_corrected_by_the_next_fit(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # This machine may be busy now, and its steps far from what was timed a moment ago.
        monkeypatch.setattr(fit_record, "CHECKED_STEPS", 1000)
        file_of_a_fit(folder)
        slow = 1e6
        values = json.loads(file_in(folder).read_text())
        for size in values["sizes"]:
            for cost in size["layers"]:
                cost["forward_seconds"] = cost["backward_seconds"] = slow
        file_in(folder).write_text(json.dumps(values))
        # In the first step it is checked that the model does what it did; a plan that changes is timed anew.
        train(folder, samples=nets.tokens(8 * (4 + TIMED_STEP)))
        (size,) = Record.from_json(file_in(folder).read_text()).sizes
        assert max(cost.backward_seconds for cost in size.layers) < slow

    @pytest.mark.parametrize(
        ("times_as_long", "num_steps", "is_discarded"),
        [
            (2.5, CHECKED_STEPS, True),
            (0.4, CHECKED_STEPS, True),
            (2.5, CHECKED_STEPS - 1, False),
            (1.0, CHECKED_STEPS, False),
        ],
    )
    def test_a_profile_whose_predictions_are_far_from_what_steps_take_is_discarded(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, times_as_long: float, num_steps: int, is_discarded: bool
    ) -> None:
        file_of_a_fit(folder)
        note_seconds, taken = Planner.note_seconds, list[float]()
        predictions: list[Any] = []

        def scaled(self: Planner, seconds: float) -> None:
            """What a step took, in the time of what the plan predicts: not in that of the machine that runs the test."""
            predicted = self._plan.predicted
            assert predicted is not None
            taken.append(seconds)
            # One prediction for all steps: a plan that is looked at again has another.
            predictions.append(predicted)
            self._plan = replace(self._plan, predicted=predictions[0])
            note_seconds(self, times_as_long * predictions[0].seconds)

        monkeypatch.setattr(Planner, "note_seconds", scaled)
        result = train(folder, samples=nets.tokens(8 * num_steps))
        assert taken == [report.seconds for report in result.reports]
        assert len(taken) == num_steps
        assert (list(folder.iterdir()) == []) == is_discarded

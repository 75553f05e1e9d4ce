"""HarmonyMonitor logs what steps did and records one; training does not notice."""

from __future__ import annotations

import csv
import time
from collections import Counter
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelPruning
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_harmony import HarmonyMonitor
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from lightning_harmony.plan.drawing.recording import Recording, read_recording
from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.task import COMPUTE, STREAM_OF, UPDATE, Errand, Phase
from lightning_harmony.setup.lightning_tree import classes_of
from support import same_training
from support.lightning_fits import (
    NUM_STEPS,
    QUIET_MARKS,
    Manual,
    Model,
    assert_same,
    harmony,
    loader,
    trainer_for,
    values,
)
from support.spreading import spread_packs

pytestmark = QUIET_MARKS
CLIP = {"gradient_clip_val": 0.02}
GIB = 2**30
UNDER = "under the forward of the next batch"


class Reports(pl.Callback):
    def __init__(self) -> None:
        self.reports: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.reports.append(trainer.strategy.step_report)


def fit(*callbacks: Any, strategy: Any = None, module: Any = None, **options: Any) -> Any:
    trainer = trainer_for(strategy or harmony(), callbacks=list(callbacks), **options)
    trainer.fit(module or Model(), loader())
    return trainer


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    """What was logged of harmony, by step."""
    with open(logger.experiment.metrics_file_path) as file:
        found = list(csv.DictReader(file))
    ours = [{name: value for name, value in row.items() if name.startswith("harmony/") and value} for row in found]
    return [row | {"step": all_of["step"]} for row, all_of in zip(ours, found, strict=True) if row]


def record(tmp_path: Path, step: int = 2, *callbacks: Any, **options: Any) -> tuple[Any, Recording]:
    """Train with a step recorded."""
    trainer = fit(HarmonyMonitor(trace_step=step, dirpath=tmp_path), *callbacks, **options)
    return trainer, read_recording(tmp_path / f"step-{step}.json")


# --- What it logs.


def test_each_step_is_logged_as_its_report_tells(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = fit(HarmonyMonitor(), logger=logger, log_every_n_steps=1)
    logged = rows(logger)
    assert [row.pop("step") for row in logged] == [str(step) for step in range(NUM_STEPS)]
    report = trainer.strategy.step_report
    found = {name.removeprefix("harmony/"): float(value) for name, value in logged[-1].items()}
    num_devices = same_training.default_devices
    assert 0 < report.busy[0] <= 1
    assert len(report.busy) == len(report.peak_device_bytes) == num_devices
    assert (report.transferred_bytes > 0) == (num_devices > 1)
    # The training loop around the step is timed, too.
    assert 0 < found.pop("samples_per_second") < report.num_samples / report.seconds
    expected = {
        "seconds": report.seconds,
        "predicted_seconds": report.predicted_seconds,
        "transferred_gib": report.transferred_bytes / GIB,
        "host_gib": report.host_bytes / GIB,
        **{f"peak_device_gib/{device}": peak / GIB for device, peak in enumerate(report.peak_device_bytes)},
        **{f"reserved_device_gib/{device}": most / GIB for device, most in enumerate(report.reserved_device_bytes)},
        **{f"busy/{device}": busy for device, busy in enumerate(report.busy)},
        "update_hidden": report.update_hidden,
        **{f"swapped_in_gib/{kind}": value / GIB for kind, value in report.swapped_in_bytes.items()},
        **{f"swapped_out_gib/{kind}": value / GIB for kind, value in report.swapped_out_bytes.items()},
    }
    # What is 0 in each step has no curve.
    assert {name: found.get(name, 0.0) for name in expected} == expected
    assert found.keys() <= expected.keys()
    assert "swapped_out_gib/weights" not in found
    # The first step has no plan that could have predicted it.
    assert "harmony/predicted_seconds" not in logged[0]


def test_only_every_so_many_steps_are_logged_and_measured(tmp_path: Path) -> None:
    logger, reports = CSVLogger(tmp_path), Reports()
    fit(HarmonyMonitor(), reports, logger=logger, log_every_n_steps=2, max_epochs=3)
    assert [row["step"] for row in rows(logger)] == ["1", "3", "5", "7"]
    # After steps 2, 5 and 8.
    assert [bool(report.busy) for report in reports.reports] == [False, True, False]


def test_every_device_is_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(HarmonyMonitor(), logger=logger, log_every_n_steps=1, devices=2)
    for row in rows(logger):
        assert all(0 < float(row[f"harmony/busy/{number}"]) <= 1 for number in (0, 1))
        assert all(float(row[f"harmony/peak_device_gib/{number}"]) > 0 for number in (0, 1))
        assert float(row["harmony/transferred_gib"]) > 0


def test_how_busy_devices_are_is_measured_for_nobody_else() -> None:
    trainer = fit()
    assert trainer.strategy.step_report.busy == []
    assert trainer.strategy.recorder is None


@pytest.mark.parametrize("tree", ["lightning.pytorch", "pytorch_lightning"])
def test_the_monitor_serves_both_trees(tree: str, tmp_path: Path) -> None:
    class Other(import_module(tree).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.layers(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logger = import_module(f"{tree}.loggers").CSVLogger(tmp_path)
    monitor = classes_of(tree).HarmonyMonitor()
    assert isinstance(monitor, import_module(tree).Callback)
    trainer = trainer_for(
        "harmony", tree=import_module(tree), callbacks=[monitor], logger=logger, log_every_n_steps=1, max_steps=2
    )
    trainer.fit(Other(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4))
    assert len(rows(logger)) == 2


class Skips(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:.*training_step.* returned .None.")
def test_a_skipped_batch_logs_nothing(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(HarmonyMonitor(), module=Skips(), logger=logger, log_every_n_steps=1)
    assert len(rows(logger)) == NUM_STEPS - 1


# --- What it leaves alone.


def test_training_and_what_the_user_logs_stay_the_same(tmp_path: Path) -> None:
    runs = []
    for number, callbacks in enumerate(([], [HarmonyMonitor(trace_step=1, dirpath=tmp_path)])):
        logger = CSVLogger(tmp_path / str(number))
        runs.append(fit(*callbacks, logger=logger, log_every_n_steps=1))
    without, with_it = runs
    assert_same(without, with_it)
    assert without.callback_metrics == with_it.callback_metrics
    assert without.logged_metrics == with_it.logged_metrics


class UpdateReasons(pl.Callback):
    """Reads no weights."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        report = trainer.strategy.step_report
        if report is not None:
            self.found.append(report.update_reason)


class Curious(HarmonyMonitor):  # type: ignore[misc]
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen = values(module)
        super().on_train_batch_end(trainer, module, *args)


@pytest.mark.parametrize(("kind", "waits"), [(HarmonyMonitor, False), (Curious, True)])
def test_only_who_looks_at_weights_holds_up_an_update(kind: Any, waits: bool, tmp_path: Path) -> None:
    reasons = UpdateReasons()
    fit(kind(), reasons, logger=CSVLogger(tmp_path), log_every_n_steps=1, **CLIP)
    assert any(UNDER in reason for reason in reasons.found) != waits
    assert any("Curious.on_train_batch_end looks at parameters" in reason for reason in reasons.found) == waits


# --- What it refuses.


def test_another_strategy_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"strategy='harmony'.*SingleDeviceStrategy"):
        fit(HarmonyMonitor(), strategy="auto", logger=CSVLogger(tmp_path))


def test_no_logger_is_refused_unless_a_step_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="logger=False"):
        fit(HarmonyMonitor())
    record(tmp_path)


@pytest.mark.parametrize("step", [-1, 1.5, "first"])
def test_no_step_is_refused(step: Any) -> None:
    with pytest.raises(ValueError, match="trace_step"):
        HarmonyMonitor(trace_step=step)


# --- The recording.


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("options", "spread"),
    [
        ({}, "none"),
        ({"devices": 2}, "none"),
        ({"devices": 3}, "some"),
        ({"devices": 2, "strategy": harmony(parallel="data")}, "none"),
        ({"strategy": harmony(device_memory=None)}, "none"),
    ],
    ids=["one", "pipeline", "spread", "data", "no capacity"],
)
def test_a_recorded_step_is_what_the_plan_and_the_report_say(
    tmp_path: Path, options: Any, spread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spread != "none":
        spread_packs(monkeypatch, spread)
    # Not what stands there after the fit: a step that updates faster than those before it is planned from anew.
    used: list[Plan] = []
    watch = LambdaCallback(on_train_batch_start=lambda trainer, *_: used.append(trainer.strategy.plan))
    trainer, recording = record(tmp_path, 2, watch, **options)
    plan, report = recording.plan, trainer.strategy.step_report
    assert plan == used[-1]
    predicted = predict(plan)
    for measured, expected in zip(recording.measured.devices, predicted.devices, strict=True):
        for kinds in (set(Phase), {Errand.SWAP_OUT, Errand.GATHER, Errand.REDUCE}, {Errand.UPDATE}):
            # On several devices the code between layers, which has a parameter here, is not seen to compute.
            unseen = plan.packs.index(("scale",)) if plan.num_devices > 1 and kinds == set(Phase) else None
            ours, theirs = (
                {s.task for s in device.spans if s.task.kind in kinds and s.task.pack != unseen}
                for device in (measured, expected)
            )
            assert ours == theirs
        # A device computes, and each of its streams works, on one thing at a time.
        for stream in {span.stream for span in measured.spans} - {"transfer"}:
            spans = [span for span in measured.spans if span.stream == stream]
            assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(spans))
        assert all(0 <= s.start_seconds <= s.end_seconds <= recording.measured.seconds for s in measured.spans)
        assert measured.peak_bytes <= (plan.profile.machine.capacity_bytes or 10**9)  # type: ignore[union-attr]
    for counted, kind in (
        (report.swapped_in_bytes, "swapped_in_bytes"),
        (report.swapped_out_bytes, "swapped_out_bytes"),
    ):
        summed: Counter[str] = sum((Counter(getattr(d, kind)) for d in recording.measured.devices), Counter())
        # What comes and goes within an update has no span of its own.
        assert +Counter(counted) - Counter({"optimizer": counted["optimizer"]}) == summed
    assert sum(device.transferred_bytes for device in recording.measured.devices) == report.transferred_bytes
    assert recording.update.startswith("just-in-time: ")


def test_a_first_step_is_recorded_layer_by_layer_and_measures_what_it_does_else(tmp_path: Path) -> None:
    plans: list[Plan] = []
    for callbacks in ([], [HarmonyMonitor(trace_step=0, dirpath=tmp_path)]):
        plans.append(fit(*callbacks).strategy.plan)
    bytes_of = [
        [
            (c.name, c.forward_work_bytes, c.backward_work_bytes, c.graph_bytes, c.stash_bytes)
            for c in plan.profile.layers
        ]
        for plan in plans
        if plan.profile is not None
    ]
    assert bytes_of[0] == bytes_of[1]
    recording = read_recording(tmp_path / "step-0.json")
    # The scale, which the code between layers uses, is known only since then.
    assert ("scale",) in recording.plan.packs
    assert all(len(pack) == 1 for pack in recording.plan.packs)
    assert recording.predicted() is None
    assert {span.task.pack for span in recording.measured.devices[0].spans} == set(range(len(recording.plan.packs)))


def test_a_deferred_update_is_seen_under_the_forward_of_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = StreamedUpdate.update

    def slowly(*args: Any, **options: Any) -> None:
        time.sleep(0.02)
        update(*args, **options)

    # It could be over before the next batch has come.
    monkeypatch.setattr(StreamedUpdate, "update", slowly)
    _, recording = record(tmp_path, max_epochs=1, **CLIP)
    spans = [span for device in recording.measured.devices for span in device.spans]
    updated = [span for span in spans if span.stream == UPDATE]
    first_backward = min(span.start_seconds for span in spans if span.task.kind is Phase.BACKWARD)
    assert updated
    assert all(span.end_seconds <= first_backward for span in updated)
    assert recording.update.startswith("deferred: ")


def test_manual_optimization_is_recorded_call_by_call(tmp_path: Path) -> None:
    _, recording = record(tmp_path, module=Manual(), strategy=harmony(device_memory="96KiB"))
    kinds = {span.task.kind for span in recording.measured.devices[0].spans if span.stream == COMPUTE}
    assert kinds == set(Phase)
    assert {span.stream for span in recording.measured.devices[0].spans} <= set(STREAM_OF.values())


def test_the_file_is_written_once_and_where_loggers_write(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    # Two batches a step: the first is recorded.
    trainer = fit(HarmonyMonitor(trace_step=0), logger=logger, log_every_n_steps=1, accumulate_grad_batches=2)
    (file,) = Path(logger.log_dir).glob("*.json")
    assert file.name == "step-0.json"
    assert read_recording(file).predicted() is None
    assert trainer.strategy.step_report is not None


def test_the_next_fit_records_again(tmp_path: Path) -> None:
    monitor = HarmonyMonitor(trace_step=1, dirpath=tmp_path)
    fit(monitor)
    (tmp_path / "step-1.json").unlink()
    fit(monitor)
    assert (tmp_path / "step-1.json").exists()


@pytest.mark.parametrize("strategy", [harmony, lambda: harmony(device_memory=None)], ids=["swapped", "fits"])
def test_a_step_that_is_never_reached_is_said_not_to_be_recorded(strategy: Any, tmp_path: Path) -> None:
    """Nothing was said: the user looked for the file."""
    with pytest.warns(UserWarning, match=rf"trace_step=99.* recorded nothing: .* was step {NUM_STEPS - 1}, as"):
        fit(HarmonyMonitor(trace_step=99, dirpath=tmp_path), strategy=strategy())
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*training_step.* returned .None.")
def test_a_step_that_is_skipped_is_said_not_to_be_recorded(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"trace_step=1\) recorded nothing: that step was skipped, as training_step"):
        fit(HarmonyMonitor(trace_step=1, dirpath=tmp_path), module=Skips())
    assert not list(tmp_path.iterdir())


def test_a_step_before_the_checkpoint_that_a_fit_goes_on_from_is_said_not_to_be_recorded(tmp_path: Path) -> None:
    """The warning said that the fit had ended before that step."""
    fit().save_checkpoint(tmp_path / "last.ckpt")
    monitor = HarmonyMonitor(trace_step=1, dirpath=tmp_path / "steps")
    trainer = trainer_for(harmony(), callbacks=[monitor], max_epochs=2)
    with pytest.warns(UserWarning, match=rf"recorded nothing: the fit began after that step, with step {NUM_STEPS}"):
        trainer.fit(Model(), loader(), ckpt_path=tmp_path / "last.ckpt")


def test_a_step_that_is_undone_and_runs_again_is_recorded(tmp_path: Path) -> None:
    class Passes(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx >= 2:
                # Seen only then: the step runs again, one microbatch after the other.
                loss = loss * (1 + getattr(self, "last", 0.0))
                self.last = float(loss.detach())
            return loss

    _, recording = record(tmp_path, 2, module=Passes())
    assert Phase.FORWARD in {span.task.kind for device in recording.measured.devices for span in device.spans}
    assert recording.why_unpredicted() == "microbatches ran one after the other"


def test_a_first_step_that_an_earlier_fit_planned_is_recorded_by_its_plan(tmp_path: Path) -> None:
    cached = {"profile_cache": tmp_path / "profiles"}
    fit(strategy=harmony(**cached))
    trainer, recording = record(tmp_path, 0, strategy=harmony(**cached), max_steps=1)
    assert recording.plan.packs == trainer.strategy.plan.packs
    # It runs one microbatch after the other, which is not what the plan predicts.
    assert recording.predicted() is None
    assert predict(recording.plan).seconds > 0


def test_parameters_that_are_pruned_between_steps_end_no_watch(tmp_path: Path) -> None:
    module, logger = Model(), CSVLogger(tmp_path)
    pruning = ModelPruning("l1_unstructured", [(module.net.head, "weight")], amount=0.3)
    monitor = HarmonyMonitor(trace_step=NUM_STEPS, dirpath=tmp_path)
    fit(monitor, pruning, module=module, logger=logger, log_every_n_steps=1, max_epochs=2)
    assert all("harmony/busy/0" in row for row in rows(logger))
    assert read_recording(tmp_path / f"step-{NUM_STEPS}.json").measured.devices[0].spans

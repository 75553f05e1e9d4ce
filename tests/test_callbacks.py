"""Lightning's callbacks, loggers, profilers, Trainer flags and Tuner see what they see without the strategy."""

from __future__ import annotations

import copy
import csv
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks as cb
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from support import nets, same_training
from support.lightning_fits import (
    NUM_MICROBATCHES,
    NUM_STEPS,
    QUIET_MARKS,
    Images,
    Model,
    assert_equal,
    assert_same,
    batches_for,
    fit,
    fit_harmony,
    harmony,
    loader,
    trainer_for,
    trainer_of,
    values,
)
from support.same_training import Net, assert_same_training

pytestmark = QUIET_MARKS


def fit_both(callback: Callable[[], Any], make: Callable[[], Any] = Model, **options: Any) -> tuple[Any, Any]:
    """Train both ways with a callback each, and compare what comes out; return the callbacks."""
    plain, swapped = callback(), callback()
    trainers = [fit(k, make(), callbacks=[c], **options) for k, c in (("plain", plain), ("harmony", swapped))]
    assert_same(*trainers)
    assert trainers[0].global_step == trainers[1].global_step
    if options.get("validate"):
        assert_equal(trainers[0].callback_metrics["val_loss"], trainers[1].callback_metrics["val_loss"])
    return plain, swapped


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with open(logger.experiment.metrics_file_path) as file:
        return list(csv.DictReader(file))


def logged_by_both(
    tmp_path: Path, callback: Callable[[], Any], make: Callable[[], Any] = Model, **options: Any
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """What a CSVLogger writes, without microbatches, so that plain Lightning sees the same batches."""
    found = []
    for kind in ("plain", "harmony"):
        logger = CSVLogger(tmp_path / kind)
        options |= {"logger": logger, "log_every_n_steps": 1, "callbacks": [callback()]}
        fit(kind, make(), num_microbatches=1, **options)
        found.append(rows(logger))
    return found[0], found[1]


# --- Callbacks that stop and save.


def test_early_stopping_stops_after_the_same_epoch() -> None:
    options: dict[str, Any] = {"max_epochs": 3, "validate": True}
    plain, swapped = fit_both(lambda: cb.EarlyStopping("val_loss", min_delta=10.0, patience=1), **options)
    assert swapped.stopped_epoch == plain.stopped_epoch
    assert plain.stopped_epoch == 1
    assert_equal(plain.best_score, swapped.best_score)


def checkpoints(folder: Path) -> dict[str, Any]:
    return {p.name: torch.load(p, weights_only=False) for p in sorted(folder.glob("*.ckpt"))}


@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "val_loss", "save_top_k": 2, "mode": "max", "save_last": True},
        {"every_n_train_steps": 2, "save_top_k": -1},
        {"train_time_interval": None, "save_on_train_epoch_end": True, "save_weights_only": True, "save_top_k": -1},
    ],
    ids=["top-k", "every-n-steps", "weights-only"],
)
def test_model_checkpoint_saves_the_same_files_at_the_same_steps(options: dict[str, Any], tmp_path: Path) -> None:
    name = "{epoch}-{step}-{val_loss:.6f}" if "monitor" in options else "{epoch}-{step}"
    for kind in ("plain", "harmony"):
        callback = cb.ModelCheckpoint(dirpath=tmp_path / kind, filename=name, **options)
        fit(kind, validate=True, max_epochs=2, enable_checkpointing=True, callbacks=[callback])
    plain, swapped = checkpoints(tmp_path / "plain"), checkpoints(tmp_path / "harmony")
    assert list(swapped) == list(plain)
    assert len(plain) >= 2
    for ours, theirs in zip(swapped.values(), plain.values(), strict=True):
        assert_equal(dict(ours["state_dict"]), dict(theirs["state_dict"]))
        assert ours["global_step"] == theirs["global_step"]
        if not options.get("save_weights_only"):
            assert_equal(ours["optimizer_states"][0], theirs["optimizer_states"][0])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
@pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("saved_by", ["plain", "harmony"])
def test_a_fit_resumes_in_the_middle_of_an_epoch_with_either_strategy(saved_by: str, tmp_path: Path) -> None:
    callback = cb.ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fit(saved_by, num_microbatches=1, enable_checkpointing=True, callbacks=[callback])
    path = tmp_path / "step=2.ckpt"
    plain, swapped = (fit(kind, num_microbatches=1, max_epochs=2, ckpt_path=path) for kind in ("plain", "harmony"))
    assert_same(plain, swapped)
    assert plain.global_step == swapped.global_step == 2 * NUM_STEPS


class Interrupted(RuntimeError):
    pass


class FailsInStep(Model):
    """Fails in the last step of the epoch, whatever the number of batches in it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == NUM_STEPS - 1:
            raise Interrupted
        return loss


class NotesException(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.seen.append((type(exception).__name__, values(module)))


@pytest.mark.filterwarnings("ignore:.*was called without a model. The last model of the previous")
@pytest.mark.filterwarnings("ignore:.*is set, but there is no last checkpoint available")
@pytest.mark.devices(1, 2)
def test_what_is_saved_on_an_exception_is_the_state_after_the_last_whole_step(tmp_path: Path) -> None:
    notes = []
    for kind in ("plain", "harmony"):
        note = NotesException()
        saver = cb.OnExceptionCheckpoint(tmp_path / kind)
        with pytest.raises(Interrupted):
            fit(kind, FailsInStep(), enable_checkpointing=True, callbacks=[saver, note])
        notes.append(note.seen)
    assert [name for name, _ in notes[0]] == [name for name, _ in notes[1]] == ["Interrupted"]
    assert_equal(notes[0][0][1], notes[1][0][1])
    plain, swapped = (checkpoints(tmp_path / kind)["on_exception.ckpt"] for kind in ("plain", "harmony"))
    assert_equal(dict(plain["state_dict"]), dict(swapped["state_dict"]))
    assert_equal(plain["optimizer_states"], swapped["optimizer_states"])


# --- Callbacks that average, freeze and prune weights.


@pytest.mark.parametrize(
    "callback",
    [
        lambda: cb.EMAWeightAveraging(decay=0.5),
        lambda: cb.EMAWeightAveraging(decay=0.5, update_starting_at_step=1, update_every_n_steps=2),
        cb.WeightAveraging,
    ],
    ids=["ema", "ema-every-2", "average"],
)
@pytest.mark.devices(1, 2)
def test_averaged_weights_are_equal_and_validated(callback: Callable[[], Any]) -> None:
    fit_both(callback, max_epochs=2, validate=True)


@pytest.mark.devices(1, 2)
@pytest.mark.nightly
def test_stochastic_weight_averaging_gives_equal_bits() -> None:
    fit_both(
        lambda: cb.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2), max_epochs=3, validate=True
    )


class TrainedImages(Images):
    """Has batch statistics, which stochastic weight averaging takes anew."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Statistics(pl.Callback):
    """Keeps the buffers of every batch of the last epoch, the one for statistics."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        # Plain Lightning ends that epoch with a step by the gradients of the last epoch, if they are still there.
        module.zero_grad()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.current_epoch == 2:
            self.seen.append({name: buffer.clone() for name, buffer in module.named_buffers()})


def test_stochastic_weight_averaging_takes_batch_statistics_anew() -> None:
    found = []
    for strategy in ("auto", harmony(num_microbatches=1, device_memory="256KiB")):
        module, statistics = TrainedImages(), Statistics()
        swa = cb.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)
        trainer = trainer_for(strategy, max_epochs=2, callbacks=[swa, statistics])
        trainer.fit(module, DataLoader(nets.images(16), batch_size=8))
        found.append((values(module), statistics.seen))
    assert_equal(*found)
    assert len(found[0][1]) == 2


class Finetuned(Model):
    """Starts with the backbone frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")
@pytest.mark.devices(1, 2)
def test_a_backbone_that_is_unfrozen_in_mid_run_gives_equal_bits() -> None:
    def callback() -> Any:
        return cb.BackboneFinetuning(
            unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, initial_denom_lr=2.0, train_bn=True
        )

    fit_both(callback, Finetuned, max_epochs=2)


class InputsUsedAgain(nets.Language):
    """Uses what each block was called with once more behind it."""

    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(nn.Linear(nets.WIDTH, nets.WIDTH) for _ in range(8))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


# Which blocks are trained in a step, of eight.
TRAINED: dict[str, Callable[[int, int], bool]] = {
    "all from the fourth step on": lambda block, step: block > 3 or step >= 3,
    "one more in each third step": lambda block, step: block >= 6 - 2 * (step // 3),
    "in turns": lambda block, step: block % 2 == step % 2,
    "all for two steps": lambda block, step: block > 3 or step in (3, 4),
}
# The steps that are looked at and measured as a first one is: those in which parameters are trained together that never were.
MEASURED = {
    "all from the fourth step on": [0, 3],
    "one more in each third step": [0, 3, 6],
    "in turns": [0, 1],
    "all for two steps": [0, 3],
}


@pytest.mark.parametrize("which", TRAINED)
@pytest.mark.devices(1, 2)
def test_blocks_that_are_trained_later_are_looked_at_as_in_a_first_step(which: str) -> None:
    """On two devices they were refused in mid-run: their inputs had needed no gradient, so that no use of them was seen."""
    measured: list[int] = []

    class Unfreezes(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for number, block in enumerate(self.net.blocks):
                block.requires_grad_(TRAINED[which](number, self.trainer.global_step))
            self.net.embed.requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            swapped, step = getattr(self.trainer.strategy, "_swapped", None), self.trainer.global_step
            if swapped is not None and swapped.engine.planner.measured_elements < 0 and step not in measured:
                measured.append(step)
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    assert_same_training(Unfreezes(InputsUsedAgain()), nets.tokens(64), device_memory="64KiB", updates=["just in time"])
    assert measured == MEASURED[which]


def inner_weights(module: Any) -> list[Any]:
    return [(block.up, "weight") for block in module.net.blocks]


def weights_of_layers(module: Any) -> list[Any]:
    return [*inner_weights(module), (module.net.head, "weight"), (module.net.embed, "weight")]


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        (weights_of_layers, {"pruning_fn": "l1_unstructured", "use_lottery_ticket_hypothesis": False}),
        # Where weights are on the host Lightning goes on to train the very tensors that it kept to go back to.
        pytest.param(
            inner_weights, {"pruning_fn": "l1_unstructured", "make_pruning_permanent": False}, marks=pytest.mark.cpu
        ),
        # Masks are drawn where the weights are, and a GPU draws others than the host.
        pytest.param(
            lambda module: None,
            {"pruning_fn": "random_unstructured", "prune_on_train_epoch_end": False},
            marks=pytest.mark.cpu,
        ),
    ],
    ids=["weights", "lottery-and-not-permanent", "all-at-random"],
)
@pytest.mark.devices(1, 2)
def test_pruning_in_every_epoch_gives_equal_bits(parameters: Any, options: dict[str, Any]) -> None:
    """The second time it looks at the weights of the last forward, not at those of the last update."""
    runs = []
    for kind in ("plain", "harmony"):
        module = Model()
        pruning = cb.ModelPruning(parameters_to_prune=parameters(module), amount=0.4, **options)
        memory = {"device_memory": "112KiB"} if kind == "harmony" else {}
        runs.append(fit(kind, module, max_epochs=2, validate=True, callbacks=[pruning], **memory))
    assert_same(*runs)
    found = [values(run.lightning_module) for run in runs]
    assert found[1].keys() == found[0].keys()
    sparse = [name for name, value in found[1].items() if (value == 0).float().mean() > 0.5 and "norm" not in name]
    assert sparse or not options.get("make_pruning_permanent", True)
    # To go back to the first weights, it keeps them in the memory of those that are trained.
    goes_back = options.get("use_lottery_ticket_hypothesis", True)
    assert runs[1].strategy.step_report.update == ("deferred" if goes_back else "just-in-time")


# --- Callbacks that watch.


class Summed(cb.ModelSummary):
    """Keeps what it would print."""

    @staticmethod
    def summarize(summary_data: list[tuple[str, list[str]]], *args: Any, **kwargs: Any) -> None:
        Summed.seen.append(summary_data)

    seen: list[Any] = []  # noqa: RUF012


def test_the_model_summary_runs_the_model_and_shows_its_sizes() -> None:
    def make() -> Model:
        module = Model()
        module.example_input_array = nets.tokens(2)
        return module

    Summed.seen.clear()
    fit_both(lambda: Summed(max_depth=3), make)
    assert Summed.seen[0] == Summed.seen[1]
    assert any("Out sizes" in column[0] for column in Summed.seen[0])


def stepped(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_loggers_get_the_same_rows_and_learning_rates(tmp_path: Path) -> None:
    plain, swapped = logged_by_both(
        tmp_path, lambda: cb.LearningRateMonitor("step", log_momentum=True), lambda: Model(stepped), validate=True
    )
    assert swapped == plain
    assert {"loss_step", "loss_epoch", "val_loss", "lr-SGD", "lr-SGD-momentum"} <= plain[0].keys()
    assert len(plain) > NUM_STEPS


@pytest.mark.cpu
def test_device_stats_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On the CPU they would need psutil, and differ from run to run.
    monkeypatch.setattr("lightning.pytorch.accelerators.CPUAccelerator.get_device_stats", lambda *_: {"stat": 1.0})
    monkeypatch.setattr("lightning.pytorch.callbacks.device_stats_monitor._PSUTIL_AVAILABLE", True)
    plain, swapped = logged_by_both(tmp_path, cb.DeviceStatsMonitor)
    assert swapped == plain
    assert any("DeviceStatsMonitor" in name for name in plain[0])


@pytest.mark.parametrize("is_swapped", [True, pytest.param(False, marks=pytest.mark.in_memory)])
def test_a_clock_that_is_replaced_with_fixed_readings_serves_the_callback_alone(
    is_swapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of a throughput callback gave the clock one reading for each time that the callback looks at it."""
    monkeypatch.setattr("time.perf_counter", iter(range(NUM_STEPS + 1)).__next__)

    class Clocked(cb.Callback):
        def __init__(self) -> None:
            self.readings: list[float] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.readings.append(time.perf_counter())

    clocked = Clocked()
    strategy = harmony() if is_swapped else harmony(device_memory=None, num_microbatches=1)
    fit_harmony(Model(), strategy, callbacks=[clocked])
    assert clocked.readings == list(range(NUM_STEPS))


@pytest.mark.filterwarnings("ignore:FLOPs not found for")
def test_throughput_counts_the_same_samples(tmp_path: Path) -> None:
    def callback() -> Any:
        return cb.ThroughputMonitor(batch_size_fn=len, length_fn=torch.numel, window_size=2)

    def make() -> Any:
        module = Model()
        module.flops_per_batch = 1000
        return module

    plain, swapped = logged_by_both(tmp_path, callback, make, max_epochs=2, validate=True)
    counts = [name for name in plain[0] if name.endswith(("/samples", "/batches", "/lengths"))]
    assert counts
    assert swapped[0].keys() == plain[0].keys()
    assert [[row[name] for name in counts] for row in swapped] == [[row[name] for name in counts] for row in plain]


class Bar(cb.TQDMProgressBar):
    """Keeps what it shows."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=1)
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        shown = self.train_progress_bar
        self.seen.append((shown.n, shown.total, dict(self.get_metrics(trainer, module))))


class InBar(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss


def test_the_progress_bar_shows_the_same_numbers() -> None:
    options: dict[str, Any] = {"num_microbatches": 1, "enable_progress_bar": True, "validate": True}
    plain, swapped = fit_both(Bar, InBar, **options)
    assert len(plain.seen) == NUM_STEPS
    assert "loss" in plain.seen[0][2]
    assert swapped.seen == plain.seen


def test_the_rich_progress_bar_and_summary_work(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    module = InBar()
    callbacks = [cb.RichProgressBar(leave=True), cb.RichModelSummary(max_depth=2)]
    trainer = fit("harmony", module, callbacks=callbacks, enable_progress_bar=True, enable_model_summary=True)
    assert "Epoch 0" in capsys.readouterr().out
    assert_same(fit("plain", InBar()), trainer)


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_profilers_record_the_same_actions(profiler: str, tmp_path: Path) -> None:
    kinds = {"simple": pl.profilers.SimpleProfiler, "advanced": pl.profilers.AdvancedProfiler}
    names = []
    for kind in ("plain", "harmony"):
        profile = kinds[profiler](dirpath=tmp_path, filename=kind)
        trainer = fit(kind, num_microbatches=1, validate=True, profiler=profile)
        name = type(trainer.strategy).__name__
        actions = re.findall(r"^(?:\| +|Profile stats for: )(\S+)", next(tmp_path.glob(f"*{kind}*")).read_text(), re.M)
        names.append({action.replace(name, "Strategy") for action in actions})
    assert names[0] == names[1]
    assert {"[Strategy]Strategy.training_step", "run_training_epoch"} <= names[0]


class Profiled(Model):
    """Has a part of the step recorded, in which microbatches take turns, with another action within."""

    def loss(self, batch: Tensor) -> Tensor:
        profile = self.trainer.profiler.profile
        with profile("net"):
            hidden = self.net.embed(batch[:, :-1])
            with profile("body"):
                hidden = self.net.body(hidden)
            logits = self.net.logits(hidden) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def profiled(kind: str, profiler: pl.profilers.Profiler) -> Any:
    train = batches_for(kind)
    given = harmony(loss_reduction="mean") if kind == "harmony" else "auto"
    accumulate = NUM_MICROBATCHES if kind == "plain" else 1
    trainer = trainer_for(given, profiler=profiler, accumulate_grad_batches=accumulate)
    trainer.fit(Profiled(), train)
    return trainer


def test_what_a_step_has_recorded_counts_once_for_each_microbatch_whose_own_time_it_takes() -> None:
    plain, swapped = pl.profilers.SimpleProfiler(), pl.profilers.SimpleProfiler()
    trainer = profiled("harmony", swapped)
    assert_same(profiled("plain", plain), trainer)
    for action in ("net", "body"):
        assert len(swapped.recorded_durations[action]) == len(plain.recorded_durations[action])
    # Waiting for the turns of others, all of a batch's microbatches would have it open at a time.
    (training,) = (d for name, d in swapped.recorded_durations.items() if name.endswith("Strategy.training_step"))
    assert sum(swapped.recorded_durations["body"]) < sum(swapped.recorded_durations["net"]) < sum(training)
    assert not {"start", "stop"} & vars(swapped).keys()


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden")
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")
@pytest.mark.parametrize("profiler", ["AdvancedProfiler", "PyTorchProfiler"])
def test_what_a_step_has_recorded_is_in_the_reports_of_other_profilers(profiler: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if profiler == "PyTorchProfiler":
        # Of the thread alone that starts it, by default.
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        options = {"export_to_chrome": False, "experimental_config": config, "row_limit": -1}
    kind = getattr(pl.profilers, profiler)
    trainer = profiled("harmony", kind(dirpath=tmp_path, filename="profile", **options))
    assert_same(fit("plain"), trainer)
    report = next(tmp_path.glob("*profile*")).read_text()
    if profiler == "PyTorchProfiler":
        assert {"[pl][profile]net", "[pl][profile]body"} <= set(report.split())
    else:
        # The profile of the outer one lasts until the inner one begins, as in plain Lightning.
        (body,) = re.findall(r"Profile stats for: body\n(.*?)(?:Profile stats for|\Z)", report, re.S)
        assert "(forward)" in body


# --- The Trainer's flags.


def test_anomaly_detection_gives_equal_bits() -> None:
    assert_same(fit("plain"), fit("harmony", detect_anomaly=True))


class Broken(torch.autograd.Function):
    """Has no gradient that is a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * float("nan")


class Anomalous(Model):
    """Breaks within a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[1].down.register_forward_hook(lambda module, args, output: Broken.apply(output))


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("kind", ["plain", "harmony"])
@pytest.mark.devices(1, 2)
def test_anomaly_detection_finds_a_nan_in_the_backward_of_a_layer(kind: str) -> None:
    with pytest.raises(RuntimeError, match=r"BrokenBackward.*returned nan"):
        fit(kind, Anomalous(), detect_anomaly=True)


@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled training dataloader shuffling")
def test_overfitting_some_batches_gives_equal_bits() -> None:
    plain = fit("plain", overfit_batches=2 * NUM_MICROBATCHES, max_epochs=2)
    swapped = fit("harmony", overfit_batches=2, max_epochs=2)
    assert_same(plain, swapped)
    assert plain.global_step == swapped.global_step == 4


def test_a_fast_run_gives_equal_bits() -> None:
    options: dict[str, Any] = {"num_microbatches": 1, "validate": True, "fast_dev_run": 2}
    plain, swapped = (fit(kind, **options) for kind in ("plain", "harmony"))
    assert_same(plain, swapped)
    assert plain.global_step == swapped.global_step == 2
    assert_equal(plain.callback_metrics["val_loss"], swapped.callback_metrics["val_loss"])


@pytest.mark.parametrize(("train", "validation"), [(2, 1), (0.67, 1.0)])
def test_limits_of_batches_hold(train: float, validation: float) -> None:
    options: dict[str, Any] = {"num_microbatches": 1, "validate": True, "max_epochs": 2}
    options |= {"limit_train_batches": train, "limit_val_batches": validation}
    plain, swapped = (fit(kind, **options) for kind in ("plain", "harmony"))
    assert_same(plain, swapped)
    assert plain.global_step == swapped.global_step == 4
    assert_equal(plain.callback_metrics["val_loss"], swapped.callback_metrics["val_loss"])


def test_limits_of_other_loops_hold() -> None:
    module = Model()
    plain, swapped = (trainer_of(k, limit_test_batches=1, limit_predict_batches=2) for k in ("plain", "harmony"))
    assert swapped.test(module, loader(), verbose=False) == plain.test(module, loader(), verbose=False)
    expected, found = plain.predict(module, loader()), swapped.predict(module, loader())
    assert len(found) == 2
    assert_equal(expected, found)


class Validations(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.seen.append((trainer.global_step, trainer.callback_metrics["val_loss"].clone(), module.training))


@pytest.mark.parametrize("between_epochs", [False, True])
def test_validation_comes_at_the_same_steps_with_the_same_weights(between_epochs: bool) -> None:
    seen = []
    for kind, interval in (("plain", 2 * NUM_MICROBATCHES), ("harmony", 2)):
        callback = Validations()
        options: dict[str, Any] = {"check_val_every_n_epoch": None} if between_epochs else {}
        fit(kind, validate=True, max_epochs=2, val_check_interval=interval, callbacks=[callback], **options)
        seen.append(callback.seen)
    assert_equal(*seen)
    assert [step for step, *_ in seen[0]] == ([0, 2, 4, 6] if between_epochs else [0, 2, 5])


# --- Where the model is built, and what becomes of it.


class Late(Model):
    """Makes its network when Lightning asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.net = True, None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            # Lightning would draw its weights on the device, harmony does on the host.
            with torch.device("cpu"):
                self.net = nets.Language()


@pytest.mark.filterwarnings("ignore:The state dict in .* contains parameters that")
@pytest.mark.devices(1, 2)
def test_a_model_that_is_built_in_configure_model_gives_equal_bits() -> None:
    assert_same(fit("plain", Late()), fit("harmony", Late()))


def test_a_model_that_is_built_in_the_trainers_context_gives_equal_bits() -> None:
    def fit_built(kind: str) -> Any:
        trainer = trainer_of(kind)
        with trainer.init_module():
            module = Model()
        assert {p.device.type for p in module.parameters()} == {
            "cpu" if kind == "harmony" else same_training.root().type
        }
        module.load_state_dict(Model().state_dict())
        trainer.fit(module, batches_for(kind))
        return trainer

    assert_same(fit_built("plain"), fit_built("harmony"))


def test_a_module_goes_from_trainer_to_trainer_and_from_strategy_to_strategy() -> None:
    expected, module = Model(), Model()
    for kind in ("harmony", "plain"):
        fit("plain", expected)
        fit(kind, module)
        assert_equal(values(expected), values(module))
    # Other weights are read afresh, and copies train as well.
    for each in (expected, module):
        each.trainer = None
    copies = [copy.deepcopy(expected), pickle.loads(pickle.dumps(module.net))]
    other = Model()
    other.net, other.scale = copies[1], nn.Parameter(module.scale.detach().clone())
    assert_same(fit("plain", copies[0]), fit("harmony", other))


# --- The tuner.


class Tuned(Model):
    """Has what the tuner tunes."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 1e-3, 2

    def train_dataloader(self) -> Any:
        return loader(self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tuner keeps its checkpoint in the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.nightly
def test_the_learning_rate_finder_finds_the_same_rate_and_leaves_the_model_as_it_was() -> None:
    results = []
    for kind in ("plain", "harmony"):
        module = Tuned()
        before = values(module)
        trainer = trainer_of(kind, 1)
        finder = Tuner(trainer).lr_find(module, num_training=6, min_lr=1e-4, max_lr=1.0, early_stop_threshold=None)
        assert_equal(values(module), before)
        trainer.fit(module)
        results.append((finder.results, finder.suggestion(0, 0), module.lr, values(module)))
    assert_equal(*results)


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize("mode", ["power", "binsearch"])
@pytest.mark.nightly
def test_the_batch_size_finder_finds_the_same_size_and_leaves_the_model_as_it_was(mode: str) -> None:
    results = []
    for kind in ("plain", "harmony"):
        module = Tuned()
        before = values(module)
        trainer = trainer_of(kind, 1)
        size = Tuner(trainer).scale_batch_size(module, mode=mode, max_trials=2, steps_per_trial=1)
        assert_equal(values(module), before)
        trainer.fit(module)
        results.append((size, module.batch_size, values(module)))
    assert_equal(*results)


@pytest.mark.cpu
@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_batch_size_finder_goes_back_to_a_size_that_fits_the_capacity(mode: str) -> None:
    class Growing(Tuned):
        def train_dataloader(self) -> Any:
            return DataLoader(nets.tokens(64), batch_size=self.batch_size)

    module = Growing()
    before = values(module)
    trainer = trainer_of("harmony", 1)
    size = Tuner(trainer).scale_batch_size(module, mode=mode, max_trials=5, steps_per_trial=2)
    assert size is not None
    assert 2 <= size < 64
    assert_equal(values(module), before)
    trainer.fit(module)
    assert trainer.strategy.step_report is not None


@pytest.mark.usefixtures("in_tmp_path")
def test_the_finders_work_as_callbacks() -> None:
    results = []
    for kind in ("plain", "harmony"):
        module = Tuned()
        finders = [
            cb.BatchSizeFinder("power", steps_per_trial=1, max_trials=2, init_val=2),
            cb.LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=6, early_stop_threshold=None),
        ]
        trainer = trainer_of(kind, 1, callbacks=finders)
        trainer.fit(module)
        results.append((finders[1].optimal_lr.results, module.lr, module.batch_size, values(module)))
    assert_equal(*results)
    assert results[0][2] > 2


# --- Loggers and profilers that need other packages.


def test_the_tensorboard_logger_gets_the_same_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    seen = []
    for kind in ("plain", "harmony"):
        module = Model(stepped)
        logger = pl.loggers.TensorBoardLogger(tmp_path / kind)
        written: list[Any] = []
        add_scalar = logger.experiment.add_scalar
        logger.experiment.add_scalar = lambda *args, add=add_scalar, to=written: (to.append(args), add(*args))
        options: dict[str, Any] = {"num_microbatches": 1, "log_every_n_steps": 1, "validate": True}
        trainer = fit(kind, module, logger=logger, **options)
        logger.experiment.add_histogram("scale", module.scale, trainer.global_step)
        seen.append(written)
        assert list((tmp_path / kind).rglob("events*"))
    assert seen[0] == seen[1]
    assert {name for name, *_ in seen[0]} >= {"loss_step", "val_loss", "epoch"}


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden")
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle")
def test_the_pytorch_profiler_records_the_step_and_its_layers(tmp_path: Path) -> None:
    profiler = pl.profilers.PyTorchProfiler(dirpath=tmp_path, filename="profile", export_to_chrome=False)
    trainer = fit("harmony", profiler=profiler)
    assert_same(fit("plain"), trainer)
    (report,) = tmp_path.glob("*profile*")
    assert "training_step" in report.read_text()


# --- The command line.


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
def test_the_command_line_fits_saves_its_config_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")

    class Plain(Model):
        def __init__(self) -> None:
            super().__init__()

        def train_dataloader(self) -> Any:
            return loader()

    monkeypatch.setattr("sys.argv", ["train.py"])
    arguments = [
        "fit", f"--trainer.accelerator={same_training.accelerator}", "--trainer.devices=1", "--trainer.logger=false",
        "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false",
        f"--trainer.default_root_dir={tmp_path}", "--trainer.strategy=harmony",
    ]  # fmt: skip
    for epochs in (1, 2):
        path = [f"--ckpt_path={next(tmp_path.rglob('*.ckpt'))}"] if epochs == 2 else []
        cli = LightningCLI(
            Plain,
            args=[*arguments, f"--trainer.max_epochs={epochs}", *path],
            seed_everything_default=7,
            save_config_kwargs={"overwrite": True},
        )
    assert "strategy: harmony" in (tmp_path / "config.yaml").read_text()
    # Nothing was said of microbatches: a batch runs whole.
    assert_same(fit("plain", num_microbatches=1, max_epochs=2), cli.trainer)

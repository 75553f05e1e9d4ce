"""The summary at the start of a fit: said once, where Lightning says what it trains, and right."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import Optimizer

from lightning_harmony.plan.drawing.page import format_seconds
from lightning_harmony.plan.values.memory_size import format_bytes, parse_bytes
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.reporting import fit_summary
from lightning_harmony.reporting.fit_summary import _packs, describe_plan
from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.updating.optimizer_state import expected_state_bytes, state_bytes
from support import nets
from support.lightning_fits import NUM_MICROBATCHES, QUIET_MARKS, Manual, Model, harmony, loader, trainer_for

pytestmark = [
    *QUIET_MARKS,
    # Of Lightning's own summary.
    pytest.mark.filterwarnings("ignore:.*unsupported operand type"),
]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(LightningTree, "show", lambda self, message: found.append(message))
    return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(LightningTree, "info", lambda self, message: found.append(message))
    return found


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that were told of. Later steps may be planned anew, where updates turn out to be faster."""
    found: list[Plan] = []

    def describe(engine: Any, *others: Any) -> str:
        found.append(engine.plan)
        return describe_plan(engine, *others)

    monkeypatch.setattr(fit_summary, "describe_plan", describe)
    return found


def fit(module: Any = None, strategy: Any = None, **options: Any) -> Any:
    trainer = trainer_for(strategy or harmony(), **{"enable_model_summary": True, **options})
    trainer.fit(module or Model(), loader())
    return trainer


def cells(text: str) -> dict[str, list[str]]:
    """The table, by the names of its rows."""
    rows = [line.split("|") for line in text.splitlines() if "|" in line]
    return {head.strip(): [cell.strip() for cell in others] for head, *others in rows}


@pytest.mark.cpu
def test_the_summary_says_what_is_known_and_then_the_plan(said: list[str], plans: list[Plan]) -> None:
    # No step follows that has another plan.
    trainer = fit(max_steps=2)
    start, planned = said
    assert re.fullmatch(
        r"Harmony: 6 layers, [\d.]+ KiB of weights in host memory, 1 cpu device \(64 KiB\)\. "
        r"The plan follows after a step or two\.",
        start,
    )
    (plan,), report = plans, trainer.strategy.step_report
    assert f"Harmony: 7 layers in {len(plan.packs)} packs, {NUM_MICROBATCHES} microbatches, 1 device\n" in planned
    assert f"{format_bytes(plan.predicted.peak_bytes[0])} of 64 KiB  Predicted peak on device 0\n" in planned
    # The time of the updates included, which is known from the second step on.
    assert plan.profile.machine.update_bytes_per_second is not None
    assert re.search(rf"{re.escape(format_seconds(plan.predicted.seconds))} +Predicted time of a step\n", planned)
    assert re.search(r"just-in-time +Weights are updated during the backward: nothing reads the gradients", planned)
    table = cells(planned)
    assert table["weights"] == [
        start.split(", ")[1].split(" of")[0],
        format_bytes(report.swapped_in_bytes["weights"]),
        "-",
    ]
    assert table["gradients"][1:] == ["-", format_bytes(report.swapped_out_bytes["gradients"])]
    assert table["optimizer state"] == [format_bytes(state_bytes(trainer.optimizers)), "with updates", "with updates"]
    stash = report.swapped_out_bytes["stash"]
    assert table["stash"] == [format_bytes(stash), format_bytes(report.swapped_in_bytes["stash"]), format_bytes(stash)]
    assert max(map(len, planned.splitlines())) <= 110


def test_the_summary_is_printed_where_lightning_prints_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    fit(max_steps=2)
    printed = capsys.readouterr()
    assert "Harmony: 6 layers" in printed.out
    assert "Predicted time of a step" in printed.out
    assert "Harmony" not in printed.err


class Counts(Model):
    """Its microbatches cannot take turns, for each finds what the one before it has left."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.factor = 1.0 + float(batch.float().mean())
        return super().training_step(batch, batch_idx) * self.factor


@pytest.mark.cpu
def test_nothing_is_predicted_of_microbatches_that_run_one_after_the_other(said: list[str]) -> None:
    """A time and bytes were, of a step in which they take turns, and far too low."""
    trainer = fit(Counts())
    assert "one by one  " in said[1]
    assert "Predicted" not in said[1]
    assert cells(said[1])["weights"][1:] == ["unknown", "unknown"]
    assert trainer.strategy.step_report.predicted_seconds is None


def test_a_second_fit_says_it_again(said: list[str]) -> None:
    fit()
    fit()
    assert len(said) == 4


@pytest.mark.parametrize("function", ["fit", "validate"])
def test_the_summary_is_silent_where_lightnings_is(said: list[str], function: str) -> None:
    trainer = trainer_for(harmony(), enable_model_summary=function == "validate")
    getattr(trainer, function)(Model(), loader())
    assert said == []


@pytest.mark.cpu
def test_several_devices_have_a_line_each(said: list[str], plans: list[Plan]) -> None:
    strategy = harmony(device_memory=["64KiB", "96KiB"])
    fit(strategy=strategy, devices=2)
    start, planned = said
    assert "2 cpu devices (64 KiB, 96 KiB)" in start
    assert "2 devices (pipeline)" in planned
    assert plans[0].predicted is not None
    peaks = plans[0].predicted.peak_bytes
    for number, capacity in enumerate(["64 KiB", "96 KiB"]):
        assert f"{format_bytes(peaks[number])} of {capacity}  Predicted peak on device {number}\n" in planned
    fit(strategy=harmony(), devices=2)
    assert "2 cpu devices (64 KiB each)" in said[2]


@pytest.mark.cpu
def test_without_a_capacity_there_is_no_limit(said: list[str], plans: list[Plan]) -> None:
    fit(strategy=harmony(device_memory=None))
    start, planned = said
    assert "1 cpu device (no limit)" in start
    assert plans[0].predicted is not None
    assert re.search(rf"\n{re.escape(format_bytes(plans[0].predicted.peak_bytes[0]))} +Predicted peak", planned)
    assert _packs(plans[0].fused) in planned


@pytest.mark.cpu
def test_the_trained_part_of_a_frozen_base_alone_has_gradients_and_state(said: list[str]) -> None:
    module = Model()
    module.net.blocks.requires_grad_(False)
    module.net.embed.requires_grad_(False)
    trained = sum(p.numel() * 4 for p in module.parameters() if p.requires_grad)
    trainer = fit(module)
    table = cells(said[1])
    assert parse_bytes(table["optimizer state"][0]) < 2 * trained + 100
    assert table["gradients"][2] == format_bytes(trainer.strategy.step_report.swapped_out_bytes["gradients"])
    assert parse_bytes(table["weights"][1]) > parse_bytes(table["gradients"][2])


@pytest.mark.cpu
def test_deferred_gradients_are_all_on_the_host_at_once(said: list[str]) -> None:
    trainer = fit(gradient_clip_val=0.1)
    table = cells(said[1])
    assert re.search(
        r"deferred +Weights are updated after the backward: gradient_clip_val=0.1 needs all gradients", said[1]
    )
    assert table["gradients"][0] == format_bytes(trainer.strategy.step_report.swapped_out_bytes["gradients"])


def test_the_summary_of_manual_optimization_says_what_happens(said: list[str]) -> None:
    fit(Manual(), harmony(device_memory="96KiB"))
    (start,) = said
    assert start.endswith("Each call of a layer brings its weights, for the training_step does the rest itself.")


def sgd(parameters: Any, **options: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, **options)


class Unknown(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (sgd, 0),
        (lambda p: sgd(p, momentum=0.9), 1),
        (torch.optim.AdamW, 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
        (torch.optim.RMSprop, 1),
        (Unknown, None),
    ],
)
def test_the_state_of_an_optimizer_is_predicted_as_far_as_it_is_known(make: Any, copies: int | None) -> None:
    net = nets.Language()
    net.head.requires_grad_(False)
    trained = sum(p.numel() * 4 for p in net.parameters() if p.requires_grad)
    optimizer = make(net.parameters())
    expected = expected_state_bytes([optimizer])
    assert expected == (None if copies is None else copies * trained)
    if expected is None:
        return
    net(nets.tokens(2)).backward()
    optimizer.step()
    # Steps are counted in a few bytes a parameter.
    assert 0 <= state_bytes([optimizer]) - expected < 10 * len(list(net.parameters()))
    assert expected_state_bytes([optimizer]) == state_bytes([optimizer])


def test_packs_are_written_as_ranges() -> None:
    assert _packs(frozenset({3})) == "pack 3"
    assert _packs(frozenset({0, 1, 2, 5, 7, 8})) == "packs 0-2, 5, 7-8"


class Looks(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen = next(module.parameters()).sum()


class Times(pl.Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.times.append(time.perf_counter())


@pytest.mark.cpu
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}], ids=["outlasting", "postponed"])
def test_a_callback_that_ends_the_overlap_of_updates_is_named(told: list[str], options: dict[str, Any]) -> None:
    fit(callbacks=[Looks()], max_epochs=2, **options)
    looks = "Looks.on_train_batch_end looks at parameters"
    assert any(f"each update ends before the next batch: {looks}" in message for message in told)


class Saves(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / "checkpoint")


@pytest.mark.cpu
def test_a_callback_that_saves_is_named_and_not_what_lightning_calls_for_it(told: list[str], tmp_path: Path) -> None:
    fit(callbacks=[Saves(tmp_path)], max_epochs=2)
    assert any("Saves.on_train_batch_end looks at parameters" in message for message in told)


def any_gradient(module: Any) -> bool:
    return any(parameter.grad is not None for parameter in module.parameters())


class LooksForGradients(pl.Callback):
    """Its own code names none."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.found = any_gradient(module)


@pytest.mark.cpu
@pytest.mark.parametrize(("options", "tells_of_gradients"), [({}, True), ({"gradient_clip_val": 0.1}, False)])
def test_gradients_that_are_gone_after_a_step_are_said_to_be(
    said: list[str], options: dict[str, Any], tells_of_gradients: bool
) -> None:
    """Whoever read them when the epoch or the fit was over found None, and nothing had said so."""
    fit(**options)
    assert ("p.grad is None" in said[1]) == tells_of_gradients


@pytest.mark.cpu
@pytest.mark.parametrize(("update", "finds"), [("auto", False), ("deferred", True)])
def test_who_finds_no_gradients_is_told_why(update: Any, finds: bool) -> None:
    callback = LooksForGradients()
    finds_none = "LooksForGradients.on_train_batch_end finds no gradients"
    with nullcontext() if finds else pytest.warns(UserWarning, match=finds_none) as warned:
        fit(callbacks=[callback], strategy=harmony(update=update), max_epochs=2)
    assert callback.found is finds
    assert finds or len([each for each in warned or () if finds_none in str(each.message)]) == 1


@pytest.mark.cpu
@pytest.mark.parametrize("callback", [lambda: Timer({"hours": 1}), lambda: LearningRateMonitor("step"), Times])
def test_callbacks_that_do_not_look_do_not_end_the_overlap(
    callback: Callable[[], pl.Callback], said: list[str], told: list[str], tmp_path: Path
) -> None:
    fit(callbacks=[callback()], logger=CSVLogger(tmp_path), log_every_n_steps=1, max_epochs=2)
    assert not any("no overlap" in message for message in [*said, *told])


@dataclass
class Config:
    """What `dataclass` adds to it asks for the thread that runs."""

    width: int = 8


class Configured(Model):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()


@pytest.mark.cpu
def test_a_dataclass_of_settings_does_not_end_the_overlap(said: list[str], told: list[str]) -> None:
    fit(Configured(), max_epochs=2)
    assert not any("no overlap" in message for message in [*said, *told])

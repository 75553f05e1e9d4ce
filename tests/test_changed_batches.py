"""A step that changes its batch, and runs again: it finds what it found first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.utils import ModelOutput

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from lightning_harmony.microbatches.remembered import KeptBatch
from support.same_training import placed

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*exceeds the device's memory in .*is run again in"),
    pytest.mark.filterwarnings("ignore:.*a batch does not fit, and its step runs again"),
]
WIDTH = 64


@dataclass
class Record:
    x: Tensor


def rows(batch: dict[str, Any]) -> Tensor:
    x: Tensor = batch["x"].mul_(1.1)
    return x


def entry(batch: dict[str, Any]) -> Tensor:
    batch["x"] = batch["x"] * 1.1
    x: Tensor = batch["x"]
    return x


def new_entry(batch: dict[str, Any]) -> Tensor:
    batch["seen"] = batch.get("seen", 0) + 1
    x: Tensor = batch["x"] * batch["seen"]
    return x


def attribute(batch: dict[str, Any]) -> Tensor:
    batch["record"].x = batch["record"].x * 1.1
    x: Tensor = batch["record"].x
    return x


def shared(batch: dict[str, Any]) -> Tensor:
    batch["shared"] += 1
    x: Tensor = batch["x"] * batch["shared"].mean()
    return x


def unseen(batch: dict[str, Any]) -> Tensor:
    x: Tensor = batch["x"]
    x.data.mul_(1.1)
    return x


def needed(batch: dict[str, Any]) -> Tensor:
    x: Tensor = batch["x"].mul_(1.1).requires_grad_()
    return x


def attribute_of_rows(batch: dict[str, Any]) -> Tensor:
    x: Any = batch["x"]
    x.scale = 1.1 * getattr(x, "scale", 1.0)
    scaled: Tensor = x * x.scale
    return scaled


def entry_and_attribute(batch: dict[str, Any]) -> Tensor:
    batch["output"]["x"] = batch["output"].x * 1.1
    x: Tensor = batch["output"].x
    return x


WAYS = [rows, entry, new_entry, attribute, shared, unseen, needed, attribute_of_rows, entry_and_attribute]


@dataclass
class Output(ModelOutput):  # type: ignore[misc, no-any-unimported]
    """Refuses to be updated or cleared, and has its entries as attributes, too."""

    x: Tensor | None = None


def collate(samples: list[Tensor]) -> dict[str, Any]:
    return {
        "x": torch.stack(samples),
        "record": Record(torch.stack(samples)),
        "shared": torch.zeros(1, 3),
        "output": Output(torch.stack(samples)),
    }


class Layer(nn.Module):
    """Takes far more room for its work than for its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.sin(self.linear(x).repeat(1, 64)).view(len(x), 64, WIDTH).mean(1)
        return out


class Model(pl.LightningModule):
    def __init__(self, way: Callable[[Any], Tensor], *, is_late: bool = False, changes_late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*[Layer() for _ in range(4)])
        self.way, self.is_late, self.changes_late, self.number = way, is_late, changes_late, 1.0
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        is_later = self.global_step >= 2
        x = batch["x"] if self.changes_late and not is_later else self.way(batch)
        if self.is_late and is_later:
            # What speaks against taking turns.
            self.number = float(x.detach().mean())
        loss: Tensor = self.net(x).square().mean() * (self.number if self.is_late and is_later else 1.0)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validated(Model):
    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        loss = self.net(self.way(batch)).square().mean()
        self.evaluated.append(loss.item())
        self.log("loss", loss, batch_size=len(batch["x"]))


def fit(model: Model, strategy: Any, batch_size: int, **options: Any) -> pl.Trainer:
    samples = list(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)))
    trainer = pl.Trainer(
        strategy=strategy,
        **placed({"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(samples, batch_size, collate_fn=collate))
    return trainer


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time that a batch was made what it was, whether that was possible."""
    found: list[bool] = []
    restore = KeptBatch.restore

    def noting(self: KeptBatch) -> bool:
        found.append(restore(self))
        return found[-1]

    monkeypatch.setattr(KeptBatch, "restore", noting)
    return found


def assert_same(ours: Model, plain: Model) -> None:
    assert ours.losses[-len(plain.losses) :] == plain.losses
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))


@pytest.mark.parametrize("way", WAYS)
def test_a_step_whose_microbatches_may_not_take_turns_runs_again(way: Any, restored: list[bool]) -> None:
    ours, plain = Model(way, is_late=True), Model(way, is_late=True)
    fit(plain, "auto", 4, accumulate_grad_batches=4)
    fit(ours, HarmonyStrategy(device_memory="4MiB", num_microbatches=4, profile_cache=False), 16)
    assert restored == [True]
    assert_same(ours, plain)


def test_a_change_in_place_of_which_there_is_no_copy_is_refused(restored: list[bool]) -> None:
    ours = Model(rows, is_late=True, changes_late=True)
    with pytest.raises(UnsupportedModelError, match="what they have changed cannot be taken back"):
        fit(ours, HarmonyStrategy(device_memory="4MiB", num_microbatches=4, profile_cache=False), 16)
    assert restored == [False]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_did_not_fit_runs_again_in_more_microbatches(way: Any, restored: list[bool]) -> None:
    ours, plain = Model(way), Model(way)
    trainer = fit(ours, HarmonyStrategy(device_memory="400KiB", profile_cache=False), 16)
    number: int = trainer.strategy.step_report.num_microbatches  # type: ignore[attr-defined]
    assert number > 1
    assert all(restored)
    assert restored
    fit(plain, "auto", 16 // number, accumulate_grad_batches=number)
    assert_same(ours, plain)


@pytest.mark.in_memory
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_did_not_fit_beside_the_model_runs_again(way: Any, restored: list[bool]) -> None:
    ours, plain = Model(way), Model(way)
    fit(ours, HarmonyStrategy(device_memory="700KiB", num_microbatches=4, profile_cache=False), 32)
    assert restored[0]
    fit(plain, "auto", 8, accumulate_grad_batches=4)
    assert_same(ours, plain)


@pytest.mark.parametrize("way", WAYS)
def test_an_evaluation_that_did_not_fit_runs_again(way: Any, restored: list[bool]) -> None:
    found = []
    samples = list(torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)))
    for strategy in ("auto", HarmonyStrategy(device_memory="400KiB", profile_cache=False)):
        trainer = pl.Trainer(
            strategy=strategy,
            **placed({"logger": False, "enable_checkpointing": False}),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = DataLoader(samples, 32, collate_fn=collate)
        found.append(trainer.validate(Validated(way), data, verbose=False)[0]["loss"])
    assert restored[0]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_what_was_changed_is_taken_back(copies: bool, is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        x = torch.ones(3)
        batch: dict[str, Any] = {"x": x, "list": [1, 2], "record": Record(x)}
        kept = KeptBatch(([batch], {"more": 1}), copies=copies)
        assert not kept.has_changed()
        batch["x"] = x + 1
        batch["list"].append(3)
        batch["record"].x = None
        assert kept.restore()
        assert batch["x"] is batch["record"].x is x
        assert batch["list"] == [1, 2]
        x.mul_(2)
        # Those of inference mode do not tell: there are copies of all.
        assert kept.has_changed() is not is_inference
        assert kept.restore() is (copies or is_inference)
        assert torch.equal(x, torch.ones(3)) is (copies or is_inference)

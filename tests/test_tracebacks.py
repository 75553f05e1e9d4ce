"""Errors of the user's code show the user's code and torch, and not what stands between them here."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import CapacityError, HarmonyStrategy
from support import nets
from support.same_training import placed

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("of the user's")


class Fragile(nn.Module):
    """A layer that fails on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(nets.WIDTH, nets.WIDTH)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.fails == "forward":
            raise ZeroDivisionError("of the user's")
        if self.fails == "operation":
            x = x + torch.ones(nets.WIDTH + 1)
        return FailsInBackward.apply(x) if self.fails == "backward" else x


class Module(pl.LightningModule):
    def __init__(self, where: str, step: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nets.Block(), Fragile(), nets.Block())
        self.where, self.step = where, step

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.net[1].fails = self.where if batch_idx == self.step else ""
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net[1].fails = "forward" if self.where == "validation" else ""
        self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def files_of(module: pl.LightningModule, error: type[Exception], **options: Any) -> list[str]:
    """The files of the frames of an error that a fit ends with."""
    arguments = {"num_microbatches": 2, **options.pop("arguments", {})}
    trainer = pl.Trainer(
        strategy=HarmonyStrategy(profile_cache=False, **arguments), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **placed(options),
    )  # fmt: skip
    batches = DataLoader(torch.randn(32, nets.WIDTH), batch_size=8)
    with pytest.raises(error) as found:
        trainer.fit(module, batches, batches)
    return [frame.filename for frame in traceback.extract_tb(found.value.__traceback__)]


@pytest.mark.parametrize(
    ("where", "step", "options"),
    [
        ("forward", 0, {}),
        ("forward", 2, {}),
        ("forward", 2, {"arguments": {"num_microbatches": 1}}),
        ("forward", 2, {"devices": 2}),
        ("backward", 0, {}),
        ("backward", 2, {"gradient_clip_val": 1.0}),
        ("validation", 0, {}),
    ],
    ids=str,
)
def test_what_stands_between_the_users_frames_is_not_shown(where: str, step: int, options: dict[str, Any]) -> None:
    files = files_of(Module(where, step), ZeroDivisionError, **options)
    assert_is_short(files)


@pytest.mark.parametrize("step", [0, 2])
def test_what_stands_between_the_users_frames_and_an_operation_of_torch_is_not_shown(step: int) -> None:
    """A virtual device passes each operation on: all our frames were shown where one failed."""
    files = files_of(Module("operation", step), RuntimeError)
    assert_is_short([file for file in files if "/torch/" not in file])
    assert files[-1].endswith("torch/_ops.py") or files[-1] == __file__


def assert_is_short(files: list[str]) -> None:
    """Lightning calls the strategy's hooks, which are ours, and these the user's code."""
    assert files[-1] == __file__
    own = {Path(file).name for file in files if "lightning_harmony" in file}
    assert own <= {"strategy.py", "deferred_update.py"}


@pytest.mark.in_memory
def test_what_stands_between_the_users_frames_is_not_shown_where_nothing_is_swapped() -> None:
    assert_is_short(files_of(Module("forward", 1), ZeroDivisionError))


@pytest.mark.cpu
def test_an_error_of_ours_shows_all() -> None:
    files = files_of(Module("", 0), CapacityError, arguments={"device_memory": "2600B"})
    assert len([file for file in files if "lightning_harmony" in file]) > 2

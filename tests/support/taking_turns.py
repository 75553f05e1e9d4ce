"""Whether microbatches take turns."""

from __future__ import annotations

import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_harmony import HarmonyStrategy
from support import nets
from support.same_training import Net, trainer_for

ONE_AFTER_THE_OTHER = "microbatches run one after the other"


def samples(number: int = 24) -> torch.utils.data.TensorDataset:
    torch.manual_seed(3)
    return torch.utils.data.TensorDataset(torch.randn(number, nets.WIDTH), torch.randn(number, nets.WIDTH))


class Lanes(pl.Callback):
    """Whether there are threads of lanes."""

    def __init__(self) -> None:
        self.exist = False

    def on_train_batch_end(self, *args: Any) -> None:
        self.exist = any(thread.name.startswith("harmony-lane") for thread in threading.enumerate())


def takes_turns(net: nn.Module, caplog: pytest.LogCaptureFixture) -> tuple[bool, list[str]]:
    """Whether microbatches take turns in the last of three steps, and what was said of that."""
    strategy = HarmonyStrategy(num_microbatches=4, loss_reduction="mean", profile_cache=False)
    lanes = Lanes()
    trainer = trainer_for(strategy, 3, [lanes])
    with caplog.at_level("INFO"):
        trainer.fit(Net(net), torch.utils.data.DataLoader(samples(), batch_size=8))
    return lanes.exist, [each for each in caplog.messages if ONE_AFTER_THE_OTHER in each]

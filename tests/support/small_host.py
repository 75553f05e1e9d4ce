"""A host that has room for a part of what a training takes, and a disk for the rest, which may fail."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, StepReport
from lightning_harmony.engine.model.disk_store import BLOCK, DiskStore
from lightning_harmony.updating.optimizer_state import state_bytes
from support.same_training import Net, Training, _fit, _result, train_plain, trainer_for

BUDGET = "lightning_harmony.updating.host_budget"
# Of a module whose fits have a disk.
DISK_MARKS = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]
WIDTH, INNER, NUM_BLOCKS, NUM_STEPS, BATCH_SIZE = 32, BLOCK // 4, 4, 5, 8


class Blocks(nn.Module):
    """Layers of which Adafactor's state, too, takes whole blocks of a disk."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(WIDTH, INNER), (INNER, WIDTH)] * NUM_BLOCKS
        self.layers = nn.ModuleList(nn.Linear(*shape) for shape in shapes)

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.square().mean()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: AdamW(parameters, lr=0.01),
    "fused AdamW": lambda parameters: AdamW(parameters, lr=0.01, fused=True),
    "SGD with momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: Adafactor(parameters, lr=0.01),
}
# Bytes of state for each byte of a parameter, as is expected before there is any.
COPIES = {"SGD with momentum": 1}


def build(optimizer: str = "AdamW") -> Net:
    torch.manual_seed(1)
    return Net(Blocks(), OPTIMIZERS[optimizer])


OF_WEIGHTS = sum(p.nbytes for p in build().parameters())
SAMPLES = torch.randn(NUM_STEPS * BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(2))


class Host(pl.Callback):
    """A host that has room for gradients and for a part of the optimizer's state.

    Args:
        share: of the layers, whose state it has no room for.
        patch: gives it that room.
        folder: where their state may live.
        copies: bytes of state for each byte of a parameter.
        options: of the strategy.

    Attributes:
        used_bytes: of the disk, in the end.
        reports: of all steps but the last.
    """

    def __init__(
        self, share: float, patch: pytest.MonkeyPatch, folder: Path | None, copies: int = 2, **options: Any
    ) -> None:
        self.used_bytes, self.reports = 0, list[StepReport]()
        self.room = int(OF_WEIGHTS * (1.9 + (copies - 1) * (1 - share))) if share else 10 * OF_WEIGHTS
        options = {"device_memory": "800KiB", "num_microbatches": 2, **options}
        self.strategy: Any = HarmonyStrategy(profile_cache=False, offload_dir=folder, **options)
        patch.setattr(f"{BUDGET}.room_on_host", lambda: self.room - self.taken())
        patch.setattr(f"{BUDGET}.num_on_disk", lambda states, excess: round(share * len(states)))

    @property
    def disk(self) -> Any:
        return self.strategy._swapped.engine.updater.streamed.disk

    def taken(self) -> int:
        if self.strategy._swapped is None:
            # The model has not come to it yet.
            return 0
        optimizers = self.strategy.lightning_module.trainer.optimizers
        of_weights = sum(weight.nbytes for weight in self.disk.weights)
        on_host = state_bytes(optimizers) - self.disk.used_bytes - of_weights
        return int(self.strategy._swapped.engine.pool.num_bytes) + on_host

    def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:
        """No update has to be over for this hook."""
        if trainer.strategy.step_report is not None:
            self.reports.append(trainer.strategy.step_report)

    def on_train_end(self, *args: Any) -> None:
        self.used_bytes = 0 if self.disk is None else self.disk.used_bytes


def train(module: Net, host: Host, *callbacks: pl.Callback, samples: Tensor = SAMPLES, **options: Any) -> Training:
    trainer = trainer_for(host.strategy, NUM_STEPS, [host, *callbacks], **options)
    _fit(trainer, module, DataLoader(samples, batch_size=BATCH_SIZE))
    return _result(trainer, module, [])


def plain(optimizer: str, *callbacks: pl.Callback, **options: Any) -> Training:
    module = build(optimizer)
    if not callbacks:
        return train_plain(module, SAMPLES, 2, BATCH_SIZE, **options)
    trainer = trainer_for("auto", NUM_STEPS, list(callbacks), accumulate_grad_batches=2, **options)
    _fit(trainer, module, DataLoader(SAMPLES, batch_size=BATCH_SIZE // 2))
    return _result(trainer, module, [])


class Keeps(pl.Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


class After(pl.Callback):
    """From a step on, a function of the system fails."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, fail: Callable[..., int], step: int = 3) -> None:
        self.arguments = patch, name, fail
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        patch, name, fail = self.arguments
        if trainer.global_step == self.step - 1:
            patch.setattr(os, name, fail)


def fails(*_: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def cut_short(*_: Any) -> int:
    return 0


def hold_writes(patch: pytest.MonkeyPatch) -> threading.Event:
    """Have what is written to disks wait; what lets it go on."""
    may_go_on, write = threading.Event(), DiskStore.write

    def wait_and_write(*arguments: Any) -> None:
        may_go_on.wait()
        write(*arguments)

    patch.setattr(DiskStore, "write", wait_and_write)
    return may_go_on

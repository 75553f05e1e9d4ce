"""A long fit with everything on: nothing grows with the number of steps."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from support import nets, same_training
from support.lightning_fits import Model, harmony, trainer_for
from support.same_training import assert_within

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]
# Steps until everything that is made once has been made.
WARM_UP = 40


@dataclass(frozen=True)
class Usage:
    """What the process and the device hold between two steps."""

    host_bytes: int
    device_bytes: int
    threads: tuple[str, ...]
    num_handles: int
    num_tensors: int


def usage(trainer: Any) -> Usage:
    engine = trainer.strategy._swapped.engine
    # What goes on under the next step holds tensors, for longer or shorter.
    engine.updater.postponed.finish()
    # The collector doesn't tell of objects that it is spared.
    gc.unfreeze()
    gc.collect()
    num_pooled = sum(len(buffers) for buffers in engine.pool._free.values())
    return Usage(
        host_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        device_bytes=sum(device.allocated_bytes() for device in engine.devices),
        threads=tuple(sorted(thread.name for thread in threading.enumerate())),
        num_handles=len(os.listdir("/proc/self/fd")),
        num_tensors=sum(issubclass(type(each), Tensor) for each in gc.get_objects()) - num_pooled,
    )


class Usages(pl.Callback):
    def __init__(self) -> None:
        self.seen: dict[int, Usage] = {}
        self.pool_bytes: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.pool_bytes.append(trainer.strategy._swapped.engine.pool.num_bytes)
        if trainer.global_step % WARM_UP == 0:
            self.seen[trainer.global_step] = usage(trainer)


class Busy(Model):
    """Logs values and a metric, in training and validation."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
        torch.manual_seed(0)
        self.net = nets.Language(num_blocks=2, dropout=0.1)
        self.metric = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric(loss.detach())
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.nightly
@pytest.mark.parametrize("num_steps", [80, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_nothing_grows_with_the_number_of_steps(num_steps: int, tmp_path: Path) -> None:
    usages = Usages()
    callbacks = [
        usages,
        cb.ModelCheckpoint(
            tmp_path / "checkpoints", monitor="val_loss", save_top_k=2, save_last=True, every_n_train_steps=25
        ),
        cb.EMAWeightAveraging(decay=0.9),
        cb.LearningRateMonitor("step"),
        cb.EarlyStopping("val_loss", patience=num_steps),
        cb.Timer(),
    ]
    trainer = trainer_for(
        harmony(device_memory="40KiB", num_microbatches=2),
        max_epochs=-1,
        max_steps=num_steps,
        callbacks=callbacks,
        logger=CSVLogger(tmp_path / "logs", flush_logs_every_n_steps=10),
        log_every_n_steps=1,
        val_check_interval=25,
        enable_checkpointing=True,
    )
    module = Busy()
    trainer.fit(module, DataLoader(nets.tokens(100), batch_size=4), DataLoader(nets.tokens(8), batch_size=4))
    assert trainer.global_step == num_steps
    assert trainer.strategy.step_report.update == "just-in-time"
    assert_within([trainer.strategy.step_report], "40KiB")
    first, last = usages.seen[WARM_UP], usages.seen[num_steps]
    assert last.threads == first.threads
    assert last.num_handles == first.num_handles
    # A GPU has the last metrics as well, which callbacks keep.
    assert last.device_bytes - first.device_bytes <= (4096 if same_training.accelerator == "gpu" else 0)
    # However late updates come on a busy machine, no more gradients wait for them than one step has.
    gradient_bytes = sum(parameter.nbytes for parameter in module.parameters())
    assert max(usages.pool_bytes) <= max(usages.pool_bytes[: WARM_UP // 2]) + gradient_bytes
    # Fewer are what tests before this one have left and let go of now.
    assert last.num_tensors <= first.num_tensors
    # What the allocator and the logger keep: far less than a step allocates, times the steps. The allocator's share varies
    # by megabytes with what the tests before this one left in pieces.
    assert last.host_bytes - first.host_bytes < (24 << 20) + 4096 * num_steps
    gc.collect()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("harmony")]

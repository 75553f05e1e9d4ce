"""A language model with all that Lightning may call, and fits of it by plain Lightning and by harmony."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from support import nets, same_training

BATCH_SIZE = 4
NUM_MICROBATCHES = 2
NUM_STEPS = 3
CAPACITY = "64KiB"
# One microbatch as large as the batch needs more room.
ROOM_FOR_WHOLE_BATCH = "72KiB"
# Of tests that fit it: what Lightning warns of in fits as small as these; and that none of them waits for ever.
QUIET_MARKS = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
FIT_MARKS = [pytest.mark.timeout(60, method="thread"), *QUIET_MARKS]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Model(pl.LightningModule):
    """A language model with everything that Lightning may call."""

    def __init__(self, make_optimizer: Callable[[Any], Any] = adamw) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nets.Language()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.make_optimizer = make_optimizer

    def forward(self, batch: Tensor) -> Tensor:
        return self.net.logits(self.net.body(self.net.embed(batch))) * self.scale

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("num_samples", float(len(batch)), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[:, :-1])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class Manual(Model):
    def __init__(self, make_optimizer: Callable[[Any], Any] = adamw) -> None:
        super().__init__(make_optimizer)
        self.automatic_optimization = False
        self.norms: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        # On a GPU, swapped gradients are on the host between batches, whose kernels sum in another order.
        self.norms.append(torch.stack([p.grad.to(same_training.root()).norm() for p in self.parameters()]).norm())
        optimizer.step()


class Images(pl.LightningModule):
    """Has buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nets.Convolutions()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch))


def leave_half(optimizer: Any, module: nn.Module) -> None:
    """Let an optimizer's `zero_grad` leave a half of each gradient, as one that a wrapper has replaced."""

    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    optimizer.zero_grad = zero_grad


def loader(batch_size: int = BATCH_SIZE) -> DataLoader[Any]:
    return DataLoader(nets.tokens(NUM_STEPS * BATCH_SIZE), batch_size=batch_size)


def trainer_for(strategy: Any, *, tree: Any = pl, **options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    devices = 1 if strategy == "auto" else same_training.default_devices
    where = same_training.placed({"devices": devices, **options})
    return tree.Trainer(**{"max_epochs": 1, "strategy": strategy, **quiet, **where})


def fit_plain(module: Any, *, accumulate: int = 1, **options: Any) -> Any:
    """Train with plain Lightning, a microbatch a batch."""
    trainer = trainer_for("auto", accumulate_grad_batches=NUM_MICROBATCHES * accumulate, **options)
    trainer.fit(module, loader(BATCH_SIZE // NUM_MICROBATCHES), ckpt_path=None)
    return trainer


@functools.cache
def plainly() -> Any:
    """The trainer of a model that plain Lightning has trained."""
    return fit_plain(Model())


def harmony(**arguments: Any) -> Any:
    arguments = {"device_memory": CAPACITY, "num_microbatches": NUM_MICROBATCHES, **arguments}
    return HarmonyStrategy(**arguments | {"device_memory": same_training.room(arguments["device_memory"])})


def fit_harmony(module: Any, strategy: Any = None, **options: Any) -> Any:
    trainer = trainer_for(strategy or harmony(), **options)
    trainer.fit(module, loader())
    return trainer


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_equal(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, check_device=same_training.accelerator == "cpu")


def assert_same(plain: Any, other: Any) -> None:
    """Equal weights and optimizer state."""
    assert_equal(values(plain.lightning_module), values(other.lightning_module))
    assert len(plain.optimizers) == len(other.optimizers)
    for a, b in zip(plain.optimizers, other.optimizers, strict=True):
        assert_equal(a.state_dict()["state"], b.state_dict()["state"])


def trainer_of(
    kind: str, num_microbatches: int = NUM_MICROBATCHES, device_memory: str | None = None, **options: Any
) -> Any:
    """A Trainer of plain Lightning or of harmony."""
    if kind == "plain":
        return trainer_for("auto", accumulate_grad_batches=num_microbatches, **options)
    memory = {} if num_microbatches > 1 else {"device_memory": ROOM_FOR_WHOLE_BATCH}
    memory = {"device_memory": device_memory} if device_memory is not None else memory
    return trainer_for(harmony(num_microbatches=num_microbatches, **memory), **options)


def batches_for(kind: str, num_microbatches: int = NUM_MICROBATCHES) -> DataLoader[Any]:
    return loader(BATCH_SIZE // num_microbatches if kind == "plain" else BATCH_SIZE)


def fit(
    kind: str,
    module: Any = None,
    *,
    num_microbatches: int = NUM_MICROBATCHES,
    validate: bool = False,
    ckpt_path: Any = None,
    **options: Any,
) -> Any:
    """Train by plain Lightning, a microbatch a batch, or by harmony; return the Trainer."""
    trainer = trainer_of(kind, num_microbatches, **options)
    train = batches_for(kind, num_microbatches)
    trainer.fit(Model() if module is None else module, train, loader() if validate else None, ckpt_path=ckpt_path)
    return trainer

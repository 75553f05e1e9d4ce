"""What cannot be estimated is refused in the user's terms; what is not known is assumed, and said."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_harmony import UnsupportedModelError, estimate

BATCH = torch.zeros(8, 16)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Empty(Model):
    def __init__(self) -> None:
        pl.LightningModule.__init__(self)


class WithoutLoss(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        return None


class Fails(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        raise KeyError("words")


class Refuses(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        raise UnsupportedModelError("not without its teacher")


def with_numbers() -> nn.Module:
    return nn.Linear(2, int(torch.ones(()).item()))


@pytest.mark.parametrize(
    ("model", "batch", "options", "said"),
    [
        (Empty, BATCH, {}, "Empty has no submodule with parameters"),
        (WithoutLoss, BATCH, {}, r"WithoutLoss\.training_step returned no loss"),
        (Fails, BATCH, {}, r"Fails cannot run a step on a batch of float32\[8, 16\]: KeyError: 'words'"),
        (Refuses, BATCH, {}, "^not without its teacher$"),
        (lambda: 3, BATCH, {}, "a model was expected, not int"),
        (lambda: nn.Linear(2, 2), BATCH, {}, "Linear has no training_step"),
        (with_numbers, BATCH, {}, r'cannot be built without memory: .* with device="cpu"'),
        (Model, None, {}, "the shapes of a batch for Model are not known"),
        (Model, torch.zeros(0, 16), {}, "no tensor with samples"),
        (Model, {"length": 3}, {}, "no tensor with samples"),
        (Model, BATCH, {"batch_size": 3}, "leave out batch_size"),
        (Model, BATCH, {"num_microbatches": 9}, "a batch has 8 samples: give at most 8"),
        (Model, BATCH, {"num_microbatches": 2, "microbatch_size": 4}, "not both"),
        (Model, BATCH, {"num_microbatches": 0}, "num_microbatches must be at least 1"),
        (Model, BATCH, {"precision": "8-true"}, "precision='8-true' cannot be estimated"),
    ],
)
def test_what_cannot_be_estimated_is_named(model: Any, batch: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises((UnsupportedModelError, ValueError), match=said):
        estimate(model, batch, machine="h100", **options)


class SparseBuffer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(16).to_sparse())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return torch.sparse.mm(self.edges, self.net(batch).t()).pow(2).mean()


class Configured(Model):
    def configure_model(self) -> None:
        self.more = nn.Linear(16, 16)


class OwnOptimizer(Model):
    class Lamb(torch.optim.SGD):
        pass

    def configure_optimizers(self) -> Any:
        return {"optimizer": self.Lamb(self.parameters(), 0.1)}


class NeedsItsTrainer(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1 / self.trainer.estimated_stepping_batches)


@pytest.mark.parametrize(
    ("kind", "optimizer", "num_layers", "note"),
    [
        (SparseBuffer, "SGD", 3, ""),
        (Configured, "SGD", 4, ""),
        (OwnOptimizer, "Lamb", 3, "Lamb is taken to keep 2 numbers for each parameter"),
        (NeedsItsTrainer, "AdamW", 3, "the optimizer is taken to be AdamW"),
    ],
)
def test_what_is_not_known_is_assumed_and_said(kind: Any, optimizer: str, num_layers: int, note: str) -> None:
    result = estimate(kind(), BATCH, machine="h100")
    assert (result.optimizer, result.num_layers) == (optimizer, num_layers)
    assert any(each.startswith(note) for each in result.notes)


def test_a_model_that_has_a_trainer_is_estimated_without_it() -> None:
    module = Model()
    module.trainer = trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert estimate(module, BATCH, machine="h100").num_layers == 3
    assert module.trainer is trainer

"""What all microbatches of a batch share: small tensors are each one's own, larger ones must stay as they are."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from support.same_training import trainer_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]


class Model(pl.LightningModule):
    """Counts in what its batch and it itself hold beside samples."""

    def __init__(self, num_shared: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        self.num_shared = num_shared
        self.found: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.found.append(float(batch["shared"][0, 0]))
        batch["shared"] += 1
        loss: Tensor = self.net(batch["x"]).square().mean()
        return loss

    def collate(self, samples: list[Tensor]) -> dict[str, Any]:
        return {"x": torch.stack(samples), "shared": torch.zeros(1, self.num_shared)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: Model, **options: Any) -> None:
    data = DataLoader(list(torch.randn(24, 16)), batch_size=8, collate_fn=model.collate)
    trainer_for(HarmonyStrategy(num_microbatches=4, profile_cache=False, **options), 3, []).fit(model, data)


def test_a_small_tensor_that_a_step_changes_is_each_microbatchs_own() -> None:
    """It was one object for all of them: what one added, the next one found."""
    model = Model()
    fit(model)
    assert set(model.found) == {0.0}


class AddsToASet(Model):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        batch["seen"].add(len(batch["seen"]))
        self.found.append(len(batch["seen"]))
        return super().training_step(batch, batch_idx)

    def collate(self, samples: list[Tensor]) -> dict[str, Any]:
        return {**super().collate(samples), "seen": set()}


def test_a_set_to_which_a_step_adds_is_each_microbatchs_own() -> None:
    model = AddsToASet()
    fit(model)
    assert model.found[::2] == [1] * 12


def test_a_large_tensor_that_a_step_changes_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"changes a tensor of shape \(1, 100000\) of its batch in place"):
        fit(Model(100_000))


class Meter:
    """Such as users write them: no module, no metric."""

    def __init__(self) -> None:
        self.total, self.num_steps = np.zeros(2), 0

    def add(self, value: float) -> None:
        self.total += value
        self.num_steps += 1


class Metered(Model):
    def __init__(self) -> None:
        super().__init__()
        self.meter, self.held = Meter(), {"metric": MeanMetric()}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.meter.add(1.0)
        self.held["metric"].to(loss.device).update(loss.detach())
        return loss


def test_the_check_of_the_loss_leaves_no_count_in_objects_arrays_and_metrics_that_are_no_submodules() -> None:
    """It runs a part of a microbatch once more, and what that counted stayed."""
    model = Metered()
    fit(model, check_loss=True)
    assert model.meter.num_steps == 12
    assert model.meter.total.tolist() == [12.0, 12.0]
    assert model.held["metric"]._update_count == 12


class Notes:
    """An object of the user's own in a batch, one for all of its samples."""

    factor = 1.0


class Slotted:
    """The same, with no dict of attributes."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class KeepsInNotes(pl.LightningModule):
    """Sets, in an object of its batch, what it reads behind its layers."""

    def __init__(self, kind: type[Any], first_step: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.kind, self.first_step = kind, first_step

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        x, notes = batch["x"], batch["notes"]
        if self.global_step >= self.first_step:
            notes.factor = 1 + float(x[0, 0])
        for layer in self.layers:
            x = layer(x) * notes.factor
        notes.factor = 1.0
        return x.square().mean()

    def collate(self, samples: list[Tensor]) -> dict[str, Any]:
        return {"x": torch.stack(samples), "notes": self.kind()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("first_step", [0, 2])
@pytest.mark.parametrize("kind", [Notes, Slotted])
def test_what_a_microbatch_keeps_in_an_object_of_its_batch_others_do_not_find(kind: type[Any], first_step: int) -> None:
    """They read what the last one to have its turn had set."""
    data = list(torch.randn(24, 16, generator=torch.Generator().manual_seed(2)))
    weights = []
    for strategy, batch_size, options in (
        ("auto", 2, {"accumulate_grad_batches": 4}),
        (HarmonyStrategy(num_microbatches=4, profile_cache=False, device_memory="16KiB"), 8, {}),
    ):
        model = KeepsInNotes(kind, first_step)
        loader = DataLoader(data, batch_size=batch_size, collate_fn=model.collate)
        trainer_for(strategy, 3, [], **options).fit(model, loader)
        weights.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))

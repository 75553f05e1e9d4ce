"""The end of an epoch that nobody expected: hooks saw weights of which some were updated, and some were not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_harmony import HarmonyStrategy
from support.same_training import trainer_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*length of IterableDataset"),
    pytest.mark.filterwarnings("ignore:.*Your `IterableDataset` has `__len__` defined"),
]
BATCHES = 5


class EndsEarly(IterableDataset[Tensor]):
    """Says that there is more."""

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.randn(BATCHES * 4, 16, generator=torch.Generator().manual_seed(1))


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(5)])
        self.seen: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(torch.cat([each.detach().flatten() for each in self.parameters()]).cpu())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StopsFromScheduler(Model):
    """A scheduler that ends the fit, after the step was asked for."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def factor(self, step: int) -> float:
        self.trainer.should_stop = step >= 3
        return 1.0


@pytest.mark.parametrize("kind", [Model, StopsFromScheduler])
@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.5}, {}], ids=["postponed", "outlasting"])
def test_hooks_at_its_end_see_finished_weights(
    kind: type[Model],
    options: dict[str, Any],
    postponed: list[bool],
) -> None:
    seen = []
    for strategy in ("auto", HarmonyStrategy(num_microbatches=1)):
        module = kind()
        trainer = trainer_for(strategy, 12, [], **options | {"max_epochs": 2})
        trainer.fit(module, DataLoader(EndsEarly(), batch_size=4))
        seen.append(module.seen)
        assert all("on_advance_end" not in vars(loop) for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop))
    assert len(seen[0]) == len(seen[1]) > 0
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
    assert postponed != []

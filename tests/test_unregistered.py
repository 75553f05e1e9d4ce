"""What only `.to()` moves is moved, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_harmony.fit.moves import move_unregistered
from support.lightning_fits import QUIET_MARKS, Model, assert_same, harmony, loader, trainer_for

pytestmark = QUIET_MARKS
META = torch.device("meta")


class Anchors(nn.Module):
    """Moves a tensor that it holds, as old code does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", torch.ones(3))
        self.grid = torch.ones(3)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.grid = fn(self.grid)
        return super()._apply(fn, recurse)


class Holder(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.anchors = Anchors()
        self.metrics = MetricCollection([MeanMetric(), SumMetric()])
        self.inner = Model()
        self.class_weights = torch.ones(3)
        self.left = torch.ones(3)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.class_weights = self.class_weights.to(*args, **kwargs)
        return super().to(*args, **kwargs)


def test_everything_but_parameters_and_buffers_goes_where_to_would_bring_it() -> None:
    module = Holder()
    (module.anchors.weight * 2).sum().backward()
    tensors = [*module.parameters(), *module.buffers(), module.anchors.weight.grad]
    move_unregistered(module, META)
    moved = [module.anchors.grid, module.class_weights, module.metrics["SumMetric"].sum_value]
    assert {tensor.device for tensor in moved} == {META}
    assert {module.device, module.inner.device, module.metrics["MeanMetric"].device} == {META}
    # `Module.to` does not know of this one.
    assert module.left.device.type == "cpu"
    after = [*module.parameters(), *module.buffers(), module.anchors.weight.grad]
    assert all(one is other for one, other in zip(tensors, after, strict=True))
    assert {tensor.device.type for tensor in after} == {"cpu"}
    assert "_apply" not in vars(module)


def test_an_error_in_the_modules_own_to_leaves_it_as_it_was() -> None:
    class Refuses(Holder):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("stay")

    module = Refuses()
    with pytest.raises(RuntimeError, match="stay"):
        move_unregistered(module, META)
    assert "_apply" not in vars(module)


class Transfers(Model):
    """Notes how batches come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def note(self, name: str, batch: Tensor, *rest: Any) -> Tensor:
        self.calls.append((name, tuple(batch.shape), *rest))
        return batch

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return self.note("before", batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Tensor, device: torch.device, dataloader_idx: int) -> Tensor:
        self.note("transfer", batch, device, dataloader_idx)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return self.note("after", batch, dataloader_idx).flip(0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert batch.device == self.device
        return self.loss(batch)


@pytest.mark.devices(1, 2)
def test_transfer_hooks_see_each_batch_once_and_whole() -> None:
    runs = []
    for strategy in ("auto", harmony(num_microbatches=1, device_memory="72KiB"), harmony()):
        trainer = trainer_for(strategy)
        trainer.fit(Transfers(), loader(), loader())
        runs.append(trainer)
    plain, whole, swapped = runs
    assert_same(plain, whole)
    assert plain.lightning_module.calls == whole.lightning_module.calls == swapped.lightning_module.calls
    assert {call[0] for call in plain.lightning_module.calls} == {"before", "transfer", "after"}

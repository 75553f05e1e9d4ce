"""Buffers that a layer changes in a step are read by the code between layers as plain Lightning has them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy
from lightning_harmony.errors import UnsupportedModelError
from support import nets
from support.same_training import Net, assert_same_training, trainer_for
from support.taking_turns import samples, takes_turns

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*normalize with the statistics of microbatches"),
]


class Remembers(nets.Block):
    """A layer that keeps the mean of what it has returned."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * y.mean(0))
        return y


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[Remembers() for _ in range(3)])
        self.count = 0

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.run(batch[0]), batch[1])


class BehindTheCall(Reads):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x - block.mean.clone()
        return x


class BehindAllCalls(Reads):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x * (1 + sum(block.mean.square().sum() for block in self.blocks))


class BeforeTheCall(Reads):
    """What the batch before has left."""

    def run(self, x: Tensor) -> Tensor:
        return self.blocks(x + self.blocks[2].mean)


class FromTheThirdStepOn(Reads):
    def run(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.blocks(x)
        return x * (1 + self.blocks[1].mean.mean().item()) if self.count > 8 else x


class Statistics(Reads):
    """A penalty on the statistics of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nets.Block(), nn.BatchNorm1d(nets.WIDTH)) for _ in range(3)])

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x * sum(block[1].running_var.mean() for block in self.blocks) / self.blocks[0][1].num_batches_tracked


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("net", [BehindTheCall, BehindAllCalls, BeforeTheCall, FromTheThirdStepOn, Statistics])
def test_a_buffer_that_is_read_between_layers_is_what_its_layer_has_left(net: Any, num_microbatches: int) -> None:
    module = Net(net())
    assert_same_training(
        module,
        samples(),
        batch_size=8,
        num_microbatches=num_microbatches,
        device_memory="44KiB",
        updates=["just in time"],
    )
    for name, buffer in module.named_buffers():
        assert type(buffer) is Tensor, name


def test_microbatches_whose_step_reads_such_a_buffer_run_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    takes, (said,) = takes_turns(BehindAllCalls(), caplog)
    assert not takes
    assert "buffer 'mean' of layer 'net.blocks.2' is read outside of its layer" in said


class Asks(Reads):
    """Wants to know what a buffer is, and nothing of what it holds."""

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        assert [block.mean.shape for block in self.blocks] == [(nets.WIDTH,)] * 3
        return x.to(self.blocks[0].mean.dtype)


def test_to_ask_for_the_shape_of_a_buffer_is_not_to_read_it(caplog: pytest.LogCaptureFixture) -> None:
    assert takes_turns(Asks(), caplog) == (True, [])


class Validates(Net):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.validated: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.net(batch))


def test_so_it_is_in_a_validation() -> None:
    results = []
    for strategy in ("auto", HarmonyStrategy(device_memory="44KiB", num_microbatches=1)):
        module = Validates(BehindTheCall())
        trainer = trainer_for(strategy, 1, [])
        loader = torch.utils.data.DataLoader(samples(8), batch_size=8)
        trainer.validate(module, loader, verbose=False)
        results.append(torch.stack(module.validated))
    assert torch.equal(*results)


class Writes(Reads):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        if self.how == "in place":
            self.blocks[0].mean.zero_()
        elif self.how == "an element":
            self.blocks[0].mean[0] = 0.0
        else:
            self.blocks[0].mean = torch.zeros(nets.WIDTH)
        return x


@pytest.mark.parametrize("how", ["in place", "an element", "assigned"])
def test_a_buffer_that_is_written_between_layers_is_refused_by_name(how: str) -> None:
    trainer = trainer_for(HarmonyStrategy(num_microbatches=2), 2, [])
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    with pytest.raises(
        UnsupportedModelError, match=r"buffer 'mean' of layer 'net\.blocks\.0' is changed within a step"
    ):
        trainer.fit(Net(Writes(how)), loader)


class ReadsAnother(nets.Block):
    """A layer that reads a buffer of a layer that is no part of it."""

    def __init__(self, others: list[Remembers]) -> None:
        super().__init__()
        self.others = others

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.others[0].mean


class ReadByAnother(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.last = ReadsAnother([self.blocks[0]])

    def run(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x))


def test_a_buffer_that_another_layer_reads_is_refused_with_both_names() -> None:
    trainer: pl.Trainer = trainer_for(HarmonyStrategy(num_microbatches=2), 2, [])
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    said = r"layer 'net\.last' reads buffer 'mean' of layer 'net\.blocks\.0'"
    with pytest.raises(UnsupportedModelError, match=said):
        trainer.fit(Net(ReadByAnother()), loader)

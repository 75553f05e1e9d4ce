"""Frozen parameters that a layer sets in its forward come and go as its buffers do: averages of codebooks, and the like."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from support.nets import WIDTH, Chain
from support.same_training import Net, assert_same_training, room, train_harmony
from support.sampling import combined

CODES = 6

pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers")]


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Sets(nn.Module):
    """A layer with a frozen parameter that it sets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Codebook(Sets):
    """As the EMA quantizer of taming-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Module()
        self.codes.weight, self.codes.size = frozen(torch.randn(CODES, WIDTH)), frozen(torch.ones(CODES))
        self.codes.sums = frozen(self.codes.weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        indices = (
            z.pow(2).sum(1, keepdim=True) + self.codes.weight.pow(2).sum(1) - 2 * z @ self.codes.weight.t()
        ).argmin(1)
        found = F.embedding(indices, self.codes.weight)
        if self.training:
            chosen = F.one_hot(indices, CODES).to(z)
            self.codes.size.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.sums.data.mul_(0.9).add_(chosen.t() @ z.detach(), alpha=0.1)
            self.codes.weight.data.copy_(self.codes.sums / self.codes.size.unsqueeze(1))
        return z + (found - z).detach() + 0.1 * z * self.codes.weight.mean(0)


class SpectralNorm(Sets):
    """As spectral normalizations that are older than torch's: each call assigns to the data of two vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = frozen(torch.randn(WIDTH)), frozen(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        self.v.data = F.normalize(weight.data.t() @ self.u.data, dim=0)
        self.u.data = F.normalize(weight.data @ self.v.data, dim=0)
        return F.linear(x, weight / self.u.dot(weight @ self.v), self.linear.bias).tanh()


class Noisy(Sets):
    """Draws, counts, and has a buffer, all of which its first call does once."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.calls = frozen(torch.zeros(WIDTH)), 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.linear(F.dropout(x, 0.5, self.training))
        with torch.no_grad():
            self.total += x.sum()
            self.mean.mul_(0.5).add_(x.mean(0))
        return x + self.mean / self.calls + 0.01 * self.total


@pytest.mark.parametrize(
    ("kind", "num_microbatches", "devices"), combined([Codebook, SpectralNorm, Noisy], [(1, 1), (4, 1), (2, 2)])
)
def test_a_layer_may_set_parameters_that_nothing_trains(kind: type[Sets], num_microbatches: int, devices: int) -> None:
    """That was refused."""
    module, samples = Net(Chain(kind)), torch.randn(40, WIDTH)
    memory = room("24KiB") if devices == 1 else None
    assert_same_training(
        module, samples, device_memory=memory, num_microbatches=num_microbatches, layers=[kind], devices=devices
    )


class ReadsBetween(Chain):
    """Code between layers reads what a layer sets, before it does so and behind it."""

    def __init__(self) -> None:
        super().__init__(Codebook)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + 0.1 * block.codes.weight.mean(0)) * block.codes.size.sum()
        return x.pow(2).mean()


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_code_between_layers_reads_what_they_have_set(num_microbatches: int) -> None:
    assert_same_training(
        Net(ReadsBetween()), torch.randn(40, WIDTH), num_microbatches=num_microbatches, layers=[Codebook]
    )


class Revives(pl.Callback):
    """Sets codes between steps."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            for block in module.net.blocks:
                block.codes.weight.data[1] = 0.5
                block.codes.size.data[1] = 1.0


def test_hooks_may_set_them_too() -> None:
    assert_same_training(
        Net(Chain(Codebook)),
        torch.randn(40, WIDTH),
        num_microbatches=1,
        layers=[Codebook],
        make_callbacks=lambda: [Revives()],
    )


def test_a_step_that_sets_what_its_layer_sets_is_refused() -> None:
    class Changes(Chain):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            self.blocks[0].codes.weight.data.mul_(0.5)
            return loss

    with pytest.raises(UnsupportedModelError, match=r"codes\.weight.*is changed inside the step"):
        train_harmony(
            Net(Changes(Codebook)), torch.randn(40, WIDTH), HarmonyStrategy(layers=[Codebook]), 8, with_gradients=False
        )


def test_what_a_layer_has_set_is_not_trained_later() -> None:
    class Unfreezes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            module.net.blocks[0].codes.weight.requires_grad_(True)

    with pytest.raises(UnsupportedModelError, match=r"'net\.blocks\.0' is to train a parameter that it has set"):
        train_harmony(
            Net(Chain(Codebook)),
            torch.randn(40, WIDTH),
            HarmonyStrategy(layers=[Codebook]),
            8,
            with_gradients=False,
            more_callbacks=[Unfreezes()],
        )

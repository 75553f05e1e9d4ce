"""Hooks of the user's own on what autograd saves: exact between layers, refused around layers, whose graphs are dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lightning_harmony import HarmonyStrategy
from lightning_harmony.errors import UnsupportedModelError
from support.chains import BATCH, MICROBATCHES, Chain, build, samples
from support.same_training import Training, compare, train_harmony, train_plain

STEPS = 3
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*")


@contextmanager
def rounded() -> Iterator[None]:
    """As where activations are kept in fewer bits."""
    with saved_tensors_hooks(lambda tensor: (tensor * 8).round(), lambda tensor: tensor / 8):
        yield


class Around(Chain):
    def through(self, x: Tensor) -> Tensor:
        with rounded():
            return super().through(x)


class FromTheSecondStep(Around):
    def through(self, x: Tensor) -> Tensor:
        return Chain.through(self, x) if self.num_calls <= MICROBATCHES else super().through(x)


class BetweenLayers(Chain):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            with rounded():
                x = x.sin() * x
        return x


class OfTorch(Chain):
    def through(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return super().through(x)


class WithoutGraph(Chain):
    def through(self, x: Tensor) -> Tensor:
        with rounded(), torch.no_grad():
            mean = self.blocks[0](x).mean()
        return super().through(x * (1 + mean))


class AroundSteps(pl.Callback):
    """Lanes have threads of their own, where these are not."""

    def on_train_batch_start(self, *args: Any) -> None:
        self.context = rounded()
        self.context.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.context.__exit__(None, None, None)


@pytest.mark.parametrize("make", [Around, FromTheSecondStep])
def test_hooks_around_layers_are_refused(make: type[Chain]) -> None:
    """They were called for nothing that a layer saved: its gradients came of other numbers, without a word."""
    with pytest.raises(UnsupportedModelError, match=r"^layer 'net\.blocks\.0' is called within .*\(rounded\.<locals>"):
        train(make)


def test_hooks_around_steps_are_refused() -> None:
    around = AroundSteps()
    with pytest.raises(UnsupportedModelError, match=r"^a step is called within"):
        train(Chain, around)
    # The batch did not come to its end.
    around.on_train_batch_end()


@pytest.mark.parametrize("make", [BetweenLayers, OfTorch, WithoutGraph])
def test_hooks_around_no_layer_train_as_in_plain_lightning(make: type[Chain]) -> None:
    compare(train_plain(build(make), samples(STEPS), MICROBATCHES, BATCH), train(make))


def train(make: type[Chain], *callbacks: pl.Callback) -> Training:
    strategy = HarmonyStrategy(device_memory="64KiB", num_microbatches=MICROBATCHES, profile_cache=False)
    return train_harmony(build(make), samples(STEPS), strategy, BATCH, with_gradients=False, more_callbacks=callbacks)

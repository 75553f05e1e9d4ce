"""Parameters that change between the forward of a batch and its backward are noticed in whichever step it happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from support.same_training import trainer_for

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

HOOKS = ["on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward"]


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(5)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def from_third_step(owner: Any, hook: str, change: Callable[[Model], Any]) -> Any:
    """A module or callback whose hook calls something in its third step: the first ones are watched more closely."""
    inherited = getattr(owner, hook)
    calls: list[None] = []

    def changes(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) >= 3:
            change(owner if isinstance(owner, Model) else args[1])
        return inherited(*args, **kwargs)

    object.__setattr__(owner, hook, changes)
    return owner


def clamp(module: Model) -> None:
    module.net[2].weight.data.clamp_(-0.1, 0.1)


def replace(module: Model) -> None:
    module.net[2].weight.data = torch.zeros(16, 16)


def freeze(module: Model) -> None:
    module.net[2].requires_grad_(False)


def fit(module: Model, *callbacks: pl.Callback) -> pl.Trainer:
    trainer = trainer_for(HarmonyStrategy(num_microbatches=2), 6, list(callbacks))
    trainer.fit(module, DataLoader(torch.randn(48, 16), batch_size=8))
    return trainer


@pytest.mark.parametrize("change", [clamp, replace, freeze])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_the_module_may_not_change_parameters(hook: str, change: Callable[[Model], Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"net\.2\.weight.*Model\.{hook} is overridden.*on_train_batch"):
        fit(from_third_step(Model(), hook, change))


@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_before_backward"])
def test_a_callback_may_not_change_parameters(hook: str) -> None:
    callback = from_third_step(pl.Callback(), hook, clamp)
    with pytest.raises(UnsupportedModelError, match=rf"net\.2\.weight.*Callback\.{hook} is overridden"):
        fit(Model(), callback)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_the_hooks_that_the_error_names_may_change_parameters(hook: str) -> None:
    assert fit(from_third_step(Model(), hook, clamp)).global_step == 6


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_only_looks_is_no_matter(hook: str) -> None:
    seen: list[Any] = []
    module = from_third_step(Model(), hook, lambda module: seen.append(module.net[2].weight.sum().item()))
    assert fit(module).global_step == 6
    assert len(seen) == 4

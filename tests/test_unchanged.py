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
from support.chains import BATCH, WIDTH, Block, Chain, samples
from support.same_training import Net, compare, train_harmony, train_plain, trainer_for

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


class WithTeacher(Net):
    """A copy that follows in a hook between forward and backward."""

    def __init__(
        self, *, hook: str = "on_before_zero_grad", passes_through: bool = False, is_frozen: bool = True
    ) -> None:
        torch.manual_seed(1)
        super().__init__(Chain())
        self.teacher = nn.ModuleList(Block() for _ in range(5)).requires_grad_(not is_frozen)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.passes_through = passes_through
        object.__setattr__(self, hook, self.follow)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net.through(batch[0])
        with torch.set_grad_enabled(self.passes_through):
            y = x if self.passes_through else batch[0]
            for block in self.teacher:
                y = block(y)
        loss = (x * self.scale - y).square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def follow(self, *args: Any) -> None:
        with torch.no_grad():
            for mean, newest in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mean.data = mean.data.lerp(newest.data, 0.5)


@pytest.mark.parametrize("memory", ["64KiB", "90KiB"])
@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_before_backward"])
def test_a_teacher_that_the_backward_does_not_read_may_follow(hook: str, memory: str) -> None:
    plain = train_plain(WithTeacher(hook=hook), samples(), 1, BATCH)
    strategy = HarmonyStrategy(device_memory=memory, num_microbatches=1, profile_cache=False)
    compare(plain, train_harmony(WithTeacher(hook=hook), samples(), strategy, BATCH, with_gradients=False))


def test_a_teacher_that_nobody_has_frozen_may_follow_if_the_backward_does_not_read_it() -> None:
    """As the averages of the weights of a diffusion model, which are copies of it."""

    def module() -> WithTeacher:
        return WithTeacher(hook="on_before_backward", is_frozen=False)

    plain = train_plain(module(), samples(), 1, BATCH)
    strategy = HarmonyStrategy(device_memory="64KiB", num_microbatches=1, profile_cache=False)
    compare(plain, train_harmony(module(), samples(), strategy, BATCH, with_gradients=False))


def test_a_teacher_that_gradients_pass_through_may_not_follow() -> None:
    strategy = HarmonyStrategy(device_memory="64KiB", num_microbatches=1, profile_cache=False)
    with pytest.raises(UnsupportedModelError, match=r"parameter 'teacher\.0\.one\.weight' changed between the forward"):
        train_harmony(WithTeacher(passes_through=True), samples(), strategy, BATCH, with_gradients=False)


def test_a_frozen_parameter_between_layers_may_not_change() -> None:
    module = WithTeacher()

    def scale(*args: Any) -> None:
        module.scale.data.mul_(0.9)

    object.__setattr__(module, "on_before_zero_grad", scale)
    strategy = HarmonyStrategy(device_memory="64KiB", num_microbatches=1, profile_cache=False)
    with pytest.raises(UnsupportedModelError, match="parameter 'scale' changed between the forward"):
        train_harmony(module, samples(), strategy, BATCH, with_gradients=False)

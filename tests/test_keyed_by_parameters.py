"""Dicts and sets of parameters find in a step what they find in plain Lightning, although stand-ins ask them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.lightning_fits import FIT_MARKS, Model, assert_equal, assert_same, harmony, loader, trainer_for

pytestmark = FIT_MARKS
ROOMY = "96KiB"


class Looks(Model):
    """Looks parameters up in its steps.

    Args:
        look: returns what is found, in numbers.
    """

    def __init__(self, look: Callable[[Any], Any]) -> None:
        super().__init__()
        self.look = look
        self.decayed = {parameter for parameter in self.parameters() if parameter.ndim > 1}
        self.names = {parameter: len(name) for name, parameter in self.named_parameters()}
        self.counts: Counter[Any] = Counter()
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(self.look(self))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(self.look(self))


def in_set(module: Any) -> Any:
    return [parameter in module.decayed for parameter in module.parameters()]


def by_dict(module: Any) -> Any:
    return [module.names[parameter] for parameter in module.parameters()]


def by_default(module: Any) -> Any:
    return [module.names.get(parameter.detach(), -1) for parameter in module.parameters()]


def in_list(module: Any) -> Any:
    first = next(module.parameters())
    return first in [first], [first].index(first), next(module.net.parameters()) in (module.net.embed.weight,)


def of_its_own(module: Any) -> Any:
    made = {parameter: number for number, parameter in enumerate(module.parameters())}
    return [made[parameter] for parameter in module.parameters()], len(set(module.parameters()) & module.decayed)


def counted(module: Any) -> Any:
    module.counts.update(module.net.parameters())
    return [module.counts[parameter] for parameter in module.parameters()]


def in_optimizer(module: Any) -> Any:
    state = module.optimizers(use_pl_optimizer=False).state
    return [float(state[parameter].get("step", 0)) for parameter in module.parameters()]


def by_values(module: Any) -> Any:
    scale, same_scale = module.scale, module.scale
    weight, same_weight = module.net.head.weight, module.net.head.weight
    return [
        *((scale == same_scale).item(), bool((weight == same_weight).all()), int((weight == same_weight).sum())),
        *((weight == same_weight).shape, torch.equal(weight, same_weight), bool((weight.detach() == weight).all())),
        (weight == 2).any().item(),
    ]


LOOKS = {f.__name__: f for f in (in_set, by_dict, by_default, in_list, of_its_own, counted, in_optimizer, by_values)}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_step_finds_parameters_in_dicts_and_sets(look: Any) -> None:
    runs = []
    for strategy in ("auto", harmony(num_microbatches=1, device_memory=ROOMY)):
        runs.append(trainer_for(strategy, max_epochs=2))
        runs[-1].fit(Looks(look), loader(), loader())
    assert_same(*runs)
    assert_equal(*(run.lightning_module.seen for run in runs))
    # Also between steps, by the parameters themselves.
    assert_equal(*([run.lightning_module.counts[p] for p in run.lightning_module.parameters()] for run in runs))


class Found(Model):
    """Sums up what its step finds of each parameter, in a dict that it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[nn.Parameter, float] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for parameter in self.net.blocks.parameters():
            self.sums[parameter] = self.sums.get(parameter, 0.0) + float(parameter.detach().sum())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.net.blocks.parameters():
            self.sums[parameter] *= 0.5


def test_hooks_find_what_a_step_has_put_into_a_dict() -> None:
    runs = []
    for strategy in ("auto", harmony(num_microbatches=1, device_memory=ROOMY)):
        runs.append(trainer_for(strategy, max_epochs=2))
        runs[-1].fit(Found(), loader())
    assert_same(*runs)
    assert_equal(
        *([run.lightning_module.sums[p] for p in run.lightning_module.net.blocks.parameters()] for run in runs)
    )


class Keeping(Model):
    """Keeps parameters in a list that its step makes, and computes with them in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.kept = [parameter for name, parameter in self.named_parameters() if "bias" not in name]
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self.norms.append(float(sum(parameter.norm() for parameter in self.kept).detach()))
            self.norms.append(
                float(sum(p.norm() for name, p in self.named_parameters() if "bias" not in name).detach())
            )


def test_parameters_that_a_step_has_kept_are_those_after_it_in_a_hook() -> None:
    """An assertion failed there, without a word, but under no_grad."""
    trainer = trainer_for(harmony(device_memory=ROOMY))
    trainer.fit(Keeping(), loader())
    kept, own = trainer.lightning_module.norms[::2], trainer.lightning_module.norms[1::2]
    assert kept
    assert kept == own


class Missing(Model):
    """A number that is not known yet."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(float("nan")), requires_grad=False)
        self.known: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.known.append(bool(self.temperature == self.temperature))
        return super().training_step(batch, batch_idx)


def test_a_parameter_that_is_no_number_does_not_equal_itself() -> None:
    trainer = trainer_for(harmony(device_memory=ROOMY))
    trainer.fit(Missing(), loader())
    assert trainer.lightning_module.known
    assert not any(trainer.lightning_module.known)

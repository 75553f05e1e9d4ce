"""Trainings whose packs are updated where their gradients are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, StepReport
from lightning_harmony.plan.values.plan import Plan
from support import nets
from support.same_training import SEED, Net, Training, _fit, _result, train_harmony, trainer_for

STEPS, CAPACITY = 4, "160KiB"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=0.01),
}


class Seen(pl.Callback):
    """Keeps the reports of steps, from a hook that runs in the next step: none that updates have to be over for."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_before_zero_grad(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.step_report is not None:
            self.reports.append(trainer.strategy.step_report)


def build(optimizer: str = "AdamW", net: nn.Module | None = None) -> Net:
    torch.manual_seed(SEED)
    return Net(net or nets.Language(), OPTIMIZERS[optimizer])


def samples() -> Any:
    return nets.tokens(8 * STEPS)


def plan_in_use(module: Net, **options: Any) -> Plan:
    """The plan of the last step."""
    strategy = HarmonyStrategy(device_memory=CAPACITY, num_microbatches=4, profile_cache=False)
    plans: list[Plan] = []
    keeping = pl.Callback()
    keeping.on_train_epoch_end = lambda trainer, module: plans.append(trainer.strategy.plan)  # type: ignore[method-assign]
    callbacks = [keeping]
    train_harmony(
        copy.deepcopy(module), samples(), strategy, 8, with_gradients=False, more_callbacks=callbacks, **options
    )
    return plans[0]


def planned(module: Net, **options: Any) -> Plan:
    """A plan with all packs updated where their gradients are, which a fit has measured."""
    plan = plan_in_use(module, **options)
    return replace(plan, device_updated=frozenset(plan.visits), predicted=None)


def plan_by_hand(devices: int = 1) -> Plan:
    """The same for the network that most tests have, without a fit that measures it: its graphs of two packs are kept."""
    packs = (("net.embed",), *((f"net.blocks.{number}",) for number in range(4)), ("net.head",))
    visits = tuple(range(len(packs)))
    shape: Any = {"num_devices": devices, "num_microbatches": 4}
    return Plan(packs, visits, 5, kept=frozenset({3, 4}), device_updated=frozenset(visits), **shape)


def train(module: Net, plan: Plan, *more: pl.Callback, **options: Any) -> tuple[Training, list[StepReport]]:
    """Train with a plan, and no hook that would have each step wait for its update."""
    seen = Seen()
    capacity = options.pop("device_memory", CAPACITY)
    strategy = HarmonyStrategy(device_memory=capacity, num_microbatches=4, plan=plan, profile_cache=False)
    training = _train(copy.deepcopy(module), strategy, [seen, *more], **options)
    return training, seen.reports


def _train(module: Net, strategy: Any, callbacks: list[pl.Callback], **options: Any) -> Training:
    trainer = trainer_for(strategy, STEPS, callbacks, **options)
    _fit(trainer, module, DataLoader(samples(), batch_size=8))
    return _result(trainer, module, [])


def stay(module: Net, reports: list[StepReport]) -> bool:
    """Whether gradients stayed on the device in the last step."""
    trained = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    return reports[-1].swapped_out_bytes["gradients"] < trained

"""The default dtype is the process's: an update beside a step that sets it makes what it makes in plain Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.lightning_fits import (
    BATCH_SIZE,
    FIT_MARKS,
    NUM_MICROBATCHES,
    NUM_STEPS,
    Model,
    adamw,
    assert_equal,
    assert_same,
    harmony,
    loader,
    trainer_for,
)
from support.postponing import BOTH_WAYS

pytestmark = FIT_MARKS
ROOMY = "128KiB"


class Own(torch.optim.Optimizer):
    """Makes its numbers of the default dtype."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                step = self.state[parameter].setdefault("step", torch.tensor(0.0))
                step += 0.1
                parameter.sub_(parameter.grad * (0.1 / (1 + torch.tensor(0.3) * step)))
        return loss


OPTIMIZERS: dict[str, Any] = {
    "AdamW": adamw,
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-1, lambd=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Own": Own,
}


def assert_same_fits(make: Any, **options: Any) -> Any:
    """Train by plain Lightning, with a microbatch a batch, and by harmony, whose trainer is returned."""
    plain = trainer_for("auto", accumulate_grad_batches=NUM_MICROBATCHES, **options)
    plain.fit(make(), loader(BATCH_SIZE // NUM_MICROBATCHES))
    swapped = trainer_for(harmony(device_memory=ROOMY), **options)
    swapped.fit(make(), loader())
    assert_same(plain, swapped)
    # Types, too.
    assert_equal(*(run.optimizers[0].state_dict()["state"] for run in (plain, swapped)))
    return swapped


@BOTH_WAYS
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.usefixtures("postponed")
def test_updates_do_not_see_the_default_dtype_of_a_step(
    optimizer: str, precision: Any, options: dict[str, Any]
) -> None:
    assert_same_fits(lambda: Model(OPTIMIZERS[optimizer]), precision=precision, max_epochs=3, **options)


@pytest.mark.parametrize(
    ("optimizer", "precision", "num_at_once"),
    [
        ("AdamW", "bf16-true", 0),
        ("momentum", "64-true", 0),
        ("AdamW", "64-true", 1),
        ("ASGD", "bf16-true", NUM_STEPS - 1),
    ],
)
def test_only_an_update_that_reads_the_default_dtype_ends_before_the_next_batch(
    optimizer: str, precision: Any, num_at_once: int, postponed: list[bool]
) -> None:
    module = Model(OPTIMIZERS[optimizer])
    trainer_for(harmony(update="deferred", device_memory=ROOMY), precision=precision).fit(module, loader())
    assert len(postponed) == NUM_STEPS - 1 - num_at_once


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Sets(Model):
    """Its step sets the default dtype itself."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with default_dtype(torch.float64):
            return super().training_step(batch, batch_idx)


@BOTH_WAYS
@pytest.mark.usefixtures("postponed")
def test_updates_do_not_see_the_default_dtype_that_a_step_sets_itself(options: dict[str, Any]) -> None:
    assert_same_fits(lambda: Sets(OPTIMIZERS["NAdam"]), max_epochs=2, **options)


class Late(Model):
    """A layer gets gradients from the second epoch on: its optimizer state is made by then."""

    def __init__(self) -> None:
        super().__init__(OPTIMIZERS["NAdam"])
        self.net.late = nn.Linear(16, 16)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.net.embed(batch)
        if self.current_epoch > 0:
            x = x + self.net.late(x)
        return self.net.logits(self.net.body(x)) * self.scale


@BOTH_WAYS
@pytest.mark.usefixtures("postponed")
def test_state_that_is_made_in_a_later_step_does_not_have_its_default_dtype(options: dict[str, Any]) -> None:
    assert_same_fits(Late, precision="64-true", max_epochs=3, **options)

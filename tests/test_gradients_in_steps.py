"""Gradients of earlier steps are not there for the code of a step whose layers are swapped: who reads them is told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from lightning_harmony.errors import UnsupportedModelError
from support.lightning_fits import (
    FIT_MARKS,
    Manual,
    Model,
    assert_equal,
    assert_same,
    harmony,
    loader,
    trainer_for,
    values,
)

pytestmark = FIT_MARKS
ROOMY = "96KiB"


class Reads(Model):
    """Reads gradients of its parameters in a step.

    Args:
        read: does.
        first_step: from which step on.
    """

    def __init__(self, read: Callable[[Any], Any], first_step: int = 0) -> None:
        super().__init__()
        self.read, self.first_step, self.seen = read, first_step, list[Any]()
        self.net.blocks[0].requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step >= self.first_step:
            self.seen.append(self.read(self))
        return super().training_step(batch, batch_idx)


def swapped(**options: Any) -> Any:
    return trainer_for(harmony(num_microbatches=1, device_memory=ROOMY), **options)


def gradients(module: Any) -> Any:
    return [float(p.grad.norm()) for p in module.parameters() if p.grad is not None]


def norms_of_lightning(module: Any) -> Any:
    return grad_norm(module, 2)


def norm_of_torch(module: Any) -> Any:
    return torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)


def whether_there_are_any(module: Any) -> Any:
    return getattr(module.net.head.weight, "grad", None) is None


READS = {f.__name__: f for f in (gradients, norms_of_lightning, norm_of_torch, whether_there_are_any)}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=str)
def test_a_step_that_reads_gradients_is_refused_before_anything_changes(read: Any, options: dict[str, Any]) -> None:
    module = Reads(read)
    before = values(module)
    with pytest.raises(
        UnsupportedModelError, match=r"gradient of parameter .* is read within a step.* on_after_backward"
    ):
        swapped(**options).fit(module, loader())
    assert_equal(before, values(module))


def test_a_later_step_that_reads_gradients_is_refused_before_its_update() -> None:
    plain = trainer_for("auto", max_steps=2)
    plain.fit(Reads(gradients, first_step=2), loader())
    trainer = swapped(max_epochs=2)
    module = Reads(gradients, first_step=2)
    with pytest.raises(UnsupportedModelError, match="is read within a step"):
        trainer.fit(module, loader())
    assert_equal(values(plain.lightning_module), values(module))


class ReadsInBackward(Model):
    def forward(self, batch: Tensor) -> Tensor:
        x = self.net.embed(batch)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * (1 + sum(gradients(self))))
        return self.net.logits(self.net.body(x)) * self.scale


def test_a_hook_in_the_backward_that_reads_gradients_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="is read within a step"):
        swapped().fit(ReadsInBackward(), loader())


class Validates(Model):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("norm", float(sum(gradients(self))))


def test_an_evaluation_reads_gradients_as_long_as_there_were_none() -> None:
    found = [trainer.validate(Validates(), loader()) for trainer in (trainer_for("auto"), swapped())]
    assert found[0] == found[1] == [{"norm": 0.0}]
    with pytest.raises(UnsupportedModelError, match="is read within a step"):
        swapped().fit(Validates(), loader(), loader())


def zero_grad(module: Any) -> Any:
    module.zero_grad()
    module.optimizers().zero_grad()
    return module.net.zero_grad(set_to_none=False)


def of_frozen_parameters(module: Any) -> Any:
    return [parameter.grad for parameter in module.net.blocks[0].parameters()]


def of_detached_parameters(module: Any) -> Any:
    return [parameter.detach().grad for parameter in module.parameters()]


def of_a_copy(module: Any) -> Any:
    return [parameter.grad for parameter in copy.deepcopy(module.net.head).parameters()]


HARMLESS = {f.__name__: f for f in (zero_grad, of_frozen_parameters, of_detached_parameters, of_a_copy)}


@pytest.mark.parametrize("read", HARMLESS.values(), ids=HARMLESS)
def test_what_reads_no_gradients_of_trained_parameters_is_as_in_plain_lightning(read: Any) -> None:
    runs = [trainer_for("auto", max_epochs=2), swapped(max_epochs=2)]
    for run in runs:
        run.fit(Reads(read), loader())
    assert_same(*runs)
    assert_equal(*(run.lightning_module.seen for run in runs))


def test_a_step_that_optimizes_by_hand_reads_gradients() -> None:
    runs = [trainer_for("auto"), swapped()]
    for run in runs:
        run.fit(Manual(), loader())
    assert_same(*runs)
    assert_equal(*(run.lightning_module.norms for run in runs))

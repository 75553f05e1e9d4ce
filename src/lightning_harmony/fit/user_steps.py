"""The user's steps as microbatches of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_harmony.engine.batches.merge import loss_of
from lightning_harmony.engine.step.executor import Executor
from lightning_harmony.engine.step.turns import Microbatch
from lightning_harmony.engine.structures.nested import leaves_of, map_tensors


class TrainingStep:
    """The user's training_step on one microbatch, with what it returned.

    Attributes:
        output: as the step returned it, on the root device.
        loss: of the microbatch, there too; None if the step returned none.
        requires_grad: whether the loss can be differentiated.
    """

    def __init__(self, engine: Executor, precision: Any, step: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._engine = engine
        self._precision = precision
        self._step = step
        self._args = args
        self._kwargs = kwargs
        self.output: Any = None
        self.loss: Tensor | None = None
        self.requires_grad = False

    def num_elements(self) -> int:
        """Elements of the microbatch."""
        return num_elements(self._args)

    def __call__(self) -> Tensor | None:
        """Run it; return the loss with its graph."""
        with self._precision.train_step_context():
            output = self._step(*self._args, **self._kwargs)
        loss = loss_of(output)
        if not isinstance(loss, Tensor):
            self.output = output
            return None
        self.loss, self.requires_grad = self._engine.to_root(loss), loss.requires_grad
        self.output = map_tensors(self._engine.to_root, output)
        return loss


def before_accumulation(gradient: Tensor, scale: Tensor | float, batches: int) -> Tensor:
    """The gradient that was brought to a batch's loss, before `accumulate_grad_batches` has divided it.

    A microbatch's loss is divided by all microbatches of a step at once then, as in plain Lightning: to divide twice rounds
    twice.

    Args:
        gradient: of the batch's loss.
        scale: that of a gradient scaler, 1 without one: what Lightning's own code brings, undivided.
        batches: by how many it was divided.
    """
    if batches == 1:
        return gradient
    whole = torch.zeros_like(gradient) + scale
    return torch.where(gradient == whole / batches, whole, gradient * batches)


def num_elements(value: Any) -> int:
    """Elements of all tensors in a batch."""
    return sum(leaf.numel() for leaf in leaves_of(value) if isinstance(leaf, Tensor))


def run_without_backward(
    engine: Executor, microbatches: Sequence[Microbatch], num_elements: int, *, interleave: bool = False
) -> None:
    """Run steps that nobody differentiates, the largest of which has so many elements."""
    engine.forward(
        microbatches, num_elements=num_elements, predicted_gradient=None, is_training=False, interleave=interleave
    )
    engine.abandon()

"""Weights that are no parameters: a hook computes them from some before each call of their module.

Pruning does it so (`torch.nn.utils.prune`), and so do the older `weight_norm` and `spectral_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.structures.containers import MISSING, put_value
from lightning_harmony.engine.structures.operations import Unseen
from lightning_harmony.errors import UnsupportedModelError


@dataclass(frozen=True)
class DerivedWeight:
    """An attribute of a module that a hook computes from parameters."""

    owner: nn.Module
    name: str

    def get(self) -> Any:
        """What is there."""
        return vars(self.owner).get(self.name, MISSING)

    def set(self, value: Any) -> None:
        """Put it there."""
        put_value(vars(self.owner), self.name, value)


def derived_weights(module: nn.Module) -> list[DerivedWeight]:
    """All of a module and those below it."""
    return [weight for owner in module.modules() for weight in _of(owner)]


def derives_weights(module: nn.Module) -> bool:
    """Whether a module's own call computes some of its weights."""
    return any(True for _ in _of(module))


def _of(owner: nn.Module) -> Iterator[DerivedWeight]:
    for hook in owner._forward_pre_hooks.values():
        if isinstance(hook, prune.BasePruningMethod):
            yield DerivedWeight(owner, hook._tensor_name)
        elif isinstance(hook, WeightNorm | SpectralNorm):
            yield DerivedWeight(owner, hook.name)


class OutOfReach:
    """What is in a derived weight's place while layers are swapped: nobody but its module's call may use that.

    Args:
        name: the qualified name of the attribute.
        left: what a call of its module has left there last, on the host.
        refuses_gradients: whether code that finds this later could still send gradients through it.
    """

    def __init__(self, name: str, left: Any = MISSING, *, refuses_gradients: bool = False) -> None:
        self._name, self._left, self._is_of_before, self._refuses_gradients = name, left, True, refuses_gradients

    def keep(self, made: Tensor) -> None:
        """Keep what a call of the module has computed, which will be in its place when nothing is swapped any more."""
        with Unseen(), torch.inference_mode(False):
            left: Any = made.detach().to("cpu", copy=True)
        if self._refuses_gradients and made.requires_grad:
            left = _RefusesGradients.apply(torch.zeros((), requires_grad=True), left, self._refusal())
        left.is_derived = True
        self._left, self._is_of_before = left, False

    def __getattr__(self, attribute: str) -> Any:
        raise self._refusal()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse whatever it is passed to."""
        raise next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OutOfReach))._refusal()

    def _refusal(self) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self._name!r} is used outside of its module's call, which computes it from parameters that are swapped, as "
            "pruning and the older weight_norm and spectral_norm do: call the module, or use those parameters"
        )


def is_derived(value: Any) -> bool:
    """Whether that is in a derived weight's place while layers are swapped, or was left there by a call: no user's change."""
    return issubclass(type(value), OutOfReach) or (type(value) is Tensor and hasattr(value, "is_derived"))


@contextmanager
def keeping_derived(weights: Sequence[DerivedWeight], varies: Callable[[nn.Module], bool]) -> Iterator[None]:
    """The context of a call that computes weights, which are kept for when it is over.

    Args:
        weights: these.
        varies: whether calls change what they compute those of a module from: else the first of a step tells of all.
    """
    outside = [weight.get() for weight in weights]
    try:
        yield
    finally:
        for weight, place in zip(weights, outside, strict=True):
            made = weight.get()
            if (
                isinstance(place, OutOfReach)
                and isinstance(made, Tensor)
                and (place._is_of_before or varies(weight.owner))
            ):
                place.keep(made)


class _RefusesGradients(torch.autograd.Function):
    """What is left in a derived weight's place, for others to look at: gradients would not come to the parameters."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, left: Tensor, refusal: Exception) -> Tensor:
        """Return what is left there."""
        ctx.refusal = refusal
        return left

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Refuse."""
        raise ctx.refusal


@contextmanager
def out_of_reach(weights: Mapping[str, DerivedWeight], *, only_here: bool = False) -> Iterator[None]:
    """Within the context, nobody but their modules' calls can use these weights, given by their qualified names.

    Behind it they are what these calls have computed last, as in plain PyTorch: not what parameters have become since.

    Args:
        weights: which.
        only_here: whether a step goes on behind the context, as where each call has one of its own.
    """
    stand_ins = {name: OutOfReach(name, each.get(), refuses_gradients=only_here) for name, each in weights.items()}
    for name, weight in weights.items():
        weight.set(stand_ins[name])
    try:
        yield
    finally:
        for name, weight in weights.items():
            weight.set(stand_ins[name]._left)

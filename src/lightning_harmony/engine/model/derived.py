"""Weights that are no parameters: a hook computes them from some before each call of their module.

Pruning does it so (`torch.nn.utils.prune`), and so do the older `weight_norm` and `spectral_norm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.structures.containers import MISSING, put_value
from lightning_harmony.errors import UnsupportedModelError


@dataclass(frozen=True)
class DerivedWeight:
    """An attribute of a module that a hook computes from parameters."""

    owner: nn.Module
    name: str
    hook: Any

    def compute(self) -> None:
        """Make it what the parameters are now; what changes its buffers with every computation is left as it is."""
        if not isinstance(self.hook, SpectralNorm):
            with torch.inference_mode(False), torch.no_grad():
                self.hook(self.owner, ())

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
            yield DerivedWeight(owner, hook._tensor_name, hook)
        elif isinstance(hook, WeightNorm | SpectralNorm):
            yield DerivedWeight(owner, hook.name, hook)


class OutOfReach:
    """What is in a derived weight's place while layers are swapped: nobody but its module's call may use that.

    Args:
        name: the qualified name of the attribute.
    """

    def __init__(self, name: str) -> None:
        self._name = name

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


@contextmanager
def out_of_reach(weights: Mapping[str, DerivedWeight]) -> Iterator[None]:
    """Within the context, nobody but their modules' calls can use these weights, given by their qualified names."""
    before = {name: weight.get() for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.set(OutOfReach(name))
    try:
        yield
    finally:
        for name, weight in weights.items():
            weight.set(before[name])

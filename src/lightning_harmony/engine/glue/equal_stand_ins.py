"""What `==` gives for stand-ins of one parameter: dicts and sets find the parameter by them, others compare its values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_harmony.engine.structures.tree import stood_for

COMPARING = frozenset((Tensor.eq, Tensor.__eq__))


class EqualStandIns(Tensor):
    """Whether each element of a parameter equals itself, computed when somebody asks for more than whether it is true."""

    _compute: Callable[[], Tensor]

    # Nothing may be traced through what waits for other lanes.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Say that it is true, as dicts and sets ask; compare the values for anything else."""
        if func is Tensor.__bool__:
            return True
        args, kwargs = tree_map_only(EqualStandIns, lambda each: each._compute(), (args, kwargs or {}))
        return func(*args, **kwargs)


def equal_stand_ins(compute: Callable[..., Tensor], one: Any, other: Any) -> EqualStandIns | None:
    """What comparing two tensors gives that stand for one parameter, or of which one is it; None of others.

    Args:
        compute: calls a function with the parameters in place of their stand-ins.
        one: a stand-in, or what it is compared with.
        other: the same.
    """
    # Dicts compare no object with itself: where code does, it asks whether there are NaN.
    if one is other or stood_for(one) is not stood_for(other):
        return None
    stand_in = other if stood_for(one) is one else one
    element = torch.ones((), dtype=torch.bool, device=stand_in.device).expand(stand_in.shape)
    result = Tensor._make_subclass(EqualStandIns, element)
    result._compute = partial(compute, Tensor.eq, (stand_in, stand_in), {})
    return result

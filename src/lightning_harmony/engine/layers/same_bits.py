"""Whether tensors have the same bits, or differ as little as what made them differs from itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor

from lightning_harmony.engine.structures.operations import Unseen
from lightning_harmony.engine.structures.parts import are_alike

# How many times as much a recorded gradient may differ from that of the code as the code's own does from run to run: the
# largest differences of two runs differ, too.
_MOST_TIMES = 4
# Of code that may make other bits from run to run: it seldom does where it adds up little.
_MOST_RUNS = 4


def differ_as_runs_do(
    one: Sequence[Tensor | None], other: Sequence[Tensor | None], again: Callable[[], Sequence[Tensor | None]]
) -> bool:
    """Whether tensors are the same as others, or differ from them as little as code does that makes them from run to run.

    Args:
        one: what the code has made.
        other: what is compared with that.
        again: runs the code again, if that is needed. What it makes.
    """
    differences, of_runs, num_runs = list(map(_difference, one, other)), [0.0] * len(one), 0
    while any(each > 0 and not each <= _MOST_TIMES * of < inf for each, of in zip(differences, of_runs, strict=True)):
        if num_runs == _MOST_RUNS:
            return False
        num_runs += 1
        of_runs = list(map(max, of_runs, map(_difference, one, again())))
    return True


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference of two tensors' elements: 0 only for the same bits, infinite where these cannot be compared."""
    if are_same(one, other):
        return 0.0
    if one is None or other is None or not are_alike(one, other) or not one.numel():
        return inf
    with Unseen():
        largest = float((one - other).abs().max())
    # Other bits of a zero, or none of a number.
    return largest if largest > 0 else inf


def are_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are of one type and size, and have the same bits; also if there are none."""
    if one is None or other is None:
        return one is other
    return are_alike(one, other) and not bool(bits_differ(one, other))


def bits_differ(one: Tensor, other: Tensor) -> Tensor:
    """Whether any bits differ: that a number is none equals itself here."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    one, other = (torch.view_as_real(each) if each.is_complex() else each for each in (one.detach(), other.detach()))
    if one.element_size() in kinds:
        kind = kinds[one.element_size()]
        one, other = one.view(kind), other.view(kind)
    return (one != other).any()

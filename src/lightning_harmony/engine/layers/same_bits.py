"""Whether tensors have the same bits, or differ as little as what made them differs from itself."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_harmony.engine.structures.operations import Unseen
from lightning_harmony.engine.structures.parts import are_alike

# How many times as much a recorded gradient may differ from that of the code as the code's own does from run to run: the
# largest differences of two runs differ, too.
_MOST_TIMES = 4


def are_as_reproducible(one: Tensor | None, again: Tensor | None, other: Tensor | None) -> bool:
    """Whether a tensor is the same as another one, or differs from it as little as that does from itself when made again."""
    if one is None or again is None or other is None or are_same(one, other):
        return are_same(one, other)
    if not are_alike(one, again) or not are_alike(one, other):
        return False
    with Unseen():
        differs = float((one - again).abs().max())
        return 0 < float((one - other).abs().max()) <= _MOST_TIMES * differs


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

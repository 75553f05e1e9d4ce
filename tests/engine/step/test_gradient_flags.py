"""Parameters of which a step says that they need gradients, or none, for a while."""

from __future__ import annotations

import torch
from torch import nn

from lightning_harmony.engine.step.gradient_flags import GradientFlags


def test_each_microbatch_finds_what_it_has_said() -> None:
    flags, one, other = GradientFlags(), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1), requires_grad=False)
    flags.switch_to(0)
    flags.set(0, [one], False)
    flags.set(0, [other], True)
    flags.switch_to(1)
    assert (one.requires_grad, other.requires_grad) == (True, False)
    flags.set(1, [one], False)
    flags.switch_to(0)
    assert (one.requires_grad, other.requires_grad) == (False, True)
    flags.switch_to(1)
    assert (one.requires_grad, other.requires_grad) == (False, False)
    assert (flags.needed(one), flags.needed(other)) == (True, False)


def test_what_is_left_is_told_and_taken_back() -> None:
    flags, one = GradientFlags(), nn.Parameter(torch.ones(1))
    assert not flags.are_left
    flags.set(0, [one], False)
    assert flags.are_left
    flags.set(0, [one], True)
    assert not flags.are_left
    flags.set(1, [one], False)
    assert flags.are_left
    flags.restore()
    assert one.requires_grad
    assert not flags.are_left

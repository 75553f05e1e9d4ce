"""Bits that are the same, and differences as small as those of code that is not reproducible."""

from __future__ import annotations

from math import nan

import pytest
import torch
from torch import Tensor

from lightning_harmony.engine.layers.same_bits import are_same, differ_as_runs_do

ONE = torch.tensor([1.0, nan])


def never() -> list[Tensor]:
    raise AssertionError("it need not run again")


@pytest.mark.parametrize("none", [torch.empty(0), None, ONE])
def test_the_same_bits_need_no_other_run(none: Tensor | None) -> None:
    assert differ_as_runs_do([none], [none], never)


@pytest.mark.parametrize(
    "other",
    [None, torch.tensor([1.0, nan, 1.0]), ONE.double(), torch.tensor([nan, nan])],
    ids=["none", "larger", "wider", "no number"],
)
def test_what_cannot_be_compared_is_other(other: Tensor | None) -> None:
    assert not are_same(ONE, other)
    assert not differ_as_runs_do([ONE], [other], lambda: [ONE])
    assert not differ_as_runs_do([torch.tensor([0.0])], [torch.tensor([-0.0])], lambda: [torch.tensor([0.0])])


@pytest.mark.parametrize(("factor", "is_as_runs"), [(1, True), (3, True), (8, False)])
def test_it_may_differ_as_much_as_the_code_does_from_itself(factor: int, is_as_runs: bool) -> None:
    one = torch.tensor([1.0])
    assert differ_as_runs_do([one], [one + factor * 1e-6], lambda: [one + 1e-6]) is is_as_runs


def test_code_that_seldom_differs_runs_until_it_does() -> None:
    one, runs = torch.tensor([1.0]), iter([0.0, 0.0, 1e-6])
    assert differ_as_runs_do([one, one], [one + 1e-6, one], lambda: [one + next(runs), one])
    assert not differ_as_runs_do([one], [one + 1e-6], lambda: [one])

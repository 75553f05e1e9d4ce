"""Weights that hooks compute before each call: found, computed where parameters are, and out of others' reach."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_harmony.engine.model.derived import (
    DerivedWeight,
    derived_weights,
    derives_weights,
    keeping_derived,
    out_of_reach,
)
from lightning_harmony.errors import UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


def pruned() -> nn.Linear:
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)


def test_weights_that_pruning_and_older_norms_compute_are_found_below_a_module() -> None:
    normed, bounded = torch.nn.utils.weight_norm(nn.Linear(2, 2)), torch.nn.utils.spectral_norm(nn.Linear(2, 2))
    newer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    module = nn.Sequential(pruned(), normed, bounded, newer, nn.Linear(2, 2))
    assert [(weight.owner, weight.name) for weight in derived_weights(module)] == [
        (module[0], "weight"), (normed, "weight"), (bounded, "weight"),
    ]  # fmt: skip
    assert [derives_weights(child) for child in module] == [True, True, True, False, False]
    assert not derives_weights(module)


def call(weight: DerivedWeight, made: Tensor, *, varies: bool = False) -> None:
    outside = weight.get()
    with keeping_derived([weight], lambda owner: varies):
        weight.set(made)
    weight.set(outside)


def test_behind_its_calls_a_derived_weight_is_what_the_last_one_computed_that_may_compute_something_else() -> None:
    module = pruned()
    (weight,) = derived_weights(module)
    made = [torch.full((4, 4), float(number), requires_grad=True) for number in range(4)]
    with out_of_reach({"weight": weight}):
        for value, varies in zip(made, (False, False, True, False), strict=True):
            call(weight, value, varies=varies)
    assert torch.equal(module.weight, made[2])
    assert not module.weight.requires_grad
    with torch.inference_mode(), out_of_reach({"weight": weight}):
        call(weight, made[3] * 2)
    assert torch.equal(module.weight, made[3] * 2)
    assert not module.weight.is_inference()


def test_out_of_reach_only_the_modules_own_call_can_use_them() -> None:
    module = pruned()
    before = module.weight
    (weight,) = derived_weights(module)
    with out_of_reach({"net.0.weight": weight}):
        for use in (
            lambda: torch.ones(4) * module.weight,
            lambda: torch.add(torch.ones(4), module.weight),
            lambda: module.weight.shape,
            lambda: F.linear(torch.ones(4), module.weight),
        ):
            with pytest.raises(UnsupportedModelError, match=r"net\.0\.weight.* is used outside of its module's call"):
                use()
        assert module(torch.ones(1, 4)).isfinite().all()
    assert module.weight is before


def test_where_a_step_goes_on_behind_a_call_what_it_left_can_be_read_and_takes_no_gradients() -> None:
    module = pruned()
    (weight,) = derived_weights(module)
    made = torch.ones(4, 4, requires_grad=True)
    with out_of_reach({"weight": weight}, only_here=True):
        call(weight, made * 2)
    assert torch.equal(module.weight, made * 2)
    with pytest.raises(UnsupportedModelError, match="'weight' is used outside of its module's call"):
        module.weight.sum().backward()

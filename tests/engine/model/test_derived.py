"""Weights that hooks compute before each call: found, computed where parameters are, and out of others' reach."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from lightning_harmony.engine.model.derived import derived_weights, derives_weights, out_of_reach
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


def test_derived_weights_are_computed_from_what_the_parameters_are_now() -> None:
    module = pruned()
    with torch.no_grad():
        module.weight_orig.fill_(2.0)
    (weight,) = derived_weights(module)
    with torch.inference_mode():
        weight.compute()
    assert torch.equal(module.weight, 2.0 * module.weight_mask)
    assert not module.weight.requires_grad
    assert not module.weight.is_inference()


def test_a_computation_that_changes_buffers_is_left_to_the_modules_call() -> None:
    module = torch.nn.utils.spectral_norm(nn.Linear(3, 3))
    before = module.weight_u.clone()
    (weight,) = derived_weights(module)
    weight.compute()
    assert torch.equal(module.weight_u, before)


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

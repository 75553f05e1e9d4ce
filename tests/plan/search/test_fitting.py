"""Whether a step by a plan has room on its devices, and what it does without where it has none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_harmony.plan.search.deciding import decide
from lightning_harmony.plan.search.fitting import fitted, least_bytes
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.profile import DeviceLimits, Profile
from support.plans import LAYER, names

NUM_LAYERS = 4
# Of each layer: weights, gradients, and the work of its backward, which is more than that of its forward.
ALONE = 100 + 100 + 8
# What each microbatch keeps when it comes to a layer again, and how much more it takes where all take turns.
CARRIED = 20
LAYERS = tuple(
    replace(LAYER, name=f"layer {number}", arriving_bytes=10, returning_bytes=CARRIED) for number in range(NUM_LAYERS)
)


def plan_in(capacity: int | None, num_microbatches: int = 4, **options: int) -> Plan:
    packs = names(NUM_LAYERS)
    profile = Profile(LAYERS, DeviceLimits(capacity))
    plan = Plan(packs, tuple(range(NUM_LAYERS)), NUM_LAYERS, num_microbatches=num_microbatches, profile=profile)
    return replace(plan, **options)  # type: ignore[arg-type]


def test_microbatches_that_take_turns_need_what_each_carries_at_a_time() -> None:
    plan = plan_in(None)
    assert least_bytes(plan, 1) == ALONE + CARRIED
    assert least_bytes(plan, 4) == ALONE + 4 * CARRIED


def test_microbatches_run_one_after_the_other_where_turns_do_not_fit() -> None:
    enough = ALONE + 4 * CARRIED
    assert fitted(plan_in(enough)) == (plan_in(enough), True)
    assert fitted(plan_in(enough - 1)) == (plan_in(enough - 1), False)
    assert fitted(plan_in(1)) == (plan_in(1), False)


def test_a_graph_goes_before_microbatches_run_one_after_the_other() -> None:
    """Its input stayed on the device, and the backward of the loss did not fit."""
    enough = ALONE + 4 * CARRIED
    fused = plan_in(enough, first_fused=NUM_LAYERS - 1)
    assert least_bytes(fused, 1) == ALONE + 10 + LAYER.kept_bytes
    plan, takes_turns = fitted(replace(plan_in(ALONE + CARRIED), first_fused=NUM_LAYERS - 1))
    assert (plan.fused, plan.kept, takes_turns) == (frozenset(), frozenset(), False)
    kept = replace(plan_in(enough), kept=frozenset({0}))
    assert least_bytes(kept, 4) == enough + 4 * LAYER.kept_bytes
    plan, takes_turns = fitted(kept)
    assert (plan.kept, takes_turns) == (frozenset(), True)


@pytest.mark.parametrize("parallel", ["pipeline", "data"])
def test_all_microbatches_may_be_on_one_of_several_devices(parallel: str) -> None:
    """With two devices the third step failed: one had more of them than a prediction gave it."""
    plan = replace(plan_in(None), num_devices=2, parallel=parallel)  # type: ignore[arg-type]
    # What is sent to the device comes beside what was found there.
    each = CARRIED + LAYER.input_bytes
    assert least_bytes(plan, 4) == ALONE + (4 if parallel == "pipeline" else 2) * each
    tight = replace(plan, profile=Profile(LAYERS, DeviceLimits(least_bytes(plan, 4) - 1)))
    assert fitted(tight)[1] is False


def test_what_a_prediction_has_room_for_stays_as_it_is() -> None:
    plan = decide({cost.name: cost for cost in LAYERS}, [cost.name for cost in LAYERS], 4, DeviceLimits(2000))
    assert plan.predicted is not None
    assert fitted(plan) == (plan, True)


@pytest.mark.parametrize("plan", [replace(plan_in(1), profile=None), replace(plan_in(1), reuse="none", lookahead=0)])
def test_what_nobody_knows_and_what_is_compared_with_stays_as_it_is(plan: Plan) -> None:
    assert fitted(plan) == (plan, True)

"""What every plan has to be."""

import pytest

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.simulate.validity import refuse_invalid
from lightning_harmony.plan.values.plan import Plan


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (Plan((("a",), ("a",)), (0, 1), 1), "layer 'a' is in 2 places"),
        (Plan((("a",), ()), (0,), 0), "pack 1 has no layer"),
        (Plan((("a",),), (0, 1), 1), "it visits pack 1, which it doesn't have"),
        (Plan((("a",),), (0,), 2), "it fuses from visit 2 of 1"),
        (Plan((("a",), ("b",)), (0, 1, 0), 1), "pack 0 is fused, but visited before"),
        (Plan((("a",), ("b",)), (0, 1), 1, frozenset({1})), "pack 1 keeps its graphs, but isn't before"),
        (
            Plan((("a",), ("b",)), (0, 1), 1, joined=frozenset({1})),
            "the forward of visit 1 is joined to the one before",
        ),
        (Plan((("a",),), (0,), 1, joined=frozenset({0})), "isn't between the first one and the fused ones"),
        (
            Plan((("a",), ("b",)), (0, 1), 2, joined=frozenset({1}), num_devices=2),
            "it joins forwards, but consecutive",
        ),
        (
            Plan((("a",), ("b",)), (0, 1), 2, joined=frozenset({1}), reuse="visit"),
            "it joins forwards, but with reuse=",
        ),
        (Plan((("a",),), (0,), 1, spread=frozenset({0})), "it spreads packs, but not in a pipeline of several devices"),
        (
            Plan((("a",),), (0,), 1, spread=frozenset({0}), num_devices=2, parallel="data"),
            "it spreads packs, but not in",
        ),
        (
            Plan((("a",),), (0,), 1, spread=frozenset({0}), num_devices=2, reuse="visit", lookahead=0),
            "it spreads packs, but not in",
        ),
        (Plan((("a",), ("b",)), (0,), 1, spread=frozenset({1}), num_devices=2), "it spreads pack 1, which it doesn't"),
        (Plan((("a",),), (0,), 0, num_microbatches=0), "it is for 0 microbatches"),
        (Plan((("a",),), (0,), 0, num_devices=0), "it is for 0 devices"),
        (Plan((("a",),), (0,), 0, reuse="visit", lookahead=0), "it keeps graphs, but with reuse='visit'"),
        (Plan((("a",),), (0,), 1, reuse="none"), "it fetches 2 packs ahead, but with reuse='none'"),
        (Plan((("a",),), (0,), 1, lookahead=-1), "it fetches -1 packs ahead"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(plan: Plan, problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        refuse_invalid(plan)

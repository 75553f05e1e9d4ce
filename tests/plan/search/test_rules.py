"""The plan that training begins with."""

from dataclasses import replace

from lightning_harmony.plan.search.rules import fitting_packs, packed, with_graphs
from lightning_harmony.plan.values.cost import Cost

CALLS = ["a", "b", "a", "c"]
COSTS = {name: Cost(name, 10, 10, 5, 5, 4) for name in ("a", "b", "c", "unused")}


def test_layers_are_packed_in_the_order_of_their_first_calls() -> None:
    assert fitting_packs(COSTS, ["c", "a", "c", "b"], [None], "pipeline") == [["c", "a", "b"]]
    assert fitting_packs(COSTS, CALLS, [50], "pipeline") == [["a"], ["b"], ["c"]]


def test_what_is_in_no_pack_is_one_of_its_own() -> None:
    plan = packed([["a", "b"]], COSTS, CALLS, 2, "data")
    assert plan.packs == (("a", "b"), ("c",), ("unused",))
    assert plan.visits == (0, 1)
    assert (plan.first_fused, plan.kept, plan.num_devices, plan.parallel) == (2, frozenset(), 2, "data")


def test_graphs_are_kept_as_there_is_room() -> None:
    plan = packed([["a"], ["b"], ["c"]], (), ["a", "b", "c"], 1, "pipeline")
    tight, roomy = (with_graphs(plan, COSTS, 4, [capacity]) for capacity in (60, None))
    assert (tight.kept, tight.num_microbatches) == (frozenset(), 4)
    assert roomy.kept | roomy.fused == {0, 1, 2}


def test_no_graphs_are_kept_where_nothing_is_to_be_used_again() -> None:
    plan = replace(packed([["a"], ["b"], ["c"]], (), ["a", "b", "c"], 1, "pipeline"), reuse="visit")
    assert with_graphs(plan, COSTS, 4, [None]) == replace(plan, num_microbatches=4)

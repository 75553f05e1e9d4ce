"""What tasks take and leave: each tensor once."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from lightning_harmony.plan.simulate.footprint import footprints
from lightning_harmony.plan.values.cost import Cost, pack_cost
from lightning_harmony.plan.values.plan import Plan
from support.plans import names, plans

# Between layers go 10; a graph holds that before, and 30 of its own.
LAYER = Cost("layer", 0, 0, 25, 50, 40, input_bytes=10, stash_bytes=10)
PLAN = Plan(names(4), (0, 1, 2, 3), 3, num_microbatches=1)


def test_the_stash_is_the_input_that_was_there_before() -> None:
    _, second, third, _ = footprints(PLAN, [LAYER] * 4)
    assert (second.there_bytes, second.forward_bytes, second.forward_left_bytes) == (10, 25, 20)
    # Of these, one goes to the host, and the other to the next layer.
    assert (second.stash_bytes, second.passed_bytes, third.there_bytes) == (10, 10, 10)
    # What comes back is a part of what the backward was seen to take.
    assert second.loaded_bytes + second.backward_bytes == 50


def test_a_graph_holds_the_input_but_not_the_output() -> None:
    """The output counted to the graphs of both, then to that of the one, which kept it though nothing needs it."""
    _, second, third, last = footprints(replace(PLAN, kept=frozenset({1, 2})), [LAYER] * 4)
    assert second.graph_bytes == third.graph_bytes == 40
    assert (second.forward_left_bytes, second.passed_bytes, third.there_bytes) == (50, 10, 10)
    assert third.forward_bytes == 50 - 10 + 25 - 10
    # The loss goes to no layer.
    assert last.forward_left_bytes == last.graph_bytes == 40
    assert second.backward_bytes == 50 - 40


def test_what_the_loss_keeps_is_a_part_of_what_its_backward_was_seen_to_take() -> None:
    """It counted twice: as kept, and as loaded for the backward. Of a large vocabulary that is more than all else."""
    keeps = replace(PLAN, first_fused=3)
    assert footprints(keeps, [LAYER] * 4)[-1].backward_bytes == 50 - 40
    head = pack_cost([replace(LAYER, graph_bytes=15, stash_bytes=10 + 35)])
    last = footprints(keeps, [LAYER] * 3 + [head])[-1]
    assert (last.graph_bytes, last.backward_bytes) == (15 + 35, 50 - 35)
    # Before the last layer, what glue keeps is loaded in the turn of the layer behind it.
    within = footprints(replace(PLAN, kept=frozenset({2})), [LAYER, LAYER, head, LAYER])[2]
    assert (within.graph_bytes, within.backward_bytes) == (15 + 35, 50 - 15)


def test_behind_a_graph_the_next_one_stashes_its_input() -> None:
    _, second, third, _ = footprints(replace(PLAN, kept=frozenset({1})), [LAYER] * 4)
    assert (third.stash_bytes, third.loaded_bytes) == (10, 10)
    assert second.graph_bytes == 40


def test_gradients_that_are_gathered_are_there_when_the_backward_has_ended() -> None:
    """As narrow as the weights, and in addition to what it was seen to take only where that is less."""
    plan = replace(PLAN, num_devices=2, spread=frozenset({2, 3}))
    wide, narrow, frozen = (replace(LAYER, weight_bytes=w, gradient_bytes=g) for w, g in ((60, 60), (30, 60), (60, 0)))
    _, alone, spread, _ = footprints(plan, [wide] * 4)
    assert (alone.is_gathered, alone.gathered_bytes) == (False, 0)
    assert (spread.is_gathered, spread.gathered_bytes) == (True, 60)
    # They take the place of the gradient that came, and of the stash, beside the one that goes.
    assert spread.backward_bytes == 60 + 10 - 10 - 10
    assert footprints(plan, [narrow] * 4)[2].gathered_bytes == 30
    assert footprints(plan, [narrow] * 4)[2].backward_bytes == alone.backward_bytes
    assert not footprints(plan, [frozen] * 4)[2].is_gathered


def test_what_else_a_microbatch_has_goes_along() -> None:
    arriving = [10, 10, 14, 14]
    packs = [replace(LAYER, arriving_bytes=num_bytes, returning_bytes=num_bytes) for num_bytes in arriving]
    _, second, third, last = footprints(PLAN, packs)
    assert (second.there_bytes, second.forward_left_bytes, second.passed_bytes) == (10, 24, 14)
    assert third.there_bytes == 14
    assert third.backward_left_bytes == 10
    assert (third.returning_bytes, last.backward_left_bytes) == (14, 14)


def test_what_else_a_microbatch_has_may_stay_on_the_device_before() -> None:
    packs = [replace(LAYER, arriving_bytes=14, returning_bytes=14)] * len(PLAN.packs)
    assert footprints(replace(PLAN, num_devices=2), packs) == footprints(PLAN, [LAYER] * len(PLAN.packs))


def test_what_one_layer_of_a_pack_hands_to_the_next_is_in_one_graph() -> None:
    assert pack_cost([LAYER] * 3).graph_bytes == 3 * 40


@given(plans())
def test_a_step_leaves_nothing(planned: tuple[Plan, tuple[Cost, ...]]) -> None:
    """All that a microbatch takes on its way there and back is gone in the end."""
    plan, packs = planned
    found = footprints(replace(plan, num_devices=1), packs)
    there = 0
    for each in found:
        assert there == each.there_bytes
        assert there + each.forward_bytes >= each.forward_left_bytes
        there = each.passed_bytes
    there = found[-1].returning_bytes
    for each in reversed(found):
        assert there == each.returning_bytes
        assert there + each.backward_bytes >= each.backward_left_bytes
        there = each.backward_left_bytes
    assert there == 0

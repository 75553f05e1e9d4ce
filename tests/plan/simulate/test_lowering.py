"""From a plan to tasks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.simulate.lowering import lower, moves_of
from lightning_harmony.plan.simulate.order import stays
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import LOOKAHEAD, Plan
from lightning_harmony.plan.values.profile import DeviceLimits, Profile
from lightning_harmony.plan.values.task import Errand, Phase, Task
from support.plans import compute, names, plans

PACK = Cost("pack", 10, 10, 2, 3, 4, 10, 1, 1)


def plan_of(num_packs: int, first_fused: int, **more: object) -> Plan:
    return Plan(names(num_packs), tuple(range(num_packs)), first_fused, **more)  # type: ignore[arg-type]


def test_all_microbatches_run_through_a_pack_while_it_is_there() -> None:
    plan = plan_of(3, 2, num_microbatches=2)
    grid = """\
device 0 | 0SWAP_IN 1SWAP_IN 2SWAP_IN 0F0 0STASH_OUT0 0F1 0STASH_OUT1 1F0 1STASH_OUT0 1F1 1STASH_OUT1 2F0 2B0 2F1 2B1

device 0 | 2SWAP_OUT 2U 1STASH_IN0 1B0 1STASH_IN1 1B1 1SWAP_OUT 1U 0STASH_IN0 0B0 0STASH_IN1 0B1 0SWAP_OUT 0U 0EVICT

device 0 | 1EVICT 2EVICT"""
    assert str(lower(plan, [PACK] * 3, DeviceLimits())) == grid


def test_what_is_needed_last_makes_way_and_comes_back() -> None:
    plan = plan_of(4, 3, num_microbatches=1)
    # Room for two packs beside the running one, whose gradients are there in the backward.
    (tasks,) = lower(plan, [PACK] * 4, DeviceLimits(40)).devices
    weights = [str(task) for task in tasks if task.kind in (Errand.SWAP_IN, Errand.EVICT)]
    assert weights[:5] == ["0SWAP_IN", "1SWAP_IN", "2SWAP_IN", "0EVICT", "3SWAP_IN"]
    assert weights.count("0SWAP_IN") == 2
    assert weights.count("3SWAP_IN") == 1


def test_kept_graphs_hold_their_pack() -> None:
    plan = plan_of(6, 5, kept=frozenset({2}), num_microbatches=2)
    (tasks,) = lower(plan, [PACK] * 6, DeviceLimits(60)).devices
    assert tasks.count(Task(2, Errand.SWAP_IN)) == 1
    assert not any(task.kind in (Errand.STASH_OUT, Errand.STASH_IN) for task in tasks if task.pack in (2, 5))


def test_lanes_go_round_the_devices_of_a_pipeline() -> None:
    plan = plan_of(3, 2, num_microbatches=1, num_devices=2)
    devices = lower(plan, [PACK] * 3, DeviceLimits()).devices
    computing = [" ".join(str(task) for task in tasks if "SWAP" not in str(task)) for tasks in devices]
    assert computing == [
        "0F0 0STASH_OUT0 2TRANSFER_F0 2F0 2B0 2U 0TRANSFER_B0 0STASH_IN0 0B0 0U 0EVICT 2EVICT",
        "1TRANSFER_F0 1F0 1STASH_OUT0 1TRANSFER_B0 1STASH_IN0 1B0 1U 1EVICT",
    ]


def test_microbatches_of_a_pack_that_is_spread_go_round_and_their_gradients_are_gathered_at_its_home() -> None:
    plan = plan_of(2, 1, num_microbatches=3, num_devices=2, spread=frozenset({1}))
    first, second = (" ".join(map(str, tasks)) for tasks in lower(plan, [PACK] * 2, DeviceLimits()).devices)
    assert "1F1 1B1 0TRANSFER_B0" in first
    assert second == (
        "1SWAP_IN 1TRANSFER_F0 1F0 1B0 1GATHER0 1GATHER1 1TRANSFER_F2 1F2 1B2 1GATHER2 1SWAP_OUT 1U 1EVICT"
    )
    # Each device brings its weights, and lets them go.
    assert first.count("1SWAP_IN") == first.count("1EVICT") == 1


def test_what_is_gathered_has_room_at_home() -> None:
    """Weights of two packs, the sums, and the gradients of one microbatch, for which the other pack makes way."""
    plan = plan_of(3, 2, num_microbatches=2, num_devices=2, spread=frozenset({2}))
    packs = [Cost("pack", 10, 10)] * 3
    for capacity, evicted in ((40, False), (39, True)):
        tasks = [str(task) for task in lower(plan, packs, DeviceLimits(capacity)).devices[0]]
        assert ("0EVICT" in tasks[: tasks.index("2GATHER1")]) == evicted


def test_devices_with_microbatches_of_their_own_add_their_gradients() -> None:
    plan = plan_of(2, 1, num_microbatches=3, num_devices=2, parallel="data")
    first, second = ([str(task) for task in tasks] for tasks in lower(plan, [PACK] * 2, DeviceLimits()).devices)
    assert [task for task in first if task[1] in "FB"] == ["0F0", "0F2", "1F0", "1B0", "1F2", "1B2", "0B0", "0B2"]
    assert first[first.index("0B2") + 1 :][:3] == ["0REDUCE1", "0SWAP_OUT", "0U"]
    assert second[second.index("1B1") + 1 :][:3] == ["1REDUCE0", "1SWAP_OUT", "1U"]
    assert "1SWAP_OUT" not in first


def test_what_is_not_needed_any_more_makes_way_before_anything_waits_for_what_leaves() -> None:
    # Both packs, the gradients of one on their way out, and those of the other.
    plan, packs = plan_of(2, 1, num_microbatches=1), [Cost("pack", 10, 10)] * 2
    for capacity, following in ((40, "0B0"), (39, "1EVICT")):
        tasks = [str(task) for task in lower(plan, packs, DeviceLimits(capacity)).devices[0]]
        assert tasks[tasks.index("1U") + 1] == following


def test_without_grouping_each_microbatch_swaps_each_pack_anew_and_parks_its_gradients() -> None:
    plan = plan_of(2, 2, num_microbatches=2, reuse="none", lookahead=0)
    (tasks,) = lower(plan, [Cost("pack", 10, 10)] * 2, DeviceLimits()).devices
    assert " ".join(map(str, tasks)) == (
        "0SWAP_IN 0F0 0EVICT 1SWAP_IN 1F0 1EVICT 0SWAP_IN 0F1 0EVICT 1SWAP_IN 1F1 1EVICT "
        "1SWAP_IN 1B0 1PARK 1EVICT 0SWAP_IN 0B0 0PARK 0EVICT "
        "1SWAP_IN 1UNPARK1 1B1 1SWAP_OUT 1EVICT 0SWAP_IN 0UNPARK1 0B1 0SWAP_OUT 0EVICT 1U 0U"
    )


def test_with_grouping_alone_each_visit_swaps_its_pack_anew_and_the_update_follows_the_backward() -> None:
    plan = plan_of(2, 2, num_microbatches=2, reuse="visit", lookahead=0)
    (tasks,) = lower(plan, [Cost("pack", 10, 10)] * 2, DeviceLimits()).devices
    assert " ".join(map(str, tasks)) == (
        "0SWAP_IN 0F0 0F1 0EVICT 1SWAP_IN 1F0 1F1 1EVICT "
        "1SWAP_IN 1B0 1B1 1SWAP_OUT 1EVICT 0SWAP_IN 0B0 0B1 0SWAP_OUT 0EVICT 1U 0U"
    )


def test_nothing_is_fetched_ahead_where_the_plan_says_so() -> None:
    (tasks,) = lower(plan_of(3, 2, num_microbatches=1, lookahead=0), [Cost("pack", 10, 10)] * 3, DeviceLimits()).devices
    assert [str(task) for task in tasks[:6]] == ["0SWAP_IN", "0F0", "1SWAP_IN", "1F0", "2SWAP_IN", "2F0"]


def test_a_device_without_a_microbatch_has_nothing_to_do() -> None:
    plan = plan_of(4, 3, num_microbatches=2, num_devices=3, parallel="data")
    assert lower(plan, [PACK] * 4, DeviceLimits()).devices[2] == ()


def test_packs_come_ahead_of_their_use() -> None:
    (tasks,) = lower(plan_of(6, 5, num_microbatches=1), [PACK] * 6, DeviceLimits()).devices
    before = tasks[: tasks.index(Task(1, Phase.FORWARD, 0))]
    assert {task.pack for task in before if task.kind is Errand.SWAP_IN} == set(range(2 + LOOKAHEAD))


@given(plans(), st.none() | st.integers(10, 200))
def test_every_device_does_its_part_of_the_same_order(
    planned: tuple[Plan, tuple[Cost, ...]], capacity: int | None
) -> None:
    plan, packs = planned
    order = [(plan.visits[r.position], r.phase, r.microbatch) for stay in stays(plan) for r in stay.runs]
    for device, tasks in enumerate(lower(plan, packs, DeviceLimits(capacity)).devices):
        here = [Task(*run) for run in order if plan.device_of(run[0], run[2]) == device]
        assert [task for task in tasks if isinstance(task.kind, Phase)] == here


@given(plans(), st.integers(10, 200))
def test_capacity_changes_swaps_and_nothing_else(planned: tuple[Plan, tuple[Cost, ...]], capacity: int) -> None:
    """What a schedule computes, told by running it on symbols, is the same for all."""
    plan, packs = planned
    tight, ample = lower(plan, packs, DeviceLimits(capacity)), lower(plan, packs, DeviceLimits())
    moves = (Errand.SWAP_IN, Errand.EVICT)
    for some, all_ in zip(tight.devices, ample.devices, strict=True):
        assert [t for t in some if t.kind not in moves] == [t for t in all_ if t.kind not in moves]
    assert compute(plan, packs, tight) == compute(plan, packs, ample)


def with_profile(plan: Plan, packs: tuple[Cost, ...], capacity: int | None) -> Plan:
    layers = tuple(replace(cost, name=name) for (name,), cost in zip(plan.packs, packs, strict=True))
    return replace(plan, profile=Profile(layers, DeviceLimits(capacity)))


@given(plans(), st.none() | st.integers(10, 200))
def test_what_the_executor_is_told_is_what_the_schedule_tells(
    planned: tuple[Plan, tuple[Cost, ...]], capacity: int | None
) -> None:
    plan, packs = planned
    all_moves = [each.moves for each in moves_of(with_profile(plan, packs, capacity))]
    assert [each.moves for each in moves_of(plan)] == [{}] * plan.num_devices
    if not plan.just_in_time:
        assert all_moves == [{}] * plan.num_devices
        return
    for tasks, moves in zip(lower(plan, packs, DeviceLimits(capacity)).devices, all_moves, strict=True):
        moved = [task for each in moves.values() for task in each]
        of_weights = [task for task in tasks if task.kind in (Errand.SWAP_IN, Errand.EVICT)]
        # What is left at the end goes with the step.
        assert of_weights[: len(moved)] == moved
        assert all(task.kind is Errand.EVICT for task in of_weights[len(moved) :])


def test_moves_are_made_where_lanes_come_to_a_pack() -> None:
    plan = with_profile(plan_of(3, 2, num_microbatches=2, lookahead=1), (Cost("pack", 10, 10),) * 3, 30)
    (of_device,) = moves_of(plan)
    assert {(phase.value, place): " ".join(map(str, each)) for (phase, place), each in of_device.moves.items()} == {
        ("F", 0): "0SWAP_IN 1SWAP_IN",
        ("F", 1): "2SWAP_IN",
        ("F", 2): "0EVICT",
        ("B", 1): "2EVICT",
        ("B", 2): "0SWAP_IN",
    }


def test_a_plan_without_a_number_of_microbatches_is_refused() -> None:
    with pytest.raises(PlanError, match="for how many microbatches"):
        lower(plan_of(2, 1), [PACK] * 2, DeviceLimits())


def test_a_turn_of_the_forward_may_take_several_packs_which_then_are_there_together() -> None:
    plan = plan_of(3, 2, num_microbatches=2, joined=frozenset({1}), lookahead=0)
    (tasks,) = lower(plan, [Cost("pack", 10, 0)] * 3, DeviceLimits(20)).devices
    assert " ".join(map(str, tasks)) == (
        "0SWAP_IN 1SWAP_IN 0F0 1F0 0F1 1F1 0EVICT 2SWAP_IN 2F0 2B0 2F1 2B1 1B0 1B1 1EVICT 0SWAP_IN 0B0 0B1 0EVICT 2EVICT"
    )

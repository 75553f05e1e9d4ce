"""Packs are updated where their gradients are if there is room for these until then."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.search.deciding import decide, with_device_updates
from lightning_harmony.plan.simulate.lowering import lower, moves_of
from lightning_harmony.plan.simulate.replay import predict, replay
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan, Predicted
from lightning_harmony.plan.values.profile import DeviceLimits, Profile
from lightning_harmony.plan.values.task import Errand, Phase
from support.plans import names, parse_schedule

# Weights and gradients 8, of which 8 cross the bus; 1 s forward, 3 s backward.
PACK = Cost("pack", 8, 8, copied_bytes=8, forward_seconds=1.0, backward_seconds=3.0)
# 1 s each way for weights or gradients, 2 s for the update of a pack.
MACHINE = DeviceLimits(None, 8.0, 8.0, None, 4.0, updates_in_place=True)


def plan_of(num_packs: int = 4, machine: DeviceLimits = MACHINE, **more: object) -> Plan:
    layers = tuple(replace(PACK, name=f"layer {index}") for index in range(num_packs))
    plan = Plan(
        names(num_packs),
        tuple(range(num_packs)),
        num_packs - 1,
        num_microbatches=1,
        profile=Profile(layers, machine),
        **more,  # type: ignore[arg-type]
    )
    prediction = predict(plan)
    return replace(plan, predicted=Predicted(prediction.seconds, prediction.peak_bytes))


def spans_of(plan: Plan, stream: str) -> list[tuple[str, float, float]]:
    (device,) = predict(plan).devices
    return [(str(span.task), span.start_seconds, span.end_seconds) for span in device.spans if span.stream == stream]


def test_all_are_where_there_is_room() -> None:
    plan = plan_of()
    assert plan.predicted is not None
    # In, four forwards and backwards, out and the update.
    assert plan.predicted.seconds == pytest.approx(1 + 16 + 1 + 2)
    chosen = with_device_updates(plan)
    assert chosen.device_updated == {0, 1, 2, 3}
    assert chosen.predicted is not None
    # Nothing goes out before the last update.
    assert chosen.predicted.seconds == pytest.approx(1 + 16 + 2)
    assert not spans_of(chosen, "swap-out")
    (device,) = predict(chosen).devices
    assert device.swapped_out_bytes == {}
    assert spans_of(chosen, "update") == [("3U", 8.0, 10.0), ("2U", 11.0, 13.0), ("1U", 14.0, 16.0), ("0U", 17.0, 19.0)]


def test_gradients_take_room_until_they_are_used_up() -> None:
    """Updates that take 6 s, twice a backward's time: three packs wait before the last one's gradients come to be.

    With each of them wait the weights that its backward had. The one that is updated by then has weights of its own, too.
    """
    slow = replace(MACHINE, update_bytes_per_second=8 / 6)
    plan = replace(plan_of(machine=slow), device_updated=frozenset(range(4)))
    (device,) = predict(plan).devices
    from_host = predict(replace(plan, device_updated=frozenset())).devices[0]
    assert dict(device.memory)[11.0] == dict(from_host.memory)[11.0] + 8 + 2 * 8
    # The next step begins while they are used up.
    assert device.memory[0][1] > from_host.memory[0][1]


def test_a_backward_waits_for_an_update_that_has_its_room() -> None:
    slow = replace(MACHINE, update_bytes_per_second=8 / 6, capacity_bytes=40)
    plan = replace(plan_of(machine=slow), device_updated=frozenset(range(4)))
    backwards = [start for name, start, _ in spans_of(plan, "compute") if "B" in name]
    updates = {end for _, _, end in spans_of(plan, "update")}
    assert updates & set(backwards)
    assert predict(plan).devices[0].peak_bytes <= 40


# As it is on the host, a pack takes twice what it does to compute with.
CAST = replace(PACK, weight_bytes=4, master_bytes=8, staging_bytes=2)


def cast_plan(machine: DeviceLimits = MACHINE, **more: object) -> Plan:
    plan = plan_of(machine=machine, **more)
    layers = tuple(replace(CAST, name=cost.name) for cost in plan.profile.layers)  # type: ignore[union-attr]
    return replace(plan, profile=Profile(layers, machine), device_updated=frozenset(range(4)))


def test_weights_that_come_for_a_backward_stay_as_they_are_on_the_host_until_the_update() -> None:
    """The first pack's update is the last: then nothing else is there."""
    plan = cast_plan(replace(MACHINE, capacity_bytes=28))
    (device,) = predict(plan).devices
    (_, start, end) = spans_of(plan, "update")[-1]
    there = max(num_bytes for moment, num_bytes in device.memory if start <= moment < end)
    assert there == CAST.gradient_bytes + CAST.master_bytes
    assert device.peak_bytes <= 28


def test_weights_that_were_cast_for_the_forward_come_again_for_the_update() -> None:
    """They have stayed since, and come for the update once more."""
    plan = cast_plan()
    (device,) = predict(plan).devices
    (_, start, end) = spans_of(plan, "update")[-1]
    assert max(num_bytes for moment, num_bytes in device.memory if start <= moment < end) == CAST.gradient_bytes


def test_what_lasts_leaves_what_passes_its_memory() -> None:
    """Where a device keeps them apart, weights wait for an update though there would be room, and are never refused."""
    layers = tuple(replace(PACK, name=f"layer {index}", backward_work_bytes=36) for index in range(4))
    slow = replace(MACHINE, update_bytes_per_second=8 / 6, capacity_bytes=80)
    together = replace(plan_of(machine=slow), profile=Profile(layers, slow), device_updated=frozenset(range(4)))
    apart, scarce = (
        replace(together, profile=Profile(layers, replace(slow, pools_apart=True, capacity_bytes=capacity)))
        for capacity in (62, 53)
    )
    # No less than a pack's weights and gradients, and the weights of the next.
    assert [moves_of(plan)[0].lasting_bytes for plan in (together, apart, scarce)] == [None, 26, 24]
    assert predict(scarce).seconds >= predict(apart).seconds > predict(together).seconds


def test_what_leaves_in_great_amounts_does_not_keep_packs_from_coming_ahead() -> None:
    """All that the logits of many microbatches leave for the backward counted as there at once, in the memory of weights."""
    layers = [replace(PACK, name=f"layer {index}") for index in range(6)]
    layers[4] = replace(layers[4], stash_bytes=60)
    machine = replace(MACHINE, capacity_bytes=128, pools_apart=True)
    plan = replace(plan_of(6, machine=machine), num_microbatches=8, first_fused=6, device_updated=frozenset(range(6)))
    plan = replace(plan, profile=Profile(tuple(layers), machine))
    # The weights and gradients of a pack, what the updates of two use up, and the weights of the next.
    assert moves_of(plan)[0].lasting_bytes == 8 + 8 + 2 * 16 + 8
    # They used to come when the backward of the pack before had ended.
    spans = [span for span in predict(plan).devices[0].spans if span.task.kind is Phase.BACKWARD and span.task.pack < 3]
    assert all(before.end_seconds == after.start_seconds for before, after in pairwise(spans))


def test_weights_that_could_stay_leave_what_passes_its_memory() -> None:
    """They were kept for the backward, so that on a GPU none could be fetched ahead."""
    layers = tuple(replace(PACK, name=f"layer {index}", backward_work_bytes=40) for index in range(8))
    machine = replace(MACHINE, capacity_bytes=80, updates_in_place=False)
    together = replace(plan_of(8, machine=machine), profile=Profile(layers, machine))
    apart = replace(together, profile=Profile(layers, replace(machine, pools_apart=True)))
    limit = moves_of(apart)[0].lasting_bytes
    assert limit is not None

    def most_weights(plan: Plan) -> int:
        there, most = 0, 0
        for task in lower(plan, layers, DeviceLimits(80, pools_apart=plan is apart)).devices[0]:
            there += {Errand.SWAP_IN: 8, Errand.EVICT: -8}.get(task.kind, 0)  # type: ignore[call-overload]
            most = max(most, there)
        return most

    assert most_weights(together) > limit >= most_weights(apart)


def test_what_waits_for_an_update_has_the_memory_of_weights_that_could_stay() -> None:
    """Weights that stayed for their backward filled the memory: each backward waited for the update before."""
    machine = replace(MACHINE, update_bytes_per_second=8 / 3, capacity_bytes=64)
    plan = replace(plan_of(8, machine=machine), device_updated=frozenset(range(8)))
    starts = sorted(start for name, start, _ in spans_of(plan, "compute") if "B" in name)
    assert [after - before for before, after in pairwise(starts)] == [pytest.approx(3.0)] * 7


def test_fewer_packs_are_fused_where_updates_have_more_use_of_the_memory() -> None:
    """As of a GPT of 5 B parameters on a card of 16 GiB: graphs of five packs, or fast updates."""
    gigabyte = 10**9
    block = Cost(
        "block",
        weight_bytes=402 * 10**6,
        gradient_bytes=805 * 10**6,
        forward_work_bytes=gigabyte // 2,
        backward_work_bytes=6 * gigabyte // 5,
        graph_bytes=9 * gigabyte // 10,
        copied_bytes=805 * 10**6,
        input_bytes=34 * 10**6,
        stash_bytes=34 * 10**6,
        forward_seconds=0.0031,
        backward_seconds=0.0086,
        recompute_seconds=0.0031,
        staging_bytes=67 * 10**6,
        arriving_bytes=34 * 10**6,
        returning_bytes=34 * 10**6,
        master_bytes=805 * 10**6,
    )
    costs = {f"block {index}": replace(block, name=f"block {index}") for index in range(26)}
    machine = DeviceLimits(15 * gigabyte, 50e9, 50e9, None, 12.5e9, gigabyte, pools_apart=True)
    on_host = decide(costs, list(costs), 8, machine)
    chosen = decide(costs, list(costs), 8, replace(machine, updates_in_place=True))
    assert not on_host.device_updated
    assert chosen.device_updated
    assert chosen.first_fused > on_host.first_fused
    assert chosen.predicted_seconds < on_host.predicted_seconds


def test_packs_that_are_not_trained_wait_for_no_update() -> None:
    plan = plan_of()
    assert plan.profile is not None
    frozen = replace(plan.profile.layers[1], gradient_bytes=0)
    plan = replace(plan, profile=Profile((plan.profile.layers[0], frozen, *plan.profile.layers[2:]), MACHINE))
    assert with_device_updates(plan).device_updated == {0, 2, 3}


def test_fewer_packs_are_updated_where_their_gradients_are_if_more_would_take_longer() -> None:
    slow = replace(MACHINE, update_bytes_per_second=8 / 3, capacity_bytes=28)
    plan = plan_of(machine=slow)
    chosen = with_device_updates(plan)
    assert 0 < len(chosen.device_updated) < 4
    assert chosen.predicted_seconds <= plan.predicted_seconds * 1.01
    # Those that the next forward begins with.
    assert chosen.device_updated == set(range(len(chosen.device_updated)))


@pytest.mark.parametrize(
    ("machine", "more"),
    [
        (replace(MACHINE, updates_in_place=False), {}),
        (MACHINE, {"num_devices": 2, "parallel": "data"}),
        (MACHINE, {"reuse": "visit", "lookahead": 0}),
    ],
    ids=["on the host", "summed on several devices", "no pack stays"],
)
def test_gradients_go_to_the_host_first_where_packs_cannot_be_updated_in_place(
    machine: DeviceLimits, more: dict[str, object]
) -> None:
    plan = plan_of(machine=machine)
    plan = replace(plan, **more, first_fused=4 if "reuse" in more else 3)  # type: ignore[arg-type]
    assert with_device_updates(plan) == plan


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("0B0 0EVICT 0U", "0U 0B0 0EVICT", "1 backwards of pack 0 have not run"),
        ("0U", "0SWAP_OUT 0U", "the plan has pack 0 updated where its gradients are"),
        ("0U", "0U 0U", "pack 0 has been updated"),
        (" 0U", "", "the gradients of pack 0 are never"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_name(before: str, after: str, problem: str) -> None:
    plan = replace(plan_of(2), device_updated=frozenset({0}))
    assert plan.profile is not None
    packs = plan.profile.pack_costs(plan.packs)
    tasks = " ".join(map(str, lower(plan, packs, DeviceLimits()).devices[0]))
    assert before in tasks
    with pytest.raises(PlanError, match=problem):
        replay(plan, parse_schedule(f"device 0 | {tasks.replace(before, after, 1)}"), packs, MACHINE)


@pytest.mark.parametrize(
    "more",
    [
        {"device_updated": frozenset({0}), "parallel": "data", "num_devices": 2},
        {"device_updated": frozenset({0}), "spread": frozenset({0}), "num_devices": 2},
        {"device_updated": frozenset({0}), "reuse": "visit", "first_fused": 4, "lookahead": 0},
    ],
    ids=["summed on several devices", "spread", "updated behind the backward"],
)
def test_what_no_device_could_update_by_itself_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(PlanError, match=r"where (its|their) gradients are"):
        predict(replace(plan_of(), **more))  # type: ignore[arg-type]

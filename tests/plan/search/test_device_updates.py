"""Packs are updated on their device where that is predicted to make a step shorter."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import names

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.search.device_updates import with_device_updates
from lightning_harmony.plan.simulate.lowering import lower, weight_moves
from lightning_harmony.plan.simulate.replay import predict, replay
from lightning_harmony.plan.simulate.schedule import Schedule
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan, Predicted
from lightning_harmony.plan.values.profile import MachineLimits, Profile
from lightning_harmony.plan.values.task import Errand, Phase

# Weights and gradients 8, of which 8 cross the bus; 1 s forward, 3 s backward.
PACK = Cost("pack", 8, 8, copied_bytes=8, forward_seconds=1.0, backward_seconds=3.0)
# 1 s each way for weights or gradients, 2 s for the update of a pack: behind the last backward there are 3 s, and 1 s before.
MACHINE = MachineLimits(None, 8.0, 8.0, None, 4.0, state_copies=2.0)


def plan_of(num_packs: int = 4, machine: MachineLimits = MACHINE, **more: object) -> Plan:
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


def test_the_next_forward_need_not_wait_for_the_host() -> None:
    plan = plan_of()
    assert plan.predicted is not None
    # In, four forwards and backwards, out and the update.
    assert plan.predicted.seconds == pytest.approx(1 + 16 + 1 + 2)
    chosen = with_device_updates(plan)
    # The second pack's update by the host is over when its forward begins: to update it here would gain nothing.
    assert chosen.device_updated == {0}
    assert chosen.predicted is not None
    assert chosen.predicted.seconds == pytest.approx(16)


def test_its_state_comes_one_visit_ahead_and_goes_under_the_next_step() -> None:
    plan = with_device_updates(plan_of())
    prediction = predict(plan)
    (device,) = prediction.devices
    spans = {str(span.task): (span.start_seconds, span.end_seconds) for span in device.spans}
    # 24 bytes each way.
    assert spans["0STATE_IN"][1] - spans["0STATE_IN"][0] == pytest.approx(3)
    # It is asked for behind the backward before that of the second pack.
    assert spans["0STATE_IN"][0] == pytest.approx(spans["2B0"][0])
    assert spans["0DEVICE_U"] == pytest.approx((16, 16))
    assert spans["0STATE_OUT"] == pytest.approx((16, 19))
    assert prediction.seconds == pytest.approx(16)
    assert device.swapped_in_bytes == {"weights": 3 * 8, "optimizer": 24}
    assert device.swapped_out_bytes == {"gradients": 3 * 8, "optimizer": 24}
    moves = [task for tasks in weight_moves(plan)[0].values() for task in tasks]
    assert [task.pack for task in moves if task.kind is Errand.STATE_IN] == [0]
    assert weight_moves(plan)[0][Phase.BACKWARD, 2][-1].kind is Errand.STATE_IN


def test_where_something_looks_at_weights_between_steps_what_goes_is_waited_for() -> None:
    plan = with_device_updates(plan_of())
    seconds = predict(plan, replace(MACHINE, updates_outlast=False)).seconds
    # Out, and in again.
    assert seconds == pytest.approx(20)


@pytest.mark.parametrize(
    "machine",
    [
        replace(MACHINE, state_copies=None),
        # An update that takes no time leaves little to gain.
        replace(MACHINE, update_bytes_per_second=None, swap_in_bytes_per_second=800.0, swap_out_bytes_per_second=800.0),
        # There is no room for 24 bytes more.
        replace(MACHINE, capacity_bytes=40),
    ],
    ids=["devices cannot", "little to gain", "no room"],
)
def test_else_gradients_go_to_the_host_first(machine: MachineLimits) -> None:
    plan = plan_of(machine=machine)
    assert with_device_updates(plan) == plan


def test_short_steps_are_left_as_they_are() -> None:
    plan = plan_of()
    profile = plan.profile
    assert profile is not None
    layers = tuple(replace(cost, forward_seconds=0.01, backward_seconds=0.03) for cost in profile.layers)
    fast = replace(
        MACHINE, swap_in_bytes_per_second=800.0, swap_out_bytes_per_second=800.0, update_bytes_per_second=400.0
    )
    short = replace(plan, profile=Profile(layers, fast))
    short = replace(short, predicted=Predicted(predict(short).seconds, (0,)))
    assert with_device_updates(short).device_updated == frozenset()


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("0STATE_IN ", "", "the optimizer's state of pack 0 is not there"),
        ("0DEVICE_U ", "", "the device has not updated pack 0"),
        ("0STATE_OUT ", "", "the optimizer's state of pack 0 never goes to the host"),
        ("0STATE_IN", "0STATE_IN 0STATE_IN", "has come already"),
        ("0B0 0DEVICE_U", "0DEVICE_U 0B0", "1 backwards of pack 0 have not run"),
        ("0DEVICE_U 0STATE_OUT", "0SWAP_OUT 0U", "the plan has pack 0 updated on the device"),
        ("0STATE_IN", "1STATE_IN", "the plan has pack 1 updated on the host"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_name(before: str, after: str, problem: str) -> None:
    plan = replace(plan_of(2), device_updated=frozenset({0}))
    assert plan.profile is not None
    packs = plan.profile.pack_costs(plan.packs)
    tasks = " ".join(map(str, lower(plan, packs, None).devices[0]))
    assert before in tasks
    with pytest.raises(PlanError, match=problem):
        replay(plan, Schedule.parse(f"device 0 | {tasks.replace(before, after, 1)}"), packs, MACHINE)


@pytest.mark.parametrize(
    "more",
    [
        {"device_updated": frozenset({3})},
        {"device_updated": frozenset({0}), "parallel": "data", "num_devices": 2},
        {"device_updated": frozenset({0}), "spread": frozenset({0}), "num_devices": 2},
    ],
    ids=["fused", "summed on several devices", "spread"],
)
def test_what_no_device_could_update_by_itself_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="on the device"):
        plan_of(**more)  # type: ignore[arg-type]

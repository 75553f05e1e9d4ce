"""Packs are updated where their gradients are if there is room for these until then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.search.device_updates import with_device_updates
from lightning_harmony.plan.simulate.lowering import lower
from lightning_harmony.plan.simulate.replay import predict, replay
from lightning_harmony.plan.simulate.schedule import Schedule
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan, Predicted
from lightning_harmony.plan.values.profile import MachineLimits, Profile
from support.plans import names

# Weights and gradients 8, of which 8 cross the bus; 1 s forward, 3 s backward.
PACK = Cost("pack", 8, 8, copied_bytes=8, forward_seconds=1.0, backward_seconds=3.0)
# 1 s each way for weights or gradients, 2 s for the update of a pack.
MACHINE = MachineLimits(None, 8.0, 8.0, None, 4.0, updates_in_place=True)


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


def test_where_that_would_take_longer_fewer_are() -> None:
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
        (MACHINE, {"num_devices": 2}),
        (MACHINE, {"reuse": "visit", "lookahead": 0}),
    ],
    ids=["on the host", "several devices", "no pack stays"],
)
def test_else_gradients_go_to_the_host_first(machine: MachineLimits, more: dict[str, object]) -> None:
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
    tasks = " ".join(map(str, lower(plan, packs, None).devices[0]))
    assert before in tasks
    with pytest.raises(PlanError, match=problem):
        replay(plan, Schedule.parse(f"device 0 | {tasks.replace(before, after, 1)}"), packs, MACHINE)


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

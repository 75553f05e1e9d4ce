"""Which plan a step runs by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_harmony.plan.search.deciding import decide, foreseen, improved
from lightning_harmony.plan.search.rules import fitting_packs, packed, with_graphs
from lightning_harmony.plan.search.search import search_better
from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan, Predicted
from lightning_harmony.plan.values.profile import MachineLimits
from support.plans import LAYER

NAMES = [f"layer {number}" for number in range(6)]
COSTS: dict[str, Cost] = {name: replace(LAYER, name=name) for name in [*NAMES, "unused"]}
# With no limit the rules make one pack, whose way nothing hides.
SLOW = MachineLimits(None, 10.0, 10.0, None, 10.0)


@pytest.fixture
def searching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_harmony.plan.search.search.SHORT_SECONDS", 0.0)


def by_rules(machine: MachineLimits) -> Plan:
    packs = fitting_packs(COSTS, NAMES, [machine.capacity_bytes], "pipeline")
    plan = with_graphs(packed(packs, COSTS, NAMES, 1, "pipeline"), COSTS, 4, [machine.free_bytes])
    return foreseen(plan, COSTS, machine)


@pytest.mark.usefixtures("searching")
def test_the_search_replaces_what_it_clearly_beats() -> None:
    rules, plan = by_rules(SLOW), decide(COSTS, NAMES, 4, SLOW)
    assert rules.packs == (tuple(NAMES), ("unused",))
    assert len(plan.packs) > 2
    prediction = predict(plan)
    assert plan.predicted == Predicted(prediction.seconds, prediction.peak_bytes)
    assert prediction.seconds < predict(rules).seconds
    better = search_better(rules, range(6))
    assert (plan.packs, plan.first_fused, plan.kept) == (better.packs, better.first_fused, better.kept)
    assert improved(rules, NAMES) == plan
    assert improved(rules, NAMES, with_its_packs=True).packs == rules.packs


@pytest.mark.usefixtures("searching")
def test_a_search_that_may_replay_one_plan_finds_what_that_is() -> None:
    assert decide(COSTS, NAMES, 4, SLOW, most_tasks=0) == by_rules(SLOW)


def test_a_short_step_keeps_the_plan_by_rules() -> None:
    assert decide(COSTS, NAMES, 4, SLOW) == by_rules(SLOW)


def test_packs_have_the_capacity_and_graphs_what_a_step_finds_of_it() -> None:
    machine = MachineLimits(4000, occupied_bytes=1000)
    plan = decide(COSTS, NAMES, 4, machine)
    assert plan == by_rules(machine)
    assert plan.packs == decide(COSTS, NAMES, 4, MachineLimits(4000)).packs
    assert plan.predicted is not None
    assert 1000 < max(plan.predicted.peak_bytes) <= 4000


def test_one_without_room_has_no_prediction_and_is_not_searched() -> None:
    assert decide(COSTS, NAMES, 4, MachineLimits(120)).predicted is None

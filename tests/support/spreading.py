"""Plans whose packs are spread, whatever these cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_harmony.engine.step import plan_making
from lightning_harmony.plan.search.deciding import decide, with_costs
from lightning_harmony.plan.values.plan import Plan

# Which of the packs that a step visits.
SPREAD: dict[str, Callable[[Plan], frozenset[int]]] = {
    "last": lambda plan: frozenset(plan.visits[-1:]),
    "some": lambda plan: frozenset(plan.visits[::2]),
    "all": lambda plan: frozenset(plan.visits),
}


def spread_packs(monkeypatch: pytest.MonkeyPatch, which: str) -> list[Plan]:
    """From now on, plans for several devices spread packs: those plans, as they are made."""
    made: list[Plan] = []

    def decide_spread(costs: Any, calls: Any, number: int, machine: Any, **options: Any) -> Plan:
        plan = decide(costs, calls, number, machine, **options)
        if plan.num_devices > 1:
            plan = with_costs(replace(plan, spread=SPREAD[which](plan)), costs, machine)
            made.append(plan)
        return plan

    monkeypatch.setattr(plan_making, "decide", decide_spread)
    return made

"""Deciding: by which plan steps run. By that of the rules, unless the search finds one that is clearly faster."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_harmony.plan.search.device_updates import with_device_updates
from lightning_harmony.plan.search.rules import fitting_packs, packed, with_graphs
from lightning_harmony.plan.search.search import MOST_TASKS, search_better
from lightning_harmony.plan.simulate.replay import with_prediction
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Parallel, Plan
from lightning_harmony.plan.values.profile import MachineLimits, Profile


def decide(
    costs: Mapping[str, Cost],
    calls: Sequence[str],
    num_microbatches: int,
    machine: MachineLimits,
    *,
    num_devices: int = 1,
    parallel: Parallel = "pipeline",
    most_tasks: float = MOST_TASKS,
) -> Plan:
    """The plan for a step, with what it was made from and what that predicts.

    Args:
        costs: of each layer, by its name.
        calls: the names of layers in the order in which a microbatch's forward calls them.
        num_microbatches: of the batch.
        machine: what the step runs on.
        num_devices: how many devices share the work.
        parallel: how packs are placed on them.
        most_tasks: how many tasks are replayed in the search.
    """
    packs = fitting_packs(costs, calls, [machine.capacity_bytes] * num_devices, parallel)
    plan = packed(packs, costs, calls, num_devices, parallel)
    plan = with_graphs(plan, costs, num_microbatches, [machine.free_bytes] * num_devices)
    return with_device_updates(improved(foreseen(plan, costs, machine), calls, most_tasks=most_tasks))


def foreseen(plan: Plan, costs: Mapping[str, Cost], machine: MachineLimits) -> Plan:
    """A plan with what its layers cost, and what that predicts.

    Args:
        plan: the plan, with its number of microbatches.
        costs: of each layer, by its name.
        machine: what the step runs on.
    """
    layers = tuple(costs[name] for pack in plan.packs for name in pack)
    return with_prediction(replace(plan, profile=Profile(layers, machine)))


def improved(plan: Plan, calls: Sequence[str], *, with_its_packs: bool = False, most_tasks: float = MOST_TASKS) -> Plan:
    """A plan that is predicted to be clearly faster than one, if the search finds one; else that one.

    Args:
        plan: the plan, with what is foreseen of it.
        calls: the names of layers in the order in which a microbatch's forward calls them.
        with_its_packs: whether its packs stay as they are.
        most_tasks: how many tasks are replayed in the search.
    """
    assert plan.profile is not None
    costs = {cost.name: cost for cost in plan.profile.layers}
    places = {name: place for place, name in enumerate(costs)}
    order = [places[name] for name in calls]
    better = search_better(plan, order, with_its_packs=with_its_packs, most_tasks=most_tasks)
    return plan if better is plan else foreseen(better, costs, plan.profile.machine)

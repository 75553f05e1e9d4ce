"""Deciding: by which plan steps run. By that of the rules, unless the search finds one that is clearly faster."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_harmony.plan.search.graphs import fusable_from
from lightning_harmony.plan.search.rules import fitting_packs, packed, with_graphs
from lightning_harmony.plan.search.search import CLEAR_SHARE, MOST_TASKS, search_better
from lightning_harmony.plan.simulate.replay import with_prediction
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Parallel, Plan
from lightning_harmony.plan.values.profile import DeviceLimits, Profile

# How much of the optimizer state may stay on the device; of shares that are about equally fast, the first one is taken. What
# comes and goes holds up copies and the host in more ways than are predicted: steps predicted 1 % shorter took 25 % longer.
STATE_SHARES = (1.0, 0.75, 0.5, 0.25)
_ABOUT = 0.03
# Gradients that stay take room, for which others may have to wait: a step may become longer by so much, for the bus that is
# spared has more uses than a prediction knows.
TOLERATED_SHARE = 0.05
# How many packs fewer are fused, less one.
FEWER_FUSED = (0, 1, 3)


def decide(
    costs: Mapping[str, Cost],
    calls: Sequence[str],
    num_microbatches: int,
    machine: DeviceLimits,
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
    return with_homes(improved(with_costs(plan, costs, machine), calls, most_tasks=most_tasks))


def with_costs(plan: Plan, costs: Mapping[str, Cost], machine: DeviceLimits) -> Plan:
    """A plan with what its layers cost, and what that predicts.

    Args:
        plan: the plan, with its number of microbatches.
        costs: of each layer, by its name.
        machine: what the step runs on, without optimizer state that stays there.
    """
    profile = Profile(tuple(costs[name] for pack in plan.packs for name in pack), machine)
    there = plan.state_bytes_there(profile.pack_costs(plan.packs))
    machine = replace(machine, occupied_bytes=machine.occupied_bytes + there)
    return with_prediction(replace(plan, profile=replace(profile, machine=machine)))


def improved(plan: Plan, calls: Sequence[str], *, with_its_packs: bool = False, most_tasks: float = MOST_TASKS) -> Plan:
    """A plan that is predicted to be clearly faster than one, if the search finds one; else that one.

    Args:
        plan: the plan, with what is predicted of it.
        calls: the names of layers in the order in which a microbatch's forward calls them.
        with_its_packs: whether its packs stay as they are.
        most_tasks: how many tasks are replayed in the search.
    """
    assert plan.profile is not None
    costs = {cost.name: cost for cost in plan.profile.layers}
    places = {name: place for place, name in enumerate(costs)}
    order = [places[name] for name in calls]
    better = search_better(plan, order, with_its_packs=with_its_packs, most_tasks=most_tasks)
    return plan if better is plan else with_costs(better, costs, plan.profile.machine)


def with_homes(plan: Plan) -> Plan:
    """A plan with what waits on devices for its update, or from one update to the next: gradients, and optimizer state.

    State that stays takes room from graphs and from packs that are fetched ahead, whose rules are asked again: it has to save
    `CLEAR_SHARE` of a step. It is that of the packs which a forward needs first, for it waits for their update.

    Args:
        plan: the plan, with what is predicted of it where nothing stays. It stays as it is where nothing may.
    """
    without, found = with_device_updates(plan), list[Plan]()
    if plan.profile is None or plan.predicted is None or not plan.profile.machine.state_may_stay:
        return without
    costs, machine = plan.profile.pack_costs(plan.packs), plan.profile.machine
    by_name = {cost.name: cost for cost in plan.profile.layers}
    packs = [p for p in dict.fromkeys(plan.visits) if costs[p].optimizer_bytes and _has_one_device(plan, p)]
    for share in STATE_SHARES:
        kept = replace(plan, state_on_device=frozenset(packs[: round(share * len(packs))]))
        room = None if machine.free_bytes is None else machine.free_bytes - kept.state_bytes_there(costs)
        if not kept.state_on_device or (room is not None and room <= 0):
            continue
        fewer = with_graphs(kept, by_name, plan.num_microbatches or 1, [room] * plan.num_devices)
        for other in dict.fromkeys([(kept.first_fused, kept.kept), (fewer.first_fused, fewer.kept)]):
            graphs = replace(kept, first_fused=other[0], kept=other[1])
            found.append(with_device_updates(with_costs(graphs, by_name, machine)))
    least = min((each.predicted_seconds for each in found), default=0.0)
    fastest = next((each for each in found if each.predicted_seconds <= least * (1 + _ABOUT)), without)
    return fastest if fastest.predicted_seconds <= without.predicted_seconds * (1 - CLEAR_SHARE) else without


def _has_one_device(plan: Plan, pack: int) -> bool:
    """Whether one device runs a pack, and updates it."""
    return plan.num_devices == 1 or (plan.parallel == "pipeline" and pack not in plan.spread)


def with_device_updates(plan: Plan) -> Plan:
    """The plan with as many packs as there is room for updated where their gradients are.

    What waits for an update may have more use of the memory than the graphs of fused packs: fewer of these are tried, too.

    Args:
        plan: the plan, with its profile and its prediction, all of its packs updated from the host. It stays as it is where
            optimizers do not step by themselves on one device.
    """
    if plan.profile is None or plan.predicted is None or not _can_be(plan):
        return plan
    costs, capacity = plan.profile.pack_costs(plan.packs), plan.profile.machine.free_bytes
    starts = sorted(start for start in fusable_from(plan.visits, costs, capacity) if start > plan.first_fused)
    fewer = [replace(plan, first_fused=starts[place]) for place in FEWER_FUSED if place < len(starts)]
    others = [_with_room(with_prediction(other), plan.predicted_seconds) for other in fewer]
    return min([_with_room(plan, plan.predicted_seconds), *others], key=lambda other: other.predicted_seconds)


def _with_room(plan: Plan, most_seconds: float) -> Plan:
    """A plan with as many packs updated so as there is room for.

    Those come first that a backward comes to last: their update holds up the next forward.

    Args:
        plan: the plan, with its profile.
        most_seconds: what a step may be predicted to take, but for a tolerated share.
    """
    assert plan.profile is not None
    costs = plan.profile.pack_costs(plan.packs)
    packs = [
        pack
        for pack in dict.fromkeys(plan.visits)
        if plan.visits.count(pack) == 1 and pack not in plan.spread and costs[pack].gradient_bytes
    ]
    num_swapped = sum(pack not in plan.fused for pack in packs)
    # What comes to its update at once waits for long: fused packs come last.
    packs.sort(key=plan.fused.__contains__)
    number = len(packs)
    while number > 0:
        other = with_prediction(replace(plan, device_updated=frozenset(packs[:number])))
        if other.predicted_seconds <= most_seconds * (1 + TOLERATED_SHARE):
            return other
        number = num_swapped if number > num_swapped > 0 else number // 2
    return plan


def _can_be(plan: Plan) -> bool:
    """Whether packs of a plan may be updated so: one device has all of their gradients."""
    assert plan.profile is not None
    is_one = plan.num_devices == 1 or plan.parallel == "pipeline"
    return plan.profile.machine.updates_in_place and plan.just_in_time and is_one

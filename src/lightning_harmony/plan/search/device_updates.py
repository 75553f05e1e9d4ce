"""Which packs are updated where their gradients are, so that these need not go to the host, and come from there again."""

from dataclasses import replace

from lightning_harmony.plan.search.graphs import fusable_from
from lightning_harmony.plan.simulate.replay import with_prediction
from lightning_harmony.plan.values.plan import Plan

# Gradients that stay take room, for which others may have to wait: a step may become longer by so much, for the bus that is
# spared has more uses than a prediction knows.
TOLERATED_SHARE = 0.05
# How many packs fewer are fused, less one.
FEWER_FUSED = (0, 1, 3)


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

"""Which packs are updated where their gradients are, so that these need not go to the host, and come from there again."""

from dataclasses import replace

from lightning_harmony.plan.simulate.replay import with_prediction
from lightning_harmony.plan.values.plan import Plan

# Gradients that stay take room, for which others may have to wait: a step may become longer by so much, for the bus that is
# spared has more uses than a prediction knows.
TOLERATED_SHARE = 0.01


def with_device_updates(plan: Plan) -> Plan:
    """The plan with as many packs as there is room for updated where their gradients are.

    Those come first that a backward comes to last: their update holds up the next forward.

    Args:
        plan: the plan, with its profile and its prediction, all of its packs updated from the host. It stays as it is where
            optimizers do not step by themselves on one device.
    """
    if plan.profile is None or plan.predicted is None or not _can_be(plan):
        return plan
    packs = [pack for pack in dict.fromkeys(plan.visits) if plan.visits.count(pack) == 1 and pack not in plan.spread]
    number = len(packs)
    while number > 0:
        other = with_prediction(replace(plan, device_updated=frozenset(packs[:number])))
        if other.predicted_seconds <= plan.predicted_seconds * (1 + TOLERATED_SHARE):
            return other
        number //= 2
    return plan


def _can_be(plan: Plan) -> bool:
    """Whether packs of a plan may be updated so.

    Updates run one after the other. On several devices, those from the host use the bus of each.
    """
    assert plan.profile is not None
    return plan.profile.machine.updates_in_place and plan.just_in_time and plan.num_devices == 1

"""Which packs are updated where their gradients are, so that the next forward, which begins with them, need not wait."""

from dataclasses import replace
from itertools import takewhile

from lightning_harmony.plan.search.search import SHORT_SECONDS
from lightning_harmony.plan.simulate.replay import with_prediction
from lightning_harmony.plan.values.plan import Plan

# A pack has to make a step shorter by so much, for its state crosses the bus. What else is wrong in a prediction is wrong
# without, too.
WORTHWHILE_SHARE = 0.005
# What a few packs don't hide, more won't.
MOST_PACKS = 4


def with_device_updates(plan: Plan) -> Plan:
    """The plan with the first packs updated where their gradients are, if that is predicted to make a step shorter.

    The last packs of a backward are the first ones of the next forward. If their gradients go to the host first, that waits
    until they have come back in pieces and been used, and the weights have come, too: the turn of the step. But where
    gradients are, the optimizer's state has to find room beside all else.

    Args:
        plan: the plan, with its profile and its prediction, all of its packs updated from the host. It stays as it is where it
            has none of these, or where the optimizer's state is not known.
    """
    if plan.profile is None or plan.predicted is None or not _can_be(plan):
        return plan
    best, chosen = plan, frozenset[int]()
    for pack in takewhile(lambda pack: _may_be(plan, pack), plan.visits[:MOST_PACKS]):
        chosen |= {pack}
        other = with_prediction(replace(plan, device_updated=chosen))
        if other.predicted is None:
            break
        if other.predicted_seconds < best.predicted_seconds * (1 - WORTHWHILE_SHARE):
            best = other
    return best


def _can_be(plan: Plan) -> bool:
    """Whether packs of a plan may be updated so, and its step is long enough for it to matter."""
    assert plan.profile is not None
    if plan.profile.machine.state_copies is None or plan.predicted_seconds < SHORT_SECONDS:
        return False
    return plan.just_in_time and (plan.num_devices == 1 or plan.parallel == "pipeline")


def _may_be(plan: Plan, pack: int) -> bool:
    """Whether a pack is visited once, before the fused ones, and on one device."""
    return plan.visits.count(pack) == 1 and pack not in plan.fused | plan.spread

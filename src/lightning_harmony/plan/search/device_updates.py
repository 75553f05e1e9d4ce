"""Which packs their device updates, so that a forward need not wait for the host.

Just in time, those that the next forward begins with. Of a postponed update, which the forward waits for from pack to pack,
some of all.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from lightning_harmony.plan.search.search import SHORT_SECONDS
from lightning_harmony.plan.simulate.replay import with_prediction
from lightning_harmony.plan.values.plan import Plan

# A pack has to make a step shorter by so much, for its state crosses the bus. What else is wrong in a prediction is wrong
# without, too.
WORTHWHILE_SHARE = 0.005
# What a few packs don't hide, more won't.
MOST_PACKS = 4
# What is smaller is not worth the launches.
LEAST_BYTES = 16 * 2**20


class Postponed(NamedTuple):
    """A pack whose update is postponed.

    Attributes:
        trained_bytes: its parameters that have gradients.
        copied_bytes: what crosses the bus for its forward, when the host has updated it.
        update_bytes: what comes instead where its device updates it: parameters, gradients and the optimizer's state; None
            where that device cannot.
        device: the number of that.
    """

    trained_bytes: int
    copied_bytes: int
    update_bytes: int | None
    device: int = 0


def with_device_updates(plan: Plan) -> Plan:
    """The plan with the first packs updated on their device, where that is predicted to make a step shorter.

    The last packs of a backward are the first ones of the next forward. If the host updates them, that waits until their
    gradients have gone there, been used, and the weights have come back: the turn of the step. But what the update takes has
    to cross the bus beside all else, each way.

    Args:
        plan: the plan, with its profile and its prediction, all of its packs updated on the host. It stays as it is where it
            has none of these, or where devices cannot update.
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
    """Whether devices may update packs of a plan, and its step is long enough for it to matter."""
    assert plan.profile is not None
    if plan.profile.machine.state_copies is None or plan.predicted_seconds < SHORT_SECONDS:
        return False
    return plan.just_in_time and (plan.num_devices == 1 or plan.parallel == "pipeline")


def _may_be(plan: Plan, pack: int) -> bool:
    """Whether a pack is visited once, before the fused ones, and on one device."""
    return plan.visits.count(pack) == 1 and pack not in plan.fused | plan.spread


def left_to_devices(
    packs: Sequence[Postponed], update_bytes_per_second: float, swap_in_bytes_per_second: float
) -> frozenset[int]:
    """Which packs of a postponed update devices make, each when it comes for its forward, while the host makes the others.

    A list schedule: each pack goes to whoever has it ready on the device first, with what was given to both before. What a
    device updates comes while the host is busy with packs before it, so that of the bus only what it copies counts.

    Args:
        packs: as the forward comes to them.
        update_bytes_per_second: of parameters that the host updates.
        swap_in_bytes_per_second: of the copies to a device.

    Returns:
        The places of those packs.
    """
    left: set[int] = set()
    host, buses = 0.0, defaultdict[int, float](float)
    for place, pack in enumerate(packs):
        updated, bus = host + pack.trained_bytes / update_bytes_per_second, buses[pack.device]
        copied = pack.copied_bytes / swap_in_bytes_per_second
        may_be_left = pack.update_bytes is not None and pack.trained_bytes >= LEAST_BYTES
        brought = (pack.update_bytes or 0) / swap_in_bytes_per_second
        if may_be_left and bus + brought < max(updated, bus) + copied:
            left.add(place)
            buses[pack.device] += brought
        else:
            host = updated
            buses[pack.device] += copied
    return frozenset(left)

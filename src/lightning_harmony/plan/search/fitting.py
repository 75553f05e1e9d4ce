"""Fitting: whether a step by a plan has room on its devices, and what it does without where it has none.

While microbatches take turns, each keeps on the device what it carries from pack to pack: activations in the forward,
gradients in the backward. The code between layers, or autograd, holds these tensors, so they cannot go to the host. All else
makes way: other packs, sums of gradients, the stash.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_harmony.plan.simulate.replay import with_prediction
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan


def fitted(plan: Plan) -> tuple[Plan, bool]:
    """A plan as far as there is room for it, and whether its microbatches may take turns.

    Where they may not, they run one after the other, which takes no more than the first step did. Graphs are not kept where
    they take the room of what a turn cannot do without.

    Args:
        plan: the plan, with its profile and its number of microbatches.
    """
    if plan.profile is None or plan.num_microbatches is None or not plan.just_in_time:
        return plan, True
    without_graphs = plan
    if plan.fused or plan.kept:
        without_graphs = with_prediction(
            replace(plan, first_fused=len(plan.visits), kept=frozenset(), joined=frozenset())
        )
    for takes_turns in (True, False):
        for each in (plan, without_graphs):
            if _fits(each, plan.num_microbatches if takes_turns else 1):
                return each, takes_turns
    return without_graphs, False


def _fits(plan: Plan, num_lanes: int) -> bool:
    """Whether there is room for a plan while so many microbatches take turns."""
    assert plan.profile is not None
    free = plan.profile.machine.free_bytes
    if free is None or least_bytes(plan, num_lanes) <= free:
        return True
    # Of several devices, any may have more microbatches at a time than a prediction gives it.
    if plan.num_devices > 1:
        return False
    predicted = (
        plan if num_lanes == plan.num_microbatches else with_prediction(replace(plan, num_microbatches=num_lanes))
    )
    return predicted.predicted is not None


def least_bytes(plan: Plan, num_lanes: int) -> int:
    """What a step takes at most on any device when all has made way that can.

    Args:
        plan: the plan, with its profile.
        num_lanes: how many microbatches take turns.
    """
    assert plan.profile is not None
    packs = plan.profile.pack_costs(plan.packs)
    return max((_least_on(plan, packs, device, num_lanes) for device in range(plan.num_devices)), default=0)


def _least_on(plan: Plan, packs: Sequence[Cost], device: int, num_lanes: int) -> int:
    """The same of one device."""
    places = [place for place, pack in enumerate(plan.visits) if plan.runs_on(pack, device)]
    if plan.parallel == "data":
        num_lanes = -(-num_lanes // plan.num_devices)
    # Their inputs stay where they are even if the graphs are dropped.
    kept = sum(num_lanes * packs[pack].kept_bytes for pack in plan.kept if plan.runs_on(pack, device))
    return kept + max(
        (num_bytes for place in places for num_bytes in _turns(plan, packs, places, place, num_lanes)), default=0
    )


def _turns(plan: Plan, packs: Sequence[Cost], places: Sequence[int], place: int, num_lanes: int) -> Iterator[int]:
    """What is on a device in the turns of a visit: the pack, its work, and what all microbatches carry.

    Args:
        plan: the plan.
        packs: what each pack costs.
        places: the visits of the device.
        place: which of them.
        num_lanes: how many microbatches may be on the device.
    """
    cost = packs[plan.visits[place]]
    visited = [packs[pack] for pack in plan.visits]
    # What comes from another device comes when a visit has begun, so it was not found there.
    sent = [cost.input_bytes if plan.num_devices > 1 and number else 0 for number, cost in enumerate(visited)] + [0]
    arriving = [cost.arriving_bytes + sent[number] for number, cost in enumerate(visited)]
    # Behind the last layer is the loss.
    returning = [cost.returning_bytes + sent[number + 1] for number, cost in enumerate(visited[:-1])] + arriving[-1:]
    first = plan.first_fused
    if plan.num_devices > 1:
        # Any of them may be anywhere.
        forward = backward = max(max(arriving[other], returning[other]) for other in places)
    elif place < first:
        # Some have come to this visit, the others have gone on to the next one.
        forward, backward = max(arriving[place : place + 2]), max(returning[max(place - 1, 0) : place + 1])
    else:
        # In the fused visits there is one at a time: the others have not begun them, or have come back through them.
        forward = backward = max([arriving[first], *returning[max(first - 1, 0) : first]])
    others = num_lanes - 1
    graphs = cost.kept_bytes if place >= plan.first_fused else 0
    yield cost.weight_bytes + cost.forward_work_bytes + graphs + arriving[place] + others * forward
    gathered = cost.gathered_bytes if plan.visits[place] in plan.spread else 0
    work = cost.backward_work_bytes + gathered + graphs
    yield cost.state_bytes + work + returning[place] + others * backward

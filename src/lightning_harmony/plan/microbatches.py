"""The number of microbatches: which one is predicted to make a step fastest, from what was seen of other numbers."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.cost import Cost, pack_cost
from lightning_harmony.plan.graphs import graphs_to_keep
from lightning_harmony.plan.packing import fill_capacity
from lightning_harmony.plan.plan import Parallel, Plan, visits_of
from lightning_harmony.plan.profile import Profile
from lightning_harmony.plan.record import Record
from lightning_harmony.plan.replay import predict
from lightning_harmony.plan.search import SPARE_SHARE

MOST_MICROBATCHES = 64
# Less is not worth another number: what is predicted may be wrong by more.
GAIN_SHARE = 0.05


def choose_number(
    record: Record,
    batch_size: int,
    num_elements: int,
    usual: int,
    capacities: Sequence[int | None],
    parallel: Parallel,
) -> int:
    """The number of microbatches with the least predicted seconds, among those that divide the batch.

    Each is planned by rules, within the capacity less what predictions may be wrong by, from costs between or beyond the
    sizes that were seen. The usual number stays, unless another one is clearly faster, or the usual one does not fit.

    Args:
        record: what layers were seen to cost.
        batch_size: samples of a batch.
        num_elements: of its tensors.
        usual: the number that is used where nothing is known.
        capacities: of each device; None for no limit.
        parallel: how packs are placed on them.
    """
    usual = min(usual, batch_size)
    numbers = [n for n in range(1, min(batch_size, MOST_MICROBATCHES) + 1) if batch_size % n == 0 or n == usual]
    spared = [None if each is None else int(each * (1 - SPARE_SHARE)) for each in capacities]
    seconds = {}
    for number in numbers:
        samples = -(-batch_size // number)
        found = _seconds(record, ceil(samples * num_elements / batch_size), number, spared, parallel)
        if found is not None:
            seconds[number] = found
    best = min(seconds, key=lambda number: seconds[number], default=usual)
    if usual in seconds and seconds[best] > seconds[usual] * (1 - GAIN_SHARE):
        return usual
    return best


def _seconds(
    record: Record, num_elements: int, number: int, capacities: Sequence[int | None], parallel: Parallel
) -> float | None:
    """What a step with so many microbatches is predicted to take; None if it doesn't fit."""
    costs = record.costs_at(num_elements)
    smallest = min((each for each in capacities if each is not None), default=None)
    if smallest is not None and any(_needed_bytes(cost, number) > smallest for cost in costs):
        return None
    profile = Profile(costs, replace(record.machine, capacity_bytes=smallest))
    plan = _by_rules(profile, record.calls, number, capacities, parallel)
    try:
        return predict(plan).seconds
    except PlanError:
        return None


def _needed_bytes(cost: Cost, number: int) -> int:
    """What a layer takes beside the inputs of all lanes, as in a step that is measured."""
    work = max(cost.forward_work_bytes, cost.backward_work_bytes)
    return cost.state_bytes + work + number * cost.input_bytes


def _by_rules(
    profile: Profile, calls: Sequence[str], number: int, capacities: Sequence[int | None], parallel: Parallel
) -> Plan:
    """The plan that training begins with."""
    costs = {cost.name: cost for cost in profile.layers}
    order = list(dict.fromkeys(calls))
    around = len(capacities) if parallel == "pipeline" else 1
    cut = fill_capacity([costs[name] for name in order], profile.machine.capacity_bytes, around)
    packs = tuple(tuple(order[place] for place in pack) for pack in cut)
    pack_of = {name: index for index, pack in enumerate(packs) for name in pack}
    visits = visits_of([pack_of[name] for name in calls])
    whole = [pack_cost([costs[name] for name in pack]) for pack in packs]
    first_fused, kept = graphs_to_keep(visits, whole, number, capacities, parallel)
    return Plan(packs, visits, first_fused, kept, len(capacities), parallel, number, profile=profile)

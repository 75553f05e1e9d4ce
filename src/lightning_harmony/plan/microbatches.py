"""The number of microbatches: which one is predicted to make a step fastest, from what was seen of other numbers."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from lightning_harmony.plan.cost import Cost
from lightning_harmony.plan.deciding import foreseen
from lightning_harmony.plan.plan import Parallel
from lightning_harmony.plan.record import Record
from lightning_harmony.plan.rules import fitting_packs, packed, smallest, with_graphs
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
    costs = {cost.name: cost for cost in record.costs_at(num_elements)}
    limit = smallest(capacities)
    if limit is not None and any(_needed_bytes(cost, number) > limit for cost in costs.values()):
        return None
    packs = fitting_packs(costs, record.calls, capacities, parallel)
    plan = with_graphs(packed(packs, (), record.calls, len(capacities), parallel), costs, number, capacities)
    predicted = foreseen(plan, costs, replace(record.machine, capacity_bytes=limit)).predicted
    return None if predicted is None else predicted.seconds


def _needed_bytes(cost: Cost, number: int) -> int:
    """What a layer takes beside the inputs of all lanes, as in a step that is measured."""
    work = max(cost.forward_work_bytes, cost.backward_work_bytes)
    return cost.state_bytes + work + number * cost.input_bytes

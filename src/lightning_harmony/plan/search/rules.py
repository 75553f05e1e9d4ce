"""The plan by rules: layers packed as they fit, graphs kept as there is room. A search may find a better one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from lightning_harmony.plan.search.graphs import fused_alone, fused_from, kept_on_devices
from lightning_harmony.plan.search.packing import fill_capacity, smallest
from lightning_harmony.plan.values.cost import Cost, pack_cost
from lightning_harmony.plan.values.plan import Parallel, Plan, visits_of

Packs = Sequence[Sequence[str]]


def fitting_packs(
    costs: Mapping[str, Cost], calls: Sequence[str], capacities: Sequence[int | None], parallel: Parallel
) -> Packs:
    """Packs of the layers that are called, in the order of their first calls.

    Args:
        costs: of each layer, by its name.
        calls: the names of layers in the order in which a microbatch's forward calls them.
        capacities: of each device; None for no limit.
        parallel: how packs are placed on the devices.
    """
    order = list(dict.fromkeys(calls))
    around = len(capacities) if parallel == "pipeline" else 1
    cut = fill_capacity([costs[name] for name in order], smallest(capacities), around)
    return [[order[place] for place in pack] for pack in cut]


def packed(packs: Packs, layers: Iterable[str], calls: Sequence[str], num_devices: int, parallel: Parallel) -> Plan:
    """A plan of packs, and of one for each layer that is in none; no graphs are kept.

    Args:
        packs: the names of their layers.
        layers: the names of all layers.
        calls: in the order in which a microbatch's forward makes them.
        num_devices: how many devices share the work.
        parallel: how packs are placed on them.
    """
    known = {name for pack in packs for name in pack}
    every = tuple(tuple(pack) for pack in [*packs, *([name] for name in layers if name not in known)])
    pack_of = {name: number for number, pack in enumerate(every) for name in pack}
    visits = visits_of([pack_of[name] for name in calls])
    return Plan(every, visits, len(visits), num_devices=num_devices, parallel=parallel)


def with_graphs(plan: Plan, costs: Mapping[str, Cost], num_microbatches: int, capacities: Sequence[int | None]) -> Plan:
    """The plan for a number of microbatches, with the graphs for which there is room; none where it keeps none on purpose.

    Args:
        plan: its packs and visits.
        costs: of each layer, by its name.
        num_microbatches: of the batch.
        capacities: of each device; None for no limit.
    """
    plan = replace(plan, num_microbatches=num_microbatches)
    if not plan.just_in_time:
        return plan
    whole = [pack_cost([costs[name] for name in pack]) for pack in plan.packs]
    if len(capacities) == 1 or plan.parallel == "data":
        first = fused_from(plan.visits, whole, smallest(capacities))
    else:
        first = fused_alone(plan.visits)
    kept_of = kept_on_devices(plan.visits, first, whole, num_microbatches, capacities, plan.parallel)
    return replace(plan, first_fused=first, kept=frozenset(chain.from_iterable(kept_of)))

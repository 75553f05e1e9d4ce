"""Bounds: what a step by a plan takes at least, without replaying it."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_harmony.plan.simulate.order import owner
from lightning_harmony.plan.simulate.replay_state import seconds_of
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.profile import DeviceLimits


def least_seconds(plan: Plan, packs: Sequence[Cost], machine: DeviceLimits) -> float:
    """What no replay of a plan takes less than: as long as its busiest stream, and what nothing can run beside.

    Args:
        plan: the plan, with its number of microbatches.
        packs: what each pack costs.
        machine: what it runs on.
    """
    if not plan.visits:
        return 0.0
    visited = [packs[pack] for pack in plan.visits]
    forward, backward = seconds_of_visits(plan, packs)
    stay = plan.device_updated
    first = visited[0]
    way_in = seconds_of(first.copied_bytes, machine.swap_in_bytes_per_second)
    way_out = seconds_of(first.gradient_bytes, machine.update_bytes_per_second)
    if plan.visits[0] not in stay:
        way_out += seconds_of(first.gradient_bytes, machine.swap_out_bytes_per_second)
    updated = [0] * plan.num_devices
    for pack in set(plan.visits):
        updated[owner(plan, pack)] += packs[pack].gradient_bytes
    bounds = [seconds_of(max(updated), machine.update_bytes_per_second)]
    for runs in runs_of(plan):
        if not runs:
            continue
        places = list(runs)
        # A microbatch comes to a device through what is before it, and goes back through that at the end.
        around = sum(forward[: places[0]]) + sum(backward[: places[0]])
        computing = sum(number * (forward[place] + backward[place]) for place, number in runs.items())
        here = [packs[pack] for pack in {plan.visits[place] for place in places}]
        stashed = sum(
            number * visited[place].stash_bytes for place, number in runs.items() if not plan.keeps_graph(place)
        )
        # Gradients of packs that several devices have leave from any of these.
        alone = {plan.visits[place] for place in places if plan.parallel == "pipeline" or plan.num_devices == 1}
        sent = sum(packs[pack].gradient_bytes for pack in alone - plan.spread - stay)
        bounds += [
            way_in + around + computing + way_out,
            seconds_of(_swapped_in_bytes(here, machine), machine.swap_in_bytes_per_second),
            seconds_of(stashed, machine.swap_in_bytes_per_second),
            seconds_of(stashed + sent, machine.swap_out_bytes_per_second),
        ]
    return max(bounds)


def seconds_of_visits(plan: Plan, packs: Sequence[Cost]) -> tuple[list[float], list[float]]:
    """How long each forward and each backward of a microbatch computes."""
    visited = [packs[pack] for pack in plan.visits]
    backward = [
        cost.spared_backward_seconds if plan.keeps_graph(place) else cost.backward_seconds
        for place, cost in enumerate(visited)
    ]
    return [cost.forward_seconds for cost in visited], backward


def runs_of(plan: Plan) -> list[dict[int, int]]:
    """How many microbatches each device runs in each visit that it has, as a place in the order of visits."""
    runs: list[dict[int, int]] = [{} for _ in range(plan.num_devices)]
    for place, pack in enumerate(plan.visits):
        goes_round = plan.parallel == "data" or pack in plan.spread
        for microbatch in range(min(plan.num_devices, plan.num_microbatches or 0) if goes_round else 1):
            number = len(range(microbatch, plan.num_microbatches or 0, plan.num_devices if goes_round else 1))
            runs[plan.device_of(pack, microbatch)][place] = number
    return runs


def _swapped_in_bytes(packs: Sequence[Cost], machine: DeviceLimits) -> float:
    """What comes to a device: each pack, and again what isn't there any more when its backward begins."""
    once = sum(cost.copied_bytes for cost in packs)
    if machine.free_bytes is None:
        return once
    gone = sum(cost.weight_bytes for cost in packs) - machine.free_bytes
    rate = min((cost.copied_bytes / cost.weight_bytes for cost in packs if cost.weight_bytes), default=0.0)
    return once + max(gone, 0) * rate

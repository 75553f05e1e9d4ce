"""Cut the layers, in execution order, into packs that fit the capacity."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from lightning_harmony.plan.values.cost import Cost

# The pack that runs, the one that comes in behind it, and the gradients of the one that goes out.
BUFFERING = 3
# What cannot hide under compute is the first pack's way in and the last one's way out and its update: small packs make
# it short. But each visit of a pack costs a change of lanes for each microbatch.
USEFUL_PACKS = 24


def fill_capacity(
    costs: Sequence[Cost], capacity_bytes: int | None, num_devices: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Pack greedily: each pack takes layers until three of its like would no longer fit beside the work space.

    No pack takes more than its share of the model in `USEFUL_PACKS` packs. A layer that is too large for either stands
    alone: it then runs without a neighbour being prefetched.

    Args:
        costs: one for each layer, in execution order.
        capacity_bytes: what a device may hold; None for no limit.
        num_devices: how many devices the packs go round. Without a limit, one device takes all in one pack.

    Returns:
        The packs, each the indices into ``costs`` of consecutive layers.
    """
    if capacity_bytes is None and num_devices == 1:
        return (tuple(range(len(costs))),) if costs else ()
    share = sum(cost.state_bytes for cost in costs) / USEFUL_PACKS
    packs: list[list[int]] = []
    for index in range(len(costs)):
        candidate = [*packs[-1], index] if packs else [index]
        chosen = [costs[i] for i in candidate]
        if packs and has_room(chosen, capacity_bytes) and sum(cost.state_bytes for cost in chosen) <= share:
            packs[-1] = candidate
        else:
            packs.append([index])
    return tuple(tuple(pack) for pack in packs)


def has_room(pack: Sequence[Cost], capacity_bytes: int | None) -> bool:
    """Whether several layers may be a pack: three of its like fit beside the work space of the hungriest layer."""
    if capacity_bytes is None:
        return True
    needed = BUFFERING * sum(cost.state_bytes for cost in pack) + max(cost.work_bytes for cost in pack)
    return needed + max(cost.staging_bytes for cost in pack) <= capacity_bytes


def smallest(capacities: Iterable[int | None]) -> int | None:
    """The capacity of the smallest device; None if none has a limit."""
    return min((each for each in capacities if each is not None), default=None)


def balanced(sizes: Sequence[float], num_packs: int) -> tuple[int, ...]:
    """Cut a sequence where its sums come nearest to equal shares.

    Args:
        sizes: one for each layer, in execution order.
        num_packs: how many packs are wanted. They are fewer where single layers are larger than a share.

    Returns:
        Where each pack begins.
    """
    sums = list(accumulate(sizes, initial=0.0))
    starts = {0}
    for number in range(1, num_packs):
        wanted = sums[-1] * number / num_packs
        place = min(bisect_left(sums, wanted), len(sizes))
        if place and wanted - sums[place - 1] < sums[place] - wanted:
            place -= 1
        if place < len(sizes):
            starts.add(place)
    return tuple(sorted(starts))


def filled(sizes: Sequence[float], most: float) -> tuple[int, ...]:
    """Cut a sequence into packs that are as large as they may be, from its beginning on.

    Args:
        sizes: one for each layer, in execution order.
        most: what a pack of several layers may come to.

    Returns:
        Where each pack begins.
    """
    starts: list[int] = []
    size = 0.0
    for index, each in enumerate(sizes):
        size += each
        if not starts or size > most:
            starts.append(index)
            size = each
    return tuple(starts)


def filled_from_end(sizes: Sequence[float], most: float) -> tuple[int, ...]:
    """The same from its end: what is left over is the first pack, whose way in nothing hides."""
    starts = filled(sizes[::-1], most)
    return tuple(len(sizes) - end for end in [*starts[1:], len(sizes)][::-1])

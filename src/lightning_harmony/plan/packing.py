"""Cut the layers, in execution order, into packs that fit the capacity."""

from collections.abc import Sequence

from lightning_harmony.plan.cost import Cost, pack_cost

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
        cost = pack_cost([costs[i] for i in candidate])
        needed = BUFFERING * cost.state_bytes + _work_bytes([costs[i] for i in candidate])
        fits = capacity_bytes is None or needed <= capacity_bytes
        if packs and fits and cost.state_bytes <= share:
            packs[-1] = candidate
        else:
            packs.append([index])
    return tuple(tuple(pack) for pack in packs)


def _work_bytes(pack: Sequence[Cost]) -> int:
    """The most that one of a pack's layers takes for its own forward and backward."""
    return max(cost.work_bytes for cost in pack)

"""Cut the layers, in execution order, into packs that fit the capacity."""

from collections.abc import Sequence

from lightning_harmony.plan.cost import LayerCost

# The pack that runs, the one that comes in behind it, and the gradients of the one that goes out.
BUFFERING = 3


def fill_capacity(costs: Sequence[LayerCost], capacity_bytes: int | None) -> tuple[tuple[int, ...], ...]:
    """Pack greedily: each pack takes layers until three of its like would no longer fit beside the work space.

    A layer that is too large for that stands alone: it then runs without a neighbour being prefetched.

    Args:
        costs: one for each layer, in execution order.
        capacity_bytes: what the device may hold; None for no limit.

    Returns:
        The packs, each the indices into ``costs`` of consecutive layers.
    """
    if capacity_bytes is None:
        return (tuple(range(len(costs))),) if costs else ()
    packs: list[list[int]] = []
    for index in range(len(costs)):
        candidate = [*packs[-1], index] if packs else [index]
        if packs and _pack_bytes([costs[i] for i in candidate]) <= capacity_bytes:
            packs[-1] = candidate
        else:
            packs.append([index])
    return tuple(tuple(pack) for pack in packs)


def _pack_bytes(pack: Sequence[LayerCost]) -> int:
    """Bytes that a pack takes while it runs backward between two packs of its size."""
    state = sum(cost.weight_bytes + cost.gradient_bytes for cost in pack)
    work = max(cost.forward_work_bytes + cost.backward_work_bytes for cost in pack)
    return BUFFERING * state + work

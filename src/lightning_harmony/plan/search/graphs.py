"""Whose graphs are kept from forward to backward, so that nothing is recomputed."""

from collections.abc import Iterator, Sequence

from lightning_harmony.plan.search.packing import BUFFERING, smallest
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Parallel

# The host updates about as fast as a GPU runs backward: what it cannot begin in time, it ends too late.
FUSED_SHARE = 0.25


def fused_alone(visits: Sequence[int]) -> int:
    """The visit from which packs are fused where each has its device: the last one, unless its pack is visited before.

    A microbatch that ran forth and back through packs of several devices would keep all of them waiting for it.
    """
    return len(visits) - 1 if visits and visits[-1] not in visits[:-1] else len(visits)


def kept_on_devices(
    visits: Sequence[int],
    first_fused: int,
    packs: Sequence[Cost],
    num_microbatches: int,
    capacities: Sequence[int | None],
    parallel: Parallel,
) -> list[tuple[int, ...]]:
    """The packs that have room to keep their graphs: of each device that has packs of its own, the last one first.

    Args:
        visits: the packs in the order in which a forward reaches them.
        first_fused: the visit from which packs are fused.
        packs: what each pack costs.
        num_microbatches: of the batch.
        capacities: what each device may hold; None for no limit.
        parallel: how packs are placed on the devices.
    """
    num_devices = len(capacities)
    if num_devices == 1 or parallel == "data":
        return [kept(visits, first_fused, packs, -(-num_microbatches // num_devices), smallest(capacities))]
    found = []
    for device, capacity in enumerate(capacities):
        before, fused = (
            [pack for pack in part if pack % num_devices == device]
            for part in (visits[:first_fused], visits[first_fused:])
        )
        found.append(kept([*before, *fused], len(before), packs, num_microbatches, capacity))
    return found


def fused_from(visits: Sequence[int], packs: Sequence[Cost], capacity_bytes: int | None) -> int:
    """The visit from which a microbatch runs through to its loss and back, with the graphs of one microbatch kept.

    The packs of these visits stay on the device until the last microbatch has come back, and only then are updated: so
    they are at most a part of the model, whose update hides under the backward of the rest.

    Args:
        visits: the packs in the order in which a forward reaches them.
        packs: what each pack costs.
        capacity_bytes: what the device may hold; None for no limit.

    Returns:
        A position in ``visits``; the end where even the last pack is visited before.
    """
    start = len(visits)
    most = sum(packs[index].state_bytes for index in set(visits)) * FUSED_SHARE
    for position in fusable_from(visits, packs, capacity_bytes):
        tail = set(visits[position:])
        if len(tail) > 1 and sum(packs[index].state_bytes for index in tail) > most:
            break
        start = position
    return start


def fusable_from(
    visits: Sequence[int], packs: Sequence[Cost], capacity_bytes: int | None, *, may_be: bool = False
) -> Iterator[int]:
    """Each visit from which packs can be fused, the last one first.

    Args:
        visits: the packs in the order in which a forward reaches them.
        packs: what each pack costs.
        capacity_bytes: what the device may hold; None for no limit.
        may_be: whether those count, too, of which only a replay tells whether they fit.
    """
    needed = _least_fused_bytes if may_be else _fused_bytes
    for position in range(len(visits) - 1, -1, -1):
        tail = set(visits[position:])
        if tail & set(visits[:position]):
            continue
        # The last pack alone takes nothing but the graphs that its backward needs anyway.
        if len(tail) > 1 and capacity_bytes is not None and needed(visits, position, packs) > capacity_bytes:
            return
        yield position


def kept(
    visits: Sequence[int], first_fused: int, packs: Sequence[Cost], num_microbatches: int, capacity_bytes: int | None
) -> tuple[int, ...]:
    """The packs before the fused ones that keep the graphs of all microbatches, as far as there is room.

    The last ones: their graphs are kept for the shortest time.

    Args:
        visits: the packs in the order in which a forward reaches them.
        first_fused: the visit from which packs are fused.
        packs: what each pack costs.
        num_microbatches: how many graphs of a pack are kept.
        capacity_bytes: what the device may hold; None for no limit.

    Returns:
        The packs, the last one first.
    """
    chosen: list[int] = []
    room = None if capacity_bytes is None else capacity_bytes - _fused_bytes(visits, first_fused, packs)
    for index in dict.fromkeys(reversed(visits[:first_fused])):
        if room is not None:
            room -= packs[index].weight_bytes + num_microbatches * packs[index].kept_bytes
            if room < 0:
                break
        chosen.append(index)
    return tuple(chosen)


def _fused_bytes(visits: Sequence[int], position: int, packs: Sequence[Cost]) -> int:
    """What is on the device while one microbatch runs through the fused packs, or the others beside their gradients."""
    tail, rest = set(visits[position:]), set(visits[:position])
    fused = sum(packs[index].state_bytes + packs[index].kept_bytes for index in tail)
    work = max((packs[index].work_bytes for index in {*tail, *rest}), default=0)
    swapped = max((packs[index].state_bytes for index in rest), default=0)
    return fused + work + (BUFFERING - 1) * swapped


def _least_fused_bytes(visits: Sequence[int], position: int, packs: Sequence[Cost]) -> int:
    """What of that no order of tasks can spare."""
    return sum(packs[index].state_bytes + packs[index].kept_bytes for index in set(visits[position:]))

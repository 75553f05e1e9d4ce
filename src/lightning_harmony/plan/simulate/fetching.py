"""Fetching ahead: weights come earlier than on demand wherever there is room for good, and so without a swap more.

What is fetched ahead takes only what is free until its use, or what goes before that anyway and is not used meanwhile. A pack
that made way for it, or that it made way for before its use, would have to come again.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass
class Residence:
    """The weights of a pack on a device, for some stays.

    Attributes:
        pack: its index.
        num_bytes: of its weights.
        staging_bytes: what they take besides while they come.
        first: the stay before which they come.
        last: the last stay that uses them.
        end: the stay before which they go.
        goes_at_once: whether they go as soon as the stay before that has computed.
    """

    pack: int
    num_bytes: int
    staging_bytes: int
    first: int
    last: int
    end: int
    goes_at_once: bool = False


def fetch_ahead(
    residences: Sequence[Residence],
    needed_bytes: Sequence[int],
    following: Sequence[Collection[int]],
    capacity_bytes: int | None,
) -> None:
    """Let weights come as early as may be.

    Args:
        residences: when weights come and go on demand, in the order in which they come.
        needed_bytes: what each stay needs beside weights.
        following: the packs that may be fetched ahead while each stay runs.
        capacity_bytes: what there is; None for no limit.
    """
    changes = [0] * (len(needed_bytes) + 1)
    going: defaultdict[int, list[Residence]] = defaultdict(list)
    for each in residences:
        changes[each.first] += each.num_bytes
        changes[each.end] -= each.num_bytes
        going[each.end].append(each)
    taken = [needed + weights for needed, weights in zip(needed_bytes, accumulate(changes), strict=False)]
    gone: dict[int, int] = {}
    for each in residences:
        wanted_at = each.first
        for stay in range(wanted_at - 1, gone.get(each.pack, 0) - 1, -1):
            if each.pack not in following[stay]:
                break
            if capacity_bytes is not None:
                short = taken[stay] + each.num_bytes + each.staging_bytes - capacity_bytes
                idle = [
                    other
                    for end in range(stay + 1, wanted_at + 1)
                    for other in going[end]
                    if other.first <= other.last < stay
                ]
                if short > sum(other.num_bytes for other in idle):
                    break
                while short > 0:
                    other = idle.pop(0)
                    short -= other.num_bytes
                    _let_go(other, stay, taken, going)
            each.first = stay
            taken[stay] += each.num_bytes
        gone[each.pack] = each.end


def _let_go(each: Residence, stay: int, taken: list[int], going: defaultdict[int, list[Residence]]) -> None:
    """Let weights go before an earlier stay."""
    going[each.end].remove(each)
    going[stay].append(each)
    for later in range(stay, each.end):
        taken[later] -= each.num_bytes
    each.end, each.goes_at_once = stay, False

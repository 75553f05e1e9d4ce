"""Which node updates which parameter, and has its optimizer state."""

from __future__ import annotations

from collections.abc import Iterable


def assign(sizes: Iterable[int], loads: list[int]) -> list[int]:
    """Give each of some parameters to the node that has the fewest bytes so far.

    Args:
        sizes: their bytes, in an order that all nodes have.
        loads: the bytes that each node has. What comes is added.

    Returns:
        The number of the owner of each.
    """
    owners = []
    for num_bytes in sizes:
        owner = loads.index(min(loads))
        loads[owner] += num_bytes
        owners.append(owner)
    return owners


def largest_share(sizes: Iterable[int], num_nodes: int) -> float:
    """The share of all bytes that the node has which has most; 1 if there are none.

    Args:
        sizes: of parameters, in the order in which they are assigned.
        num_nodes: how many nodes there are.
    """
    loads = [0] * num_nodes
    assign(sizes, loads)
    return max(loads) / sum(loads) if any(loads) else 1.0

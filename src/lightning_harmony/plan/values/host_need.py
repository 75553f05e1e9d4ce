"""What a training takes of the host's memory: weights, optimizer state, the stash, and gradients on their way to an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# How many packs' gradients may be on their way into an update just in time, where the host has room for them. The fused packs,
# up to a quarter of them, become final together. What waits when the backward ends is all that the host has to do under the
# next forward: with 8, it ran out of work there. More would only take host memory, as the device's work is launched far ahead.
RING = 12


@dataclass(frozen=True)
class HostNeed:
    """What a training takes of the host's memory.

    Attributes:
        weight_bytes: parameters.
        gradient_bytes: the most of their gradients that is there beside the optimizer's state.
        least_gradient_bytes: the same where the gradients of one pack at a time wait for their update.
        optimizer_bytes: the optimizer's state.
        stash_bytes: the stash of all microbatches.
        least_stash_bytes: the stash of one.
    """

    weight_bytes: int
    gradient_bytes: int
    least_gradient_bytes: int
    optimizer_bytes: int
    stash_bytes: int
    least_stash_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of it, where the host has it."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.stash_bytes

    @property
    def in_turns_bytes(self) -> int:
        """What microbatches that take turns cannot do without."""
        return self.weight_bytes + self.least_gradient_bytes + self.optimizer_bytes + self.stash_bytes

    @property
    def least_bytes(self) -> int:
        """What training cannot do without, microbatches that run one after the other included."""
        return self.weight_bytes + self.least_gradient_bytes + self.optimizer_bytes + self.least_stash_bytes


def waiting_bytes(packs: Iterable[int], *, is_deferred: bool, ring: int = RING) -> int:
    """The most that gradients take on the host in a step.

    Args:
        packs: the bytes of each pack's.
        is_deferred: whether they all come before the first update.
        ring: how many packs' may wait for an update just in time.
    """
    return sum(packs) if is_deferred else sum(sorted(packs)[-ring:])


def num_on_disk(states: Sequence[int], excess: int) -> int:
    """How many layers have their optimizer state on disk, so that the host has so many bytes less: the last ones.

    Their updates come first in a backward, and the next forward needs them last: the disk has the longest time.

    Args:
        states: the bytes of each layer's state, in the order of the forward.
        excess: the bytes that the host has no room for.

    Returns:
        All that have any, where those are too few bytes.
    """
    number = 0
    while excess > 0 and number < len(states):
        number += 1
        excess -= states[-number]
    return number


def spread_on_disk(weights: Sequence[int], excess: int) -> list[int]:
    """Which layers have their weights on disk, so that the host has so many bytes less: evenly among the others.

    While those that are in memory compute, the disk has time for the next.

    Args:
        weights: the bytes of each layer's that may live there, in the order of the forward.
        excess: the bytes that the host has no room for.

    Returns:
        Their numbers. All that have any, where those are too few bytes.
    """
    total, owed, numbers = sum(weights), 0, []
    # The last one, if any: at the turn from the forward to the backward it is read once.
    for number, num_bytes in reversed(list(enumerate(weights))):
        owed += min(max(excess, 0), total) * num_bytes
        if num_bytes and owed > 0:
            numbers.append(number)
            owed -= total * num_bytes
    return numbers


def bytes_beside_state(packs: Iterable[int], state_bytes: int, *, is_deferred: bool, ring: int = RING) -> int:
    """The most that gradients take in all of a training, beside the whole state of the optimizer.

    All of the first step's come before its updates, which begin when it has succeeded. But each update lets its gradients go
    as it makes its state.

    Args:
        packs: the bytes of each pack's.
        state_bytes: of the optimizer.
        is_deferred: whether, in the steps after it, they all come before the first update.
        ring: how many packs' may wait for an update just in time.
    """
    packs = list(packs)
    return max(waiting_bytes(packs, is_deferred=is_deferred, ring=ring), sum(packs) - state_bytes)

"""Gradients in host memory: where updates run just in time, no more than those of a few packs wait there."""

from __future__ import annotations

from collections.abc import Iterable

# How many packs' gradients may be on their way into an update just in time. The fused packs, up to a quarter of them, become
# final together. What waits when the backward ends is all that the host has to do under the next forward: with 8, it ran out
# of work there. More would only take host memory, as the device's work is launched far ahead.
RING = 12


def waiting_bytes(packs: Iterable[int], *, is_deferred: bool) -> int:
    """The most that gradients take on the host in a step.

    Args:
        packs: the bytes of each pack's.
        is_deferred: whether they all come before the first update.
    """
    return sum(packs) if is_deferred else sum(sorted(packs)[-RING:])


def bytes_beside_state(packs: Iterable[int], state_bytes: int, *, is_deferred: bool) -> int:
    """The most that gradients take in all of a training, beside the whole state of the optimizer.

    All of the first step's come before its updates, which begin when it has succeeded. But each update lets its gradients go
    as it makes its state.

    Args:
        packs: the bytes of each pack's.
        state_bytes: of the optimizer.
        is_deferred: whether, in the steps after it, they all come before the first update.
    """
    packs = list(packs)
    return max(waiting_bytes(packs, is_deferred=is_deferred), sum(packs) - state_bytes)

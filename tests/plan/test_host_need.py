"""What a training takes of the host."""

from dataclasses import replace

import pytest

from lightning_harmony.plan.cost import Cost
from lightning_harmony.plan.host_need import RING, bytes_beside_state, ring_within, stash_bytes, waiting_bytes
from lightning_harmony.plan.plan import Plan
from lightning_harmony.plan.profile import Profile

PACKS = [*range(1, 2 * RING), 1000]


def test_just_in_time_those_of_few_packs_wait() -> None:
    assert waiting_bytes(PACKS, is_deferred=True) == sum(PACKS)
    assert waiting_bytes(PACKS, is_deferred=False) == sum(PACKS[-RING:])
    # Whatever their order, and where there are few.
    assert waiting_bytes(reversed(PACKS), is_deferred=False) == sum(PACKS[-RING:])
    assert waiting_bytes([3, 4], is_deferred=False) == 7


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_the_first_step_has_all_before_there_is_a_state(copies: int) -> None:
    total = sum(PACKS)
    state = copies * total
    assert bytes_beside_state(PACKS, state, is_deferred=True) == total
    needed = state + bytes_beside_state(iter(PACKS), state, is_deferred=False)
    # Of the first step, as its updates go on: some have made their state, the others have their gradients.
    first = max(copies * sum(PACKS[:done]) + sum(PACKS[done:]) for done in range(len(PACKS) + 1))
    assert needed >= first
    assert needed == max(total, state + sum(PACKS[-RING:]))


def test_as_many_gradients_wait_as_there_is_room_for() -> None:
    assert ring_within([5, 3, 4], 12) == RING
    assert ring_within(PACKS, 10**6) == RING
    assert [ring_within(PACKS, room) for room in (999, 1000, 1000 + 2 * RING - 2, 1000 + 2 * RING - 1)] == [0, 1, 1, 2]


def test_the_stash_is_that_of_visits_that_keep_no_graph() -> None:
    costs = (Cost("a", 1, 1, stash_bytes=100), Cost("b", 1, 1, stash_bytes=10), Cost("c", 1, 1, stash_bytes=1))
    plan = Plan((("a",), ("b",), ("c",)), (0, 1, 0, 2), first_fused=3, kept=frozenset({1}), profile=Profile(costs))
    assert stash_bytes(plan, 4) == 4 * 200
    assert stash_bytes(replace(plan, profile=None), 4) == 0

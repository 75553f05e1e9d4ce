"""What a training takes of the host."""

import pytest

from lightning_harmony.plan.values.host_need import RING, bytes_beside_state, num_on_disk, spread_on_disk, waiting_bytes

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


@pytest.mark.parametrize(("excess", "number"), [(-5, 0), (0, 0), (1, 1), (30, 1), (31, 3), (50, 3), (51, 4), (99, 4)])
def test_the_last_layers_state_goes_to_disk_and_no_more_than_must(excess: int, number: int) -> None:
    assert num_on_disk([10, 20, 0, 30], excess) == number


@pytest.mark.parametrize(
    ("excess", "numbers"),
    [
        (-5, []),
        (0, []),
        (1, [8]),
        (10, [8]),
        (30, [2, 5, 8]),
        (45, [0, 2, 4, 6, 8]),
        (90, [*range(9)]),
        (99, [*range(9)]),
    ],
)
def test_weights_on_disk_are_spread_over_the_layers_and_no_more_than_must(excess: int, numbers: list[int]) -> None:
    assert sorted(spread_on_disk([10] * 9, excess)) == numbers


def test_weights_of_several_sizes_make_enough_room() -> None:
    sizes = [5, 0, 70, 1, 20, 0, 3]
    for excess in range(sum(sizes) + 1):
        numbers = spread_on_disk(sizes, excess)
        moved = [sizes[number] for number in numbers]
        assert all(moved)
        assert excess <= sum(moved) < excess + max(sizes)

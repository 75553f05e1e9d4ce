"""How many microbatches are tried until the fewest that fit are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_harmony.microbatches.fewest import Fewest

LASTING, CAPACITY = 40, 100


def tried(samples: int, num_bytes: Callable[[int], float], least: int = 1) -> list[int]:
    """The numbers that are tried, given what so many samples take beside what lasts; 0 behind them if none fits."""
    fewest, numbers = Fewest(1, samples // least, samples, LASTING, CAPACITY), []
    while True:
        numbers.append(fewest.number)
        taken = LASTING + num_bytes(-(-samples // fewest.number))
        if taken <= CAPACITY:
            if fewest.fits(int(taken)):
                return numbers
        elif not fewest.fails():
            return [*numbers, 0]


@pytest.mark.parametrize(
    ("samples", "of_sample", "numbers"),
    [
        (64, 0.9, [1]),
        (64, 1.0, [1, 2]),
        (64, 4.0, [1, 2, 4, 8, 5]),
        (64, 2.5, [1, 2, 4, 3]),
        (64, 60.0, [1, 2, 4, 8, 16, 32, 64]),
        (6, 20.0, [1, 2]),
        (6, 31.0, [1, 2, 4, 6]),
        (64, 61.0, [1, 2, 4, 8, 16, 32, 64, 0]),
    ],
)
def test_the_fewest_are_found_where_each_sample_takes_as_much(
    samples: int, of_sample: float, numbers: list[int]
) -> None:
    assert tried(samples, lambda size: size * of_sample) == numbers


def test_one_more_is_tried_where_fewer_take_more_than_those_that_fit_tell() -> None:
    assert tried(64, lambda size: 4.0 * size if size <= 10 else 70.0) == [1, 2, 4, 8, 5, 6, 7]
    assert tried(64, lambda size: 4.0 * size if size <= 8 else 70.0) == [1, 2, 4, 8, 5, 6, 7, 8]


def test_each_microbatch_keeps_as_many_samples_as_it_needs() -> None:
    assert tried(6, lambda size: 31.0 * size, least=2) == [1, 2, 3, 0]

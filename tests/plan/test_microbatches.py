"""The number of microbatches that is predicted to be fastest."""

from __future__ import annotations

import pytest

from lightning_harmony.plan.cost import Cost
from lightning_harmony.plan.microbatches import choose_number
from lightning_harmony.plan.profile import MachineLimits
from lightning_harmony.plan.record import Origin, Record, SeenSize

NAMES = tuple("abcdef")


def costs(samples: int, overhead: float = 0.0, work: int = 10) -> tuple[Cost, ...]:
    """Layers of 100 bytes, each call of which takes some time for any number of samples."""
    return tuple(
        Cost(
            name,
            100,
            100,
            work * samples,
            2 * work * samples,
            3 * work * samples,
            100,
            samples,
            samples,
            overhead + 0.1 * samples,
            overhead + 0.3 * samples,
        )
        for name in NAMES
    )


def record(*sizes: int, overhead: float = 0.0, work: int = 10) -> Record:
    seen = tuple(SeenSize(8 * size, costs(size, overhead, work)) for size in sizes)
    machine = MachineLimits(None, 1e4, 1e4, None, 1e4)
    return Record(Origin("", "", ""), NAMES, False, (), seen, machine)


def chosen(known: Record, capacity: int | None = 10_000, batch_size: int = 16, devices: int = 1) -> int:
    return choose_number(known, batch_size, 8 * batch_size, 4, [capacity] * devices, "pipeline")


def test_where_each_call_takes_its_time_few_are_fastest() -> None:
    assert chosen(record(2, 4, overhead=1.0)) == 1


def test_but_no_fewer_than_fit() -> None:
    known = record(2, 4, overhead=1.0, work=30)
    assert [chosen(known, capacity) for capacity in (700, 1100, 1800, 4000)] == [8, 4, 2, 1]


def test_the_usual_number_stays_where_no_other_is_clearly_faster() -> None:
    assert chosen(record(2, 4), capacity=None) == 4


def test_several_devices_need_several() -> None:
    assert chosen(record(2, 4), devices=4) > 4


@pytest.mark.parametrize("batch_size", [1, 3, 6, 7])
def test_it_divides_the_batch_or_is_the_usual_one(batch_size: int) -> None:
    number = chosen(record(1, 2, overhead=1.0), batch_size=batch_size)
    assert batch_size % number == 0 or number == min(4, batch_size)


def test_where_nothing_fits_the_usual_number_is_for_the_executor_to_try() -> None:
    assert chosen(record(2, 4), capacity=100) == 4

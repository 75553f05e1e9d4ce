"""A schedule prints as a grid, which reads back."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_harmony.plan.simulate.schedule import Schedule
from support.plans import parse_schedule, parse_task, tasks

schedules = st.lists(st.lists(tasks, max_size=30).map(tuple), max_size=12).map(tuple).map(Schedule)


def schedule(*lines: str) -> Schedule:
    return Schedule(tuple(tuple(parse_task(word) for word in line.split()) for line in lines))


SMALL = schedule("0SWAP_IN 0F0 0STASH_OUT0 2SWAP_IN", "1SWAP_IN 1F0 1B0")


@given(schedule=schedules)
def test_what_str_prints_can_be_read_back(schedule: Schedule) -> None:
    assert parse_schedule(str(schedule)) == schedule


@given(schedule=schedules)
def test_no_line_is_too_long(schedule: Schedule) -> None:
    assert all(len(line) <= 120 for line in str(schedule).splitlines())


def test_devices_are_lines_and_places_are_columns() -> None:
    assert str(SMALL).splitlines() == [
        "device 0 | 0SWAP_IN 0F0 0STASH_OUT0 2SWAP_IN",
        "device 1 | 1SWAP_IN 1F0 1B0         .",
    ]


def test_what_is_marked_is_shown_with_what_is_around_it() -> None:
    assert SMALL.grid({(0, 1), (1, 3)}).splitlines() == [
        "device 0 | 0SWAP_IN >0F0< 0STASH_OUT0 2SWAP_IN",
        "device 1 | 1SWAP_IN 1F0   1B0         >end<",
    ]
    long = schedule(" ".join(f"{index}F0" for index in range(100)))
    assert long.grid({(0, 50)}) == f"device 0 | {' '.join('>50F0<' if i == 50 else f'{i}F0' for i in range(42, 59))}"

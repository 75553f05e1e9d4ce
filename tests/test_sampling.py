"""Tests of the choice of cases that `make test` runs."""

from types import SimpleNamespace
from typing import Any

from support.sampling import combined, sample_of

NETS = [f"net {number}" for number in range(28)]
CAPACITIES = [(None,), ("44KiB",)]


def case(net: str, capacity: str | None) -> Any:
    return SimpleNamespace(
        nodeid=f"test[{net}-{capacity}]", callspec=SimpleNamespace(params={"net": net, "capacity": capacity})
    )


def test_a_test_with_more_cases_runs_more_of_them_and_one_at_least() -> None:
    for number, expected in ((1, 1), (15, 1), (16, 2), (56, 2)):
        assert len(sample_of([case(*row) for row in combined(NETS, CAPACITIES)[:number]])) == expected


def test_each_value_of_few_comes_and_no_value_of_many_twice() -> None:
    cases = [case(*row) for row in combined(NETS, CAPACITIES)]
    chosen = [each.callspec.params for each in sample_of(cases)]
    assert {params["capacity"] for params in chosen} == {None, "44KiB"}
    assert len({params["net"] for params in chosen}) == len(chosen)
    assert sample_of(cases[::-1]) == sample_of(cases)

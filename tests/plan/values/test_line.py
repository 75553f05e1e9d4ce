"""Values between two others, or beyond them."""

from lightning_harmony.plan.outlook.work import Work
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.line import on_line


def test_each_number_lies_on_a_line_of_its_own() -> None:
    one, other = Cost("layer", 10, 4, 100, forward_seconds=1.0), Cost("layer", 10, 8, 300, forward_seconds=2.0)
    assert on_line(one, other, 0.0) == one
    assert on_line(one, other, 1.0) == other
    assert on_line(one, other, 0.5) == Cost("layer", 10, 6, 200, forward_seconds=1.5)
    assert on_line((one, 1), (other, 3), 2.0) == (Cost("layer", 10, 12, 500, forward_seconds=3.0), 5)


def test_whole_numbers_are_rounded_up_and_none_is_below_nothing() -> None:
    assert on_line(1, 2, 0.1) == 2
    assert on_line(5, 10, -2.0) == 0
    assert on_line(0.5, 1.0, -2.0) == 0.0


def test_what_only_one_has_is_nothing_in_the_other() -> None:
    one, other = Work({"float32": 10}), Work({"bfloat16": 4})
    assert on_line(one, other, 0.5) == Work({"float32": 5, "bfloat16": 2})

"""The line through two values: what lies between two sizes of microbatches that were seen, or beyond them."""

import math
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def on_line(one: T, other: T, factor: float) -> T:
    """The value by ``factor`` of the way from one to another, each number in it on a line of its own.

    Whole numbers are rounded up: what is needed is never said to be less. No number is less than 0.

    Args:
        one: numbers, or dataclasses, tuples and mappings of such.
        other: the same with other numbers.
        factor: 0 for the one, 1 for the other, more to go beyond that.
    """
    value: T = _on_line(one, other, factor)
    return value


def _on_line(one: Any, other: Any, factor: float) -> Any:
    if one == other or isinstance(one, str):
        return one
    if isinstance(one, int):
        return max(0, math.ceil(one + (other - one) * factor))
    if isinstance(one, float):
        return max(0.0, one + (other - one) * factor)
    if isinstance(one, tuple):
        return tuple(_on_line(a, b, factor) for a, b in zip(one, other, strict=True))
    if is_dataclass(one) and not isinstance(one, type):
        values = {f.name: _on_line(getattr(one, f.name), getattr(other, f.name), factor) for f in fields(one)}
        return type(one)(**values)
    # What only one of two mappings has is nothing in the other.
    return {name: _on_line(one.get(name, 0), other.get(name, 0), factor) for name in dict.fromkeys([*one, *other])}

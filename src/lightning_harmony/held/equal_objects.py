"""Whether two objects of somebody's own class hold the same: code may put a copy in the place of what it does not change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_HEAP_TYPE = 1 << 9
# Equal ones are the same, whichever object they are.
COMPARED = (bool, int, float, complex, str, bytes)
# How deep it is looked, and at how many values in all.
_DEPTH, _MOST = 6, 10_000


def are_equal_objects(one: Any, other: Any) -> bool:
    """Whether two objects are of one class of Python's, and hold the same; False where it would take long to tell.

    Those without attributes may be told apart by their identity alone, and are not equal.
    """
    return _Comparison().of_objects(one, other, _DEPTH)


class _Comparison:
    """Compares what is in two objects."""

    def __init__(self) -> None:
        self._num_left = _MOST

    def of_objects(self, one: Any, other: Any, depth: int) -> bool:
        kind = type(one)
        if type(other) is not kind or not _holds_attributes_alone(kind):
            return False
        return bool(vars(one)) and self._of_values(vars(one), vars(other), depth)

    def _of_values(self, one: Any, other: Any, depth: int) -> bool:
        self._num_left -= 1
        kind = type(one)
        if one is other or type(other) is not kind:
            return one is other
        if depth == 0 or self._num_left < 0:
            return False
        if kind in COMPARED:
            return bool(one == other)
        if kind in (list, tuple):
            return len(one) == len(other) and self._of_pairs(zip(one, other, strict=True), depth)
        if kind is dict:
            same_keys = list(map(_identity, one)) == list(map(_identity, other))
            return same_keys and self._of_pairs(zip(one.values(), other.values(), strict=True), depth)
        if kind in (set, frozenset):
            return len(one) == len(other) and set(map(_identity, one)) == set(map(_identity, other))
        return self.of_objects(one, other, depth)

    def _of_pairs(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> bool:
        return all(self._of_values(one, other, depth - 1) for one, other in pairs)


def _identity(value: Any) -> Any:
    return (type(value), value) if type(value) in COMPARED else id(value)


def _holds_attributes_alone(kind: Any) -> bool:
    """Whether objects of a class hold nothing but attributes: no memory of C, no slots, no entries."""
    bases = kind.__mro__[:-1]
    are_of_python = all(base.__flags__ & _HEAP_TYPE and not vars(base).get("__slots__") for base in bases)
    return kind.__dictoffset__ != 0 and are_of_python

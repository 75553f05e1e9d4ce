"""Cases of tests: all combinations, and the few of them that `make test` runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, TypeVar
from zlib import crc32

import pytest

Value = TypeVar("Value")

# `make test-whole` runs all cases of all tests.
IS_WHOLE = bool(os.environ.get("WHOLE_MATRICES"))


def combined(rows: Iterable[Any], columns: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each row with each of the columns.

    Args:
        rows: values of one parameter, or tuples of several parameters' values.
        columns: tuples of the other parameters' values.
    """
    return [(*(row if isinstance(row, tuple) else (row,)), *column) for row, column in product(rows, columns)]


def one_of(values: Sequence[Value], name: str) -> Value:
    """One of some values, the same in every run."""
    return values[crc32(name.encode()) % len(values)]


def sample_of(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Some of the cases of a test: one, from 16 on two, from 64 on three, and so on, by the logarithm to the base of 4.

    Each is the one with most values that none before it has, and of equals one that the names say: the same in every run, and
    another one in a test with the same parameters.
    """
    left = sorted(cases, key=lambda case: crc32(case.nodeid.encode()))
    chosen: list[pytest.Item] = []
    seen: set[tuple[str, int]] = set()
    for _ in range(max(1, (len(cases).bit_length() - 1) // 2)):
        chosen.append(max(left, key=lambda case: len(_values_of(case) - seen)))
        left.remove(chosen[-1])
        seen |= _values_of(chosen[-1])
    return chosen


def _values_of(case: pytest.Item) -> set[tuple[str, int]]:
    # Values are objects of the test's module, which all cases share.
    callspec = getattr(case, "callspec", None)
    return set() if callspec is None else {(name, id(value)) for name, value in callspec.params.items()}

"""Pairs out of a matrix of cases: each row and each column comes, not each of their combinations."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

# `make test-whole` runs all combinations.
IS_WHOLE = bool(os.environ.get("WHOLE_MATRICES"))
# Parameters that say where a model trains, and not what is tried there.
CIRCUMSTANCES = frozenset(
    [
        *("num_default_devices", "devices", "num_devices", "parallel"),
        *("device_memory", "memory", "capacity"),
        *("num_microbatches", "update"),
    ]
)


def in_turns(rows: Iterable[Any], columns: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each row with one of the columns, these in turns; with each of them if whole matrices are asked for.

    Args:
        rows: values of one parameter, or tuples of several parameters' values.
        columns: tuples of the other parameters' values.
    """
    pairs = product(rows, columns) if IS_WHOLE else ((row, columns[i % len(columns)]) for i, row in enumerate(rows))
    return [(*(row if isinstance(row, tuple) else (row,)), *column) for row, column in pairs]

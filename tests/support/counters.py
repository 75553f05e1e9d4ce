"""Counts that are kept where tests ask for them."""

from __future__ import annotations

from collections.abc import Callable


def counter() -> tuple[Callable[[], int], Callable[[], int]]:
    """What counts in a variable of a closure, and what reads how far."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count, lambda: calls

"""A clock that a test sets."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest


def set_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Have all of the package's modules read another clock.

    Args:
        monkeypatch: puts the real one back.
        clock: tells the seconds.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_harmony.") and hasattr(module, "perf_counter"):
            monkeypatch.setattr(module, "perf_counter", clock)

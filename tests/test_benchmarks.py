"""The benchmarks name parts of the package, which they time."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "realworld"

pytestmark = pytest.mark.cpu


def test_what_the_time_of_the_host_is_taken_of_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that had another name since had such a run fail at its start."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    parts = import_module("host_time").PARTS
    named = [(module, *name.split(".")) for functions in parts.values() for module, name in functions]
    missing = [each for each in named if not hasattr(getattr(import_module(each[0]), each[1], None), each[2])]
    assert missing == []

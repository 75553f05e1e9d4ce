"""State that Python does not show is read and set in place."""

from __future__ import annotations

import itertools
import random
from array import array
from typing import Any

import numpy as np
import pytest
import torch

from lightning_harmony.engine.structures.object_state import LARGEST_BYTES, Access, restore_of
from lightning_harmony.engine.structures.seekable import seekable

STATES: dict[str, tuple[Any, Any]] = {
    "generator of Python's": (random.Random(1), lambda value: value.random()),
    "generator of NumPy's": (np.random.default_rng(1), lambda value: value.random()),
    "old generator of NumPy's": (np.random.RandomState(1), lambda value: value.rand()),
    "generator of torch's": (torch.Generator(), lambda value: torch.rand(2, generator=value).tolist()),
    "iterator": (seekable(itertools.count()), next),
    "array of NumPy's": (np.zeros((2, 3)), lambda value: value.__iadd__(1).tolist()),
    "scalar of NumPy's": (np.array(1), lambda value: value.__iadd__(1).tolist()),
    "days": (np.zeros(2, "datetime64[D]"), lambda value: value.__iadd__(np.timedelta64(1, "D")).tolist()),
    "column": (np.zeros((3, 2))[:, 1], lambda value: value.__iadd__(1).tolist()),
    "bytearray": (bytearray(b"ab"), lambda value: value.extend(b"c") or bytes(value)),
    "array of Python's": (array("d", [1.0]), lambda value: value.append(2.0) or value.tolist()),
}


@pytest.mark.parametrize("kind", STATES)
def test_what_follows_is_the_same_again(kind: str) -> None:
    value, change = STATES[kind]
    restore = restore_of(value)
    assert restore is not None
    after = change(value)
    for _ in range(2):
        restore()
        assert change(value) == after


@pytest.mark.parametrize(
    "value",
    [
        *(3, "text", [1], b"bytes", object()),
        *(np.zeros(LARGEST_BYTES), np.array([[1], None], object), array("d", [0.0] * LARGEST_BYTES)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_of_everything_else_there_is_none(value: Any) -> None:
    assert restore_of(value) is None


def test_an_array_that_is_only_shown_is_seen_to_change_and_left_alone() -> None:
    value = np.zeros(2)
    shown = value.view()
    shown.flags.writeable = False
    access, restore = Access.of_array(shown), restore_of(shown)
    assert access is not None
    assert restore is not None
    before = access.get()
    value += 1
    assert access.get() != before
    restore()
    assert value.tolist() == [1, 1]

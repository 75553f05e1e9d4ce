"""Rows: along which dimension tensors and arrays have samples."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_harmony.engine.structures.nested import is_ndarray


def is_array(value: Any) -> bool:
    """Whether a value has a shape and can be sliced, as tensors can."""
    if is_tensor(value):
        return True
    # By shape, not by type: data frames and tensor dictionaries slice like tensors.
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and len(shape) > 0 and hasattr(value, "__getitem__")


def rows_of(value: Any) -> int | None:
    """The rows of an array; None for anything else."""
    if isinstance(value, Tensor):
        return int(value.size(0)) if value.dim() > 0 else None
    return int(value.shape[0]) if is_array(value) and value.shape else None


def has_rows(value: Any, num_rows: int) -> bool:
    """Whether a value is an array of so many rows."""
    return rows_of(value) == num_rows


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or an array of NumPy's."""
    return isinstance(value, Tensor) or is_ndarray(value)

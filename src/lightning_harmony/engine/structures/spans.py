"""Spans of memory, by addresses: tensors, arrays and storages that share some need not share an object."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_harmony.engine.structures.nested import is_ndarray

# Where it begins and ends.
Span = tuple[int, int]


class Spans:
    """Spans that others are compared with."""

    def __init__(self, spans: Iterable[Span | None]) -> None:
        known = sorted(span for span in spans if span is not None)
        self._starts = [start for start, _ in known]
        # Of each and those before it.
        self._ends = list(accumulate((end for _, end in known), max))

    def meet(self, spans: Iterable[Span | None]) -> bool:
        """Whether some memory is in one of these spans and in one of those."""
        return any(span is not None and self._meets(*span) for span in spans)

    def _meets(self, start: int, end: int) -> bool:
        num_before = bisect_left(self._starts, end)
        return num_before > 0 and self._ends[num_before - 1] > start


def span_of(value: Any) -> Span | None:
    """Where the memory of a tensor, with all of its storage, of a storage, or of an array or a view of one is; else None."""
    kind = type(value)
    if issubclass(kind, memoryview):
        return span_of(value.obj)
    if is_ndarray(value):
        return _span_of_array(value) if value.nbytes else None
    is_tensor = issubclass(kind, Tensor) and value.layout is torch.strided
    if not is_tensor and not issubclass(kind, torch.UntypedStorage | torch.TypedStorage):
        return None
    try:
        memory = value.untyped_storage() if is_tensor else value
        start, num_bytes = memory.data_ptr(), memory.nbytes()
    except (RuntimeError, NotImplementedError):
        # A fake tensor, or one that is made of others, has none of its own.
        return None
    return (start, start + num_bytes) if start and num_bytes else None


def _span_of_array(array: Any) -> Span:
    low = high = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        low, high = low + min((size - 1) * stride, 0), high + max((size - 1) * stride, 0)
    return low, high + array.itemsize

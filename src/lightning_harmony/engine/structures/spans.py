"""Spans of memory, by addresses: tensors, arrays and storages that share some need not share an object."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from torch import Tensor

# Where it begins and ends.
Span = tuple[int, int]


class Spans:
    """Spans that others are compared with."""

    def __init__(self, spans: Iterable[Span]) -> None:
        known = sorted(span for span in spans if span[0] < span[1])
        self._starts = [start for start, _ in known]
        # Of each and those before it.
        self._ends = list(accumulate((end for _, end in known), max))

    def meet(self, spans: Iterable[Span]) -> bool:
        """Whether some memory is in one of these spans and in one of those."""
        for start, end in spans:
            num_before = bisect_left(self._starts, end)
            if start < end and num_before > 0 and self._ends[num_before - 1] > start:
                return True
        return False


def span_of(tensor: Tensor) -> Span:
    """Where the memory of a strided tensor is, all of its storage."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()

"""When steps begin, told by their batches."""

from __future__ import annotations

import time

import torch
from torch import Tensor


class Clock:
    """Makes batches, and notes when: a callback that runs between two steps would be taken to look at the weights.

    Args:
        num_batches: how many an optimizer step takes.
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self._num_made = 0
        self.times: list[float] = []

    def __call__(self, samples: list[Tensor]) -> Tensor:
        """A batch; before the first of a step, all earlier work of a GPU is done."""
        if self._num_made % self._num_batches == 0:
            self.note()
        self._num_made += 1
        return torch.stack(samples)

    def note(self) -> None:
        """Wait for a GPU, and note the time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each step."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

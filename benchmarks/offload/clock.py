"""When steps begin, told by their batches."""

from __future__ import annotations

import time

import torch
from torch import Tensor


class Clock:
    """Makes batches, and notes when: a callback that runs between two steps would be taken to look at the weights.

    A GPU tells by its own clock when it has come to a batch. To wait for it there would count what goes on under the next
    step, such as copies to the host, as if nothing could be computed meanwhile.

    Args:
        num_batches: how many an optimizer step takes.

    Attributes:
        times: when the host made the first batch of each step, by `time.perf_counter`.
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches
        self._num_made = 0
        self._events: list[torch.cuda.Event] = []
        self.times: list[float] = []

    def __call__(self, samples: list[Tensor]) -> Tensor:
        """A batch; the first of a step is noted."""
        if self._num_made % self._num_batches == 0:
            self.note()
        self._num_made += 1
        return torch.stack(samples)

    def note(self) -> None:
        """Note the time, and when a GPU has done what it was given to compute until now."""
        self.times.append(time.perf_counter())
        if torch.cuda.is_available():
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()

    def seconds(self) -> list[float]:
        """Of each step."""
        if self._events:
            torch.cuda.synchronize()
            return [
                before.elapsed_time(after) / 1000 for before, after in zip(self._events, self._events[1:], strict=False)
            ]
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

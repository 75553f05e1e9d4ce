"""A net whose step is told by a function, which changes what it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SIZE = 16
SAMPLES = torch.randn(24, SIZE, generator=torch.Generator().manual_seed(1))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh())


class Layers(nn.Module):
    """Counts its calls.

    Args:
        run: what a call does: it returns the loss of some samples.
        num_frozen: so many of the first layers need no gradients.
    """

    def __init__(self, run: Callable[[Layers, Tensor], Tensor], num_frozen: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(5))
        self.other = block()
        self.out = nn.Linear(SIZE, 1)
        self.layers[:num_frozen].requires_grad_(False)
        self.run, self.num_calls = run, 0

    def scores(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.out(x)
        return scores

    def forward(self, batch: Any) -> Tensor:
        self.num_calls += 1
        return self.run(self, batch if isinstance(batch, Tensor) else batch[0])

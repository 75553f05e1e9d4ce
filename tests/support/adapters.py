"""Networks of frozen weights with adapters beside them, as quantized bases are trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen weight and a trained product of two small ones.

    Args:
        base: the frozen one, from a number of features to as many.
        size: that number.
    """

    def __init__(self, base: nn.Module, size: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(size, 4, bias=False), nn.Linear(4, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) + self.up(self.down(x))


class Stack(nn.Module):
    """Layers, and the loss of what comes of them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()  # type: ignore[no-any-return]

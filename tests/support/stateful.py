"""Networks of layers that keep or read more than parameters and buffers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from support import nets


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, nets.WIDTH, generator=generator)) for _ in range(12)]


class Blocks(nn.Module):
    """Four blocks, between an input and a target."""

    def __init__(self, block: Any = nets.Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.run(x), y)


class CountsInATensor(nets.Block):
    """Not registered as a buffer, and changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] += len(x)
        return super().forward(x) / (1 + 0.01 * self.seen[0])


class Measures(nets.Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.mean.update(x.detach().abs().mean())
        return super().forward(x) / (1 + self.mean.compute())


class Masked(nets.Block):
    def forward(self, x: Tensor, context: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x * context.mask)


class GivesAMask(Blocks):
    """One object for all blocks, wherever they are."""

    def __init__(self) -> None:
        super().__init__(Masked)

    def run(self, x: Tensor) -> Tensor:
        context = SimpleNamespace(mask=(x > -1).to(x.dtype))
        for block in self.blocks:
            x = block(x, context)
        return x


class SetsWhatLayersRead(Blocks):
    """Set on the layers as a mask often is: their recompute in the backward must see it, too."""

    class Scaled(nets.Block):
        scale: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    def __init__(self) -> None:
        super().__init__(self.Scaled)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        for block in self.blocks:
            block.scale = 1 + y.mean()
        return F.mse_loss(self.run(x), y)


class ReadsWhatLayersSet(Blocks):
    """Attention maps, statistics of activations."""

    class Watched(nets.Block):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = super().forward(x).detach()
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__(self.Watched)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.run(x)
        return F.mse_loss(x, y) * (1 + sum(block.seen.mean() for block in self.blocks))

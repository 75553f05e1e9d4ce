"""Chains of layers, each of which uses or keeps what goes from layer to layer in a way of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from support.same_training import Net

WIDTH, MICROBATCHES, BATCH, STEPS = 24, 3, 6, 4


class Block(nn.Module):
    """Uses what it is called with four times."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        found = 0.5 * x + torch.tanh(self.one(x)) * torch.tanh(self.other(x)) + 0.3 * x.sin()
        for other in others:
            found = found + 0.1 * self.one(other) * other.cos()
        return found


class Chain(nn.Module):
    memory = "44KiB"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.num_calls = 0

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        self.num_calls += 1
        return self.through(batch[0]).square().mean()

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class UsedBetweenLayers(Chain):
    """As where residuals are added outside of layers."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = 0.7 * x.sigmoid() + block(x) * x.cos()
        return x


class LookedAt(Chain):
    """As where norms of activations are logged: no gradient comes of that."""

    def through(self, x: Tensor) -> Tensor:
        norms = []
        for block in self.blocks:
            made = block(x)
            norms.append(x.detach().norm())
            with torch.no_grad():
                norms.append(x.norm() + x.shape[0])
            x = made
        return x


class Transformed(Chain):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + 0.3 * torch.vmap(lambda row: row.sin() * row.cos())(x)
        return x


class Transposed(Chain):
    """By a property, which is no operation to who looks at these."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            made = block(x)
            turned = x.mT
            x = made + 0.3 * (turned.sin() * turned.cos()).mT
        return x


class LeftToALayer(Chain):
    """What a layer finds in an attribute."""

    class Block(Block):
        context: Tensor | None = None

        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            others = () if self.context is None else (self.context,)
            return super().forward(x, *others)

    memory = "120KiB"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(5))

    def through(self, x: Tensor) -> Tensor:
        first, second, *rest = self.blocks
        x = first(x)
        rest[0].context = x if self.num_calls > 2 * MICROBATCHES else None
        x = second(x)
        for block in rest:
            x = block(x)
        return x


class Checkpointed(Chain):
    def through(self, x: Tensor) -> Tensor:
        def segment(x: Tensor) -> Tensor:
            for block in self.blocks[1:4]:
                x = block(x) + 0.3 * x.sin() * x.cos()
            return x

        x = self.blocks[0](x)
        x = torch.utils.checkpoint.checkpoint(segment, x, use_reentrant=False)
        return self.blocks[4](x)


class InAFunction(Chain):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient * x.cos()

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + 0.3 * self.Own.apply(x) * self.Own.apply(x)
        return x


class Encoder(Chain):
    """What several read comes of a layer of its own, and goes through an operation for each."""

    def through(self, x: Tensor) -> Tensor:
        first, *rest = self.blocks
        memory = first(x)
        for block in rest:
            x = block(x.tanh(), memory.view_as(memory))
        return x + memory


class UsedByALaterLayer(Chain):
    """As what an encoder has made is by each layer of a decoder."""

    def through(self, x: Tensor) -> Tensor:
        first, *rest = self.blocks
        memory = x = first(x)
        for block in rest:
            x = block(x, memory)
        return x


class UsedBefore(Chain):
    def through(self, x: Tensor) -> Tensor:
        first, *rest = self.blocks
        x = first(x)
        scale, view = x.exp(), x[:, 1:]
        for block in rest:
            x = block(x)
        return x * scale.tanh() + view.mean()


class UsedOnceMoreLater(Chain):
    """From the fourth step on, where layers' first calls have shown nothing of it."""

    def through(self, x: Tensor) -> Tensor:
        first, second, *rest = self.blocks
        kept = x = first(x)
        x = second(x)
        for block in rest:
            x = block(x)
        return x + kept.sin() * kept.cos() if self.num_calls > 3 * MICROBATCHES else x


class ReturnedAsItIs(Chain):
    class Block(Block):
        def forward(self, x: Tensor, *others: Tensor) -> Any:
            return super().forward(x), {"given": x}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(5))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            made, kept = block(x)
            assert kept["given"] is x
            x = made + 0.1 * kept["given"].cos()
        return x


class LeftOnTheLayer(Chain):
    memory = "80KiB"

    class Block(Block):
        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            self.found = x
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(5))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x + 0.1 * block.found.sin() * block.found.cos()  # type: ignore[operator]
        return x


class Hooked(Chain):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 1.3)
            x = block(x)
        return x


class ChangedInPlace(Chain):
    class Block(Block):
        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            return super().forward(x.mul_(1.1))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), *(self.Block() for _ in range(4))])

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * 0.5
        return x


CASES: Sequence[type[Chain]] = [
    Chain, LookedAt, Transformed, Transposed, LeftToALayer, Checkpointed, InAFunction, Encoder, UsedBetweenLayers,
    UsedByALaterLayer, UsedBefore, UsedOnceMoreLater, ReturnedAsItIs, LeftOnTheLayer, Hooked, ChangedInPlace,
]  # fmt: skip


def samples(steps: int = STEPS) -> Any:
    return torch.utils.data.TensorDataset(
        torch.randn(BATCH * steps, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    )


def build(kind: Callable[[], Chain]) -> Net:
    torch.manual_seed(0)
    return Net(kind())

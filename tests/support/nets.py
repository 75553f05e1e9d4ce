"""Small networks, each with one thing that a swapped layer could get wrong. Each returns the loss of a batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
VOCABULARY = 32


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class ByHand(torch.autograd.Function):
    """Runs a block, and in the backward its parts once more, with a backward of their own: as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        (x,), block = ctx.saved_tensors, ctx.block
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (x + block.down(F.gelu(block.up(block.norm(x))))).backward(gradient)
        return x.grad, None


class Language(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, num_blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, batch: Tensor) -> Tensor:
        logits = self.logits(self.body(self.embed(batch[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Remembering(Language):
    """Its glue keeps what the next microbatch reads: a new tensor, one that it changes in place, what a layer made."""

    total: Tensor | None
    newest: Tensor | None
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "newest", "last"):
            self.register_buffer(name, None)

    def body(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and self.last is not None:
                x = x + self.last.mean()
            if number == 2:
                self.last = x.detach()
        mean = x.detach().mean((0, 1))
        if self.total is None or self.newest is None:
            self.total, self.newest = mean.clone(), mean
            return x
        x = x + self.total + self.newest
        self.total.add_(mean)
        self.newest = self.newest * 0.5 + mean
        return x


class Tied(Language):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class TiedByCode(Language):
    """The head is the embedding's weight, used outside of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embed.weight)


class OwnParameters(Language):
    """Parameters that the glue uses, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 6, WIDTH))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x + self.position[:, : x.shape[1]])
        return x * self.temperature.exp() + self.temperature


class Offset(nn.Module):
    """A layer that returns its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self) -> Tensor:
        return self.weight


class ReturnedParameter(Language):
    def __init__(self) -> None:
        super().__init__()
        self.offset = Offset()

    def body(self, x: Tensor) -> Tensor:
        offset = self.offset()
        return super().body(x + offset) * offset


class Frozen(Language):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)


class Repeated(Language):
    """A layer used twice, not in a row, and one used twice in a row."""

    def body(self, x: Tensor) -> Tensor:
        for number in (0, 1, 0, 2, 2, 3):
            x = self.blocks[number](x)
        return x


class RandomlySkipped(Language):
    """Skips layers by both generators, so that lanes take different ways; at times nobody calls a layer."""

    def body(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == 0 or (torch.rand(()) < 0.6 and random.random() < 0.8):
                x = block(x)
        return x


class Reordered(Language):
    """Another order of calls in every step after the first."""

    def body(self, x: Tensor) -> Tensor:
        order = torch.randperm(len(self.blocks)).tolist()
        for number in order:
            x = self.blocks[number](x)
        return x


class SkipConnections(Language):
    """What the first layers return is used by the last: a U-Net's shape."""

    def body(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        third = self.blocks[2](second * 0.5)
        return self.blocks[3](third + second) - first + x


class RichBlock(nn.Module):
    """Takes and returns kwargs, tuples, dicts and None."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, pair: tuple[Tensor, Any], *, extra: dict[str, Any], scale: float = 1.0) -> Any:
        x, _ = pair
        y = self.inner(x) * scale + extra["mask"].unsqueeze(-1)
        return {"pair": (y, None), "norm": y.norm(dim=-1, keepdim=True), "count": 3}


class Rich(Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RichBlock() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[:2], device=x.device).tril()
        for block in self.blocks:
            result = block((x, None), extra={"mask": mask, "unused": [None, 1]}, scale=0.5)
            assert result["count"] == 3
            x = result["pair"][0] + 0.1 * result["norm"]
        return x


class Hooked(Language):
    """Hooks on layers, within them and on what goes from one to the next; each changes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda module, args: (1.1 * args[0],))
            block.register_forward_hook(lambda module, args, output: 0.9 * output)
            block.register_full_backward_hook(lambda module, inputs, outputs: (0.5 * inputs[0],))
            block.register_full_backward_pre_hook(lambda module, outputs: (outputs[0].clamp(-1e-2, 1e-2),))
            block.up.register_forward_hook(lambda module, args, output: output.tanh())
            block.up.register_full_backward_hook(lambda module, inputs, outputs: (0.7 * inputs[0],))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.register_hook(lambda gradient: gradient + 1e-4)
        return x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.inner(x) * (1 + gate.clone())


class ChangesAnInput(Language):
    """Layers take a tensor that the glue changes in place afterwards: it may be small enough to stay where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        gate = torch.zeros(1, device=x.device)
        for block in self.blocks:
            x = block(x, gate)
            gate += 0.1
        return x


class Chain(nn.Module):
    """Three layers of a kind, and a loss of what they make."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([kind() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


class Shared(nn.Module):
    """A cross-attention: the memory is taken by every layer, twice within one call."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: Tensor) -> Tensor:
        memory = x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = x + block(x, memory, memory, need_weights=False)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())


class Convolutions(nn.Module):
    """Batch norm, and residual connections written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.ReLU(inplace=True), nn.BatchNorm2d(8))
            for _ in range(3)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        x = self.stem(images)
        for block in self.blocks:
            identity = x
            x = block(x)
            x += identity
            x = F.relu_(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Recurrent(nn.Module):
    """An LSTM keeps references to its weights beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: Tensor) -> Tensor:
        x, _ = self.rnn(self.embed(batch[:, :-1]))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())


class SpectralNorm(Language):
    """Power iteration changes a buffer in every forward, and the weight depends on it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            torch.nn.utils.parametrizations.spectral_norm(block.up)


class Regularized(Language):
    """A penalty over all parameters, from the glue."""

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch) + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())


class HuggingFace(nn.Module):
    """A model that returns its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


def tokens(num_samples: int = 24, length: int = 7) -> Tensor:
    return torch.randint(0, VOCABULARY, (num_samples, length), generator=torch.Generator().manual_seed(1))


def images(num_samples: int = 24) -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 8, 8, generator=generator), number % 5) for number in range(num_samples)]


class Mixing(Language):
    """Glue that takes tensors of all layers together, changes some in place, and makes new ones."""

    def forward(self, batch: Tensor) -> Tensor:
        x = first = self.embed(batch[:, :-1])
        seen = [x]
        for block in self.blocks:
            x = block(x) + 0.1 * first
            seen.append(x)
        mixed = torch.stack(seen).mean(0) * torch.ones(x.shape[-1], device=batch.device)
        total = torch.zeros_like(mixed)
        for each in seen:
            total += each
        total[:, 0] = seen[-1][:, 0]
        mixed = torch.where(total > 0, mixed, first) + torch.cat([seen[0], seen[-1]], dim=-1)[..., : x.shape[-1]]
        return super().logits(mixed).flatten(0, 1).logsumexp(-1).mean() + torch.einsum("btw,btw->", total, first) / 1e3


class Explodes(Block):
    fault: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fault is not None:
            self.fault()
        return super().forward(x)

"""The GPT that every contender trains, and its data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset


@dataclass(frozen=True)
class Shape:
    """The size of a GPT; by default of 5.09 billion parameters."""

    hidden: int = 4096
    layers: int = 24
    heads: int = 64
    vocabulary: int = 32000
    length: int = 2048


class Block(nn.Module):
    """A pre-norm transformer block with an FFN of four times the hidden size."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend and feed forward."""
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(pl.LightningModule):
    """An ordinary GPT with an untied head.

    Args:
        shape: its size.
        recompute: whether each block is recomputed in backward, as training in memory does to save activations.
        fused: for AdamW.
        has_masters: whether parameters are narrow, and AdamW updates float32 copies of them.
    """

    def __init__(self, shape: Shape, *, recompute: bool, fused: bool | None, has_masters: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.fused = fused
        self.has_masters = has_masters
        self.losses: list[Tensor] = []
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Next-token loss."""
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        optimizer = AdamWOfMasters if self.has_masters else torch.optim.AdamW
        return optimizer(self.parameters(), lr=1e-4, fused=self.fused)


class AdamWOfMasters(torch.optim.AdamW):
    """AdamW on float32 copies of narrow parameters, whose gradients are summed in float32: what FSDP2's mixed precision does.

    The parameters are where they will train when it is made.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        self._parameters: list[Tensor] = list(parameters)
        self._masters: list[Tensor] = [nn.Parameter(parameter.detach().float()) for parameter in self._parameters]
        super().__init__(self._masters, **options)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(_add_to, master))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the masters, and the parameters from them."""
        loss = super().step(closure)
        torch._foreach_copy_(self._parameters, self._masters)
        return loss


def _add_to(master: Tensor, parameter: nn.Parameter) -> None:
    gradient, parameter.grad = parameter.grad, None
    if master.grad is None:
        master.grad = gradient.float() if gradient is not None else None
    elif gradient is not None:
        master.grad.add_(gradient)


def build(
    shape: Shape,
    *,
    recompute: bool,
    fused: bool | None,
    has_masters: bool = False,
    device: str = "cuda",
    on_host: bool = True,
) -> GPT:
    """A model, its numbers drawn on the GPU: on the host that would take a minute."""
    with torch.device("meta"):
        model = GPT(shape, recompute=recompute, fused=fused, has_masters=has_masters)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02, generator=generator)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
    if on_host:
        model.to("cpu")
    if device == "cuda":
        torch.cuda.empty_cache()
    return model


class Tokens(Dataset[Tensor]):
    """Random tokens."""

    def __init__(self, num_samples: int, shape: Shape) -> None:
        self._num_samples = num_samples
        self._shape = shape

    def __len__(self) -> int:
        """Samples."""
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        """Tokens of one sample."""
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, self._shape.vocabulary, (self._shape.length + 1,), generator=generator)

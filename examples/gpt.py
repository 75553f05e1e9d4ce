"""A small GPT: an ordinary LightningModule, written as if it fitted the device."""

import math
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model and how it is trained."""

    vocabulary: int = 2048
    context: int = 128
    hidden: int = 256
    num_layers: int = 6
    num_heads: int = 4
    dropout: float = 0.0
    learning_rate: float = 4e-3
    warmup_steps: int = 10
    weight_decay: float = 0.1


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.hidden, 3 * config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Mix every position with those before it."""
        heads = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """One transformer block: attention, then a two-layer network, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp_input = nn.Linear(config.hidden, 4 * config.hidden)
        self.mlp_output = nn.Linear(4 * config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        addition: Tensor = self.dropout(self.mlp_output(F.gelu(self.mlp_input(self.mlp_norm(x)))))
        return x + addition


class GPT(pl.LightningModule):
    """A decoder-only language model."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.context, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.apply(self._initialize)

    def _initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            # Every block adds to the same stream: start small, so that the sum does not drown the tokens.
            for linear in (module.attention.output, module.mlp_output):
                nn.init.normal_(linear.weight, std=0.1 * linear.in_features**-0.5)
        if isinstance(module, GPT):
            nn.init.normal_(module.positions.weight, std=0.1)
            # Small logits: the first loss is close to that of guessing.
            nn.init.normal_(module.head.weight, std=0.3 * module.head.in_features**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token that follows each position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss over all tokens of the batch."""
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW; the learning rate rises linearly, then falls along a cosine."""
        config = self.config
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        num_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = LambdaLR(optimizer, lambda step: _learning_rate_factor(step, config.warmup_steps, num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, tokens: Tensor, num_tokens: int, temperature: float = 0.8, seed: int = 0) -> Tensor:
        """Continue tokens, of shape (tokens,), by `num_tokens` that are drawn from what the model predicts."""
        was_training = self.training
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        tokens = tokens.to(self.device)
        for _ in range(num_tokens):
            logits = self(tokens[None, -self.config.context :])[0, -1].float().cpu()
            drawn = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)])
        self.train(was_training)
        return tokens.cpu()


def _learning_rate_factor(step: int, warmup_steps: int, num_steps: int) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

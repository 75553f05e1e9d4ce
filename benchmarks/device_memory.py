"""Train GPTs on a GPU under a capacity, and report what the allocator handed out at most.

python benchmarks/device_memory.py --hidden 2048 --layers 18 --device-memory 4GiB
"""

from __future__ import annotations

import argparse
import statistics
import time

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_harmony import HarmonyStrategy
from lightning_harmony.plan.memory_size import format_bytes, parse_bytes


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
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
    """A GPT with an untied head."""

    def __init__(self, hidden: int, layers: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Next-token loss."""
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, fused on the host."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Tokens(Dataset[Tensor]):
    """Random tokens."""

    def __init__(self, num_samples: int, length: int, vocabulary: int) -> None:
        self._size = num_samples, length + 1
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        """Samples."""
        return self._size[0]

    def __getitem__(self, index: int) -> Tensor:
        """Tokens of one sample."""
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, self._vocabulary, (self._size[1],), generator=generator)


class Times(pl.Callback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *args: object) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: dict[str, Tensor], *a: object
    ) -> None:
        """Stop it."""
        self.losses.append(float(outputs["loss"]))
        self.seconds.append(time.perf_counter() - self._start)


def main() -> None:
    """Train and print one row."""
    parser = argparse.ArgumentParser()
    for name, value in (("hidden", 2048), ("layers", 18), ("heads", 16), ("vocabulary", 32000), ("length", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device-memory", default="4GiB")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--strategy", choices=("harmony", "plain"), default="harmony")
    options = parser.parse_args()
    pl.seed_everything(0)
    model = GPT(options.hidden, options.layers, options.heads, options.vocabulary)
    num_parameters = sum(p.numel() for p in model.parameters())
    samples = Tokens(options.steps * options.batch_size, options.length, options.vocabulary)
    times = Times()
    harmony = HarmonyStrategy(device_memory=options.device_memory, num_microbatches=options.num_microbatches)
    plain = options.strategy == "plain"
    trainer = pl.Trainer(
        strategy="auto" if plain else harmony,
        accelerator="gpu",
        devices=1,
        precision=options.precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times],
        accumulate_grad_batches=options.num_microbatches if plain else 1,
    )
    torch.cuda.reset_peak_memory_stats()
    size = options.batch_size // options.num_microbatches if plain else options.batch_size
    trainer.fit(model, DataLoader(samples, batch_size=size))
    peak = torch.cuda.max_memory_allocated()
    print(
        f"{options.strategy}: {num_parameters / 1e9:.3f} B parameters, {options.precision}, {torch.cuda.get_device_name()}"
    )
    print(f"losses {[round(loss, 4) for loss in times.losses]}")
    print(f"step {statistics.median(times.seconds[2:]):.3f} s, all {[round(s, 2) for s in times.seconds]}")
    print(f"max_memory_allocated {format_bytes(peak)}")
    if not plain:
        print(trainer.strategy.step_report)
        assert peak <= parse_bytes(options.device_memory)


if __name__ == "__main__":
    main()

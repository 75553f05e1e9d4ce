"""Train GPTs on a GPU under a capacity, and report what the allocator handed out at most.

python benchmarks/device_memory.py --hidden 2048 --layers 18 --device-memory 4GiB
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
from offload.model import GPT, Shape, Tokens
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.plan.values.memory_size import format_bytes, parse_bytes


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
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
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
    shape = Shape(options.hidden, options.layers, options.heads, options.vocabulary, options.length)
    model = GPT(shape, recompute=False, fused=True)
    num_parameters = sum(p.numel() for p in model.parameters())
    samples = Tokens(options.steps * options.batch_size, shape)
    times = Times()
    harmony = HarmonyStrategy(options.device_memory, options.num_microbatches, profile_cache=False)
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
        print(harmony.step_report)
        assert peak <= parse_bytes(options.device_memory)


if __name__ == "__main__":
    main()

"""Train the GPT one way, and print one line of JSON.

python benchmarks/offload/train.py --strategy harmony --device-memory 16GiB
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch
from clock import Clock
from model import Shape, Tokens, build
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyMonitor, HarmonyPrecision, HarmonyStrategy
from lightning_harmony.plan.values.memory_size import parse_bytes


class PrintAndLeave(pl.Callback):
    """Prints a line of JSON when all steps are done, and ends the process.

    To bring the weights back to the host, as a fit does when it ends, would take longer than the steps did.

    Args:
        report: makes the line.
    """

    def __init__(self, report: Callable[[Any], dict[str, Any]]) -> None:
        self._report = report

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Print."""
        print(json.dumps(self._report(trainer)), flush=True)
        os._exit(0)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=("plain", "recompute", "harmony"), default="harmony")
    parser.add_argument(
        "--precision",
        default="bf16-mixed",
        help="of Lightning; bf16-compute under harmony, to which bf16-true with float32 masters compares in memory",
    )
    parser.add_argument("--compile", action="store_true", help="compile the blocks, or under harmony all layers")
    parser.add_argument("--device-memory", help="the capacity under harmony; all of the GPU if not given")
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--parallel", choices=("pipeline", "data"), default="pipeline")
    parser.add_argument("--clip", type=float, default=None, help="gradient_clip_val")
    parser.add_argument(
        "--gpu-memory", help="let torch's allocator have no more than this, as a GPU of that size would"
    )
    parser.add_argument(
        "--trace", help="a folder: record the last step but one under harmony, which says when each task ran"
    )
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and print."""
    options = _parsed(arguments)
    shape = Shape(*(getattr(options, name) for name in asdict(Shape())))
    harmony = options.strategy == "harmony"
    if options.gpu_memory:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_bytes(options.gpu_memory) / total)
    start = time.perf_counter()
    has_masters = not harmony and options.precision == "bf16-true"
    fused = None if harmony or options.clip else True
    recompute = options.strategy == "recompute"
    # Where it trains in memory it can be made there.
    model = build(shape, recompute=recompute, fused=fused, has_masters=has_masters, on_host=harmony)
    built = time.perf_counter() - start
    batch_size = options.num_microbatches * options.microbatch_size
    samples = Tokens(options.steps * batch_size, shape)
    clock = Clock(1 if harmony else options.num_microbatches)
    strategy: Any = "auto"
    if harmony:
        strategy = HarmonyStrategy(
            profile_cache=False,
            device_memory=options.device_memory,
            num_microbatches=options.num_microbatches,
            parallel=options.parallel,
            compile_layers=options.compile,
        )
    elif options.compile:
        for block in model.blocks:
            block.compile()
    is_plugin = options.precision == "bf16-compute"

    def report(trainer: Any) -> dict[str, Any]:
        seconds = clock.seconds()
        group = options.num_microbatches
        each = [float(loss) for loss in model.losses]
        losses = [statistics.mean(each[i : i + group]) for i in range(0, len(each), group)]
        gpus = range(options.devices)
        row: dict[str, Any] = {
            "strategy": options.strategy,
            "precision": options.precision,
            "parameters": sum(p.numel() for p in model.parameters()),
            "tokens": batch_size * shape.length,
            "step": round(statistics.median(seconds[3:]), 3),
            "devices": options.devices,
            "device memory": options.device_memory,
            "steps": [round(second, 3) for second in seconds],
            "set up": round(clock.times[0] - start, 1),
            "first step": round(clock.times[1] - start, 1),
            "model built": round(built, 1),
            "device GiB": max(round(torch.cuda.max_memory_allocated(gpu) / 2**30, 2) for gpu in gpus),
            "reserved GiB": max(round(torch.cuda.max_memory_reserved(gpu) / 2**30, 2) for gpu in gpus),
            "host GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
            "losses": [round(loss, 5) for loss in losses],
            "allocator retries": torch.cuda.memory_stats()["num_alloc_retries"],
            "gpu": torch.cuda.get_device_name(),
        }
        if harmony:
            row["report"] = asdict(trainer.strategy.step_report)
        return row

    monitors = [HarmonyMonitor(trace_step=options.steps - 2, dirpath=options.trace)] if options.trace else []
    trainer = pl.Trainer(
        strategy=strategy,
        callbacks=[PrintAndLeave(report), *monitors],
        accelerator="gpu",
        devices=options.devices,
        precision=None if is_plugin else options.precision,
        plugins=HarmonyPrecision(options.precision) if is_plugin else None,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=options.clip,
        accumulate_grad_batches=1 if harmony else options.num_microbatches,
    )
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    size = batch_size if harmony else options.microbatch_size
    trainer.fit(model, DataLoader(samples, batch_size=size, collate_fn=clock))


if __name__ == "__main__":
    main()

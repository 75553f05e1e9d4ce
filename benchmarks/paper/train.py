"""Train one of the paper's models by the plans of several rows, one after the other, and print a line of JSON for each.

python benchmarks/paper/train.py --model gpt2-xl --devices 1

On one device these are the rows of the ablation; on several, the four schemes of the paper. `compare.py` makes tables and
a picture of the lines.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from models import LAYERS, SUBJECTS, Model, Samples, Subject, build, initialise, subject_of
from rows import ROWS, Costs, costs_of, count, plan_of
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.plan.machine import H200
from lightning_harmony.plan.memory_size import format_bytes, parse_bytes
from lightning_harmony.plan.plan import Plan

# The first step runs layer by layer, and the second one by the plan for the first time.
WARM_UP = 2
# What it takes the host to have a layer run forth and back for a microbatch: one process does so for all devices.
LAUNCH_SECONDS = 4e-3


class Clock(pl.Callback):
    """Seconds and reports of all steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.reports: list[Any] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self._began = _now()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seconds.append(_now() - self._began)
        self.reports.append(trainer.strategy.step_report)


def _forget_peaks() -> None:
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)


def _now() -> float:
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)
    return time.perf_counter()


def measure(
    model: Model, subject: Subject, plan: Plan | None, num_microbatches: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Train for some steps by a plan; without one, by what the strategy plans itself."""
    clock = Clock()
    given = {"num_microbatches": num_microbatches} if plan is None else {"plan": plan}
    strategy = HarmonyStrategy(
        device_memory=options.capacity, layers=LAYERS, parallel=options.parallel_now, update="just-in-time", **given
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        max_steps=WARM_UP + options.steps,
        precision="32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    batch_size = num_microbatches * subject.microbatch_size
    samples = Samples(subject.shape, batch_size * (WARM_UP + options.steps))
    torch.manual_seed(0)
    began = time.perf_counter()
    trainer.fit(model, DataLoader(samples, batch_size=batch_size))
    used, report = strategy.plan, clock.reports[-1]
    assert used is not None
    if plan is not None and (used.packs, used.visits, used.reuse) != (plan.packs, plan.visits, plan.reuse):
        raise RuntimeError(f"the plan that was given was not run by, but\n{used}")
    step = statistics.median(clock.seconds[WARM_UP:])
    return {
        "seconds": step,
        "all_seconds": [round(each, 4) for each in clock.seconds],
        "samples_per_second": batch_size / step,
        "fit_seconds": time.perf_counter() - began,
        "losses": [float(loss) for loss in model.losses],
        "report": {**asdict(report), "update_reason": None},
        "num_packs": len(used.packs),
        "num_fused": len(used.fused_visits),
        "num_kept": len(used.kept),
    }


def row_of(name: str, parallel: str, model: Model, subject: Subject, costs: Costs, options: Any) -> dict[str, Any]:
    """One row: what was planned, what the formula says, what was measured."""
    num_microbatches = subject.num_microbatches * (1 if options.fixed_batch else options.devices)
    options.parallel_now = parallel
    plan = plan_of(name, costs, num_microbatches, options.devices, parallel)
    row: dict[str, Any] = {
        "model": options.model,
        "row": name,
        "parallel": parallel,
        "devices": options.devices,
        "num_microbatches": num_microbatches,
        "microbatch_size": subject.microbatch_size,
        "capacity_bytes": parse_bytes(options.capacity),
        "weight_bytes": costs.weight_bytes,
        "planned": asdict(count(plan, costs)),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
    }
    try:
        initialise(model, subject.shape)
        _forget_peaks()
        # The last row is what users get: the strategy's own plan, from what it measures.
        row |= measure(model, subject, None if name == "search" else plan, num_microbatches, options)
    except Exception as error:
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
    return row


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What all scripts here take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", default="11GB", help="of each device")
    parser.add_argument(
        "--small", action="store_true", help="models of the same structure that a CPU trains in no time"
    )
    parser.add_argument("--microbatches", type=int, help="of each device")
    parser.add_argument("--microbatch-size", type=int)
    return parser


def chosen(name: str, options: argparse.Namespace) -> Subject:
    """A model as the arguments ask for it."""
    subject = subject_of(name, is_small=options.small)
    values = asdict(subject) | {"shape": subject.shape}
    values["num_microbatches"] = options.microbatches or subject.num_microbatches
    values["microbatch_size"] = options.microbatch_size or subject.microbatch_size
    return Subject(**values)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SUBJECTS, required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rows", nargs="*", choices=ROWS, help="all on one device, on several the first and the last")
    parser.add_argument("--parallel", nargs="*", choices=["data", "pipeline"], help="on one device they are the same")
    parser.add_argument("--steps", type=int, default=5, help="measured, behind two that are not")
    parser.add_argument("--accelerator", default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--fixed-batch", action="store_true", help="as many samples for all numbers of devices")
    parser.add_argument("--out", type=Path, help="a file that the lines are added to, as well")
    options = parser.parse_args()
    # What is compared is FP32.
    torch.backends.cudnn.allow_tf32 = False

    subject = chosen(options.model, options)
    several = options.devices > 1
    rows = options.rows or ([ROWS[0], ROWS[-1]] if several else ROWS)
    parallels = options.parallel or (["data", "pipeline"] if several else ["pipeline"])
    costs = costs_of(subject.shape, subject.microbatch_size, H200, parse_bytes(options.capacity))
    _announce(subject, rows, parallels, costs, options)
    model = build(subject.shape)
    for name in rows:
        for parallel in parallels:
            row = row_of(name, parallel, model, subject, costs, options)
            line = json.dumps(row)
            print(line, flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(line + "\n")
            taken = (
                f"{row['seconds']:.3f} s a step, {row['fit_seconds']:.0f} s in all"
                if "seconds" in row
                else row["error"]
            )
            _say(f"{name}, {parallel}: {taken}")
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _announce(subject: Subject, rows: Any, parallels: Any, costs: Costs, options: argparse.Namespace) -> None:
    """Say what is coming, and how long it will take on an H200."""
    num_microbatches = subject.num_microbatches * (1 if options.fixed_batch else options.devices)
    seconds = 0.0
    for name in rows:
        for parallel in parallels:
            plan = plan_of(name, costs, num_microbatches, options.devices, parallel)
            step = max(count(plan, costs).seconds, LAUNCH_SECONDS * len(costs.calls) * num_microbatches)
            # The first step, layer by layer and planning, takes as long as several; and the host's memory is registered.
            seconds += 15 + (4 + WARM_UP + options.steps) * step
    _say(
        f"{subject.title}, W = {format_bytes(costs.weight_bytes)}, {num_microbatches} microbatches of "
        f"{subject.microbatch_size} on {options.devices} devices of {options.capacity}: {len(rows) * len(parallels)} rows, "
        f"expected to take about {seconds / 60 + 0.5:.1f} minutes on H200s"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

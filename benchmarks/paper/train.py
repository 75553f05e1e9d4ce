"""Train one of the paper's models by the plans of several rows, one after the other, and print a line of JSON for each.

python benchmarks/paper/train.py --model gpt2-xl --devices 1

On one device these are the rows of the ablation, behind one of plain Lightning, which has the model in memory; on several, the
four schemes of the paper. `ablation.py` and `compare.py` make tables and a picture of the lines.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from models import LAYERS, SUBJECTS, Model, Samples, Subject, build, initialise, subject_of
from rows import IN_MEMORY, ROWS, Costs, Counted, costs_of, count, plan_of
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.plan.values.machine import H200
from lightning_harmony.plan.values.memory_size import format_bytes, parse_bytes
from lightning_harmony.plan.values.plan import Parallel, Plan

# The first step runs layer by layer, and the second one by the plan for the first time.
WARM_UP = 2
# What it takes the host to have a layer run forth and back for a microbatch: one process does so for all devices.
LAUNCH_SECONDS = 4e-3


class Clock(pl.Callback):
    """Seconds and reports of all steps.

    Args:
        num_batches: how many a step takes.
    """

    def __init__(self, num_batches: int = 1) -> None:
        self.seconds: list[float] = []
        self.reports: list[Any] = []
        self._num_batches = num_batches

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self._num_batches == 0:
            self._began = _now()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self._num_batches == 0:
            self.seconds.append(_now() - self._began)
            self.reports.append(getattr(trainer.strategy, "step_report", None))


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
    model: Model,
    subject: Subject,
    plan: Plan | None,
    num_microbatches: int,
    parallel: Parallel,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Train for some steps by a plan; without one, by what the strategy plans itself."""
    clock = Clock()
    given = {"num_microbatches": num_microbatches} if plan is None else {"plan": plan}
    strategy = HarmonyStrategy(
        device_memory=options.capacity,
        layers=LAYERS,
        parallel=parallel,
        update="just-in-time",
        profile_cache=False,
        **given,
    )
    batch_size = num_microbatches * subject.microbatch_size
    measured = _fit(model, subject, batch_size, clock, options, strategy=strategy, devices=options.devices)
    used, report = strategy.plan, clock.reports[-1]
    assert used is not None
    if plan is not None and (used.packs, used.visits, used.reuse) != (plan.packs, plan.visits, plan.reuse):
        raise RuntimeError(f"the plan that was given was not run by, but\n{used}")
    return {
        **measured,
        "report": {**asdict(report), "update_reason": None},
        "num_packs": len(used.packs),
        "num_fused": len(used.fused_visits),
        "num_kept": len(used.kept),
    }


def measure_in_memory(
    model: Model, subject: Subject, num_microbatches: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Train for some steps by plain Lightning, which accumulates the same microbatches and recomputes each layer."""
    clock = Clock(num_microbatches)
    model.recomputes = True
    try:
        measured = _fit(
            model, subject, subject.microbatch_size, clock, options, accumulate_grad_batches=num_microbatches
        )
    finally:
        model.recomputes = False
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {**measured, "peak_bytes": peak}


def _fit(
    model: Model, subject: Subject, batch_size: int, clock: Clock, options: argparse.Namespace, **own: Any
) -> dict[str, Any]:
    """Train for some steps, and tell what all rows have in common."""
    num_steps = WARM_UP + options.steps
    step_size = batch_size * own.get("accumulate_grad_batches", 1)
    trainer = pl.Trainer(
        **{"devices": 1} | own,
        accelerator=options.accelerator,
        max_steps=num_steps,
        precision="32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    samples = Samples(subject.shape, num_steps * step_size)
    torch.manual_seed(0)
    began = time.perf_counter()
    trainer.fit(model, DataLoader(samples, batch_size=batch_size))
    step = statistics.median(clock.seconds[WARM_UP:])
    return {
        "seconds": step,
        "all_seconds": [round(each, 4) for each in clock.seconds],
        "samples_per_second": step_size / step,
        "fit_seconds": time.perf_counter() - began,
        "losses": [float(loss) for loss in model.losses],
    }


@dataclass(frozen=True)
class Row:
    """What is to be measured.

    Attributes:
        name: one of `ROWS`, or `IN_MEMORY`.
        num_microbatches: of a step.
        parallel: how devices share the work.
        plan: its plan; None in memory.
        counted: what replay counts of that.
    """

    name: str
    num_microbatches: int
    parallel: Parallel
    plan: Plan | None = None
    counted: Counted | None = None


def row_of(row: Row, model: Model, subject: Subject, costs: Costs, options: argparse.Namespace) -> dict[str, Any]:
    """What was planned, what the formula says, and what was measured."""
    found: dict[str, Any] = {
        "model": options.model,
        "row": row.name,
        "parallel": row.parallel,
        "devices": options.devices,
        "num_microbatches": row.num_microbatches,
        "microbatch_size": subject.microbatch_size,
        "capacity_bytes": None if row.plan is None else parse_bytes(options.capacity),
        "weight_bytes": costs.weight_bytes,
        "planned": None if row.counted is None else asdict(row.counted),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
    }
    try:
        initialise(model, subject.shape)
        _forget_peaks()
        if row.plan is None:
            found |= measure_in_memory(model, subject, row.num_microbatches, options)
        else:
            # The last row is what users get: the strategy's own plan, from what it measures.
            given = None if row.name == "search" else row.plan
            found |= measure(model, subject, given, row.num_microbatches, row.parallel, options)
    except Exception as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"[:2000]
    return found


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
    parser.add_argument(
        "--rows",
        nargs="*",
        choices=(IN_MEMORY, *ROWS),
        help="all on one device; on several the first of swapping and the last",
    )
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
    rows = options.rows or ([ROWS[0], ROWS[-1]] if several else [IN_MEMORY, *ROWS])
    if several and IN_MEMORY in rows:
        parser.error(f"--rows {IN_MEMORY!r} is of one device")
    parallels = options.parallel or (["data", "pipeline"] if several else ["pipeline"])
    costs = costs_of(subject.shape, subject.microbatch_size, H200, parse_bytes(options.capacity))
    num_microbatches = subject.num_microbatches * (1 if options.fixed_batch else options.devices)
    planned = []
    for name in rows:
        for parallel in parallels:
            if name == IN_MEMORY:
                planned.append(Row(name, num_microbatches, parallel))
                continue
            plan = plan_of(name, costs, num_microbatches, options.devices, parallel)
            planned.append(Row(name, num_microbatches, parallel, plan, count(plan, costs)))
    _say(
        f"{subject.title}, W = {format_bytes(costs.weight_bytes)}, {num_microbatches} microbatches of "
        f"{subject.microbatch_size} on {options.devices} devices of {options.capacity}: {len(planned)} rows, expected to take "
        f"about {_expected_seconds(planned, len(costs.calls) * num_microbatches, options.steps) / 60:.1f} minutes on H200s"
    )
    model = build(subject.shape)
    for row in planned:
        found = row_of(row, model, subject, costs, options)
        line = json.dumps(found)
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(line + "\n")
        taken = (
            f"{found['seconds']:.3f} s a step, {found['fit_seconds']:.0f} s in all" if "seconds" in found else "failed"
        )
        _say(f"{row.name}, {row.parallel}: {taken}")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _expected_seconds(planned: Sequence[Row], num_calls: int, num_steps: int) -> float:
    """The first step, which goes layer by layer, takes as long as several; and the host's memory is registered."""
    steps = [max(row.counted.seconds if row.counted else 0.0, LAUNCH_SECONDS * num_calls) for row in planned]
    return 15 + sum(15 + (3 + WARM_UP + num_steps) * step for step in steps)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

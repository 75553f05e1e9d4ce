"""Compare what a step was predicted to take with what it takes: GPTs under several capacities and numbers of microbatches.

Each model is built once, in a process of its own, and trained a few steps for each row. A row prints a line of the table, and
all of its figures as a line of JSON on stderr.

python benchmarks/prediction.py
python benchmarks/prediction.py --only 5B/8GiB/16 5B/16GiB/16
python benchmarks/prediction.py --accelerator cpu --models tiny --capacities 4MiB 8MiB
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from offload.model import GPT, Shape, Tokens, build
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.errors import CapacityError, PlanError
from lightning_harmony.fit.garbage import NUM_FIRST_STEPS
from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.prediction import Prediction

MODELS = {
    "1B": Shape(hidden=2048, layers=18, heads=32),
    "5B": Shape(),
    "tiny": Shape(hidden=64, layers=4, heads=4, vocabulary=512, length=128),
}
# Sequences in a microbatch: more of the large model's do not fit the smallest capacity.
SEQUENCES = {"1B": 2, "5B": 1, "tiny": 2}
COLUMNS = (
    "predicted s",
    "measured s",
    "ratio",
    "predicted peak GiB",
    "measured peak GiB",
    "ratio",
    "predicted in GB",
    "counted in GB",
    "predicted out GB",
    "counted out GB",
)


class Steps:
    """Makes batches, and takes stock before each: a callback that runs between steps would be taken to look at weights.

    So would what holds the strategy, through which they are reached.

    Args:
        strategy: whose steps they are.
        is_gpu: whether a GPU is waited for, and its allocator asked.
    """

    def __init__(self, strategy: Any, *, is_gpu: bool) -> None:
        self._strategy = weakref.proxy(strategy)
        self._is_gpu = is_gpu
        self._began: float | None = None
        self._plan: Plan | None = None
        self.taken: list[dict[str, Any]] = []

    def __call__(self, samples: list[Tensor]) -> Tensor:
        """A batch; what was computed before it is done."""
        self.end()
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._plan, self._began = self._strategy.plan, time.perf_counter()
        return torch.stack(samples)

    def end(self) -> None:
        """Note what the step that began last took."""
        if self._is_gpu:
            # Not for all streams: copies of this step may go on beside the next one.
            torch.cuda.current_stream().synchronize()
        if self._began is None:
            return
        seconds, report = time.perf_counter() - self._began, self._strategy.step_report
        peak = torch.cuda.max_memory_allocated() if self._is_gpu else report.peak_device_bytes[0]
        self.taken.append({"seconds": seconds, "peak_bytes": peak, "report": report, "plan": self._plan})
        self._began = None


def fit(model: GPT, shape: Shape, row: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps; return what they were predicted to take, and what they took."""
    name, capacity, number = row.split("/")
    num_microbatches, is_gpu = int(number), options.accelerator == "gpu"
    batch_size = num_microbatches * (options.microbatch_size or SEQUENCES[name])
    strategy = HarmonyStrategy(device_memory=capacity, num_microbatches=num_microbatches, profile_cache=False)
    steps = Steps(strategy, is_gpu=is_gpu)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.perf_counter()
    # One more, which ends with the fit and does not count.
    data = Tokens((options.steps + 1) * batch_size, shape)
    trainer.fit(model, DataLoader(data, batch_size=batch_size, collate_fn=steps))
    took = time.perf_counter() - start
    plan = strategy.plan
    # The first step by the plan still grows the allocator's pools, and in one the garbage collector looks at everything once.
    planned = [s for s in steps.taken[NUM_FIRST_STEPS:] if s["plan"] and plan and _does_the_same(s["plan"], plan)]
    if not planned:
        raise RuntimeError(f"the plan was still changed in the last of {options.steps} steps: give more --steps")
    assert plan is not None
    assert plan.profile is not None
    measured = _measured(planned)
    values: dict[str, Any] = {
        "row": row,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": batch_size * shape.length,
        "seconds of each step": [round(step["seconds"], 4) for step in steps.taken],
        "fit seconds": round(took, 1),
        "measured": measured,
        "predicted": None,
        "plan": str(plan),
        "machine": asdict(plan.profile.machine),
        "layers": [asdict(cost) for cost in plan.profile.layers],
        "report": asdict(planned[-1]["report"]),
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "torch": torch.__version__,
    }
    try:
        values["predicted"] = _predicted(predict(plan))
    except PlanError as error:
        values["error"] = f"no prediction: {error}".splitlines()[0]
    return values


def _does_the_same(plan: Plan, other: Plan) -> bool:
    """Whether what they foresee is all in which they may differ."""
    return replace(plan, predicted=None, profile=None) == replace(other, predicted=None, profile=None)


def _measured(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    report = steps[-1]["report"]
    return {
        "seconds": statistics.median(step["seconds"] for step in steps),
        "steps": len(steps),
        "peak_bytes": max(step["peak_bytes"] for step in steps),
        "in": dict(report.swapped_in_bytes),
        "out": dict(report.swapped_out_bytes),
    }


def _predicted(prediction: Prediction) -> dict[str, Any]:
    device = prediction.devices[0]
    return {
        "seconds": prediction.seconds,
        "peak_bytes": device.peak_bytes,
        "compute_seconds": device.compute_seconds,
        "in": dict(device.swapped_in_bytes),
        "out": dict(device.swapped_out_bytes),
    }


def train_all(rows: Sequence[str], options: argparse.Namespace) -> None:
    """Train one model for each of its rows, and print each as JSON."""
    name = rows[0].split("/")[0]
    shape = MODELS[name]
    model = build(shape, recompute=False, fused=None, device="cuda" if options.accelerator == "gpu" else "cpu")
    for row in rows:
        try:
            values = fit(model, shape, row, options)
        except (CapacityError, RuntimeError) as error:
            values = {"row": row, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(values), flush=True)
        # What the last fit left must not count for the next: the optimizer's state hangs on the trainer.
        model.trainer = None
        model.losses.clear()
        gc.collect()
        if options.accelerator == "gpu":
            torch.cuda.empty_cache()


def _lines(rows: Sequence[str], arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What a process of its own prints of each row; what went wrong for those of which it prints nothing."""
    command = [sys.executable, str(Path(__file__)), *arguments, "--in-process", "--only", *rows]
    missing = list(rows)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"row"'):
                values = json.loads(line)
                missing.remove(values["row"])
                yield values
    for row in missing:
        yield {"row": row, "error": f"the process ended with code {process.returncode}"}


def _table_line(values: dict[str, Any]) -> str:
    if "measured" not in values:
        return f"| {values['row']} | {values['error'].splitlines()[0]} |"
    measured, predicted = values["measured"], values["predicted"]
    if predicted is None:
        cells = ["", f"{measured['seconds']:.3f}", "", "", f"{measured['peak_bytes'] / 2**30:.3f}", values["error"]]
        return f"| {values['row']} | {' | '.join(cells)} |"
    cells = []
    for key, unit, digits in (("seconds", 1, 3), ("peak_bytes", 2**30, 3)):
        cells += [f"{each[key] / unit:.{digits}f}" for each in (predicted, measured)]
        cells.append(f"{predicted[key] / measured[key]:.3f}")
    for way in ("in", "out"):
        cells += [f"{sum(each[way].values()) / 1e9:.3f}" for each in (predicted, measured)]
    return f"| {values['row']} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the rows that were asked for; by default all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1B", "5B"])
    parser.add_argument("--capacities", nargs="+", default=["4GiB", "8GiB", "16GiB"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--microbatch-size", type=int, help="sequences; by default 2, and 1 of the 5B model")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--only", nargs="+", help="these rows alone, such as 5B/8GiB/16")
    parser.add_argument("--in-process", action="store_true", help="train here, the rows of one model")
    options = parser.parse_args(arguments)
    rows = options.only or [
        f"{m}/{c}/{n}" for m, c, n in product(options.models, options.capacities, options.microbatches)
    ]
    if options.in_process:
        train_all(rows, options)
        return
    passed = ["--steps", str(options.steps), "--precision", options.precision, "--accelerator", options.accelerator]
    if options.microbatch_size:
        passed += ["--microbatch-size", str(options.microbatch_size)]
    print(f"| | {' | '.join(COLUMNS)} |\n|---|{'--:|' * len(COLUMNS)}", flush=True)
    for name in dict.fromkeys(row.split("/")[0] for row in rows):
        for values in _lines([row for row in rows if row.split("/")[0] == name], passed):
            print(_table_line(values), flush=True)
            print(json.dumps(values), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

"""`lightning-harmony bench`: the speed of this machine against the device memory that training may take."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import gcd
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_harmony.engine.measure.this_machine import describe_versions, measure_machine
from lightning_harmony.errors import CapacityError
from lightning_harmony.estimating.estimation import estimate
from lightning_harmony.estimating.result import Estimate
from lightning_harmony.estimating.subject import precision_name, quiet
from lightning_harmony.lightning_pytorch import HarmonyStrategy
from lightning_harmony.plan.drawing.page import format_seconds
from lightning_harmony.plan.values.card_memory import limit_for
from lightning_harmony.plan.values.machine import Machine
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.reporting.figures import refuse_format, refuse_without_folder
from lightning_harmony.reporting.speed_curve import OURS, PLAIN, Point, Series, draw_curve
from lightning_harmony.workload import Sizes, Workload, workload_of

# The first step measures and the next ones make the plan; on a GPU, memory is page-locked and the allocator settles.
WARM_UP_STEPS = {"gpu": 6, "cpu": 3}
MEASURED_STEPS = {"gpu": 6, "cpu": 3}
BUDGETS = {"gpu": 4, "cpu": 3}
NUM_MICROBATCHES = {"gpu": 8, "cpu": 2}
# Which are trained on again and again.
_NUM_BATCHES = 4
# Estimates are some per cent off, those of training in memory by what the optimizer's step takes meanwhile.
LEAST_SPARE, MOST_SPARE = 1.05, 1.15
_HEAD = ("device memory", "a step", "speed", "predicted", "predicted peak", "peak", "packs")


# On a GPU, the first of these whose training fits there and on the host; on the CPU, one that takes seconds.
GPU_SIZES = (Sizes(2048, 8), Sizes(1536, 8), Sizes(1024, 8), Sizes(512, 6, batch_size=16))
CPU_SIZES = Sizes(128, 3, length=64, batch_size=4, num_microbatches=2, vocabulary=1000)


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        device_memory_bytes: the budget; None for plain Lightning, which has no limit.
        seconds: of a step, the median of those that are measured.
        speed: the seconds of plain Lightning in memory divided by these.
        predicted_seconds: of a step by the plan that was made after the first one; None where nothing is swapped.
        predicted_peak_bytes: by the same plan.
        peak_bytes: the most that was allocated on the device; None where nothing counts it.
        num_packs: into which the layers were divided; 0 where nothing is swapped.
        failure: why it could not be trained; empty if it could.
    """

    device_memory_bytes: int | None
    seconds: float | None = None
    speed: float | None = None
    predicted_seconds: float | None = None
    predicted_peak_bytes: int | None = None
    peak_bytes: int | None = None
    num_packs: int = 0
    failure: str = ""


class _Clock(pl.Callback):
    """Notes when each step ends. On a GPU that is when the host has launched it, which is at most some launches ahead."""

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # Of the batches that accumulate, those after a step have its number, too.
        self._ends.setdefault(trainer.global_step, perf_counter())

    def seconds(self, warm_up: int) -> float:
        """The median of the steps after the first ones."""
        ends = [end for step, end in self._ends.items() if step >= warm_up]
        return statistics.median(end - start for start, end in pairwise(ends))


@dataclass(frozen=True)
class Bench:
    """A benchmark of this machine.

    Args:
        workload: what is trained.
        outlook: what the estimate says of it without a limit.
        machine: where.
        precision: as for Lightning's Trainer.
        accelerator: "gpu" or "cpu".
        num_steps: that are measured.
    """

    workload: Workload
    outlook: Estimate
    machine: Machine
    precision: str
    accelerator: str
    num_steps: int

    def budgets(self, number: int) -> list[int]:
        """Device memory from the least that trains to all that training takes in memory, with equal ratios between them."""
        least = int(LEAST_SPARE * self._least_bytes())
        most = max(least, int(MOST_SPARE * self.outlook.in_memory_bytes))
        amounts = [int(least * (most / least) ** (step / max(number - 1, 1))) for step in range(number)]
        return [limit_for(amount) if self.accelerator == "gpu" else amount for amount in amounts]

    def _least_bytes(self) -> int:
        """What is needed where there is no more than that: packs and layers are the smaller, the less a device has."""
        need = self.outlook.outlook.need.num_bytes
        for _ in range(2):
            need = min(need, _estimate(self.workload, self.precision, self.machine, need).outlook.need.num_bytes)
        return need

    def plain(self) -> Row:
        """Train in memory, as plain Lightning does, with the same microbatches.

        Raises:
            ValueError: if there is too little memory.
        """
        try:
            seconds, peak, _ = self._fit("auto", self.workload.num_microbatches)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"plain Lightning runs out of memory: {self.workload.smaller} ({error})") from error
        return Row(None, seconds, 1.0, peak_bytes=peak)

    def harmony(self, budget: int, plain: Row) -> Row:
        """Train under a budget."""
        strategy = HarmonyStrategy(
            device_memory=budget, num_microbatches=self.workload.num_microbatches, profile_cache=False
        )
        row = Row(budget)
        try:
            seconds, peak, trained = self._fit(strategy, 1)
        except (CapacityError, torch.OutOfMemoryError) as error:
            return replace(row, failure=str(error))
        predicted = None if trained.plan is None else trained.plan.predicted
        if predicted is not None:
            row = replace(row, predicted_seconds=predicted.seconds, predicted_peak_bytes=max(predicted.peak_bytes))
        assert plain.seconds is not None
        report = trained.step_report
        return replace(
            row,
            seconds=seconds,
            speed=plain.seconds / seconds,
            peak_bytes=max(report.peak_device_bytes, default=peak),
            num_packs=report.num_packs,
        )

    def _fit(self, strategy: Any, accumulate: int) -> tuple[float, int | None, Any]:
        """Seconds of a step, bytes allocated at the most, and the strategy that trained."""
        clock, warm_up = _Clock(), WARM_UP_STEPS[self.accelerator]
        torch.manual_seed(0)
        # Trainers and models refer to each other: an earlier one would still hold its memory.
        gc.collect()
        batch_size = self.workload.batch_size
        made = self.workload.samples(_NUM_BATCHES * batch_size)
        if self.accelerator == "gpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator=self.accelerator,
            devices=1,
            precision=self.precision,  # type: ignore[arg-type]
            max_steps=warm_up + self.num_steps,
            accumulate_grad_batches=accumulate,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(self.workload.build(), DataLoader(made, batch_size // accumulate))  # type: ignore[arg-type]
        peak = torch.cuda.max_memory_allocated() if self.accelerator == "gpu" else None
        return clock.seconds(warm_up), peak, trainer.strategy


def run(
    *,
    model: Any = None,
    batch: Any = None,
    sequence_length: int | None = None,
    accelerator: str | None = None,
    precision: str | None = None,
    steps: int | None = None,
    budgets: int | None = None,
    picture: Path = Path("bench.png"),
    json_file: Path | None = None,
    show: Callable[[str], None] = print,
    **sizes: int,
) -> list[Row]:
    """Train in memory and under several budgets; print a table, draw the curve.

    Args:
        model: a function that makes a LightningModule, or the configuration of a Hugging Face model; None for a transformer.
        batch: an example batch of the model, as for `estimate`.
        sequence_length: tokens of a sample of a Hugging Face model.
        accelerator: "gpu" or "cpu"; None for the GPU if there is one.
        precision: as for Lightning's Trainer; None for bf16-mixed on a GPU, else 32-true.
        steps: to measure in each training; None for 6 on a GPU, else 3.
        budgets: how many; None for 4 on a GPU, else 3.
        picture: where the curve goes.
        json_file: where the rows go, if anywhere.
        show: takes a line.
        sizes: of the transformer in place of those that the machine suggests, as attributes of `Sizes`; with a model, its
            batch_size and num_microbatches.

    Raises:
        ValueError: if an argument makes no sense, or the model does not fit in memory.
        ImportError: if matplotlib is not installed.
    """
    has_gpu = torch.cuda.is_available()
    if accelerator == "gpu" and not has_gpu:
        raise ValueError("--accelerator gpu, but torch finds no CUDA device: use --accelerator cpu")
    for name, number in {"steps": steps, "budgets": budgets}.items():
        if number is not None and number < 1:
            raise ValueError(f"--{name} must be at least 1, not {number}")
    accelerator = accelerator or ("gpu" if has_gpu else "cpu")
    on_gpu = accelerator == "gpu"
    precision = precision_name(precision or ("bf16-mixed" if on_gpu else "32-true"))
    refuse_format(picture)
    if json_file is not None:
        refuse_without_folder(json_file)
    if model is None:
        if batch is not None or sequence_length is not None:
            raise ValueError("--batch and --sequence-length are of a model: name one, or give --length")
        candidates = [replace(each, **sizes).workload() for each in (GPU_SIZES if on_gpu else [CPU_SIZES])]
    else:
        candidates = [_of_model(model, batch, sequence_length, accelerator, **sizes)]
    # Nobody watches what Lightning and torch say of trainings.
    with quiet("lightning.pytorch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bench = _fitting(candidates, precision, steps, accelerator)
        notes = _describe(bench)
        for line in (*notes, "", _line(_HEAD)):
            show(line)
        rows = [bench.plain()]
        show(_line(_cells(rows[0])))
        for budget in bench.budgets(budgets or BUDGETS[accelerator]):
            rows.append(bench.harmony(budget, rows[0]))
            show(_line(_cells(rows[-1])))
    if any(row.speed for row in rows[1:]):
        _draw(rows, notes, picture)
        show(f"wrote {picture}")
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": notes, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
        show(f"wrote {json_file}")
    return rows


def _of_model(
    model: Any,
    batch: Any,
    sequence_length: int | None,
    accelerator: str,
    *,
    batch_size: int | None = None,
    num_microbatches: int | None = None,
    **of_transformer: int,
) -> Workload:
    if of_transformer:
        raise ValueError(
            f"--{next(iter(of_transformer))} is of the transformer that is trained where no model is named: give the model's "
            "own arguments, as in transformers.GPT2Config n_layer=24"
        )
    found = workload_of(
        model, batch, batch_size=batch_size, sequence_length=sequence_length, num_microbatches=num_microbatches or 1
    )
    number = gcd(found.batch_size, NUM_MICROBATCHES[accelerator])
    return found if num_microbatches else replace(found, num_microbatches=number)


def _fitting(candidates: list[Workload], precision: str, num_steps: int | None, accelerator: str) -> Bench:
    """The largest model whose training fits in memory.

    Raises:
        ValueError: if none does.
    """
    machine = measure_machine()
    for workload in candidates:
        outlook = _estimate(workload, precision, machine, None)
        room = machine.device_bytes if accelerator == "gpu" else machine.host_bytes
        if (room is None or MOST_SPARE * outlook.in_memory_bytes < room) and outlook.fits_host(outlook.chosen):
            return Bench(workload, outlook, machine, precision, accelerator, num_steps or MEASURED_STEPS[accelerator])
    raise ValueError(
        f"{workload.text} takes {format_bytes(outlook.in_memory_bytes)} in memory, for plain Lightning to train it, and "
        f"{format_bytes(outlook.outlook.host.least_bytes)} of the host, which has {format_bytes(machine.host_bytes or 0)}: "
        f"{workload.smaller}"
    )


def _estimate(workload: Workload, precision: str, machine: Machine, limit: int | None) -> Estimate:
    return estimate(
        workload.estimated,
        workload.batch,
        num_microbatches=workload.num_microbatches,
        precision=precision,
        machine=replace(machine, device_bytes=None),
        device_memory=limit,
    )


# ---- what is told ------------------------------------------------------------------------------------------------------


def _describe(bench: Bench) -> list[str]:
    """Model, machine and versions."""
    workload, outlook = bench.workload, bench.outlook
    where = bench.machine.name
    if bench.accelerator == "cpu":
        where = (
            f"a virtual device in the memory of {_cpu_name()}: this shows what it does, and not how fast a GPU would be"
        )
    return [
        f"{workload.text}, {outlook.num_parameters / 1e6:.3g} M parameters, {bench.precision}, {outlook.optimizer}; "
        f"{outlook.items_per_step:,} {outlook.items} a step, {workload.num_microbatches} microbatches",
        where,
        describe_versions(),
    ]


def _cpu_name() -> str:
    """The model of the processor, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{next(iter(models), platform.machine())}, {os.cpu_count()} cores"


def _cells(row: Row) -> tuple[str, ...]:
    budget = "plain, no limit" if row.device_memory_bytes is None else format_bytes(row.device_memory_bytes)
    if row.failure:
        return budget, f"does not train: {row.failure.splitlines()[0]}"

    def amount(num_bytes: int | None) -> str:
        return "" if num_bytes is None else format_bytes(num_bytes)

    return (
        budget,
        "" if row.seconds is None else format_seconds(row.seconds),
        "" if row.speed is None else f"{row.speed:.2f}",
        "" if row.predicted_seconds is None else format_seconds(row.predicted_seconds),
        amount(row.predicted_peak_bytes),
        amount(row.peak_bytes),
        str(row.num_packs) if row.num_packs else "in memory",
    )


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.rjust(max(len(head), 9)) for cell, head in zip(cells, _HEAD, strict=False))


def _draw(rows: list[Row], notes: list[str], file: Path) -> None:
    plain, *others = rows
    ours = [
        Point(format_bytes(row.device_memory_bytes), row.device_memory_bytes, row.speed, (-5, 5, "right"))
        for row in others
        if row.speed is not None and row.device_memory_bytes is not None
    ]
    series = [Series(ours, OURS, is_line=True)]
    if plain.peak_bytes is not None:
        series.append(Series([Point("plain", plain.peak_bytes, 1.0, (0, -8, "center"))], PLAIN))
    speed = "speed of harmony, against plain Lightning in memory = 1"
    draw_curve(series, file, memory="device memory that training may take", speed=speed, notes=notes)

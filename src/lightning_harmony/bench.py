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
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

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

# The first step measures and the next ones make the plan; on a GPU, memory is page-locked and the allocator settles.
WARM_UP_STEPS = {"gpu": 6, "cpu": 3}
MEASURED_STEPS = {"gpu": 6, "cpu": 3}
BUDGETS = {"gpu": 4, "cpu": 3}
# Estimates are some per cent off, those of training in memory by what the optimizer's step takes meanwhile.
LEAST_SPARE, MOST_SPARE = 1.05, 1.15
_HEAD = ("device memory", "a step", "speed", "predicted", "predicted peak", "peak", "packs")


@dataclass(frozen=True)
class Sizes:
    """What is trained.

    Attributes:
        hidden: numbers for each token between the layers.
        layers: of the transformer.
        length: tokens of a sample.
        batch_size: samples of a step.
        num_microbatches: into which a step is split.
        vocabulary: different tokens.
    """

    hidden: int
    layers: int
    length: int = 1024
    batch_size: int = 32
    num_microbatches: int = 8
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        for name, number in asdict(self).items():
            if number < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {number}")
        if self.hidden > 64 and self.hidden % 64:
            raise ValueError(
                f"--hidden {self.hidden}: each head has 64 numbers, so give a multiple of 64, or less than that"
            )
        if self.batch_size % self.num_microbatches:
            raise ValueError(
                f"--num-microbatches {self.num_microbatches} must divide --batch-size {self.batch_size}: plain Lightning "
                "takes the microbatches as batches of its own, which have one size"
            )


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


class Transformer(pl.LightningModule):
    """A plain transformer that is trained to tell a word from each of its words."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, heads = sizes.hidden, max(1, sizes.hidden // 64)
        self.tokens = nn.Embedding(sizes.vocabulary, hidden)
        self.positions = nn.Embedding(sizes.length, hidden)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(sizes.layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, sizes.vocabulary, bias=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # noqa: D102
        words, targets = batch
        x = self.tokens(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:  # noqa: D102
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


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
        sizes: what is trained.
        outlook: what the estimate says of it without a limit.
        machine: where.
        precision: as for Lightning's Trainer.
        accelerator: "gpu" or "cpu".
        num_steps: that are measured.
    """

    sizes: Sizes
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
            need = min(need, _estimate(self.sizes, self.precision, self.machine, need).outlook.need.num_bytes)
        return need

    def plain(self) -> Row:
        """Train in memory, as plain Lightning does, with the same microbatches.

        Raises:
            ValueError: if there is too little memory.
        """
        try:
            seconds, peak, _ = self._fit("auto", self.sizes.num_microbatches)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"plain Lightning runs out of memory: use a smaller --hidden, --layers or --length ({error})"
            ) from error
        return Row(None, seconds, 1.0, peak_bytes=peak)

    def harmony(self, budget: int, plain: Row) -> Row:
        """Train under a budget."""
        strategy = HarmonyStrategy(
            device_memory=budget, num_microbatches=self.sizes.num_microbatches, profile_cache=False
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
        sizes, clock, warm_up = self.sizes, _Clock(), WARM_UP_STEPS[self.accelerator]
        torch.manual_seed(0)
        # Trainers and models refer to each other: an earlier one would still hold its memory.
        gc.collect()
        shape = (4 * sizes.batch_size, sizes.length)
        made = TensorDataset(*(torch.randint(0, sizes.vocabulary, shape) for _ in range(2)))
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
        trainer.fit(Transformer(sizes), DataLoader(made, sizes.batch_size // accumulate))
        peak = torch.cuda.max_memory_allocated() if self.accelerator == "gpu" else None
        return clock.seconds(warm_up), peak, trainer.strategy


def run(
    *,
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
        accelerator: "gpu" or "cpu"; None for the GPU if there is one.
        precision: as for Lightning's Trainer; None for bf16-mixed on a GPU, else 32-true.
        steps: to measure in each training; None for 6 on a GPU, else 3.
        budgets: how many; None for 4 on a GPU, else 3.
        picture: where the curve goes.
        json_file: where the rows go, if anywhere.
        show: takes a line.
        sizes: in place of those that the machine suggests, as attributes of `Sizes`.

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
    candidates = [replace(each, **sizes) for each in (GPU_SIZES if on_gpu else [CPU_SIZES])]
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


def _fitting(candidates: list[Sizes], precision: str, num_steps: int | None, accelerator: str) -> Bench:
    """The largest model whose training fits in memory.

    Raises:
        ValueError: if none does.
    """
    machine = measure_machine()
    for sizes in dict.fromkeys(candidates):
        outlook = _estimate(sizes, precision, replace(machine, device_bytes=None), None)
        room = machine.device_bytes if accelerator == "gpu" else machine.host_bytes
        if (room is None or MOST_SPARE * outlook.in_memory_bytes < room) and outlook.fits_host(outlook.chosen):
            return Bench(sizes, outlook, machine, precision, accelerator, num_steps or MEASURED_STEPS[accelerator])
    raise ValueError(
        f"the smallest model takes {format_bytes(outlook.in_memory_bytes)} in memory, for plain Lightning to train it, and "
        f"{format_bytes(outlook.outlook.host.least_bytes)} of the host, which has {format_bytes(machine.host_bytes or 0)}: "
        "use a smaller --hidden, --layers, --length or --batch-size"
    )


def _estimate(sizes: Sizes, precision: str, machine: Machine, limit: int | None) -> Estimate:
    batch = torch.empty(sizes.batch_size, sizes.length, dtype=torch.int64, device="meta")
    return estimate(
        lambda: Transformer(sizes),
        [batch, batch],
        num_microbatches=sizes.num_microbatches,
        precision=precision,
        machine=replace(machine, device_bytes=None),
        device_memory=limit,
    )


# ---- what is told ------------------------------------------------------------------------------------------------------


def _describe(bench: Bench) -> list[str]:
    """Model, machine and versions."""
    sizes, outlook = bench.sizes, bench.outlook
    where = bench.machine.name
    if bench.accelerator == "cpu":
        where = (
            f"a virtual device in the memory of {_cpu_name()}: this shows what it does, and not how fast a GPU would be"
        )
    return [
        f"transformer, {outlook.num_parameters / 1e6:.3g} M parameters, {sizes.layers} layers of {sizes.hidden}, "
        f"{bench.precision}, AdamW; {sizes.batch_size * sizes.length:,} tokens a step, {sizes.num_microbatches} microbatches",
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

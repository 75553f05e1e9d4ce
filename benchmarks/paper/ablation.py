"""What each part of Harmony saves: bytes of weights and gradients a step, counted by replay, beside their formulas.

python benchmarks/paper/ablation.py

No GPU is needed. Each row adds something to the one before. With --measured FILE, the file of lines that `train.py --out`
wrote, each row shows the median step on one GPU, too.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import SUBJECTS, Subject
from rows import ROWS, Costs, Counted, costs_of, count, plan_of
from train import arguments, chosen

from lightning_harmony.errors import CapacityError, PlanError
from lightning_harmony.plan.machine import H200
from lightning_harmony.plan.memory_size import parse_bytes

PLACEMENTS = {"data": "DP", "pipeline": "PP"}


@dataclass(frozen=True)
class Line:
    """One row for one placement: what was counted for each number of devices."""

    row: str
    parallel: str
    counted: dict[int, Counted]


def lines_of(subject: Subject, costs: Costs, numbers: list[int]) -> list[Line]:
    """Replay all rows."""
    lines = []
    for row in ROWS:
        for parallel in PLACEMENTS:
            counted = {}
            for number in numbers:
                plan = plan_of(row, costs, subject.num_microbatches * number, number, parallel)
                counted[number] = count(plan, costs)
            lines.append(Line(row, parallel, counted))
    return lines


def table(lines: list[Line], numbers: list[int], seconds: dict[str, float]) -> str:
    """As Markdown. Bytes are in GB, those of the formula in brackets."""
    head = ["", "", "formula", *(f"{n} device{'s' if n > 1 else ''}" for n in numbers), "differ by"]
    if seconds:
        head.append("step on one GPU")
    rows = [head, ["---", "---", "---", *["--:"] * (len(head) - 3)]]
    for line in lines:
        cells = [f"{c.num_bytes / 1e9:.1f} ({c.formula_bytes / 1e9:.1f})" for c in line.counted.values()]
        formula = next(iter(line.counted.values())).formula
        name = ("" if line.row == ROWS[0] else "+ ") + line.row
        rows.append([name, PLACEMENTS[line.parallel], formula, *cells, f"{_largest_difference(line):.2%}"])
        if seconds:
            rows[-1].append(f"{seconds[line.row]:.3f} s" if line.row in seconds else "")
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _largest_difference(line: Line) -> float:
    return max(abs(c.num_bytes / c.formula_bytes - 1) for c in line.counted.values())


def read_seconds(file: Path, model: str) -> dict[str, float]:
    """The steps on one device that were measured of a model, by row."""
    measured: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    return {
        row["row"]: row["seconds"]
        for row in measured
        if row["model"] == model and row["devices"] == 1 and "seconds" in row
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--devices", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--measured", type=Path)
    options = parser.parse_args()
    worst = 0.0
    for name in options.models:
        began = time.perf_counter()
        subject = chosen(name, options)
        costs = costs_of(subject.shape, subject.microbatch_size, H200, parse_bytes(options.capacity))
        try:
            lines = lines_of(subject, costs, options.devices)
        except (CapacityError, PlanError) as error:
            sys.exit(f"{subject.title}: {error}")
        first = lines[0].counted[options.devices[-1]]
        print(
            f"### {subject.title}: W = {costs.weight_bytes / 1e9:.2f} GB, m = {subject.num_microbatches} microbatches of "
            f"{subject.microbatch_size} on each device, {options.capacity}\n"
        )
        print(table(lines, options.devices, read_seconds(options.measured, name) if options.measured else {}))
        print(
            f"\nWhere memory is virtual, the paper counts {first.paper}: {first.paper_bytes / 1e9:.0f} GB in data parallel on "
            f"{options.devices[-1]} devices.\n",
            flush=True,
        )
        worst = max(worst, *(_largest_difference(line) for line in lines))
        print(f"{subject.title}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"largest difference between formula and count: {worst:.2%}", file=sys.stderr)
    if worst > 0.02:
        sys.exit("formula and count differ by more than 2 %")


if __name__ == "__main__":
    main()

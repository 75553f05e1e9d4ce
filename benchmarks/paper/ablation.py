"""What each part of Harmony saves: bytes of weights and gradients a step, counted by replay, beside their formulas.

python benchmarks/paper/ablation.py

No GPU is needed. Each row adds something to the one before. With --measured FILE, the lines that `train.py --out FILE`
wrote on one GPU, a second table has the median steps.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import SUBJECTS, Subject
from rows import IN_MEMORY, ROWS, Costs, Counted, costs_of, count, plan_of
from train import arguments, chosen

from lightning_harmony.errors import CapacityError, PlanError
from lightning_harmony.plan.values.machine import H200
from lightning_harmony.plan.values.memory_size import parse_bytes
from lightning_harmony.plan.values.plan import Parallel

PLACEMENTS: dict[Parallel, str] = {"data": "DP", "pipeline": "PP"}


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


def bytes_table(lines_by_model: dict[str, list[Line]]) -> str:
    """As Markdown: in each cell, the GB counted on each number of devices."""
    head = ["", "", "formula", *(SUBJECTS[name].title for name in lines_by_model), "they differ by"]
    rows = [head, ["---", "---", "---", *["--:"] * (len(head) - 3)]]
    for lines in zip(*lines_by_model.values(), strict=True):
        cells = [" / ".join(_gigabytes(c.num_bytes) for c in line.counted.values()) for line in lines]
        formula = next(iter(lines[0].counted.values())).formula
        worst = max(map(_largest_difference, lines))
        rows.append([_name(lines[0].row), PLACEMENTS[lines[0].parallel], formula, *cells, f"{worst:.2%}"])
    return _markdown(rows)


def seconds_table(seconds_by_model: dict[str, dict[str, float]]) -> str:
    """As Markdown: the steps that were measured on one device."""
    head = ["", *(SUBJECTS[name].title for name in seconds_by_model)]
    rows = [head, ["---", *["--:"] * (len(head) - 1)]]
    for row in (IN_MEMORY, *ROWS):
        steps = [seconds.get(row) for seconds in seconds_by_model.values()]
        rows.append([_name(row), *("" if step is None else f"{step:.3f} s" for step in steps)])
    return _markdown(rows)


def _name(row: str) -> str:
    return row if row in (IN_MEMORY, ROWS[0]) else f"+ {row}"


def _gigabytes(num_bytes: int) -> str:
    size = num_bytes / 1e9
    return f"{size:.1f}" if size < 100 else f"{size:.0f}"


def _markdown(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _largest_difference(line: Line) -> float:
    return max(abs(c.num_bytes / c.formula_bytes - 1) for c in line.counted.values())


def read_seconds(file: Path, model: str) -> dict[str, float]:
    """The steps on one device that were measured of a model, by row."""
    measured: list[dict[str, Any]] = [
        json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")
    ]
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
    found: dict[str, list[Line]] = {}
    for name in options.models:
        began = time.perf_counter()
        subject = chosen(name, options)
        costs = costs_of(subject.shape, subject.microbatch_size, H200, parse_bytes(options.capacity))
        try:
            found[name] = lines_of(subject, costs, options.devices)
        except (CapacityError, PlanError) as error:
            sys.exit(f"{subject.title}: {error}")
        print(
            f"- {subject.title}: W = {costs.weight_bytes / 1e9:.2f} GB, m = {subject.num_microbatches} microbatches of "
            f"{subject.microbatch_size} on each device. Where memory is virtual, the paper counts "
            + _paper(found[name], options.devices[-1]),
            flush=True,
        )
        print(f"{subject.title}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    numbers = " / ".join(map(str, options.devices))
    print(f"\nGB of weights and gradients a step on {numbers} devices of {options.capacity}:\n\n{bytes_table(found)}")
    if options.measured:
        seconds = {name: read_seconds(options.measured, name) for name in options.models}
        print(f"\nThe step on one device:\n\n{seconds_table(seconds)}")
    worst = max(_largest_difference(line) for lines in found.values() for line in lines)
    if worst > 0.02:
        sys.exit(f"formula and count differ by {worst:.2%}")


def _paper(lines: list[Line], number: int) -> str:
    """What the paper's formulas give for the first row on a number of devices."""
    first = [line.counted[number] for line in lines if line.row == ROWS[0]]
    return f"{' or '.join(f'{c.paper} = {c.paper_bytes / 1e9:.0f} GB' for c in first)} on {number} devices."


if __name__ == "__main__":
    main()

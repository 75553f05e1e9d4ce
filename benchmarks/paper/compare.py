"""The paper's comparison, from what `train.py --out` wrote: throughput and swapped bytes of four schemes, with a picture.

python benchmarks/paper/compare.py results.jsonl --png paper.png

(a) each microbatch swaps each layer anew, the devices sharing the microbatches; (b) the same, the devices sharing the layers;
(c) Harmony DP; (d) Harmony PP.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import SUBJECTS
from rows import ROWS

from lightning_harmony.plan.values.plan import Parallel

SCHEMES: dict[str, tuple[str, str, Parallel]] = {
    "a": ("a: per microbatch, data parallel", ROWS[0], "data"),
    "b": ("b: per microbatch, pipeline", ROWS[0], "pipeline"),
    "c": ("c: Harmony DP", ROWS[-1], "data"),
    "d": ("d: Harmony PP", ROWS[-1], "pipeline"),
}
# On one device, two of them are one.
ON_ONE_DEVICE = {"b": "a, b: per microbatch", "d": "c, d: Harmony"}
CLAIMED_SPEED, CLAIMED_BYTES = 7.6, 300


@dataclass(frozen=True)
class Measured:
    """One scheme on so many devices."""

    model: str
    devices: int
    scheme: str
    samples_per_second: float
    seconds: float
    state_bytes: int
    stash_bytes: int
    paper_bytes: int


def read(files: Sequence[Path]) -> list[Measured]:
    """What was measured of the four schemes; of a row that was measured twice, the last."""
    found: dict[tuple[str, int, str], Measured] = {}
    for file in files:
        for line in (line for line in file.read_text().splitlines() if line.startswith("{")):
            row = json.loads(line)
            for scheme, (_, name, parallel) in SCHEMES.items():
                is_alone = row["devices"] == 1
                is_its = scheme in ON_ONE_DEVICE if is_alone else row["parallel"] == parallel
                if row["row"] == name and is_its and "seconds" in row:
                    found[row["model"], row["devices"], scheme] = _measured(row, scheme)
    return [found[key] for key in sorted(found, key=lambda key: (list(SUBJECTS).index(key[0]), *key[1:]))]


def _measured(row: dict[str, Any], scheme: str) -> Measured:
    ways = [row["report"][f"swapped_{way}_bytes"] for way in ("in", "out")]
    return Measured(
        row["model"],
        row["devices"],
        scheme,
        row["samples_per_second"],
        row["seconds"],
        sum(way[kind] for way in ways for kind in ("weights", "gradients", "optimizer")),
        sum(way["stash"] for way in ways),
        row["planned"]["paper_bytes"],
    )


def table(rows: Sequence[Measured]) -> str:
    """As Markdown, each scheme against (a) on as many devices."""
    first = {(row.model, row.devices): row for row in reversed(rows) if row.scheme in "ab"}
    lines = [
        "| model | devices | scheme | step | samples/s | speed of (a) | weights and gradients | bytes of (a) | stash |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        base = first.get((row.model, row.devices))
        speed = f"{row.samples_per_second / base.samples_per_second:.2f} x" if base else ""
        fewer = f"1/{base.state_bytes / row.state_bytes:.1f}" if base else ""
        lines.append(
            f"| {SUBJECTS[row.model].title} | {row.devices} | {_title(row)} | {row.seconds:.3f} s | "
            f"{row.samples_per_second:.2f} | {speed} | {row.state_bytes / 1e9:.1f} GB | {fewer} | "
            f"{row.stash_bytes / 1e9:.1f} GB |"
        )
    return "\n".join(lines)


def _title(row: Measured) -> str:
    return ON_ONE_DEVICE[row.scheme] if row.devices == 1 else SCHEMES[row.scheme][0]


def claims(rows: Sequence[Measured]) -> str:
    """The largest ratios that were measured, beside the paper's."""
    by_key = {(row.model, row.devices, row.scheme): row for row in rows}
    speeds, swaps, virtual = [], [], []
    for row in rows:
        for base in (by_key.get((row.model, row.devices, scheme)) for scheme in "ab"):
            if base is None or row.scheme not in "cd":
                continue
            where = f"{SUBJECTS[row.model].title}, {row.devices} x {row.scheme} against {base.scheme}"
            speeds.append((row.samples_per_second / base.samples_per_second, where))
            swaps.append((base.state_bytes / row.state_bytes, where))
            virtual.append((base.paper_bytes / row.state_bytes, where))
    if not speeds:
        return "no pair of schemes was measured"
    parts = [
        f"throughput: up to {max(speeds)[0]:.1f} x ({max(speeds)[1]}); the paper: up to {CLAIMED_SPEED} x",
        f"swapped weights and gradients: down by up to {max(swaps)[0]:.0f} x ({max(swaps)[1]}); the paper: up to "
        f"{CLAIMED_BYTES} x, where memory is virtual, which also writes what did not change and brings the optimizer's state",
        f"the bytes that the paper's formula gives for that, over those counted here: up to {max(virtual)[0]:.0f} x "
        f"({max(virtual)[1]})",
    ]
    return "\n".join(f"- {part}" for part in parts)


# ---- picture -----------------------------------------------------------------------------------------------------------

# Two hues, of which the darker one is the pipeline.
COLOURS = {"a": "#f2b17c", "b": "#d9772b", "c": "#7fb3d5", "d": "#1f6aa5"}
GREY = "#5a5a5a"


def draw(rows: Sequence[Measured], file: Path) -> None:
    """Throughput above, swapped bytes below, a column for each model."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    models = list(dict.fromkeys(row.model for row in rows))
    plt.rcParams.update({"font.size": 10, "axes.edgecolor": "#b0b0b0", "axes.titleweight": "bold"})
    figure, axes = plt.subplots(
        2, len(models), figsize=(1.6 + 4.2 * len(models), 6.4), squeeze=False, layout="constrained"
    )
    for column, model in enumerate(models):
        above, below = axes[0][column], axes[1][column]
        mine = [row for row in rows if row.model == model]
        _bars(above, mine, [row.samples_per_second for row in mine], "{:.1f}")
        _bars(below, mine, [row.state_bytes / 1e9 for row in mine], "{:.0f}")
        above.set_title(SUBJECTS[model].title)
        above.set_ylim(0, 1.18 * max(row.samples_per_second for row in mine))
        below.set_yscale("log")
        below.minorticks_off()
        below.yaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
        # The same for all models, so that heights compare.
        below.set_ylim(min(row.state_bytes for row in rows) / 2e9, 2 * max(row.state_bytes for row in rows) / 1e9)
        if column == 0:
            above.set_ylabel("samples a second")
            below.set_ylabel("weights and gradients\nswapped a step, GB (log)")
    used = [scheme for scheme in SCHEMES if any(row.scheme == scheme for row in rows)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[scheme]) for scheme in used]
    figure.legend(
        handles, [SCHEMES[s][0] for s in used], loc="outside upper center", ncols=len(used), frameon=False, fontsize=9
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _bars(axis: Any, rows: Sequence[Measured], heights: Sequence[float], form: str) -> None:
    numbers = sorted({row.devices for row in rows})
    for row, height in zip(rows, heights, strict=True):
        schemes = sorted({other.scheme for other in rows if other.devices == row.devices})
        width = 0.84 / 4
        place = numbers.index(row.devices) + (schemes.index(row.scheme) - (len(schemes) - 1) / 2) * width
        axis.bar(place, height, width * 0.92, color=COLOURS[row.scheme], zorder=2)
        axis.annotate(
            form.format(height),
            (place, height),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color=GREY,
        )
    axis.set_xticks(range(len(numbers)), [f"{number} GPU{'s' if number > 1 else ''}" for number in numbers])
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e6e6e6", zorder=0)
    axis.tick_params(length=0, colors=GREY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    rows = read(options.files)
    print(table(rows))
    print()
    print(claims(rows))
    if options.png is not None:
        draw(rows, options.png)


if __name__ == "__main__":
    main()

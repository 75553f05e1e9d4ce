"""Draw `docs/speed-against-memory.svg`: the speed of a step against device memory, from the tables of `benchmarks/README.md`.

python benchmarks/memory_picture.py
"""

from __future__ import annotations

import re
from pathlib import Path

from lightning_harmony.reporting.speed_curve import OTHERS, OURS, PLAIN, Point, Series, draw_curve

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "benchmarks" / "README.md"
PICTURE = ROOT / "docs" / "speed-against-memory.svg"

GIB = 2**30


def row(start: str, first: str) -> list[str]:
    """The cells of the first row with this first cell, behind a place in the text.

    Raises:
        ValueError: if there is no such place any more.
        LookupError: if there is no such row any more.
    """
    text = FIGURES.read_text()
    for line in text[text.index(start) :].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == first:
            return cells
    raise LookupError(f"{start}: {first}")


def number(cell: str) -> float:
    """The first number of a cell, as in "**1.018**" or "79.2 GiB"."""
    found = re.search(r"\d+(\.\d+)?", cell)
    assert found is not None, cell
    return float(found[0])


def whole_model() -> tuple[list[Point], list[Point]]:
    """The model of 5.09 B parameters in `bf16-mixed`: harmony's rows, and those of plain Lightning."""
    section = "## A GPT of 5.09 B parameters"
    recompute = row(section, "in memory, each block recomputed, `bf16-mixed`")

    def point(label: str, first: str, place: tuple[int, int, str]) -> Point:
        cells = row(section, first)
        return Point(label, GIB * number(cells[3]), number(recompute[1]) / number(cells[1]), place)

    ours = [
        point("8 GiB", "harmony, 8 GiB", (0, 8, "center")),
        point("16 GiB", "harmony, 16 GiB", (0, 8, "center")),
        point("whole GPU", "harmony, the whole GPU", (-3, 8, "center")),
    ]
    plain = [
        point("plain, with recompute", "in memory, each block recomputed, `bf16-mixed`", (0, -8, "center")),
        point("plain", "in memory, no recompute, `bf16-mixed`", (4, -8, "left")),
    ]
    return ours, plain


def half_model() -> tuple[Point, list[Point]]:
    """Half of the model, with bfloat16 weights on the device: harmony's row, and those of others."""
    section = "## Beside other tools"
    recompute = number(row(section, "in memory, each block recomputed, bf16 parameters and residual")[1])
    stale = row(section, "RoundPipe 0.1.1")
    synchronous = row(section, "RoundPipe 0.1.1, synchronous")
    zero, fsdp = row(section, "DeepSpeed 0.19.8, ZeRO-3, both offloads"), row(section, "FSDP2, CPU offload")
    ours = row(section, "harmony, 16 GiB")
    return Point("harmony", GIB * number(ours[2]), recompute / number(ours[1]), (0, -8, "center")), [
        Point("RoundPipe, one step stale", GIB * number(stale[2]), recompute / number(stale[1]), (-52, 8, "left")),
        Point("RoundPipe", GIB * number(synchronous[2]), recompute / number(synchronous[1]), (9, 0, "left")),
        Point("DeepSpeed ZeRO-3, offload", GIB * number(zero[2]), recompute / number(zero[1]), (0, -8, "center")),
        Point("FSDP2, offload", GIB * number(fsdp[2]), recompute / number(fsdp[1]), (9, 0, "left")),
    ]


def draw(file: Path) -> None:
    """Draw the picture."""
    ours, plain = whole_model()
    our_half, others = half_model()
    draw_curve(
        [
            Series(others, OTHERS, is_hollow=True),
            Series([our_half], OURS, is_hollow=True),
            Series(plain, PLAIN),
            Series(ours, OURS, "harmony", is_line=True),
        ],
        file,
        memory="device memory allocated",
        speed="speed, against plain Lightning in memory with recompute of each block = 1",
        notes=[
            "One H200, 32,768 tokens a step. Filled: 5.09 B parameters, bf16-mixed; hollow: 2.68 B, bf16.",
            "Commit 0b70b02 and before, with updates on the host. Tables and commands: benchmarks/README.md",
        ],
    )


if __name__ == "__main__":
    draw(PICTURE)
    print(f"wrote {PICTURE.relative_to(ROOT)}")

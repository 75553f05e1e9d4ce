"""Draw `docs/speed-against-memory.svg`: the speed of a step against device memory, from the tables of `benchmarks/README.md`.

python benchmarks/memory_picture.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "benchmarks" / "README.md"
PICTURE = ROOT / "docs" / "speed-against-memory.svg"

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 40, 84
MEMORY, SPEED = (2.0, 128.0), (0.0, 1.4)
OURS, PLAIN, OTHERS = "#0b6e4f", "#52606d", "#b4531f"


@dataclass(frozen=True)
class Point:
    """A row of a table.

    Attributes:
        label: what is written beside it.
        gib: of device memory, as allocated.
        speed: against plain Lightning in memory with recompute, of the same model.
        place: of the label: dx, dy and its anchor.
    """

    label: str
    gib: float
    speed: float
    place: tuple[int, int, str] = (0, -12, "middle")


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
    section = "### The newest rows"
    recompute = row(section, "in memory, each block recomputed, `bf16-mixed`")

    def point(label: str, first: str, place: tuple[int, int, str]) -> Point:
        cells = row(section, first)
        return Point(label, number(cells[4]), number(recompute[1]) / number(cells[1]), place)

    ours = [
        point("8 GiB", "harmony, 8 GiB", (0, -13, "middle")),
        point("16 GiB", "harmony, 16 GiB", (0, -13, "middle")),
        point("whole GPU", "harmony, the whole GPU", (-4, -13, "middle")),
    ]
    plain = [
        point("plain, with recompute", "in memory, each block recomputed, `bf16-mixed`", (0, 24, "middle")),
        point("plain", "in memory, no recompute, `bf16-mixed`", (8, 22, "start")),
    ]
    return ours, plain


def half_model() -> tuple[Point, list[Point]]:
    """Half of the model, with bfloat16 weights on the device: harmony's row, and those of others."""
    one_run, later = "Half of the model (12 layers", "Half of the model again, on another machine with one H200"
    recompute = number(row(one_run, "in memory, each block recomputed, bf16 parameters and residual")[1])
    stale = row(one_run, "RoundPipe 0.1.1")
    synchronous = row(one_run, "RoundPipe 0.1.1, synchronous")
    zero, fsdp = row(later, "DeepSpeed 0.19.8, ZeRO-3, both offloads"), row(later, "FSDP2, CPU offload")
    ours = row(one_run, "harmony, 16 GiB")
    return Point("harmony", number(ours[4]), recompute / number(ours[1]), (0, 22, "middle")), [
        Point("RoundPipe, one step stale", number(stale[4]), recompute / number(stale[1]), (-70, -13, "start")),
        Point("RoundPipe", number(synchronous[4]), recompute / number(synchronous[1]), (10, 4, "start")),
        Point("DeepSpeed ZeRO-3, offload", number(zero[3]), recompute / number(zero[1]), (0, 22, "middle")),
        Point("FSDP2, offload", number(fsdp[3]), recompute / number(fsdp[1]), (10, 4, "start")),
    ]


def x(gib: float) -> float:
    """Where an amount of memory is drawn; each doubling takes as much room."""
    low, high = map(math.log2, MEMORY)
    return LEFT + (math.log2(gib) - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def y(speed: float) -> float:
    """Where a speed is drawn."""
    low, high = SPEED
    return HEIGHT - BOTTOM - (speed - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def dots(points: Sequence[Point], color: str, *, hollow: bool = False) -> list[str]:
    """Points with their labels."""
    fill = f'fill="white" stroke="{color}" stroke-width="2.5"' if hollow else f'fill="{color}"'
    lines = []
    for point in points:
        dx, dy, anchor = point.place
        lines += [
            f'<circle cx="{x(point.gib):.1f}" cy="{y(point.speed):.1f}" r="5.5" {fill}/>',
            f'<text x="{x(point.gib) + dx:.1f}" y="{y(point.speed) + dy:.1f}" text-anchor="{anchor}" fill="{color}">'
            f"{point.label}</text>",
        ]
    return lines


def axes() -> list[str]:
    """The frame, its ticks and what they count."""
    lines = []
    gib = MEMORY[0]
    while gib <= MEMORY[1]:
        lines += [
            f'<line x1="{x(gib):.1f}" x2="{x(gib):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e4e7eb"/>',
            f'<text x="{x(gib):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{gib:g}</text>',
        ]
        gib *= 2
    for tenths in range(0, 15, 2):
        speed = tenths / 10
        width = 2 if tenths == 10 else 1
        color = "#9aa5b1" if tenths == 10 else "#e4e7eb"
        lines += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(speed):.1f}" y2="{y(speed):.1f}" stroke="{color}" '
            f'stroke-width="{width}"/>',
            f'<text x="{LEFT - 8}" y="{y(speed) + 4:.1f}" text-anchor="end">{speed:.1f}</text>',
        ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    lines += [
        f'<text x="{middle:.0f}" y="{HEIGHT - BOTTOM + 38}" text-anchor="middle">device memory allocated, GiB</text>',
        f'<text x="{LEFT - 44}" y="24">speed, against plain Lightning in memory with recompute of each block = 1</text>',
        note(
            HEIGHT - 24,
            "One H200, 32,768 tokens a step. Filled: 5.09 B parameters, bf16-mixed; hollow: 2.68 B, bf16.",
        ),
        note(
            HEIGHT - 8, "Commit 0b70b02 and before, with updates on the host. Tables and commands: benchmarks/README.md"
        ),
    ]
    return lines


def note(at: int, text: str) -> str:
    """A line below the picture."""
    middle = (LEFT + WIDTH - RIGHT) / 2
    return f'<text x="{middle:.0f}" y="{at}" text-anchor="middle" fill="#7b8794" font-size="12">{text}</text>'


def picture() -> str:
    """The picture as SVG."""
    ours, plain = whole_model()
    our_half, others = half_model()
    curve = " ".join(f"{x(point.gib):.1f},{y(point.speed):.1f}" for point in ours)
    name = f'<text x="{x(28):.1f}" y="{y(1.26):.1f}" fill="{OURS}" font-weight="bold">harmony</text>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#323f4b">',
        "<title>Speed of a training step against device memory</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *axes(),
        f'<polyline points="{curve}" fill="none" stroke="{OURS}" stroke-width="2.5"/>',
        *dots(others, OTHERS, hollow=True),
        *dots([our_half], OURS, hollow=True),
        *dots(plain, PLAIN),
        *dots(ours, OURS),
        name,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(f"wrote {PICTURE.relative_to(ROOT)}")

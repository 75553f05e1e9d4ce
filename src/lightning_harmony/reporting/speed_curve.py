"""The curve: the speed of a training step against the device memory that it may take, drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from lightning_harmony.reporting.figures import figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PLAIN, OTHERS = "#0b6e4f", "#52606d", "#b4531f"
_INK, _GRID, _NOTE = "#323f4b", "#e4e7eb", "#7b8794"


@dataclass(frozen=True)
class Point:
    """One training.

    Attributes:
        label: what is written beside it.
        num_bytes: of device memory.
        speed: against the reference, which is 1.
        place: of the label: to the right and up in points, and which part of it lies there.
    """

    label: str
    num_bytes: float
    speed: float
    place: tuple[int, int, str] = (0, 8, "center")


@dataclass(frozen=True)
class Series:
    """Points of one color.

    Attributes:
        points: in the order of a line through them.
        color: of points and labels.
        name: written above the line; empty for none.
        is_line: whether a line goes through them.
        is_hollow: whether the points are circles.
    """

    points: Sequence[Point]
    color: str
    name: str = ""
    is_line: bool = False
    is_hollow: bool = False


def draw_curve(series: Sequence[Series], file: Path, *, memory: str, speed: str, notes: Sequence[str]) -> None:
    """Write the picture, in the format that the suffix of the file tells.

    Args:
        series: what was trained.
        file: where the picture goes.
        memory: what the horizontal axis counts.
        speed: what the vertical axis counts, and what is 1 there.
        notes: lines below the picture: on which machine, and with which versions.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    figure = figure_class()(figsize=(7.6, 4.4), layout="constrained")
    axes = figure.subplots()
    points = [point for each in series for point in each.points]
    unit, name = (2**30, "GiB") if max(point.num_bytes for point in points) >= 2**30 else (2**20, "MiB")
    _draw_axes(axes, [point.num_bytes / unit for point in points], max(point.speed for point in points))
    for each in series:
        _draw_series(axes, each, unit)
    axes.set_xlabel(f"{memory}, {name}", color=_INK)
    axes.set_title(speed, loc="left", fontsize=10, color=_INK)
    # A longer line would be cut off on both sides.
    lines = [line for note in notes for line in wrap(note, 105)]
    figure.supxlabel("\n".join(lines), fontsize=8.5, color=_NOTE)
    from matplotlib import rc_context

    # Texts stay texts in an SVG, and the same points make the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning-harmony"}):
        figure.savefig(file, dpi=150, metadata=_metadata(file.suffix.lower(), points))


def _metadata(suffix: str, points: Sequence[Point]) -> dict[str, str | None] | None:
    """The figures in words, which SVG and PNG can hold beside the picture."""
    if suffix not in (".svg", ".png"):
        return None
    figures = "; ".join(f"{point.label}: {point.num_bytes:.0f} B, {point.speed:.3f}" for point in points)
    return {"Description": figures} | ({"Date": None} if suffix == ".svg" else {})


def _draw_series(axes: Axes, series: Series, unit: int) -> None:
    places = [point.num_bytes / unit for point in series.points]
    speeds = [point.speed for point in series.points]
    if series.is_line:
        axes.plot(places, speeds, color=series.color, linewidth=2)
    fill = "white" if series.is_hollow else series.color
    axes.scatter(places, speeds, s=42, facecolors=fill, edgecolors=series.color, linewidths=1.8, zorder=3)
    for place, point in zip(places, series.points, strict=True):
        right, up, part = point.place
        axes.annotate(
            point.label,
            (place, point.speed),
            xytext=(right, up),
            textcoords="offset points",
            ha=part,
            va="bottom" if up > 0 else "top" if up < 0 else "center",
            fontsize=9,
            color=series.color,
        )
    if series.name:
        middle = len(places) // 2
        axes.annotate(
            series.name,
            (places[middle], speeds[middle]),
            xytext=(0, 24),
            textcoords="offset points",
            ha="center",
            fontsize=10,
            fontweight="bold",
            color=series.color,
        )


def _draw_axes(axes: Axes, places: Sequence[float], fastest: float) -> None:
    """Each doubling of the memory takes as much room; the speed begins at 0."""
    axes.set_xscale("log", base=2)
    least, most = math.floor(math.log2(min(places)) - 0.25), math.ceil(math.log2(max(places)) + 0.25)
    powers = [2.0**power for power in range(least, most + 1)]
    axes.set_xlim(powers[0], powers[-1])
    axes.set_xticks(powers, [f"{power:g}" for power in powers])
    axes.set_ylim(0, 1.25 * max(fastest, 1.0))
    axes.grid(color=_GRID)
    axes.axhline(1, color="#9aa5b1", linewidth=1.6, zorder=1)
    axes.minorticks_off()
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=_INK, length=0)

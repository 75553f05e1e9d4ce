"""The picture: a prediction drawn by matplotlib, devices and their streams over time, and memory below."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_harmony.plan.memory_size import format_bytes
from lightning_harmony.plan.page import colour_of, is_light, streams_of, summary
from lightning_harmony.plan.plan import Plan
from lightning_harmony.plan.replay import COMPUTE, DevicePrediction, Prediction, Span
from lightning_harmony.plan.task import Errand

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _SOFT = "#333333", "#9aa5b1"
# A label is drawn where a task has so many inches for each of its letters.
_INCHES_PER_LETTER = 0.075
_SMALLEST_INCHES = 0.04
_WIDTH = 14.0


def draw(plan: Plan, prediction: Prediction, file: Path) -> None:
    """Write a picture, in the format that the name of the file tells.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install "lightning-harmony[viz]"') from error
    heights = [part for device in prediction.devices for part in (0.42 * len(streams_of(device)) + 0.1, 1.3)]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 1.1), layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    unit = next((unit for unit in ((1.0, "s"), (1e-3, "ms")) if prediction.seconds >= unit[0]), (1e-6, "µs"))
    for number, device in enumerate(prediction.devices):
        _draw_streams(axes[2 * number], plan, prediction, number, unit[0])
        _draw_memory(axes[2 * number + 1], plan, prediction, device, unit[0])
    axes[-1].set_xlabel(f"time ({unit[1]})", color=_INK)
    axes[-1].set_xlim(0, prediction.seconds / unit[0] or 1)
    head, *_ = summary(plan, prediction)
    computing = max((device.compute_seconds for device in prediction.devices), default=0.0)
    share = computing / prediction.seconds if prediction.seconds else 0.0
    figure.suptitle(
        f"{head}, computing {share:.0%} of the time\n"
        "colour: pack   ·   light: forward, stash   ·   strong: backward, weights, gradients, update",
        fontsize=11,
        color=_INK,
    )
    figure.savefig(file, dpi=130)


def _draw_streams(axes: Axes, plan: Plan, prediction: Prediction, number: int, unit: float) -> None:
    device = prediction.devices[number]
    streams = streams_of(device)
    inches_per_second = (_WIDTH - 1.5) / (prediction.seconds or 1)
    for row, stream in enumerate(streams):
        spans = [span for span in device.spans if span.stream == stream]
        colours = [colour_of(s.task.pack, len(plan.packs), is_light=is_light(s)) for s in spans]
        wide = [(s.end_seconds - s.start_seconds) * inches_per_second > _SMALLEST_INCHES for s in spans]
        axes.broken_barh(
            [(span.start_seconds / unit, (span.end_seconds - span.start_seconds) / unit) for span in spans],
            (row - 0.41, 0.82),
            facecolors=colours,
            # What is too short to be seen gets a line of its own colour.
            edgecolors=["white" if is_wide else colour for is_wide, colour in zip(wide, colours, strict=True)],
            linewidth=[0.4 if is_wide or stream != COMPUTE else 0.0 for is_wide in wide],
        )
        for label, start, end in _labels(spans):
            if (end - start) * inches_per_second > _INCHES_PER_LETTER * (len(label) + 1):
                middle = (start + end) / 2 / unit
                axes.text(middle, row, label, ha="center", va="center_baseline", fontsize=7, color=_INK, clip_on=True)
    axes.set_yticks(range(len(streams)), streams)
    axes.set_ylim(len(streams) - 0.45, -0.55)
    if len(prediction.devices) > 1:
        axes.set_title(f"device {number}", loc="left", fontsize=9, color=_INK)
    _plain(axes)


def _labels(spans: Sequence[Span]) -> list[tuple[str, float, float]]:
    """Names for what follows each other in one stream: a task, or a pack where all microbatches run through it."""
    labels = []
    for (pack, kind), group in groupby(spans, lambda span: span.task[:2]):
        several = list(group)
        if isinstance(kind, Errand):
            # Copies of one pack have time between them.
            labels += [(str(pack), span.start_seconds, span.end_seconds) for span in several]
        else:
            name = str(several[0].task) if len(several) == 1 else f"{pack}{kind.value}"
            labels.append((name, several[0].start_seconds, several[-1].end_seconds))
    return labels


def _draw_memory(axes: Axes, plan: Plan, prediction: Prediction, device: DevicePrediction, unit: float) -> None:
    size, name = next(
        ((2**power, name) for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if device.peak_bytes >= 2**power),
        (1, "B"),
    )
    moments = [0.0, *(moment / unit for moment, _ in device.memory), prediction.seconds / unit]
    amounts = [0.0, *(num_bytes / size for _, num_bytes in device.memory), 0.0]
    axes.fill_between(moments, amounts, step="post", color="#cfd8e3", linewidth=0)
    axes.step(moments, amounts, where="post", color="#5b6b7f", linewidth=0.9)
    capacity = None if plan.profile is None else plan.profile.machine.capacity_bytes
    lines: list[tuple[int, str, Any]] = [(device.peak_bytes, f"at most {format_bytes(device.peak_bytes)}", ":")]
    if capacity is not None:
        lines.append((capacity, f"capacity {format_bytes(capacity)}", "-"))
    for num_bytes, text, style in lines:
        axes.axhline(num_bytes / size, color="#b3452c", linewidth=0.9, linestyle=style)
        # The peak below its line and the capacity above, so that they never lie on each other.
        above = num_bytes == capacity and style == "-"
        axes.annotate(
            text,
            (1.0, num_bytes / size),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 2 if above else -2),
            textcoords="offset points",
            ha="right",
            va="bottom" if above else "top",
            fontsize=7.5,
            color="#b3452c",
        )
    axes.set_ylim(0, max(device.peak_bytes, capacity or 0) / size * 1.18 or 1)
    axes.set_ylabel(f"memory ({name})", color=_INK)
    _plain(axes)


def _plain(axes: Axes) -> None:
    """Only the lines that say something."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_SOFT)
    axes.tick_params(colors=_INK, labelsize=8, length=2)

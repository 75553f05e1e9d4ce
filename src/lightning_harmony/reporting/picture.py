"""The picture: a step drawn by matplotlib, devices and their streams over time, and memory below; or several to compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_harmony.plan.drawing.idle import CAUSES, idle_times
from lightning_harmony.plan.drawing.naming import colour_of, is_light, labels, pack_name
from lightning_harmony.plan.drawing.page import held_bytes, held_words, idle_words, streams_of, summary
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.prediction import DevicePrediction, Prediction
from lightning_harmony.plan.values.task import COMPUTE
from lightning_harmony.reporting.figures import figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

_INK, _SOFT = "#333333", "#9aa5b1"
# A label is drawn where a task has so many inches for each of its letters.
_INCHES_PER_LETTER = 0.075
_SMALLEST_INCHES = 0.04
_WIDTH = 14.0
_LEGEND = "light: forward, stash   ·   strong: backward, weights, gradients, update"
_HATCHES = dict(zip(CAUSES, ("////", "oo", "....", "xxxx", "++++", "\\\\\\\\", ""), strict=True))
_IDLE, _HATCH = "#eeeeee", "#a3a3a3"


def draw(plan: Plan, steps: Mapping[str, Prediction], file: Path) -> None:
    """Write a picture, in the format that the name of the file tells.

    Args:
        plan: tells the packs.
        steps: what they do, by a name, such as "predicted". Where there are several, they lie below each other, to one scale.
        file: where it goes.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    strips = [strip for number in range(plan.num_devices) for strip in _strips(plan, number, steps)]
    heights = [part for strip in strips for part in (0.3 * len(strip.streams) + 0.15, 1.0)]
    key = _key(plan, steps)
    num_columns = min(
        len(key), max(1, int(_WIDTH / (0.6 + _INCHES_PER_LETTER * max(len(str(patch.get_label())) for patch in key))))
    )
    key_height = 0.2 * -(-len(key) // num_columns)
    height = sum(heights) + 0.35 * len(strips) + 1.1 + key_height
    figure = figure_class()(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(step.end_seconds for step in steps.values())
    unit = next((unit for unit in ((1.0, "s"), (1e-3, "ms")) if longest >= unit[0]), (1e-6, "µs"))
    for strip, upper, lower in zip(strips, axes[::2], axes[1::2], strict=True):
        _draw_streams(upper, strip, longest, unit[0])
        _draw_memory(lower, strip, unit[0])
    axes[-1].set_xlabel(f"time ({unit[1]})", color=_INK)
    axes[-1].set_xlim(0, longest / unit[0] or 1)
    figure.suptitle(
        "\n".join([*(_headline(plan, name if len(steps) > 1 else "", step) for name, step in steps.items()), _LEGEND]),
        fontsize=11,
        color=_INK,
    )
    figure.legend(handles=key, loc="outside lower center", ncols=num_columns, fontsize=8, frameon=False)
    figure.savefig(file, dpi=130)


def _key(plan: Plan, steps: Mapping[str, Prediction]) -> list[Patch]:
    """A patch for each pack with its layers, and for each cause of idle time that there is."""
    from matplotlib.patches import Patch

    packs = [
        Patch(facecolor=colour_of(pack, is_light=False), label=f"{pack} {pack_name(plan, pack)}")
        for pack in range(len(plan.packs))
    ]
    causes = {
        idle.cause
        for step in steps.values()
        for number in range(len(step.devices))
        for idle in idle_times(step, number)
    }
    return packs + [
        Patch(facecolor=_IDLE, edgecolor=_HATCH, hatch=hatch, linewidth=0, label=f"idle: {cause}")
        for cause, hatch in _HATCHES.items()
        if cause in causes
    ]


def _headline(plan: Plan, name: str, step: Prediction) -> str:
    head, *_ = summary(plan, step)
    shares = [device.compute_seconds / step.seconds if step.seconds else 0.0 for device in step.devices]
    least, most = f"{min(shares, default=0.0):.0%}", f"{max(shares, default=0.0):.0%}"
    computing = most if least == most else f"{least} to {most}"
    idle = idle_words(step, 0) if len(step.devices) == 1 else ""
    waits = f"; idle: {idle}" if idle else ""
    return f"{name}{': ' if name else ''}{head}, computing {computing} of the time{waits}"


@dataclass(frozen=True)
class _Strip:
    """One device in one step.

    Attributes:
        title: says which.
        step: what all devices do.
        number: of the device.
        streams: the rows, the same in all steps.
        most_bytes: to which the memory reaches in any of them.
        capacity_bytes: what it may hold; None for no limit.
    """

    title: str
    step: Prediction
    number: int
    streams: Sequence[str]
    most_bytes: int
    capacity_bytes: int | None

    @property
    def device(self) -> DevicePrediction:
        """What it does."""
        return self.step.devices[self.number]


def _strips(plan: Plan, number: int, steps: Mapping[str, Prediction]) -> Iterator[_Strip]:
    devices = {name: step.devices[number] for name, step in steps.items()}
    streams = streams_of(devices.values())
    capacity = None if plan.profile is None else plan.profile.machine.capacity_bytes
    most = max(capacity or 0, *(device.peak_bytes for device in devices.values()))
    for name in devices:
        words = [f"device {number}"] * (plan.num_devices > 1) + [name] * (len(steps) > 1)
        yield _Strip(", ".join(words), steps[name], number, streams, most, capacity)


def _draw_streams(axes: Axes, strip: _Strip, longest: float, unit: float) -> None:
    inches_per_second = (_WIDTH - 1.5) / (longest or 1)
    for row, stream in enumerate(strip.streams):
        spans = [span for span in strip.device.spans if span.stream == stream]
        colours = [colour_of(s.task.pack, is_light=is_light(s)) for s in spans]
        wide = [(s.end_seconds - s.start_seconds) * inches_per_second > _SMALLEST_INCHES for s in spans]
        axes.broken_barh(
            [(span.start_seconds / unit, (span.end_seconds - span.start_seconds) / unit) for span in spans],
            (row - 0.41, 0.82),
            facecolors=colours,
            # What is too short to be seen gets a line of its own colour.
            edgecolors=["white" if is_wide else colour for is_wide, colour in zip(wide, colours, strict=True)],
            linewidth=[0.4 if is_wide or stream != COMPUTE else 0.0 for is_wide in wide],
        )
        for label, start, end, ink in labels(spans):
            if (end - start) * inches_per_second > _INCHES_PER_LETTER * (len(label) + 1):
                middle = (start + end) / 2 / unit
                axes.text(middle, row, label, ha="center", va="center_baseline", fontsize=7, color=ink, clip_on=True)
    if COMPUTE in strip.streams:
        _draw_idle(axes, strip, strip.streams.index(COMPUTE), inches_per_second, unit)
    axes.set_yticks(range(len(strip.streams)), strip.streams)
    axes.set_ylim(len(strip.streams) - 0.45, -0.55)
    if strip.title:
        axes.set_title(strip.title, loc="left", fontsize=9.5, fontweight="bold", color=_INK)
    if strip.step.seconds < longest:
        axes.axvline(strip.step.seconds / unit, color=_SOFT, linewidth=0.9, linestyle="--")
    _plain(axes)


def _draw_idle(axes: Axes, strip: _Strip, row: int, inches_per_second: float, unit: float) -> None:
    """Where a device computes nothing, with the cause in hatching, and in words where there is room."""
    for cause, start, end in idle_times(strip.step, strip.number):
        place = [(start / unit, (end - start) / unit)]
        hatch = _HATCHES[cause]
        axes.broken_barh(
            place, (row - 0.41, 0.82), facecolor=_IDLE, edgecolor=_HATCH, hatch=hatch, linewidth=0, zorder=0.5
        )
        label = f"idle: {cause}"
        if (end - start) * inches_per_second > _INCHES_PER_LETTER * (len(label) + 1):
            middle = (start + end) / 2 / unit
            box = {"facecolor": _IDLE, "edgecolor": "none", "pad": 1}
            axes.text(middle, row, label, ha="center", va="center_baseline", fontsize=7, color=_INK, bbox=box)


def _draw_memory(axes: Axes, strip: _Strip, unit: float) -> None:
    device, capacity = strip.device, strip.capacity_bytes
    size, name = next(
        ((2**power, name) for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if strip.most_bytes >= 2**power),
        (1, "B"),
    )
    moments = [0.0, *(moment / unit for moment, _ in device.memory), strip.step.seconds / unit]
    amounts = [0.0, *(num_bytes / size for _, num_bytes in device.memory), 0.0]
    axes.fill_between(moments, amounts, step="post", color="#cfd8e3", linewidth=0)
    axes.step(moments, amounts, where="post", color="#5b6b7f", linewidth=0.9)
    held = held_bytes(device)
    lines: list[tuple[int, str, Any]] = [(held, held_words(device), ":")]
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
            bbox={"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.8},
        )
    axes.set_ylim(0, strip.most_bytes / size * 1.18 or 1)
    axes.set_ylabel(f"memory ({name})", color=_INK)
    _plain(axes)


def _plain(axes: Axes) -> None:
    """Only the lines that say something."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_SOFT)
    axes.tick_params(colors=_INK, labelsize=8, length=2)

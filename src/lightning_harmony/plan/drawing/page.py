"""The page: a step, predicted or measured, as one HTML file, to be scrolled and pointed at, with nothing to load."""

import colorsys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.prediction import DevicePrediction, Prediction, Span
from lightning_harmony.plan.values.streams import STREAMS
from lightning_harmony.plan.values.task import Phase

_WIDTH, _ROW, _GAP, _LEFT, _CURVE = 1600, 26, 4, 84, 120
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }
.wide { overflow-x: auto; } svg { display: block; } text { font: 11px system-ui, sans-serif; fill: #222; }
rect:hover { stroke: #000; stroke-width: 1.5; } pre { font-size: 12px; background: #f6f6f6; padding: 1em; overflow-x: auto; }
"""


def colour_of(pack: int, num_packs: int, *, is_light: bool) -> str:
    """The colour of a pack: hues from blue to red in the order of the packs, lighter where ``is_light``."""
    hue = 0.62 - 0.6 * (pack / max(num_packs - 1, 1))
    red, green, blue = colorsys.hls_to_rgb(hue, 0.76 if is_light else 0.52, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def summary(plan: Plan, prediction: Prediction) -> list[str]:
    """What a prediction comes to, a line for the step and one for each device."""
    seconds = prediction.seconds
    lines = [
        f"{len(plan.packs)} packs, {plan.num_microbatches} microbatches, "
        f"{plan.num_devices} {'device' if plan.num_devices == 1 else 'devices'}: {format_seconds(seconds)} a step"
    ]
    for number, device in enumerate(prediction.devices):
        swapped_in, swapped_out = device.swapped_in_bytes, device.swapped_out_bytes
        share = device.compute_seconds / seconds if seconds else 0.0
        transferred = f", {format_bytes(device.transferred_bytes)} from other devices" if plan.num_devices > 1 else ""
        lines.append(
            f"device {number}: computes {share:.0%} of the time, at most {format_bytes(device.peak_bytes)}; "
            f"in: {_by_kind(swapped_in)}; out: {_by_kind(swapped_out)}{transferred}"
        )
    return lines


def summaries(plan: Plan, steps: Mapping[str, Prediction]) -> list[str]:
    """What several steps come to, each named where there are several."""
    lines = []
    for name, step in steps.items():
        head, *devices = summary(plan, step)
        lines += [f"{name}: {head}" if len(steps) > 1 else head, *devices]
    return lines


def format_seconds(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def is_light(span: Span) -> bool:
    """Whether a span is drawn lighter than the others of its pack: a forward, or a stash."""
    return span.task.kind is Phase.FORWARD or "STASH" in span.task.kind.value


def streams_of(devices: Iterable[DevicePrediction]) -> list[str]:
    """The streams that any of these use, from top to bottom."""
    used = {span.stream for device in devices for span in device.spans}
    return [stream for stream in STREAMS if stream in used]


def to_html(plan: Plan, steps: Mapping[str, Prediction], title: str) -> str:
    """Timeline and memory of each device, and the plan.

    Args:
        plan: names the layers of the packs.
        steps: what they do, by a name, such as "predicted". Where there are several, they lie below each other.
        title: of the page.
    """
    longest = max(step.end_seconds for step in steps.values())
    drawings = []
    for number in range(plan.num_devices):
        devices = {name: step.devices[number] for name, step in steps.items()}
        scales = _Scales(longest, max(device.peak_bytes for device in devices.values()), streams_of(devices.values()))
        for name, device in devices.items():
            heading = f"device {number}, {name}" if len(steps) > 1 else f"device {number}"
            drawing = "".join(_drawing(plan, device, scales))
            drawings.append(f"<h3>{heading}</h3><div class=wide>{drawing}</div>")
    lines, newline = "<br>".join(escape(line) for line in summaries(plan, steps)), "\n"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h2>{title}</h2><p>{lines}</p><p>Colours are packs; forwards and stashes are light, backwards and weights "
        f"are not. Point at a task to see what it is.</p>{newline.join(drawings)}"
        f"<h3>Packs</h3><pre>{escape(str(plan))}</pre></html>\n"
    )


def _by_kind(num_bytes: Mapping[str, int]) -> str:
    return ", ".join(f"{format_bytes(number)} {kind}" for kind, number in num_bytes.items()) or "nothing"


class _Scales(NamedTuple):
    """What drawings of one device have in common.

    Attributes:
        seconds: to the right end.
        num_bytes: to the top of the memory.
        streams: the rows.
    """

    seconds: float
    num_bytes: int
    streams: Sequence[str]


def _drawing(plan: Plan, device: DevicePrediction, scales: _Scales) -> Iterator[str]:
    scale = (_WIDTH - _LEFT) / scales.seconds if scales.seconds else 0.0
    top = len(scales.streams) * (_ROW + _GAP)
    yield f'<svg width="{_WIDTH}" height="{top + _CURVE + 30}">'
    for row, stream in enumerate(scales.streams):
        yield f'<text x="0" y="{row * (_ROW + _GAP) + 17}">{stream}</text>'
    for span in device.spans:
        row, seconds = scales.streams.index(span.stream), span.end_seconds - span.start_seconds
        left, names = _LEFT + span.start_seconds * scale, ", ".join(plan.packs[span.task.pack])
        told = f"{span.task}: {format_seconds(seconds)} from {format_seconds(span.start_seconds)}"
        yield (
            f'<rect x="{left:.2f}" y="{row * (_ROW + _GAP)}" width="{max(seconds * scale, 0.3):.2f}" height="{_ROW}" '
            f'fill="{colour_of(span.task.pack, len(plan.packs), is_light=is_light(span))}"><title>{told}\n{escape(names)}'
            "</title></rect>"
        )
    yield from _curve(device, top, scale, scales)
    yield "</svg>"


def _curve(device: DevicePrediction, top: int, scale: float, scales: _Scales) -> Iterator[str]:
    """The memory below, with its peak."""
    bottom, most = top + _CURVE + 10, max(scales.num_bytes, 1)
    points, across, height = [f"{_LEFT},{bottom}"], float(_LEFT), float(bottom)
    for moment, num_bytes in device.memory:
        across = _LEFT + moment * scale
        points.append(f"{across:.2f},{height:.2f}")
        height = bottom - _CURVE * num_bytes / most
        points.append(f"{across:.2f},{height:.2f}")
    points.append(f"{across:.2f},{bottom}")
    yield f'<polygon points="{" ".join(points)}" fill="#cfd8e3" stroke="#5b6b7f"/>'
    yield f'<text x="0" y="{top + 20}">{format_bytes(scales.num_bytes)}</text><text x="0" y="{bottom}">memory</text>'
    yield f'<text x="{_LEFT}" y="{bottom + 16}">0</text>'
    yield f'<text x="{_WIDTH}" y="{bottom + 16}" text-anchor="end">{format_seconds(scales.seconds)}</text>'

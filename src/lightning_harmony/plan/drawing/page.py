"""The page: a step, predicted or measured, as one HTML file, to be scrolled and pointed at, with nothing to load."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

from lightning_harmony.plan.drawing.idle import idle_by_cause, idle_times
from lightning_harmony.plan.drawing.naming import colour_of, is_light, labels, pack_name, task_name
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.prediction import DevicePrediction, Prediction
from lightning_harmony.plan.values.task import COMPUTE, STREAMS

_ROW, _GAP, _CURVE, _NUM_TICKS = 26, 4, 120, 8
# How wide a letter is, as a share of a window that is not small. In small ones there are no labels.
_LETTER = 0.007
_GRID, _LIMIT = "#dde3ea", "#b3452c"
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }
.device { display: flex; } .names { position: relative; flex: 0 0 11em; font-size: 12px; white-space: nowrap; }
.names div { position: absolute; } .wide { flex: 1; min-width: 0; overflow-x: auto; } svg { display: block; width: 100%; }
.zoomed { width: calc(100% * var(--zoom, 1)); container-type: inline-size; }
@container (max-width: 60em) { .label { display: none; } } pre { white-space: pre-wrap; }
text { font: 11px system-ui, sans-serif; fill: #222; pointer-events: none; } rect:hover { stroke: #000; stroke-width: 1.5; }
.key span { display: inline-block; margin-right: 1.2em; } .key i { display: inline-block; width: 1em; height: 1em; }
"""
_ZOOM = (
    "<label>zoom <input type=range min=1 max=30 step=any value=1 "
    "oninput=\"document.body.style.setProperty('--zoom', this.value)\"></label>"
)


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
        waits = idle_words(prediction, number)
        transferred = f"; from other devices: {format_bytes(device.transferred_bytes)}" if plan.num_devices > 1 else ""
        lines.append(
            f"device {number}: computes {share:.0%} of the time{waits and f' (idle: {waits})'}, {held_words(device)}; "
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


def idle_words(step: Prediction, number: int) -> str:
    """What a device waits for, with shares of the step, as in "weights 6%, host 2%"; empty where that is next to nothing."""
    idle = idle_by_cause(step, number).items()
    return ", ".join(f"{cause} {time / step.seconds:.0%}" for cause, time in idle if time >= 0.005 * step.seconds)


def held_bytes(device: DevicePrediction) -> int:
    """The top of the curve of a device's memory."""
    return max((num_bytes for _, num_bytes in device.memory), default=0)


def held_words(device: DevicePrediction) -> str:
    """The top of the curve, and what there may be at the most."""
    held, most = format_bytes(held_bytes(device)), format_bytes(device.peak_bytes)
    return f"at most {held}" if held == most else f"at most {held} ({most} if copies take longer)"


def streams_of(devices: Iterable[DevicePrediction]) -> list[str]:
    """The streams that any of these use, from top to bottom."""
    used = {span.stream for device in devices for span in device.spans}
    return [stream for stream in STREAMS if stream in used]


def to_html(plan: Plan, steps: Mapping[str, Prediction], title: str) -> str:
    """Timeline and memory of each device, and the plan, as wide as the window.

    Args:
        plan: names the layers of the packs.
        steps: what they do, by a name, such as "predicted". Where there are several, they lie below each other.
        title: of the page.
    """
    longest = max(step.end_seconds for step in steps.values())
    capacity = None if plan.profile is None else plan.profile.machine.capacity_bytes
    drawings = []
    for number in range(plan.num_devices):
        devices = {name: step.devices[number] for name, step in steps.items()}
        most = max(capacity or 0, *(device.peak_bytes for device in devices.values()))
        scales = _Scales(longest or 1.0, most or 1, capacity, streams_of(devices.values()))
        for name, device in devices.items():
            heading = f"device {number}, {name}" if len(steps) > 1 else f"device {number}"
            names, drawing = "".join(_names(device, scales)), "".join(_drawing(plan, steps[name], number, scales))
            drawings.append(
                f"<h3>{heading}</h3><div class=device><div class=names>{names}</div>"
                f"<div class=wide><div class=zoomed>{drawing}</div></div></div>"
            )
    lines, newline = "<br>".join(escape(line) for line in summaries(plan, steps)), "\n"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h2>{title}</h2><p>{lines}</p><p class=key>{''.join(_key(plan))}</p><p>Colours are packs; forwards and stashes are "
        "light, backwards and weights are not. Grey is idle time, with its cause. Point at anything to see what it is. "
        f"{_ZOOM}</p>{newline.join(drawings)}<h3>Packs</h3><pre>{escape(str(plan))}</pre></html>\n"
    )


def ticks(seconds: float, most: int) -> list[float]:
    """Round moments of a step, at most so many steps of 1, 2 or 5 apart."""
    if seconds <= 0:
        return [0.0]
    size = 10 ** floor(log10(seconds / most))
    step = next(size * each for each in (1, 2, 5, 10) if seconds / (size * each) <= most)
    return [number * step for number in range(int(seconds / step + 1e-9) + 1)]


def _key(plan: Plan) -> Iterator[str]:
    for pack in range(len(plan.packs)):
        colour = colour_of(pack, is_light=False)
        yield f'<span><i style="background:{colour}"></i> {pack} {escape(pack_name(plan, pack))}</span> '


def _by_kind(num_bytes: Mapping[str, int]) -> str:
    return ", ".join(f"{format_bytes(number)} {kind}" for kind, number in num_bytes.items()) or "nothing"


class _Scales(NamedTuple):
    """What drawings of one device have in common.

    Attributes:
        seconds: to the right end.
        num_bytes: to the top of the memory.
        capacity_bytes: what the device may hold; None for no limit.
        streams: the rows.
    """

    seconds: float
    num_bytes: int
    capacity_bytes: int | None
    streams: Sequence[str]

    @property
    def top(self) -> int:
        """Where the memory begins, below the rows."""
        return len(self.streams) * (_ROW + _GAP) + 10

    @property
    def bottom(self) -> int:
        """Where it ends."""
        return self.top + _CURVE

    def across(self, seconds: float) -> str:
        """A moment or a time as a share of the width."""
        return f"{100 * seconds / self.seconds:.4f}%"

    def height(self, num_bytes: int) -> float:
        """Where an amount of memory is drawn."""
        return self.bottom - _CURVE * num_bytes / self.num_bytes


def _names(device: DevicePrediction, scales: _Scales) -> Iterator[str]:
    """What stands beside a drawing: the streams, and the memory's limits."""
    for row, stream in enumerate(scales.streams):
        yield f'<div style="top:{row * (_ROW + _GAP) + 4}px">{stream}</div>'
    held = scales.height(held_bytes(device)) - 9
    if scales.capacity_bytes is not None:
        at = scales.height(scales.capacity_bytes) - 9
        held = min(max(held, at + 16), scales.bottom - 32)
        yield f'<div style="top:{at:.0f}px;color:{_LIMIT}">capacity {format_bytes(scales.capacity_bytes)}</div>'
    yield f'<div style="top:{held:.0f}px;color:{_LIMIT}">at most {format_bytes(held_bytes(device))}</div>'
    yield f'<div style="top:{scales.bottom - 16}px">memory</div>'


def _drawing(plan: Plan, step: Prediction, number: int, scales: _Scales) -> Iterator[str]:
    device = step.devices[number]
    yield f'<svg height="{scales.bottom + 22}">'
    for moment in ticks(scales.seconds, _NUM_TICKS):
        x = scales.across(moment)
        anchor = "start" if moment == 0 else "end" if moment > 0.95 * scales.seconds else "middle"
        yield f'<line x1="{x}" x2="{x}" y1="0" y2="{scales.bottom}" stroke="{_GRID}"/>'
        yield f'<text x="{x}" y="{scales.bottom + 15}" text-anchor="{anchor}">{format_seconds(moment) if moment else 0}</text>'
    if COMPUTE in scales.streams:
        for idle in idle_times(step, number):
            told = f"idle: {idle.cause}, {format_seconds(idle.end_seconds - idle.start_seconds)}"
            yield from _box(scales, COMPUTE, idle.start_seconds, idle.end_seconds, "#e6e6e6", told, "idle")
            yield from _label(scales, COMPUTE, f"idle: {idle.cause}", idle.start_seconds, idle.end_seconds)
    for span in device.spans:
        colour, told = colour_of(span.task.pack, is_light=is_light(span)), task_name(plan, span.task)
        lasting = f"{format_seconds(span.end_seconds - span.start_seconds)} from {format_seconds(span.start_seconds)}"
        told = f"{told}: {lasting}\n{', '.join(plan.packs[span.task.pack])}"
        yield from _box(scales, span.stream, span.start_seconds, span.end_seconds, colour, told, "task")
    for stream in scales.streams:
        for label, start, end, ink in labels([span for span in device.spans if span.stream == stream]):
            yield from _label(scales, stream, label, start, end, ink)
    yield from _curve(device, step.seconds, scales)
    yield "</svg>"


def _box(scales: _Scales, stream: str, start: float, end: float, colour: str, told: str, kind: str) -> Iterator[str]:
    y = scales.streams.index(stream) * (_ROW + _GAP)
    yield (
        f'<rect class="{kind}" x="{scales.across(start)}" y="{y}" width="{scales.across(end - start)}" height="{_ROW}" '
        f'fill="{colour}" stroke="{colour}" stroke-width="0.3"><title>{escape(told)}</title></rect>'
    )


def _label(scales: _Scales, stream: str, label: str, start: float, end: float, ink: str = "#333333") -> Iterator[str]:
    """A label in the middle of what it is for, where that is wide enough."""
    if (end - start) / scales.seconds > _LETTER * (len(label) + 1):
        y = scales.streams.index(stream) * (_ROW + _GAP) + 17
        x = scales.across((start + end) / 2)
        yield f'<text class="label" x="{x}" y="{y}" text-anchor="middle" style="fill:{ink}">{label}</text>'


def _curve(device: DevicePrediction, seconds: float, scales: _Scales) -> Iterator[str]:
    """The memory below until the step ends, with its top and what the device may hold."""
    ends = [*(moment for moment, _ in device.memory[1:]), max(seconds, device.memory[-1][0])] if device.memory else []
    for (moment, num_bytes), end in zip(device.memory, ends, strict=True):
        y, told = scales.height(num_bytes), f"{format_bytes(num_bytes)} from {format_seconds(moment)}"
        yield (
            f'<rect class="memory" x="{scales.across(moment)}" y="{y:.2f}" width="{scales.across(end - moment)}" '
            f'height="{scales.bottom - y:.2f}" fill="#b9c6d6"><title>{told}</title></rect>'
        )
    lines = [(held_bytes(device), ' stroke-dasharray="2 3"')]
    if scales.capacity_bytes is not None:
        lines.append((scales.capacity_bytes, ""))
    for num_bytes, dashes in lines:
        y = scales.height(num_bytes)
        yield f'<line x1="0" x2="100%" y1="{y:.2f}" y2="{y:.2f}" stroke="{_LIMIT}"{dashes}/>'

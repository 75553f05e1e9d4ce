"""The trace: a step, predicted or measured, in the format of Chrome's and Perfetto's trace viewers."""

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from lightning_harmony.plan.drawing.idle import idle_times
from lightning_harmony.plan.drawing.naming import task_name
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.prediction import Prediction, Span
from lightning_harmony.plan.values.task import STREAMS

_IDLE = "idle"


def to_trace(plan: Plan, steps: Mapping[str, Prediction]) -> str:
    """Steps as JSON, for https://ui.perfetto.dev or chrome://tracing: devices are processes, streams are threads.

    Args:
        plan: names the layers of the packs.
        steps: what they do, by a name, such as "predicted". Where there are several, they lie below each other.
    """
    events: list[dict[str, Any]] = []
    for process, (number, name) in enumerate(product(range(plan.num_devices), steps)):
        title = f"device {number}, {name}" if len(steps) > 1 else f"device {number}"
        events += _process(plan, steps[name], number, process, title)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _process(plan: Plan, step: Prediction, number: int, process: int, title: str) -> Iterator[dict[str, Any]]:
    """One device in one step."""
    device = step.devices[number]
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
    for thread, stream in enumerate((*STREAMS, _IDLE)):
        place = {"pid": process, "tid": thread}
        yield {"ph": "M", **place, "name": "thread_name", "args": {"name": stream}}
        yield {"ph": "M", **place, "name": "thread_sort_index", "args": {"sort_index": thread}}
    for span in device.spans:
        yield _event(plan, process, span)
    for idle in idle_times(step, number):
        yield {
            "ph": "X", "pid": process, "tid": len(STREAMS), "name": f"idle: {idle.cause}", "cat": _IDLE,
            "ts": _microseconds(idle.start_seconds), "dur": _microseconds(idle.end_seconds - idle.start_seconds),
        }  # fmt: skip
    for moment, num_bytes in device.memory:
        yield {
            "ph": "C", "pid": process, "name": "memory", "ts": _microseconds(moment), "args": {"bytes": num_bytes},
        }  # fmt: skip


def _event(plan: Plan, process: int, span: Span) -> dict[str, Any]:
    layers = plan.packs[span.task.pack]
    return {
        "ph": "X",
        "pid": process,
        "tid": STREAMS.index(span.stream),
        "name": task_name(plan, span.task),
        "cat": span.stream,
        "ts": _microseconds(span.start_seconds),
        "dur": _microseconds(span.end_seconds - span.start_seconds),
        "args": {"task": str(span.task), "pack": span.task.pack, "layers": ", ".join(layers)},
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)

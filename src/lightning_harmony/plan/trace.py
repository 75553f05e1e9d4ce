"""The trace: a prediction in the format of Chrome's and Perfetto's trace viewers."""

import json
from typing import Any

from lightning_harmony.plan.plan import Plan
from lightning_harmony.plan.replay import STREAMS, Prediction, Span


def to_trace(plan: Plan, prediction: Prediction) -> str:
    """A prediction as JSON, for https://ui.perfetto.dev or chrome://tracing: devices are processes, streams are threads.

    Args:
        plan: names the layers of the packs.
        prediction: of a step by that plan.
    """
    events: list[dict[str, Any]] = []
    for number, device in enumerate(prediction.devices):
        events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": f"device {number}"}})
        for thread, stream in enumerate(STREAMS):
            place = {"pid": number, "tid": thread}
            events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": stream}})
            events.append({"ph": "M", **place, "name": "thread_sort_index", "args": {"sort_index": thread}})
        events += [_event(plan, number, span) for span in device.spans]
        events += [
            {"ph": "C", "pid": number, "name": "memory", "ts": _microseconds(moment), "args": {"bytes": num_bytes}}
            for moment, num_bytes in device.memory
        ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _event(plan: Plan, device: int, span: Span) -> dict[str, Any]:
    layers = plan.packs[span.task.pack]
    return {
        "ph": "X",
        "pid": device,
        "tid": STREAMS.index(span.stream),
        "name": str(span.task),
        "cat": span.stream,
        "ts": _microseconds(span.start_seconds),
        "dur": _microseconds(span.end_seconds - span.start_seconds),
        "args": {"pack": span.task.pack, "layers": ", ".join(layers)},
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)

"""What each GPU waits for in a step, from torch's profiler: operations, and the calls of CUDA that launched them.

A GPU computes on one stream. Where nothing runs there, the next operation was launched late, by a host that was busy, or it
was launched in time and waited: for whatever operation of any stream ended last before it began.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

# As the profiler names what GPUs do, and what launches it.
_OPERATIONS, _CALLS = {"kernel", "gpu_memcpy", "gpu_memset"}, {"cuda_runtime", "cuda_driver"}
# From the end of what was waited for to the next operation, at most; shorter gaps are the GPU's own.
_SOON, _LEAST_GAP = 20e-6, 5e-6


class Operation(NamedTuple):
    """Something that a GPU does; times in seconds.

    Attributes:
        begin: when it begins.
        end: when it ends.
        gpu: which one.
        stream: of it.
        name: of a kernel, or how something is copied.
        launched: when the call that launched it has returned; None if that is not known.
    """

    begin: float
    end: float
    gpu: int
    stream: int
    name: str
    launched: float | None


class GpuTime:
    """Records one step.

    Args:
        path: where to write the recording, for https://ui.perfetto.dev; it ends in .json.gz.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._profile = profile(activities=[ProfilerActivity.CUDA])

    def start(self) -> None:
        """The step begins."""
        self._profile.start()

    def stop(self) -> None:
        """The step is over; waits for the GPUs."""
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.synchronize(gpu)
        self._profile.stop()

    def row(self) -> dict[str, Any]:
        """Shares of the step by GPU, and by thread the calls of CUDA."""
        self._profile.export_chrome_trace(self._path)
        with gzip.open(self._path, "rb") as file:
            events = json.load(file)["traceEvents"]
        return {"gpus": shares(operations(events)), "calls": calls(events)}


def operations(events: list[dict[str, Any]]) -> list[Operation]:
    """What the GPUs did, in the order of beginnings."""
    launches = {
        event["args"]["correlation"]: (event["ts"] + event["dur"]) / 1e6
        for event in events
        if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
    }
    found = [
        Operation(
            event["ts"] / 1e6,
            (event["ts"] + event["dur"]) / 1e6,
            event["pid"],
            event["tid"],
            event["name"],
            launches.get(event["args"].get("correlation")),
        )
        for event in events
        if event.get("cat") in _OPERATIONS
    ]
    return sorted(found)


def shares(found: list[Operation]) -> dict[int, dict[str, float]]:
    """By GPU: shares of the step in which it computes, and in which it waits, by what for.

    Args:
        found: what the GPUs did, in the order of beginnings.
    """
    begin, end = found[0].begin, max(each.end for each in found)
    ends = sorted((each.end, each.gpu, each.stream, each.name) for each in found)
    return {gpu: _shares_of(gpu, found, ends, begin, end) for gpu in sorted({each.gpu for each in found})}


def _shares_of(
    gpu: int, found: list[Operation], ends: list[tuple[float, int, int, str]], begin: float, end: float
) -> dict[str, float]:
    computing: Counter[int] = Counter()
    for each in found:
        if each.gpu == gpu and not each.name.startswith("Mem"):
            computing[each.stream] += round((each.end - each.begin) * 1e9)
    stream = computing.most_common(1)[0][0]
    seconds: dict[str, float] = defaultdict(float)
    free_at = begin
    for each in found:
        if (each.gpu, each.stream) != (gpu, stream):
            continue
        gap = each.begin - free_at
        if gap > _LEAST_GAP:
            late = 0.0 if each.launched is None else min(max(each.launched - free_at, 0.0), gap)
            seconds["waits for the host"] += late
            seconds[f"waits for {_cause(ends, each, gpu, stream)}"] += gap - late
        seconds["computes"] += each.end - max(each.begin, free_at) if each.end > free_at else 0.0
        free_at = max(free_at, each.end)
    seconds["has nothing more to do"] = end - free_at
    seconds["in other streams, other kernels"] = (sum(computing.values()) - computing[stream]) / 1e9
    return {
        what: round(value / (end - begin), 4)
        for what, value in sorted(seconds.items(), key=lambda item: -item[1])
        if value > 0
    }


def _cause(ends: list[tuple[float, int, int, str]], operation: Operation, gpu: int, stream: int) -> str:
    """What an operation waited for: what ended last before it, elsewhere than in its stream."""
    place = bisect_left(ends, (operation.begin + 1e-7,))
    while place > 0 and ends[place - 1][0] > operation.begin - _SOON:
        place -= 1
        _, other, its_stream, name = ends[place]
        if (other, its_stream) != (gpu, stream):
            kind = name.split(" (")[0] if name.startswith("Mem") else "a kernel of another stream"
            return kind if other == gpu else f"{kind}, of another GPU"
    return "nothing that is known"


def calls(events: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """By thread, of each kind of call of CUDA's: seconds, how many there were, and the longest one's; those that take any."""
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for event in events:
        if event.get("cat") in _CALLS:
            seconds = event["dur"] / 1e6
            entry = found[str(event["tid"])].setdefault(event["name"], [0.0, 0.0, 0.0])
            entry[0] += seconds
            entry[1] += 1
            entry[2] = max(entry[2], seconds)
    return {
        thread: {
            name: [round(value, 4) for value in entry]
            for name, entry in sorted(names.items(), key=lambda item: -item[1][0])
            if entry[0] > 0.01
        }
        for thread, names in found.items()
        if sum(entry[0] for entry in names.values()) > 0.05
    }

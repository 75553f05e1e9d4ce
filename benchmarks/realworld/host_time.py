"""Where the host's time goes in a step: seconds of each part of the engine, of layers' own code, and of waiting.

One lane runs at a time, so the parts of all lanes together are the time in which work is launched. What a part calls of
another one counts there alone. Where a part takes longer than it is at work, it waits: for a device, or for other threads to
let it have Python's lock.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any

_ENGINE = "lightning_harmony.engine"
# Waiting for the other lanes is their time.
WAITING = "waits for its turn"
# By what they are called, the modules and functions that a part begins with.
PARTS: dict[str, list[tuple[str, str]]] = {
    "layers' own code": [(f"{_ENGINE}.layers.layer_call", "LayerCall._run")],
    "calls of layers": [
        (f"{_ENGINE}.layers.layer_call", "LayerCall.run"),
        (f"{_ENGINE}.layers.layer_call", "LayerCall.open"),
        (f"{_ENGINE}.layers.call_weights", "WeightGradients.take"),
    ],
    "replayed graphs": [(f"{_ENGINE}.devices.recording", "Recording.replay")],
    "calls of recorded layers": [
        (f"{_ENGINE}.layers.recorded_call", "RecordedCall.__init__"),
        (f"{_ENGINE}.layers.recorded_call", "RecordedCall.run"),
        (f"{_ENGINE}.layers.recorded_call", "RecordedCall.backward"),
    ],
    "recording": [
        (f"{_ENGINE}.layers.recordings", "Recordings.end_call"),
        (f"{_ENGINE}.layers.recordings", "Recordings.note_backward"),
    ],
    "comparing recordings with code": [(f"{_ENGINE}.layers.recordings", "Recordings.compare")],
    "lets recordings go": [(f"{_ENGINE}.layers.recordings", "Recordings.let_go")],
    "waits for room": [
        (f"{_ENGINE}.memory.residents", "Residents._await_room"),
    ],
    "waits for updates": [(f"{_ENGINE}.memory.swap", "Swapper.await_update")],
    "visits": [
        (f"{_ENGINE}.step.pack_preparation", "PackPreparation.visit"),
        (f"{_ENGINE}.step.pack_preparation", "PackPreparation.enter"),
    ],
    "stash": [
        (f"{_ENGINE}.step.runtime", "Runtime.stash"),
        (f"{_ENGINE}.memory.kept_tensor", "KeptTensor.load"),
    ],
    "transfers": [
        (f"{_ENGINE}.step.runtime", "Runtime.brought"),
        (f"{_ENGINE}.step.runtime", "Runtime.go_over"),
    ],
    "sums": [(f"{_ENGINE}.step.gradient_sums", "GradientSums.add")],
    "handing over to updates": [(f"{_ENGINE}.step.gradient_sums", "GradientSums.deliver_final")],
    "whose turn is next": [(f"{_ENGINE}.step.granting", "Granting.next")],
    "what lanes have of their own": [
        ("lightning_harmony.microbatches.lane_attributes", "LaneAttributes.switch"),
        ("lightning_harmony.microbatches.stale_reads", "StaleReads.enter"),
        ("lightning_harmony.microbatches.stale_reads", "StaleReads.leave"),
    ],
    "the step between layers": [("lightning_harmony.fit.user_steps", "TrainingStep.__call__")],
    "autograd": [(f"{_ENGINE}.step.microbatch_runner", "MicrobatchRunner._run_backward")],
    "before and after turns": [("lightning_harmony.microbatches.interleaving", "Interleaving.run")],
    WAITING: [
        (f"{_ENGINE}.lanes.lane", "LanePool.hand_on"),
        (f"{_ENGINE}.lanes.lane", "LanePool.drive"),
    ],
}


class HostTime:
    """Takes the time of these parts from when it is made."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.at_work: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._threads = threading.local()
        for part, functions in PARTS.items():
            for module, name in functions:
                self._wrap(part, module, name)

    def clear(self) -> None:
        """Count from now on."""
        self.seconds.clear()
        self.at_work.clear()
        self.calls.clear()

    def row(self, num_steps: int) -> dict[str, list[float]]:
        """By part, the seconds of a step, those at work on a core, and how often it begins in one, the largest first."""
        parts = [part for part, _ in self.seconds.most_common() if part != WAITING]
        return {
            p: [
                round(self.seconds[p] / num_steps, 4),
                round(self.at_work[p] / num_steps, 4),
                round(self.calls[p] / num_steps, 1),
            ]
            for p in parts
        }

    def _wrap(self, part: str, module: str, name: str) -> None:
        owner, attribute = name.split(".")
        kind = getattr(import_module(module), owner)
        function: Callable[..., Any] = getattr(kind, attribute)
        is_context = inspect.isgeneratorfunction(inspect.unwrap(function))

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.calls[part] += 1
            if is_context:
                # What happens within the context is not its own.
                return _Context(function(*args, **kwargs), partial(self._within, part))
            return self._within(part, function, *args, **kwargs)

        setattr(kind, attribute, timed)

    def _within(self, part: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = getattr(self._threads, "part", "")
        self._change(part)
        try:
            return function(*args, **kwargs)
        finally:
            self._change(before)

    def _change(self, to: str) -> None:
        """From now on, the calling thread is in another part."""
        now, worked, threads = time.perf_counter(), time.thread_time(), self._threads
        if (before := getattr(threads, "part", "")) != "":
            self.seconds[before] += now - threads.since
            self.at_work[before] += worked - threads.worked
        threads.part, threads.since, threads.worked = to, now, worked


class _Context:
    """A context whose beginning and end are run by something else."""

    def __init__(self, context: Any, run: Callable[..., Any]) -> None:
        self._context, self._run = context, run

    def __enter__(self) -> Any:
        return self._run(self._context.__enter__)

    def __exit__(self, *error: object) -> Any:
        return self._run(self._context.__exit__, *error)

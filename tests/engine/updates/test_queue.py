"""What is told of updates that several devices make, and that a more urgent one interrupts."""

import threading
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.updates.queue import Overlap
from support.queues import queues_of


def some() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1))]


def test_an_update_within_another_counts_once() -> None:
    spans: list[tuple[list[nn.Parameter], float, float]] = []
    overlap = Overlap(on_update=lambda parameters, start, end: spans.append((list(parameters), start, end)))
    (queue,) = queues_of([VirtualDevice(None)], overlap)
    outer, inner = some(), some()
    with queue.updating(outer, 7):
        with queue.updating(inner):
            time.sleep(0.01)
        time.sleep(0.001)
    queue.close()
    assert [parameters for parameters, _, _ in spans] == [outer, inner, outer]
    assert all(before <= start for (_, _, before), (_, start, _) in pairwise(spans))
    # Only what was to be timed is, without what interrupted it.
    speed = queue.take_speed()
    assert speed.num_bytes == 7
    assert speed.seconds == pytest.approx(spans[0][2] - spans[0][1] + spans[2][2] - spans[2][1])
    assert queue.take_speed().num_bytes == 0
    assert spans[2][2] - spans[0][1] <= overlap.busy_seconds


def test_what_two_devices_update_at_the_same_time_counts_once() -> None:
    overlap, both = Overlap(), threading.Barrier(2)
    queues = queues_of([VirtualDevice(None), VirtualDevice(None)], overlap)
    start = time.perf_counter()

    def update(number: int) -> None:
        with queues[number].updating(some(), 10):
            both.wait(60)
            time.sleep(0.05)

    events = [queue.submit(lambda number=number: update(number)) for number, queue in enumerate(queues)]
    for event in events:
        event.synchronize()
    elapsed = time.perf_counter() - start
    for queue in queues:
        queue.close()
    assert overlap.busy_seconds <= elapsed
    # Each is timed by itself.
    assert [queue.take_speed().num_bytes for queue in queues] == [10, 10]

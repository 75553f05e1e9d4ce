"""Idle time and its causes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as limits

from lightning_harmony.plan.drawing.idle import CAUSES, Idle, idle_by_cause, idle_times
from lightning_harmony.plan.simulate.lowering import lower
from lightning_harmony.plan.simulate.replay import replay
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.prediction import DevicePrediction, Prediction, Span
from lightning_harmony.plan.values.profile import DeviceLimits
from lightning_harmony.plan.values.task import STREAM_OF
from support.plans import machines, parse_task, plans


def step_of(seconds: float, *spans: tuple[str, float, float], num_devices: int = 1) -> Prediction:
    tasks = [(parse_task(name), start, end) for name, start, end in spans]
    made = tuple(Span(task, STREAM_OF[task.kind], start, end) for task, start, end in tasks)
    return Prediction(seconds, (DevicePrediction(made, 0, 0, (), 0.0, {}, {}, 0),) * num_devices)


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        ("1SWAP_IN", "weights"),
        ("1UNPARK0", "gradients"),
        ("1STASH_IN0", "stash"),
        ("1U", "update"),
        ("1TRANSFER_F0", "other device"),
        ("0STASH_OUT0", "room"),
        ("0SWAP_OUT", "room"),
        ("0U", "room"),
        ("0SWAP_IN", "host"),
        ("1STASH_IN1", "host"),
    ],
)
def test_a_task_waits_for_what_it_needs(other: str, cause: str) -> None:
    step = step_of(4.0, ("0F0", 0.0, 1.0), (other, 0.5, 3.0), ("1F0", 3.0, 4.0))
    assert idle_times(step, 0) == [Idle(cause, 1.0, 3.0)]


@pytest.mark.parametrize(
    ("other", "cause"), [("1U", "update"), ("1SWAP_OUT", "gradients"), ("1REDUCE1", "other device")]
)
def test_the_end_of_a_step_waits_for_the_last_of_it(other: str, cause: str) -> None:
    step = step_of(3.0, ("0B0", 0.0, 1.0), (other, 1.0, 3.0))
    assert idle_times(step, 0) == [Idle(cause, 1.0, 3.0)]


def test_a_device_that_has_nothing_left_to_do_waits_for_another_one() -> None:
    step = step_of(3.0, ("0B0", 0.0, 1.0), ("0U", 1.0, 2.0), num_devices=2)
    assert idle_times(step, 0) == [Idle("update", 1.0, 2.0), Idle("other device", 2.0, 3.0)]


def test_what_nothing_explains_is_the_hosts() -> None:
    step = step_of(10.0, ("1SWAP_IN", 0.0, 2.0), ("1F0", 3.0, 4.0), ("0U", 4.0, 5.0), ("1F1", 9.0, 10.0))
    assert idle_times(step, 0) == [Idle("weights", 0.0, 2.0), Idle("host", 2.0, 3.0), Idle("host", 4.0, 9.0)]
    assert idle_by_cause(step, 0) == {"host": 6.0, "weights": 2.0}


@given(planned=plans(), machine=machines)
@limits(max_examples=30)
def test_a_step_computes_or_is_idle(planned: tuple[Plan, tuple[Cost, ...]], machine: DeviceLimits) -> None:
    plan, packs = planned
    step = replay(plan, lower(plan, packs, DeviceLimits()), packs, DeviceLimits(None, machine.swap_in_bytes_per_second))
    for number, device in enumerate(step.devices):
        idle = idle_by_cause(step, number)
        assert device.compute_seconds + sum(idle.values()) == pytest.approx(step.seconds)
        assert set(idle) <= set(CAUSES)

"""Recordings: what was measured, written down and read back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as limits

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.drawing.recording import Recording, read_recording
from lightning_harmony.plan.simulate.lowering import lower
from lightning_harmony.plan.simulate.replay import predict, replay
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.profile import DeviceLimits
from lightning_harmony.plan.values.task import Phase
from support.plans import STEP, machines, plans

RECORDING = Recording(STEP, predict(STEP), "just-in-time: nothing reads all gradients")


@given(planned=plans(), machine=machines)
@limits(max_examples=30)
def test_what_is_written_is_read_back(planned: tuple[Plan, tuple[Cost, ...]], machine: DeviceLimits) -> None:
    plan, packs = planned
    measured = replay(plan, lower(plan, packs, DeviceLimits()), packs, replace(machine, capacity_bytes=None))
    recording = Recording(plan, measured, "deferred: so")
    assert Recording.from_json(recording.to_json()) == recording


def test_the_prediction_is_that_of_the_plan() -> None:
    assert RECORDING.predicted() == predict(STEP)
    unmeasured = replace(RECORDING, plan=replace(STEP, profile=None))
    assert unmeasured.predicted() is None
    assert unmeasured.why_unpredicted() == "the plan was made before the step had been measured"


def test_what_took_no_turns_is_not_told_what_turns_take() -> None:
    """Some steps run one microbatch after the other, with a plan for turns: their prediction was much too short."""
    (device,) = RECORDING.measured.devices
    spans = sorted(
        (span for span in device.spans if span.task.kind is Phase.FORWARD), key=lambda span: span.task.microbatch or 0
    )
    in_sequence = tuple(span._replace(start_seconds=n, end_seconds=n + 0.5) for n, span in enumerate(spans))
    recording = replace(RECORDING, measured=replace(RECORDING.measured, devices=(replace(device, spans=in_sequence),)))
    assert recording.predicted() is None
    assert recording.why_unpredicted() == "microbatches ran one after the other"


def changed(**parts: Any) -> str:
    return json.dumps(json.loads(RECORDING.to_json()) | parts)


def with_span(*span: Any) -> str:
    data = json.loads(RECORDING.to_json())
    data["measured"]["devices"][0]["spans"] = [list(span)]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is not JSON"),
        ("[]", "this is not a recorded step"),
        (STEP.to_json(), "HarmonyMonitor"),
        (changed(version=0), "version 0"),
        (changed(plan=None), "recording.plan: Expected `object`"),
        (changed(measured={}), "recording.measured: Object missing required field `seconds`"),
        (changed(update=1), "recording.update: Expected `str`, got `int`"),
        (changed(plan={**json.loads(RECORDING.to_json())["plan"], "num_devices": 2}), "of 1 devices, its plan for 2"),
        (with_span([3, "X", 0], "compute", 0.0, 1.0), "spans[0][0][1]: Expected one of F, B, SWAP_IN"),
        (with_span([3, [], 0], "compute", 0.0, 1.0), "Expected one of F, B, SWAP_IN"),
        (with_span(3, "compute", 0.0, 1.0), "spans[0][0]: Expected `array`, got `int`"),
        (with_span([0, "F", 0], "compute", 0.0), "Expected `array` of length 4"),
        (with_span([9, "F", 0], "compute", 0.0, 1.0), "there is no pack 9"),
        (with_span([0, "F", 0], "swap-in", 0.0, 1.0), "stream 'swap-in', where it never runs"),
        (with_span([0, "EVICT", None], "compute", 0.0, 1.0), "where it never runs"),
        (with_span([0, "F", 0], "compute", 2.0, 1.0), "runs from 2.0 s to 1.0 s"),
    ],
)
def test_what_is_no_recording_is_refused(text: str, problem: str) -> None:
    with pytest.raises(PlanError) as refused:
        Recording.from_json(text)
    assert problem in str(refused.value)


def test_a_file_is_named_in_what_is_wrong_with_it(tmp_path: Any) -> None:
    file = tmp_path / "step.json"
    with pytest.raises(PlanError, match="No such file"):
        read_recording(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=re.escape("step.json")):
        read_recording(file)
    file.write_text(RECORDING.to_json())
    assert read_recording(file) == RECORDING

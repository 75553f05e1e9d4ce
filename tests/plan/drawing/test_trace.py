"""The trace of a prediction, as trace viewers read it."""

import json

from lightning_harmony.plan.drawing.idle import idle_times
from lightning_harmony.plan.drawing.trace import to_trace
from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.values.task import STREAMS
from support.plans import STEP

PREDICTION = predict(STEP)
EVENTS = json.loads(to_trace(STEP, {"predicted": PREDICTION}))["traceEvents"]


def test_every_task_is_an_event_on_the_thread_of_its_stream() -> None:
    tasks = [event for event in EVENTS if event["ph"] == "X" and event["cat"] != "idle"]
    assert [event["args"]["task"] for event in tasks] == [str(span.task) for span in PREDICTION.devices[0].spans]
    backward = next(event for event in tasks if event["args"]["task"] == "1B1")
    assert backward["name"] == "c to d backward, microbatch 1"
    assert (backward["pid"], STREAMS[backward["tid"]], backward["dur"]) == (0, "compute", 1e6)
    assert backward["args"] == {"task": "1B1", "pack": 1, "layers": "c, d"}


def test_devices_and_streams_have_names() -> None:
    named = {event["args"]["name"] for event in EVENTS if event["ph"] == "M" and "name" in event["args"]}
    assert named == {"device 0", *STREAMS, "idle"}


def test_idle_times_are_events_with_their_causes() -> None:
    waits = [event for event in EVENTS if event["ph"] == "X" and event["cat"] == "idle"]
    assert [event["name"] for event in waits] == [f"idle: {idle.cause}" for idle in idle_times(PREDICTION, 0)]
    assert waits[0]["name"] == "idle: weights"


def test_several_steps_are_processes_of_their_own() -> None:
    events = json.loads(to_trace(STEP, {"measured": PREDICTION, "predicted": PREDICTION}))["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {0: "device 0, measured", 1: "device 0, predicted"}
    tasks = [event for event in events if event["ph"] == "X"]
    assert [event["pid"] for event in tasks] == [0] * (len(tasks) // 2) + [1] * (len(tasks) // 2)


def test_memory_is_a_counter() -> None:
    counted = [(event["ts"] / 1e6, event["args"]["bytes"]) for event in EVENTS if event["ph"] == "C"]
    assert counted == list(PREDICTION.devices[0].memory)

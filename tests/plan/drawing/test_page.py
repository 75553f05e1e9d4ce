"""The page of a prediction."""

import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import settings as limits

from lightning_harmony.plan.drawing.page import (
    format_seconds,
    held_words,
    idle_words,
    streams_of,
    summaries,
    summary,
    ticks,
    to_html,
)
from lightning_harmony.plan.simulate.lowering import lower
from lightning_harmony.plan.simulate.replay import predict, replay
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.profile import DeviceLimits
from support.plans import STEP, machines, plans

PREDICTION = predict(STEP)


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def boxes(drawing: ElementTree.Element, kind: str = "task") -> dict[str, ElementTree.Element]:
    """What is drawn of a kind, by what it tells."""
    return {box.find("title").text: box for box in drawing.iter("rect") if box.get("class") == kind}  # type: ignore[union-attr, misc]


def test_every_task_is_drawn_in_the_row_of_its_stream_and_tells_what_it_is() -> None:
    (drawing,) = drawings(to_html(STEP, {"predicted": PREDICTION}, "A step"))
    told = boxes(drawing)
    assert len(told) == len(PREDICTION.devices[0].spans)
    assert "c to d backward, microbatch 1: 1 s from 6 s\nc, d" in told
    assert "a & b forward, microbatch 0: 1 s from 1 s\na & b" in told
    rows = {name.split(":")[0]: box.get("y") for name, box in told.items()}
    weights = {rows[f"{pack} weights to the device"] for pack in ("a & b", "c to d")}
    assert rows["a & b forward, microbatch 0"] == rows["c to d backward, microbatch 1"] not in weights
    assert len(weights) == 1


def test_a_page_is_as_wide_as_its_window_with_ticks_capacity_and_key() -> None:
    assert STEP.profile is not None
    plan = replace(STEP, profile=replace(STEP.profile, machine=DeviceLimits(10240, 2048.0, 2048.0)))
    page = to_html(plan, {"predicted": predict(plan)}, "A step")
    (drawing,) = drawings(page)
    places = [float((box.get(side) or "").rstrip("%")) for box in drawing.iter("rect") for side in ("x", "width")]
    assert drawing.get("width") is None
    assert all((box.get("x") or "").endswith("%") for box in drawing.iter("rect"))
    assert all(0 <= place <= 100 for place in places)
    assert [text.text for text in drawing.iter("text")][:3] == ["0", "2 s", "4 s"]
    assert "capacity 10 KiB" in page
    assert "</i> 1 c to d</span>" in page
    assert boxes(drawing, "idle")


def test_what_a_device_holds_at_last_is_drawn_to_the_end_of_the_step() -> None:
    """It had no width, and the device looked empty behind the last change."""
    device = replace(PREDICTION.devices[0], memory=((0.0, 1024), (PREDICTION.seconds / 2, 512)))
    (drawing,) = drawings(to_html(STEP, {"measured": replace(PREDICTION, devices=(device,))}, "A step"))
    widths = [float((box.get("width") or "").rstrip("%")) for box in boxes(drawing, "memory").values()]
    assert widths == pytest.approx([50, 50])


def test_names_beside_a_drawing_do_not_cover_each_other() -> None:
    assert STEP.profile is not None
    for held in (100, 5000, 10240):
        device = replace(PREDICTION.devices[0], memory=((0.0, held),), peak_bytes=held)
        plan = replace(STEP, profile=replace(STEP.profile, machine=DeviceLimits(10240)))
        page = to_html(plan, {"measured": replace(PREDICTION, devices=(device,))}, "A step")
        tops = sorted(int(top) for top in re.findall(r'<div style="top:(\d+)px', page))
        assert all(below - above >= 16 for above, below in pairwise(tops))


@pytest.mark.parametrize(
    ("seconds", "most", "found"),
    [(3.7, 8, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]), (10.0, 5, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]), (0.0, 5, [0.0])],
)
def test_ticks_are_round(seconds: float, most: int, found: list[float]) -> None:
    assert ticks(seconds, most) == pytest.approx(found)


def test_the_stated_peak_is_the_top_of_the_curve() -> None:
    device = replace(PREDICTION.devices[0], memory=((0.0, 1024), (1.0, 3072), (2.0, 0)), peak_bytes=3072)
    assert held_words(device) == "at most 3 KiB"
    assert held_words(replace(device, peak_bytes=4096)) == "at most 3 KiB (4 KiB if copies take longer)"


def test_the_summary_tells_seconds_shares_peak_and_bytes() -> None:
    first, second = summary(STEP, PREDICTION)
    device = PREDICTION.devices[0]
    assert first == f"2 packs, 2 microbatches, 1 device: {PREDICTION.seconds:.3g} s a step"
    assert second == (
        f"device 0: computes {10 / PREDICTION.seconds:.0%} of the time (idle: {idle_words(PREDICTION, 0)}), "
        f"{held_words(device)}; in: 4 KiB weights, 1 KiB stash; out: 1 KiB stash, 2 KiB gradients"
    )
    assert "weights 9%" in idle_words(PREDICTION, 0)


def test_what_comes_from_other_devices_is_not_told_among_what_goes_to_the_host() -> None:
    devices = (PREDICTION.devices[0], replace(PREDICTION.devices[0], transferred_bytes=3072))
    *_, last = summary(replace(STEP, num_devices=2), replace(PREDICTION, devices=devices))
    assert last.endswith("; out: 1 KiB stash, 2 KiB gradients; from other devices: 3 KiB")


@given(planned=plans(), machine=machines)
@limits(max_examples=30)
def test_whatever_is_predicted_can_be_drawn(planned: tuple[Plan, tuple[Cost, ...]], machine: DeviceLimits) -> None:
    plan, packs = planned
    prediction = replay(
        plan, lower(plan, packs, DeviceLimits()), packs, DeviceLimits(None, machine.swap_in_bytes_per_second)
    )
    assert len(drawings(to_html(plan, {"predicted": prediction}, "A step"))) == plan.num_devices


def test_only_streams_that_are_used_have_a_row() -> None:
    assert streams_of(PREDICTION.devices) == ["swap-in", "stash-in", "compute", "swap-out", "update"]


def test_several_steps_are_drawn_below_each_other_to_one_scale() -> None:
    slow = predict(replace(STEP, profile=replace(STEP.profile, machine=DeviceLimits(None, 1024.0, 1024.0))))  # type: ignore[type-var]
    page = to_html(STEP, {"measured": slow, "predicted": PREDICTION}, "A step")
    assert re.findall("<h3>(device.*?)</h3>", page) == ["device 0, measured", "device 0, predicted"]
    name = "a & b forward, microbatch 0: 1 s from"
    widths = [
        next(box.get("width") for told, box in boxes(drawing).items() if told.startswith(name))
        for drawing in drawings(page)
    ]
    assert widths[0] == widths[1]
    assert [line.partition(":")[0] for line in summaries(STEP, {"measured": slow, "predicted": PREDICTION})] == [
        "measured", "device 0", "predicted", "device 0",
    ]  # fmt: skip


def test_times_are_written_in_the_unit_that_suits_them() -> None:
    assert [format_seconds(s) for s in (12.345, 1.0, 0.5, 0.00123, 4.56e-5, 0.0)] == [
        "12.3 s",
        "1 s",
        "500 ms",
        "1.23 ms",
        "45.6 µs",
        "0 µs",
    ]

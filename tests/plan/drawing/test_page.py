"""The page of a prediction."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import settings as limits

from lightning_harmony.plan.drawing.page import colour_of, format_seconds, streams_of, summaries, summary, to_html
from lightning_harmony.plan.simulate.lowering import lower
from lightning_harmony.plan.simulate.replay import predict, replay
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.profile import MachineLimits
from support.plans import STEP, machines, plans

PREDICTION = predict(STEP)


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_every_task_is_drawn_in_the_row_of_its_stream_and_tells_what_it_is() -> None:
    (drawing,) = drawings(to_html(STEP, {"predicted": PREDICTION}, "A step"))
    told = [box.find("title").text for box in drawing.iter("rect")]  # type: ignore[union-attr]
    assert len(told) == len(PREDICTION.devices[0].spans)
    assert "1B1: 1 s from 6 s\nc, d" in told
    assert "0F0: 1 s from 1 s\na & b" in told
    rows = {box.find("title").text.split(":")[0]: box.get("y") for box in drawing.iter("rect")}  # type: ignore[union-attr]
    assert rows["0F0"] == rows["1B1"] != rows["0SWAP_IN"] == rows["1SWAP_IN"]


def test_the_summary_tells_seconds_share_peak_and_bytes() -> None:
    first, second = summary(STEP, PREDICTION)
    assert first == f"2 packs, 2 microbatches, 1 device: {PREDICTION.seconds:.3g} s a step"
    share = 10 / PREDICTION.seconds
    peak = PREDICTION.peak_bytes[0] / 1024
    assert second == (
        f"device 0: computes {share:.0%} of the time, at most {peak:g} KiB; "
        "in: 4 KiB weights, 1 KiB stash; out: 1 KiB stash, 2 KiB gradients"
    )


@given(planned=plans(), machine=machines)
@limits(max_examples=30)
def test_whatever_is_predicted_can_be_drawn(planned: tuple[Plan, tuple[Cost, ...]], machine: MachineLimits) -> None:
    plan, packs = planned
    prediction = replay(plan, lower(plan, packs, None), packs, MachineLimits(None, machine.swap_in_bytes_per_second))
    assert len(drawings(to_html(plan, {"predicted": prediction}, "A step"))) == plan.num_devices


def test_only_streams_that_are_used_have_a_row() -> None:
    assert streams_of(PREDICTION.devices) == ["swap-in", "stash-in", "compute", "swap-out", "update"]


def test_several_steps_are_drawn_below_each_other_to_one_scale() -> None:
    slow = predict(replace(STEP, profile=replace(STEP.profile, machine=MachineLimits(None, 1024.0, 1024.0))))  # type: ignore[type-var]
    page = to_html(STEP, {"measured": slow, "predicted": PREDICTION}, "A step")
    assert re.findall("<h3>(device.*?)</h3>", page) == ["device 0, measured", "device 0, predicted"]
    widths = [
        next(float(box.get("width") or 0) for box in drawing.iter("rect") if "0F0" in box.find("title").text)  # type: ignore[operator, union-attr]
        for drawing in drawings(page)
    ]
    assert widths[0] == pytest.approx(widths[1])
    assert [line.partition(":")[0] for line in summaries(STEP, {"measured": slow, "predicted": PREDICTION})] == [
        "measured", "device 0", "predicted", "device 0",
    ]  # fmt: skip


def test_packs_have_colours_of_their_own() -> None:
    colours = [colour_of(pack, 12, is_light=light) for pack in range(12) for light in (False, True)]
    assert len(set(colours)) == 24
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
    assert colour_of(0, 1, is_light=False)


def test_times_are_written_in_the_unit_that_suits_them() -> None:
    assert [format_seconds(s) for s in (12.345, 1.0, 0.5, 0.00123, 4.56e-5, 0.0)] == [
        "12.3 s",
        "1 s",
        "500 ms",
        "1.23 ms",
        "45.6 µs",
        "0 µs",
    ]

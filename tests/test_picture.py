"""Pictures of a step."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_harmony.plan.simulate.replay import predict
from support.plans import STEP

pytest.importorskip("matplotlib")

from lightning_harmony.reporting.picture import draw

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_picture_is_drawn_with_a_timeline_and_the_memory_of_each_device(tmp_path: Path, num_devices: int) -> None:
    plan = replace(STEP, num_devices=num_devices)
    file = tmp_path / "plan.svg"
    draw(plan, {"predicted": predict(plan)}, file)
    text = file.read_text()
    # Words are paths in the drawing, with what they say beside them.
    for word in ["swap-in", "compute", "update", "memory (KiB)", "time (s)"]:
        assert text.count(f"<!-- {word} -->") == (1 if word == "time (s)" else num_devices)
    assert "<!-- 1 c to d -->" in text
    assert "<!-- idle: weights -->" in text
    assert ("<!-- transfer -->" in text) == (num_devices == 2)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_measured_and_predicted_lie_below_each_other(tmp_path: Path, num_devices: int) -> None:
    plan = replace(STEP, num_devices=num_devices)
    file = tmp_path / "step.svg"
    draw(plan, {"measured": predict(plan), "predicted": predict(plan)}, file)
    text = file.read_text()
    titles = re.findall("<!-- ((?:device ., )?(?:measured|predicted)) -->", text)
    devices = ["device 0, ", "device 1, "] if num_devices == 2 else [""]
    parts = [f"{device}{name}" for device in devices for name in ("measured", "predicted")]
    assert titles == parts
    assert text.count("<!-- compute -->") == 2 * num_devices


def test_the_suffix_tells_the_format(tmp_path: Path) -> None:
    draw(STEP, {"predicted": predict(STEP)}, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")

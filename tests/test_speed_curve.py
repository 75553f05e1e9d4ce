"""The picture of speed against memory."""

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from lightning_harmony.reporting.speed_curve import OURS, Point, Series, draw_curve

pytestmark = pytest.mark.cpu


def test_long_notes_go_on_in_the_next_line(tmp_path: Path) -> None:
    """A line that was wider than the picture lost both of its ends."""
    note = "a virtual device in the memory of a processor with a long name, 2 cores: " + "what it shows, " * 6
    file = tmp_path / "curve.svg"
    draw_curve(
        [Series([Point("8 GiB", 2.0**33, 1.0)], OURS)], file, memory="memory", speed="speed", notes=[note, "end"]
    )
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", file.read_text()) + re.findall(
        r"<tspan[^>]*>([^<]*)", file.read_text()
    )
    lines = [text for text in texts if text and text in f"{note}end"]
    assert len(lines) >= 3
    assert max(map(len, lines)) <= 105

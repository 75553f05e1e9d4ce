"""What is said in a fit stands above progress bars, and does not tear them."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from tqdm import tqdm

from lightning_harmony.setup.lightning_tree import LightningTree
from lightning_harmony.setup.progress import above_progress_bars

pytestmark = pytest.mark.cpu
TREE = LightningTree("lightning.pytorch")


def test_a_bar_of_tqdm_is_cleared_before_a_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The line began behind the bar, and half a bar stayed above it."""
    with tqdm(total=8, file=sys.stdout) as bar:
        bar.update(1)
        capsys.readouterr()
        TREE.show("said")
        out = capsys.readouterr().out
    before, _, after = out.partition("said\n")
    assert before.endswith("\r")
    assert not before.strip()
    assert "1/8" in after


def test_what_is_logged_stands_above_a_bar_of_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that had kept the stream wrote into the bar."""
    console, progress_of = pytest.importorskip("rich.console"), pytest.importorskip("rich.progress")
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler, logger = logging.StreamHandler(), logging.Logger("one of its own", logging.INFO)
    logger.addHandler(handler)
    shown = console.Console(file=terminal, force_terminal=True)
    with progress_of.Progress(console=shown, auto_refresh=False) as progress:
        progress.add_task("bar", total=8)
        progress.refresh()
        with above_progress_bars(logger):
            logger.info("said")
    assert handler.stream is terminal
    # The bar's line is erased, or the line would stand behind it.
    assert "\r\x1b[2Ksaid\n" in terminal.getvalue()

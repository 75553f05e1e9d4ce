"""The command line."""

from importlib.metadata import version

import pytest
import torch

from lightning_harmony.cli import main


def test_machine_shows_versions_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {version('torch')}" in lines[0]
    assert lines[1].startswith("host: ")
    assert lines[1].endswith(" free")
    assert len(lines) == 2 + max(torch.cuda.device_count(), 1)


def test_a_command_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "machine" in capsys.readouterr().err

"""The command line."""

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from lightning_harmony.cli import main
from lightning_harmony.plan.machine import read_machine


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


def test_a_measured_machine_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "--measure"]) == 0
    file = tmp_path / "machine.json"
    file.write_text(capsys.readouterr().out)
    machine = read_machine(str(file))
    assert machine.flops_per_second["float32"] > 0
    assert (machine.device_bytes is None) == (not torch.cuda.is_available())

"""Which weights lie in files, and need no memory of their own."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_harmony.engine.model.mapped_files import files_of

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="the system does not tell what memory maps"
)
CONTENT = {"one": torch.arange(2000.0), "two": torch.ones(3, 700, dtype=torch.bfloat16)}


def test_those_that_packages_load(tmp_path: Path) -> None:
    torch.save(CONTENT, tmp_path / "weights.pt")
    save_file(CONTENT, tmp_path / "weights.safetensors")
    for path, tensors in (
        (tmp_path / "weights.pt", torch.load(tmp_path / "weights.pt", mmap=True)),
        (tmp_path / "weights.safetensors", load_file(tmp_path / "weights.safetensors")),
    ):
        assert files_of(tensors.values()) == dict.fromkeys(tensors.values(), path)
        # It is the same memory.
        part = tensors["one"][100:200]
        assert files_of([part]) == {part: path}


def test_not_those_with_memory_of_their_own(tmp_path: Path) -> None:
    torch.save(CONTENT, tmp_path / "weights.pt")
    read = torch.load(tmp_path / "weights.pt")
    shared = torch.ones(5000).share_memory_()
    anonymous = torch.frombuffer(mmap.mmap(-1, 8192), dtype=torch.float32)
    assert not files_of([*read.values(), shared, anonymous, torch.ones(0), torch.ones(5, device="meta")])


def test_not_those_that_would_change_the_file_or_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "array"
    np.ones(5000, dtype=np.float32).tofile(path)
    assert not files_of([torch.from_numpy(np.memmap(path, np.float32, "r+"))])
    with pytest.warns(UserWarning, match="not writable"):
        fixed = torch.from_numpy(np.memmap(path, np.float32, "r"))
    assert not files_of([fixed])
    assert files_of([torch.from_numpy(np.memmap(path, np.float32, "c"))])


def test_not_those_with_gaps_or_of_files_that_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(CONTENT, path)
    tensors = torch.load(path, mmap=True)
    gaps: list[Tensor] = [tensors["one"][::2], tensors["two"].t()]
    assert not files_of(gaps)
    path.unlink()
    assert not files_of(tensors.values())

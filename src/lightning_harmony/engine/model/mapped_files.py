"""Mapped files: weights that lie in the files they were loaded from, which the system reads when somebody looks."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_harmony.engine.model.disk_store import folder_of

_Tensor = TypeVar("_Tensor", bound=Tensor)


class _Mapping(NamedTuple):
    """A part of the process's memory.

    Attributes:
        start: its first address.
        end: the address after its last.
        path: of the file that it maps; None where it maps none, or what is written there would be written to the file.
    """

    start: int
    end: int
    path: Path | None


def files_of(tensors: Iterable[_Tensor]) -> dict[_Tensor, Path]:
    """The tensors that lie in private mappings of files, as `safetensors` and ``torch.load(mmap=True)`` make them.

    Such memory is the system's to give back, as it is in the file. What is written to it stays in memory, and not in the file.
    Those that an earlier fit has left on disk are among them, whose files nobody else sees.

    Args:
        tensors: those to look at. One with gaps, or of a class of its own, is not among those that are found.

    Returns:
        Each with its file. None, where the system does not tell.
    """
    mappings = _mappings()
    starts = [mapping.start for mapping in mappings]
    found: dict[_Tensor, Path] = {}
    for tensor in tensors:
        if not is_plain(tensor):
            continue
        if (folder := folder_of(tensor)) is not None:
            found[tensor] = folder / "a file without a name"
            continue
        first = bisect_right(starts, tensor.data_ptr()) - 1
        if first >= 0 and (path := mappings[first].path) and tensor.data_ptr() + tensor.nbytes <= mappings[first].end:
            found[tensor] = path
    return found


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is an ordinary one of the host, without gaps."""
    is_strided = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    return is_strided and type(tensor.data) is Tensor and tensor.is_contiguous() and tensor.nbytes > 0


def _mappings() -> list[_Mapping]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return [_mapping(*line.split(None, 5)) for line in lines]


def _mapping(addresses: str, allowed: str, _offset: str, _device: str, inode: str, path: str = "") -> _Mapping:
    start, end = (int(address, 16) for address in addresses.split("-"))
    # Of a file without a name, or of one that is memory, nothing would be saved.
    is_file = inode != "0" and allowed.startswith("rw") and allowed.endswith("p") and not path.startswith("/dev/")
    return _Mapping(start, end, Path(path) if is_file and os.path.exists(path) else None)

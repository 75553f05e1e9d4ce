"""Many tensors go to another device in few copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_harmony.engine.replicas import flat_pieces
from lightning_harmony.engine.replicas.flat_pieces import FlatPieces

HOST = torch.device("cpu")


@pytest.fixture
def tensors() -> list[Tensor]:
    return [
        torch.randn(3, 5),
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.arange(7),
        torch.randn(()).to(torch.bfloat16),
        torch.arange(6.0)[::2],
        torch.zeros(1, 3).expand(4, 3),
        torch.zeros(0),
        torch.randn(300),
    ]


@pytest.mark.parametrize("most", [1, 64, 1 << 20], ids=["one each", "some together", "all together"])
def test_tensors_arrive_as_they_are_in_pieces_of_any_size(
    tensors: list[Tensor], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_pieces, "PIECE_BYTES", most)
    pieces = FlatPieces(tensors)
    buffers = pieces.buffers(HOST)
    views = pieces.views(buffers)
    pieces.fill(buffers, tensors)
    assert all(
        torch.equal(view, tensor) and view.dtype is tensor.dtype for view, tensor in zip(views, tensors, strict=True)
    )
    assert views[1].is_contiguous(memory_format=torch.channels_last)
    if most == 1 << 20:
        assert len(buffers) == 1


def test_of_no_tensors_there_are_no_pieces() -> None:
    pieces = FlatPieces(())
    assert pieces.views(pieces.buffers(HOST)) == []

"""Copies with the strides of what they copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_harmony.engine.structures.strides import copied


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(8, 16),
        torch.randn(16, 8).t(),
        torch.randn(2, 9, 16)[:, 1:],
        torch.randn(16).expand(8, 16),
        torch.randn(64).unfold(0, 8, 2),
        torch.tensor(1.5),
        torch.empty(0, 4),
    ],
    ids=["dense", "transposed", "gaps", "expanded", "overlapping", "scalar", "empty"],
)
def test_a_copy_has_the_strides_of_its_source_and_memory_of_its_own(tensor: Tensor) -> None:
    copy = copied(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert tensor.numel() == 0 or copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_a_sparse_tensor_is_copied_as_it_is() -> None:
    tensor = torch.eye(4).to_sparse()
    assert torch.equal(copied(tensor).to_dense(), torch.eye(4))

"""Copies with the strides of what they copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_harmony.engine.structures.strides import assign, cloned_together, copied, is_expanded, places_in_memory


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
        torch.ones(1).expand(0),
    ],
    ids=["dense", "transposed", "gaps", "expanded", "overlapping", "scalar", "empty", "expanded to nothing"],
)
def test_a_copy_has_the_strides_of_its_source_and_memory_of_its_own(tensor: Tensor) -> None:
    copy = copied(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert tensor.numel() == 0 or copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_clones_share_memory_where_what_they_are_of_did() -> None:
    whole, alone, sparse = torch.randn(4, 6), torch.randn(4, 6)[:, ::2], torch.eye(3).to_sparse()
    tensors = [whole[1:, ::2], whole.double(), whole.t(), alone, sparse]
    apart = [copied(each).requires_grad_(each is tensors[0]) for each in tensors]
    clones = cloned_together(apart, places_in_memory(tensors))
    assert [each.requires_grad for each in clones] == [True, False, False, False, False]
    assert [each.stride() for each in clones[:4]] == [each.stride() for each in tensors[:4]]
    assert all(map(torch.equal, clones[:4], tensors))
    clones[0].mul_(2)
    assert torch.equal(clones[2].t()[1:, ::2], clones[0])
    assert torch.equal(clones[1], whole.double())
    assert torch.equal(apart[0], tensors[0])


def test_a_sparse_tensor_is_copied_as_it_is() -> None:
    tensor = torch.eye(4).to_sparse()
    assert torch.equal(copied(tensor).to_dense(), torch.eye(4))


@pytest.mark.parametrize(
    ("tensor", "expanded"),
    [
        (torch.zeros(4).expand(3, 4), True),
        (torch.zeros(3, 1).expand(2, 3, 4), True),
        (torch.zeros(1).expand(0), False),
        (torch.zeros(3, 4).t(), False),
        (torch.tensor(0.5), False),
        (torch.eye(4).to_sparse(), False),
    ],
)
def test_an_expanded_tensor_is_given_other_values(tensor: Tensor, expanded: bool) -> None:
    """PyTorch itself refuses to write to one: what had to be restored hid the error that it was restored for."""
    assert is_expanded(tensor) is expanded
    values = (
        tensor.clone() + tensor.clone().fill_(2) if tensor.layout is torch.strided else torch.ones(4, 4).to_sparse()
    )
    assign(tensor, values)
    assert torch.equal(tensor.to_dense(), values.to_dense())


def test_values_of_another_size_are_refused() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        assign(torch.zeros(2, 4), torch.ones(3, 4))

"""Undoing what a step has changed in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.held.held_state import Held, Kind
from lightning_harmony.microbatches.lane_attributes import KnownChanges
from lightning_harmony.microbatches.remembered import undo_of_tensor
from lightning_harmony.microbatches.step_undo import MOST_COPIED, Undo


def undo_with(tensors: list[Tensor]) -> Undo:
    return Undo(nn.Linear(2, 2), [Held("queue", tensors, Kind.CONTAINER)], KnownChanges())


def test_what_nothing_was_seen_to_change_is_named_and_taken_back() -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    undo = undo_with(tensors)
    assert undo.late() is None
    tensors[1].add_(1)
    assert undo.late() == "a Tensor held by 'queue' is changed in place"
    assert undo.restore()
    assert torch.equal(tensors[1], torch.zeros(2))


def test_of_long_lists_a_change_is_named_and_cannot_be_taken_back() -> None:
    """To copy a thousand losses before each step took longer than the step."""
    tensors = [torch.zeros(2) for _ in range(MOST_COPIED + 1)]
    undo = undo_with(tensors)
    assert undo.restore()
    tensors[-1].add_(1)
    assert undo.late() == "a Tensor held by 'queue' is changed in place"
    assert not undo.restore()


def test_an_expanded_tensor_is_taken_back() -> None:
    tensors = [torch.zeros(1).expand(3)]
    undo = undo_with(tensors)
    tensors[0][:1].add_(1)
    assert tensors[0].tolist() == [1, 1, 1]
    assert undo.restore()
    assert tensors[0].tolist() == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "made", [torch.eye(3).to_sparse, torch.eye(3).to_sparse_csr, lambda: torch.nested.nested_tensor([torch.ones(2)])]
)
def test_a_tensor_that_is_not_strided_is_taken_back(made: Callable[[], Tensor]) -> None:
    """Where there is no comparison of such tensors, an error of that took the place of another attempt."""
    tensor = made()
    undo = undo_of_tensor(tensor)
    for change in (lambda: tensor, lambda: tensor.mul_(2)):
        change()
        undo()
        same = tensor.unbind()[0] == 1 if tensor.is_nested else tensor.to_dense() == torch.eye(3)
        assert same.all()


def test_a_tensor_that_was_made_larger_is_taken_back() -> None:
    """A step that did not fit ended with an error of the copy in place of another attempt."""
    tensors = [torch.empty(0), torch.ones(1)]
    undo_all = [undo_of_tensor(tensor) for tensor in tensors]
    for tensor in tensors:
        tensor.resize_(3).fill_(2)
    for undo in undo_all:
        undo()
    assert [tensor.tolist() for tensor in tensors] == [[], [1]]

"""Changes that torch does not count."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from lightning_harmony.engine.memory.unseen_changes import CallChanges, UnseenChanges
from lightning_harmony.errors import UnsupportedModelError
from support.composed import Packed

pytestmark = pytest.mark.cpu


class Looking:
    def __init__(self) -> None:
        self.found = 0
        self.changes = UnseenChanges(nullcontext, self._note)
        self.first, self.second = (CallChanges(layer, self.changes) for layer in ("first", "second"))

    def _note(self) -> None:
        self.found += 1


@pytest.fixture
def looking() -> Looking:
    return Looking()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 8),
        torch.zeros(4, 8).t(),
        torch.zeros(4, 16)[:, ::2],
        torch.zeros(4, 1).expand(4, 8),
        torch.zeros(()),
    ],
    ids=["contiguous", "transposed", "with gaps", "expanded", "a number"],
)
def test_are_found_whatever_the_strides(tensor: Tensor, looking: Looking) -> None:
    looking.changes.look(tensor)
    looking.changes.look(tensor)
    assert looking.found == 0
    tensor.data.view_as(tensor)[..., :1].fill_(1) if tensor.dim() else tensor.data.fill_(1)
    looking.changes.look(tensor)
    assert looking.found == 1


def test_are_none_where_torch_counts_them(looking: Looking) -> None:
    tensor = torch.zeros(8)
    looking.changes.look(tensor, by=looking.first, saves=True)
    tensor.add_(1)
    looking.changes.look(tensor)
    looking.changes.look_again()
    assert looking.found == 0


def test_are_refused_where_a_graph_has_saved_the_memory(looking: Looking) -> None:
    tensor = torch.zeros(8)
    looking.changes.look(tensor, by=looking.first, saves=True)
    looking.changes.look(tensor, by=looking.second)
    tensor.data.add_(1)
    with pytest.raises(UnsupportedModelError, match="layer 'first'"):
        looking.changes.look_again()


def test_of_a_layers_own_code_come_again_with_it(looking: Looking) -> None:
    tensor = torch.zeros(8)
    looking.changes.look(tensor)
    tensor.data.add_(1)
    looking.changes.look(tensor, by=looking.first, saves=True)
    looking.changes.look_again()
    assert looking.found == 1


def test_of_a_layers_own_code_are_refused_where_the_graph_of_another_call_has_saved_the_memory(
    looking: Looking,
) -> None:
    tensor = torch.zeros(8)
    looking.changes.look(tensor, by=looking.first, saves=True)
    looking.changes.look(tensor, by=looking.second, saves=True)
    tensor.data.add_(1)
    with pytest.raises(UnsupportedModelError, match="layer 'first'"):
        looking.changes.look(tensor, by=looking.second)


def test_of_memory_that_only_the_tensor_has_left_are_none_of_the_graphs(looking: Looking) -> None:
    tensor = torch.zeros(8)
    looking.changes.look(tensor, by=looking.first, saves=True, is_made=True)
    tensor.data = torch.ones(8)
    looking.changes.look(tensor)
    assert looking.found == 1


def test_of_a_tensor_in_the_place_of_another_are_none(looking: Looking) -> None:
    for number in range(20):
        looking.changes.look(torch.full((8,), float(number)), by=looking.first, saves=True)
    looking.changes.look_again()
    assert looking.found == 0


def test_are_not_looked_for_in_tensors_of_other_kinds(looking: Looking) -> None:
    with torch.inference_mode():
        inference = torch.zeros(8)
    others = [
        inference,
        torch.zeros(8).to_sparse(),
        torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        torch.zeros(8, dtype=torch.complex64).conj(),
        Packed.of(torch.rand(8, 8)),
    ]
    for _ in range(2):
        for other in others:
            looking.changes.look(other, by=looking.first, saves=True)
    looking.changes.look_again()
    assert looking.found == 0

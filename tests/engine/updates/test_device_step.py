"""Pieces of updates: each element is in one, in order, and what a step finds on the device is what torch puts there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_harmony.engine.model.host_store import ALIGNMENT
from lightning_harmony.engine.updates.device_step import Pieces, copy_all, is_on_device

KIB = 1024


def parameters(*numbers: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(number)) for number in numbers]


def sizes(pieces: Pieces) -> list[int]:
    return [sum(part.of(part.parameter.detach()).nbytes for part in piece) for piece in pieces]


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=8), st.integers(1, 40 * KIB), st.booleans())
def test_each_element_is_in_one_piece_and_in_order(numbers: list[int], most_bytes: int, may_be_cut: bool) -> None:
    members = parameters(*numbers)
    for number, parameter in enumerate(members):
        parameter.data.fill_(number)
        parameter.data += torch.arange(parameter.numel()) / 8192
    pieces = list(Pieces(members, most_bytes, lambda parameter: may_be_cut))
    parts = [part for piece in pieces for part in piece]
    together = torch.cat([part.of(part.parameter.detach()) for part in parts])
    assert torch.equal(together, torch.cat([parameter.detach() for parameter in members]))
    assert [part.parameter for part in parts if part.is_last] == members
    for piece in pieces:
        assert len({part.parameter for part in piece}) == len(piece)
        # Kernels are chosen by alignment.
        assert all(part.elements is None or part.elements.start % ALIGNMENT == 0 for part in piece)
        cut = [part for part in piece if not part.is_last]
        assert len(cut) <= 1
    if may_be_cut:
        least = ALIGNMENT * 4
        assert all(size <= max(most_bytes, least) for size in sizes(Pieces(members, most_bytes, lambda _: True)))


def test_the_first_and_the_last_pieces_are_smaller_for_nothing_goes_on_beside_them() -> None:
    found = sizes(Pieces(parameters(80 * KIB, 80 * KIB), 64 * KIB, lambda _: True))
    assert sum(found) == 640 * KIB
    assert found[:3] == [16 * KIB, 32 * KIB, 64 * KIB]
    assert found[-1] <= 16 * KIB
    assert max(found) == 64 * KIB


def test_parameters_smaller_than_the_first_piece_are_one_piece() -> None:
    assert len(list(Pieces(parameters(100, 200, 300), 64 * KIB, lambda _: True))) == 1


def test_what_cannot_be_cut_has_a_piece_of_its_own() -> None:
    small, large = parameters(16, 40 * KIB)
    pieces = list(Pieces([small, large, small], 64 * KIB, lambda _: False))
    assert [[part.parameter for part in piece] for piece in pieces] == [[small], [large], [small]]


@pytest.mark.parametrize("flag", ["fused", "capturable"])
def test_the_number_of_a_step_is_on_the_device_where_the_implementation_counts_there(flag: str) -> None:
    number = torch.zeros(())
    assert not is_on_device("step", number, {flag: False})
    assert is_on_device("step", number, {flag: True})


def test_all_other_tensors_are_on_the_device_and_python_numbers_are_not() -> None:
    assert is_on_device("mu_product", torch.zeros(()), {})
    assert is_on_device("exp_avg", torch.zeros(3), {})
    assert not is_on_device("exp_avg", None, {})
    assert not is_on_device("step", 3, {"fused": True})


class Doubling(Tensor):
    """Takes twice what is copied to it."""

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Doubling:
        with torch._C.DisableTorchFunctionSubclass():
            self.as_subclass(Tensor).copy_(2 * source, non_blocking)
        return self


def test_what_has_a_class_of_its_own_is_copied_by_that() -> None:
    one, other, own = torch.zeros(2), nn.Parameter(torch.zeros(3, 2)), torch.zeros(2).as_subclass(Doubling)
    with torch.no_grad():
        copy_all([(one, torch.ones(2)), (own, torch.ones(2)), (other, torch.arange(6.0).view(2, 3).t())])
    assert one.tolist() == [1, 1]
    assert own.tolist() == [2, 2]
    assert other.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert [one._version, other._version] == [1, 1]


def test_nothing_to_copy_is_nothing_to_do() -> None:
    copy_all([])

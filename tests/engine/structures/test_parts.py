"""The tensors that a tensor consists of, and the same tensor made of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.structures.parts import (
    are_alike,
    are_equal,
    cloned,
    data_of,
    is_composed,
    made_of,
    num_bytes_of,
    parts_of,
    storages_of,
)
from support.composed import Lookup, Nested, Packed, Scaled, Unsteady

VALUES = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def test_a_plain_tensor_is_its_only_part() -> None:
    parameter = nn.Parameter(VALUES)
    assert parts_of(parameter) == (parameter,)
    assert not is_composed(parameter)
    assert made_of(parameter, [VALUES]) is VALUES
    assert num_bytes_of(parameter) == 8 * 8 * 4


def test_parts_are_found_at_any_depth() -> None:
    nested = nn.Parameter(Nested.of(VALUES), requires_grad=False)
    assert is_composed(nested)
    packed: Any = nested.packed  # type: ignore[attr-defined]
    expected = [packed.codes, packed.scale, packed.zero, nested.offset]  # type: ignore[attr-defined]
    assert [id(part) for part in parts_of(nested)] == [id(part) for part in expected]
    assert num_bytes_of(nested) == 8 * 8 // 2 + 3 * 8 * 4


@pytest.mark.parametrize("kind", [Packed, Nested, Scaled, Lookup])
def test_a_tensor_made_of_copies_has_the_same_class_and_values(kind: type[Any]) -> None:
    tensor = kind.of(VALUES)
    other = made_of(tensor, [part.clone() for part in parts_of(tensor)])
    assert type(other) is kind
    assert other.shape == tensor.shape
    assert torch.equal(other.values_(), tensor.values_())  # type: ignore[attr-defined]
    assert are_equal(other, tensor)
    assert not {part.data_ptr() for part in parts_of(other)} & {part.data_ptr() for part in parts_of(tensor)}


def test_a_clone_has_the_same_values_where_the_class_would_quantize_anew() -> None:
    tensor = Unsteady.of(VALUES)
    assert not torch.equal(tensor.clone().values_(), tensor.values_())
    assert are_equal(cloned(tensor), tensor)
    assert torch.equal(cloned(VALUES), VALUES)


def test_tensors_are_alike_that_are_composed_in_the_same_way() -> None:
    tensor = Packed.of(VALUES)
    assert are_alike(tensor, Packed.of(VALUES * 2))
    assert not are_equal(tensor, Packed.of(VALUES * 2))
    assert not are_alike(tensor, Scaled.of(VALUES))
    assert not are_alike(tensor, Unsteady.of(VALUES))
    # What tells how to read the parts counts, too.
    assert not are_alike(tensor, tensor.to(torch.bfloat16))
    assert not are_alike(VALUES, VALUES[1:])
    assert not are_alike(VALUES, VALUES.double())


def test_data_counts_its_own_changes() -> None:
    tensor = Packed.of(VALUES)
    data: Any = data_of(tensor)
    data.scale.mul_(2)
    assert torch.equal(tensor.scale, data.scale)
    assert (tensor.scale._version, data.scale._version) == (0, 1)


def test_storages_are_strided() -> None:
    sparse = torch.eye(3).to_sparse_coo()
    assert all(part.layout is torch.strided for part in storages_of(sparse))
    composed: Tensor = Nested.of(VALUES)
    assert [id(part) for part in storages_of(composed)] == [id(part) for part in parts_of(composed)]

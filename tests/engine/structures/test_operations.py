"""The engine's own operations, out of sight of graphs and modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_harmony.engine.structures.operations import Unseen, detached


class Seen(TorchDispatchMode):
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


class TestUnseen:
    def test_neither_graphs_nor_modes_see_what_is_done(self) -> None:
        weight = torch.ones(2, requires_grad=True)
        with Seen() as seen, Unseen():
            product = weight * 2
        assert not product.requires_grad
        assert not seen.operations

    @pytest.mark.parametrize("enabled", [True, False])
    def test_afterwards_all_is_as_before_even_after_an_error(self, enabled: bool) -> None:
        weight = torch.ones(2, requires_grad=True)
        with Seen() as seen, torch.set_grad_enabled(enabled):
            with pytest.raises(KeyError), Unseen(), Unseen():
                raise KeyError
            product = weight * 2
        assert product.requires_grad is enabled
        assert seen.operations == [torch.ops.aten.mul.Tensor]


class TestDetached:
    def test_shares_memory_and_counts_the_same_changes(self) -> None:
        product = torch.ones(2, requires_grad=True) * 2
        with Seen() as seen:
            tensor = detached(product)
        assert not seen.operations
        assert tensor.grad_fn is None
        product.add_(1)
        assert tensor.tolist() == [3, 3]
        assert tensor._version == product._version

    def test_a_class_that_has_its_values_elsewhere_detaches_them_itself(self) -> None:
        two = TwoTensor(torch.ones(2), torch.zeros(2)).requires_grad_()
        one: Tensor = detached(two)
        assert isinstance(one, TwoTensor)
        assert not one.requires_grad
        assert one.b.tolist() == [0, 0]

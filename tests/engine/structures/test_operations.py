"""The engine's own operations, out of sight of graphs and modes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_harmony.engine.structures.operations import Unseen, detached, run_as_without_mode, viewed


class Seen(TorchDispatchMode):
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


class Running(TorchDispatchMode):
    """Runs what it sees as it runs without a mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_as_without_mode(func, args, kwargs or {})


def behind_linear(make: Callable[[], nn.Module]) -> Callable[[Tensor], Tensor]:
    """What a layer computes of a linear one's result, which autocast has made narrow."""
    torch.manual_seed(0)
    before, layer = nn.Linear(8, 8), make()

    def run(x: Tensor) -> Tensor:
        result = layer(before(x))
        return result[0] if isinstance(result, tuple) else result

    return run


WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) / 4
CODE: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": behind_linear(lambda: nn.Linear(8, 8)),
    "einsum": lambda x: torch.einsum("bij,jk->bik", x, WEIGHT),
    "matmul": lambda x: x @ WEIGHT,
    "bmm": lambda x: torch.bmm(x, x.mT),
    "baddbmm": lambda x: torch.baddbmm(x @ x.mT, x, x.mT),
    "convolution": lambda x: nn.functional.conv1d(x.mT, WEIGHT[..., None]),
    "distances": lambda x: torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist"),
    "norm": lambda x: (x @ WEIGHT).norm(dim=-1),
    "softmax": lambda x: (x @ WEIGHT).softmax(-1).sum((1, 2)),
    "product": lambda x: (x @ WEIGHT).prod(-1),
    "cosine": lambda x: nn.functional.cosine_similarity(x @ WEIGHT, x, dim=-1),
    "loss": lambda x: nn.functional.cosine_embedding_loss(x[0] @ WEIGHT, x[0], torch.ones(6)),
    "inverse": lambda x: torch.linalg.pinv(x[:, :4].float()),
    "lstm": behind_linear(lambda: nn.LSTM(8, 8, batch_first=True)),
    "gru": behind_linear(lambda: nn.GRU(8, 8, batch_first=True)),
    "encoder": behind_linear(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval()),
    "encoder in training": behind_linear(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
    "chunks of a weight": lambda x: x @ torch.cat(WEIGHT.chunk(2)[::-1]),
    "a part of a weight": lambda x: x @ WEIGHT.narrow(1, 2, 4),
    "without autocast": lambda x: torch.autocast("cpu", enabled=False)(torch.einsum)("bij,jk->bik", x, WEIGHT),
}


class TestRunAsWithoutMode:
    @pytest.mark.parametrize(
        "context", [nullcontext, torch.no_grad, torch.inference_mode], ids=["grad", "no grad", "inference"]
    )
    @pytest.mark.parametrize("is_cast", [True, False], ids=["autocast", "as it is"])
    @pytest.mark.parametrize("code", CODE.values(), ids=CODE)
    def test_makes_the_same_bits_whatever_is_cast(
        self, code: Callable[[Tensor], Tensor], is_cast: bool, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2))
        with context(), torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            expected = code(x)
            with Running():
                found = code(x)
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)

    @pytest.mark.parametrize(
        "change",
        [lambda each: torch._foreach_mul_(each, 2.0), lambda each: torch._foreach_copy_(each, [torch.ones(2)])],
    )
    def test_an_operation_on_a_list_counts_that_it_changes_its_tensors(self, change: Callable[[Any], Any]) -> None:
        one, other = torch.zeros(2), torch.zeros(2)
        change([one])
        with Running():
            change([other])
        assert other._version == one._version > 0


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


class TestViewed:
    def test_shares_memory_and_no_mode_sees_it(self) -> None:
        whole = torch.zeros(6)
        with Seen() as seen:
            view = viewed(whole, Tensor.as_strided, (2,), (3,), 1)
        assert not seen.operations
        view.fill_(1)
        assert whole.tolist() == [0, 1, 0, 0, 1, 0]

    def test_is_in_the_graph_of_what_is_viewed(self) -> None:
        weight = torch.ones(4, requires_grad=True)
        with Seen():
            viewed(weight, Tensor.view, 2, 2).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [1, 1, 1, 1]

    def test_modes_see_operations_again_after_an_error(self) -> None:
        with Seen() as seen:
            with pytest.raises(RuntimeError):
                viewed(torch.ones(4), Tensor.view, 3)
            torch.ones(1)
        assert torch.ops.aten.ones.default in seen.operations

    def test_a_class_that_has_its_values_elsewhere_views_them_itself(self) -> None:
        view = viewed(TwoTensor(torch.ones(4), torch.zeros(4)), Tensor.view, 2, 2)
        assert isinstance(view, TwoTensor)
        assert view.b.tolist() == [[0, 0], [0, 0]]


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

"""Hollow graphs: filled by a second run that ends early, exact, and holding no memory in between."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import Block
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.hollow_graph import HollowGraph, edge_of, empty
from lightning_harmony.engine.layer import SwappedLayer
from lightning_harmony.engine.pack import Residency
from lightning_harmony.engine.stream import Happened
from lightning_harmony.engine.verify import verify_layer
from lightning_harmony.errors import UnsupportedModelError


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).chunk(3, -1)
        return self.out((query @ key.transpose(1, 2)).softmax(-1) @ value)


class Squashed(nn.Module):
    """Saves what it returns: the second run can't end before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Storages(TorchDispatchMode):
    """Which products are computed, and which memory is still there of all that was allocated."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[Any] = []
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_products += func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._storages += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        return result

    def num_living(self, known: Sequence[Tensor]) -> int:
        ours = {tensor.untyped_storage()._cdata for tensor in known}
        living = {storage()._cdata for storage in self._storages if storage() is not None}
        return len(living - ours)


def samples() -> Tensor:
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))


# The layers here have none of the memory that packs have.
NO_WEIGHTS = torch.empty(0)


def make(run: Callable[[Tensor], Tensor], x: Tensor) -> HollowGraph:
    graph = HollowGraph()
    with graph.saving(NO_WEIGHTS):
        output = run(graph.passed(x.detach().requires_grad_()))
    assert graph.close([output])
    return graph


def differentiate(graph: HollowGraph, leaves: Sequence[GradientEdge], gradient: Tensor) -> Sequence[Tensor]:
    outputs: Any = graph.outputs
    return torch.autograd.grad(outputs, [*graph.inputs, *leaves], [gradient])


@pytest.mark.parametrize("module_class", [Block, Attention, Squashed, Recurrent])
def test_it_gives_the_gradients_of_a_whole_run(module_class: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, x, gradient = module_class(), samples(), torch.randn(2, 8, 16)
    leaf = x.detach().requires_grad_()
    expected = torch.autograd.grad(module(leaf), [leaf, *module.parameters()], gradient)
    graph = make(module, x)
    assert graph.fill(lambda: module(x.detach().requires_grad_()), NO_WEIGHTS) is None
    found = differentiate(graph, [edge_of(parameter) for parameter in module.parameters()], gradient)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_last_product_is_not_computed_again() -> None:
    block, x = Block(), samples()
    graph = make(block, x)
    with Storages() as storages:
        graph.fill(lambda: block(x.detach().requires_grad_()), NO_WEIGHTS)
    assert storages.num_products == 1


@pytest.mark.parametrize("module_class", [Block, Attention, Squashed, Recurrent])
def test_it_holds_no_memory_before_its_backward_nor_after(module_class: type[nn.Module]) -> None:
    """A graph that saves its own result held itself, and with it all that came before."""
    module, x = module_class(), samples()
    known = [x, *module.parameters()]
    with Storages() as storages:
        graph = make(module, x)
    assert storages.num_living(known) == 0
    with Storages() as storages:
        assert graph.fill(lambda: module(x.detach().requires_grad_()), NO_WEIGHTS) is None
        differentiate(graph, [edge_of(parameter) for parameter in module.parameters()], torch.ones(2, 8, 16))
    assert storages.num_living(known) == 0


def test_it_keeps_no_weights_that_have_left() -> None:
    weights = torch.randn(16, 16)
    leaf = nn.Parameter(weights.view(16, 16))
    graph = make(lambda x: F.linear(x, leaf), samples())
    edge, storage = edge_of(leaf), weakref.ref(weights.untyped_storage())
    empty(leaf)
    arrived = weights.clone()
    del weights
    assert storage() is None
    graph.fill(lambda: F.linear(samples().requires_grad_(), nn.Parameter(arrived)), NO_WEIGHTS)
    _, found = differentiate(graph, [edge], torch.ones(2, 8, 16))
    assert torch.equal(found, torch.ones(16, 16).T @ samples().flatten(0, 1))


def test_who_keeps_what_the_call_was_given_still_has_it() -> None:
    """As hooks that collect activations do."""
    seen = []
    block = Block()
    block.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    make(block, samples())
    assert torch.equal(seen[0], samples())


def test_a_run_that_saves_other_tensors_counts_by_itself() -> None:
    """A layer that decides by something outside of it: each run's gradients are its own."""
    weights = [nn.Parameter(torch.randn(16, 16)) for _ in range(2)]
    x = samples()
    graph = make(lambda x: F.linear(x, weights[0]), x)
    again = graph.fill(lambda: F.gelu(F.linear(F.gelu(F.linear(x, weights[0])), weights[1])), NO_WEIGHTS)
    assert again is not None
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(again.sum(), weights))


def test_a_run_that_saves_the_same_shapes_in_another_order_counts_by_itself() -> None:
    """A square layer saves its input and its weight in this order or that, by the strides of the input.

    One for the other gave LLaVA's vision tower gradients that were wrong by a factor of forty.
    """
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(2, 9, 16)[:, 1:]
    graph = make(layer, x)
    leaf = x.contiguous().requires_grad_()
    again = graph.fill(lambda: layer(leaf), NO_WEIGHTS)
    assert again is not None
    found = torch.autograd.grad(again.square().sum(), [leaf, *layer.parameters()])
    expected = torch.autograd.grad(layer(leaf).square().sum(), [leaf, *layer.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_run_that_saves_its_input_where_a_weight_was_counts_by_itself() -> None:
    """Though both have the same shape and strides."""
    weights = torch.randn(2, 16, 16)
    one, other = (nn.Parameter(part) for part in weights)
    x = torch.randn(16, 16)
    graph = HollowGraph()
    with graph.saving(weights):
        output = graph.passed(x.detach().requires_grad_()) * one * other
    assert graph.close([output])
    assert graph.fill(lambda: one * x.detach().requires_grad_() * other, weights) is not None


def test_code_that_catches_everything_does_not_go_on_unnoticed() -> None:
    weight, x = nn.Parameter(torch.randn(16, 16)), samples()

    def stubborn(x: Tensor) -> Tensor:
        for _ in range(2):
            with contextlib.suppress(BaseException):
                return F.linear(x, weight)
        return x

    graph = make(stubborn, x)
    assert graph.fill(lambda: stubborn(x.detach().requires_grad_()), NO_WEIGHTS) is None
    _, found = differentiate(graph, [edge_of(weight)], torch.ones(2, 8, 16))
    assert torch.equal(found, torch.ones(16, 16).T @ x.flatten(0, 1))


def test_errors_of_the_run_come_through() -> None:
    graph = make(Block(), samples())

    def fails() -> Tensor:
        raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's"):
        graph.fill(fails, NO_WEIGHTS)


def test_what_was_saved_must_not_change() -> None:
    weight, x = nn.Parameter(torch.randn(16, 16)), samples()

    def changes(x: Tensor) -> Tensor:
        y = x * 2
        z = F.linear(y, weight)
        y.add_(1)
        return z * z

    graph = make(changes, x)
    graph.fill(lambda: changes(x.detach().requires_grad_()), NO_WEIGHTS)
    with pytest.raises(RuntimeError, match=r"modified in place"):
        differentiate(graph, [edge_of(weight)], torch.ones(2, 8, 16))


def test_a_backward_before_it_is_filled_says_what_is_wrong() -> None:
    graph = make(Block(), samples())
    with pytest.raises(UnsupportedModelError, match="the graph inside a layer"):
        differentiate(graph, [], torch.ones(2, 8, 16))


def test_what_returns_its_input_has_no_graph_to_fill() -> None:
    graph = HollowGraph()
    with graph.saving(NO_WEIGHTS):
        x = graph.passed(samples().requires_grad_())
    assert not graph.close([x])


class Remembers(torch.autograd.Function):
    """Keeps a tensor as an attribute, which autograd knows nothing of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.x, ctx.factor = x, factor
        return x * x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return 2 * ctx.x * gradient * ctx.factor, None


class Saves(torch.autograd.Function):
    """Keeps a tensor as it should."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient * ctx.factor, None


def add_own_leaf(x: Tensor, factor: float) -> Tensor:
    """A leaf that is made on the way, which its graph keeps."""
    return x * factor + torch.zeros_like(x).requires_grad_()


KEEPERS = [(Remembers.apply, True), (Saves.apply, False), (add_own_leaf, True)]


@pytest.mark.parametrize(("function", "holds"), KEEPERS, ids=["attribute", "saved", "leaf"])
def test_graphs_that_keep_tensors_beside_those_saved_are_found(function: Any, holds: bool) -> None:
    module = nn.Linear(16, 16)
    layer = SwappedLayer(0, "layer", module, list(module.parameters()))
    leaves = {parameter: nn.Parameter(parameter.detach().clone()) for parameter in module.parameters()}
    residency = Residency(None, torch.empty(0), Happened(), leaves, {})  # type: ignore[arg-type]
    output = function(F.linear(samples(), leaves[module.weight], leaves[module.bias]), 2.0)
    verify_layer(layer, 5, residency, [output], list(leaves.values()))
    assert layer.holds_tensors == {5: holds}

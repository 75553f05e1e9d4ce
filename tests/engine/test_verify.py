"""Layers that swapping would break are refused by name, and no others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.layer import SwappedLayer
from lightning_harmony.engine.pack import Residency
from lightning_harmony.engine.stream import Happened
from lightning_harmony.engine.verify import verify_layer
from lightning_harmony.engine.virtual_device import VirtualDevice
from lightning_harmony.errors import UnsupportedModelError

OUTSIDE = nn.Parameter(torch.ones(3))


class Calls(nn.Module):
    """A linear layer in the hands of a function."""

    def __init__(self, function: Callable[[nn.Linear, Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self.inner, x)


def run(module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Run a layer with its weights on a device, in some type, and verify it."""
    layer = SwappedLayer(0, "model.layer", module, list(module.parameters()))
    leaves = {p: nn.Parameter(p.detach().to(dtype, copy=True), p.requires_grad) for p in layer.parameters}
    residency = Residency(VirtualDevice(None), torch.empty(0), Happened(), leaves, {})
    x = torch.randn(2, 3, dtype=dtype, requires_grad=True)
    with layer.bound(leaves, {}):
        result = module(x)
    outputs = result if isinstance(result, tuple) else (result,)
    verify_layer(layer, 1, residency, outputs, [x, *leaves.values()])


def many_paths(inner: nn.Linear, x: Tensor) -> Tensor:
    """A graph in which the number of paths doubles with every operation."""
    x = inner(x)
    for _ in range(60):
        x = x + x
    return x


def without_gradients(inner: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        return inner(x) * OUTSIDE


def make_a_leaf(inner: nn.Linear, x: Tensor) -> Tensor:
    """As Hugging Face's models of speech do, for the sake of reentrant checkpoints. It used to be refused."""
    leaf = x.detach()[:, None]
    leaf.requires_grad = True
    return inner(x) + inner(leaf)[:, 0]


def change_data(inner: nn.Linear, x: Tensor) -> Tensor:
    inner.weight.data.mul_(0.5)
    return inner(x)


def change_the_sign_of_zero(inner: nn.Linear, x: Tensor) -> Tensor:
    inner.bias.data.neg_()
    return inner(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda inner, x: inner(x),
        lambda inner, x: (inner(x), x, inner.weight),
        lambda inner, x: inner(x) * OUTSIDE.detach(),
        lambda inner, x: x.detach(),
        without_gradients,
        make_a_leaf,
        many_paths,
    ],
    ids=["usual", "returns_its_own", "detached", "constant", "no_grad", "leaf", "many_paths"],
)
def test_layers_that_use_only_their_own_pass(function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    run(Calls(function))


def test_a_frozen_layer_passes() -> None:
    run(Calls(lambda inner, x: inner(x)).requires_grad_(False))


def test_a_parameter_that_is_not_a_number_passes() -> None:
    module = Calls(lambda inner, x: inner(x))
    nn.init.constant_(module.inner.bias, torch.nan)
    run(module)


def test_a_parameter_of_any_strides_passes() -> None:
    module = Calls(lambda inner, x: inner(x))
    module.inner.weight = nn.Parameter(torch.randn(3, 3).t())
    module.single = nn.Parameter(torch.randn(4, 4)[::4, 0])
    module.scalar = nn.Parameter(torch.randn(4, 4)[2, 3])
    module.empty = nn.Parameter(torch.empty(0, 3))
    run(module)


@pytest.mark.parametrize(
    "function",
    [
        lambda inner, x: inner(x) * OUTSIDE,
        lambda inner, x: (inner(x), (x * 2 + OUTSIDE).relu()),
        lambda inner, x: (inner(x), OUTSIDE),
    ],
    ids=["multiplied", "deep", "returned"],
)
def test_a_foreign_tensor_that_needs_gradients_is_refused(function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'model\.layer' uses a tensor that needs gradients .* argument"):
        run(Calls(function))


def test_a_parameter_hidden_from_the_module_is_refused() -> None:
    module = Calls(lambda inner, x: inner(x) * module.hidden[0][0])
    module.hidden = [[nn.Parameter(torch.ones(3))]]
    with pytest.raises(UnsupportedModelError, match="a parameter that it holds outside of its module"):
        run(module)


def test_a_leaf_that_a_layer_makes_and_keeps_is_refused() -> None:
    module = Calls(lambda inner, x: inner(x) * module.hidden[-1])
    module.hidden = [torch.ones(3).requires_grad_()]
    with pytest.raises(UnsupportedModelError, match="neither its parameter nor an argument"):
        run(module)


def test_a_parameter_that_is_narrow_on_the_device_passes_unless_it_was_changed_there() -> None:
    module = Calls(lambda inner, x: inner(x))
    nn.init.constant_(module.inner.bias, torch.nan)
    run(module, torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match="changes the data of a parameter"):
        run(Calls(change_data), torch.bfloat16)


@pytest.mark.parametrize("function", [change_data, change_the_sign_of_zero])
def test_changing_the_data_of_a_parameter_is_refused(function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    module = Calls(function)
    nn.init.zeros_(module.inner.bias)
    with pytest.raises(UnsupportedModelError, match=r"'model\.layer' changes the data of a parameter .* hook"):
        run(module)

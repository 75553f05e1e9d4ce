"""Parameters come to the host as a move to the device leaves them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.fit.moves import move_companions, move_to_host, move_unregistered
from support.same_training import Net, assert_same_training, root


class QuantizedWhenMoved(nn.Parameter):
    """Is of integers from its first move on, as parameters of bitsandbytes are."""

    codes: Tensor | None

    @staticmethod
    def of(values: Tensor) -> QuantizedWhenMoved:
        parameter: QuantizedWhenMoved = Tensor._make_subclass(QuantizedWhenMoved, values, False)
        parameter.codes = None
        return parameter

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.codes is None:
            self.data = self.codes = (self.data.to(args[0]) * 64).round().to(torch.int8)
            return self
        return super().to(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWhenMoved:
        assert self.codes is None
        return QuantizedWhenMoved.of(self.detach().clone())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = QuantizedWhenMoved.of(torch.randn(8, 8) / 8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.codes is not None
        return self.out(torch.tanh(x @ self.weight.codes.to(x.dtype) / 64))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Layer() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()  # type: ignore[no-any-return]


def test_parameters_that_quantize_when_they_are_moved_do_so_before_they_are_swapped() -> None:
    assert_same_training(Net(Stack()), torch.randn(24, 8))


def test_parameters_without_a_move_of_their_own_stay_as_they_are() -> None:
    module = Stack()
    plain = {name: (p, p.data_ptr()) for name, p in module.named_parameters() if type(p) is nn.Parameter}
    weights = [layer.weight for layer in module.layers]
    move_to_host(module, torch.device("cpu"))
    after = dict(module.named_parameters())
    assert all(after[name] is p and p.data_ptr() == address for name, (p, address) in plain.items())
    for layer, weight in zip(module.layers, weights, strict=True):
        assert layer.weight is weight
        assert weight.dtype is torch.int8
        assert weight.codes is not None
        assert weight.codes.data_ptr() == weight.data_ptr()


class State:
    def __init__(self, codes: Tensor) -> None:
        self.codes, self.scale = codes, torch.ones(8, device=codes.device)


class InState(nn.Module):
    """A state object has the weight, or a copy of it, and is asked to move where the module is moved."""

    def __init__(self, values: Tensor, *, is_copy: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(values, requires_grad=False)
        self.state = State(values.clone() if is_copy else self.weight.data)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.state.codes, self.state.scale = fn(self.state.codes), fn(self.state.scale)
        return self


def codes(*size: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """Of a weight, on the accelerator."""
    return torch.arange(8 * 8).reshape(size or (8, 8)).to(root(), dtype)


@pytest.mark.parametrize("is_copy", [False, True])
def test_objects_have_the_memory_of_their_weight_on_the_host(is_copy: bool) -> None:
    layer = InState(codes(), is_copy=is_copy)
    kept, scale = layer.state.codes, layer.state.scale
    move_to_host(nn.Sequential(layer), root())
    assert layer.state.codes is kept
    assert layer.state.scale is scale
    assert {each.device.type for each in (kept, scale, layer.weight)} == {"cpu"}
    assert kept.data_ptr() == layer.weight.data_ptr()
    assert torch.equal(kept, codes().cpu())


def test_copies_that_may_be_there_to_stay_are_not_joined_with_weights() -> None:
    layers = [
        InState(codes(dtype=torch.float32), is_copy=True),
        InState(codes(64), is_copy=True),
        InState(codes(), is_copy=True),
    ]
    layers[-1].state.codes[0, 0] = 5
    move_to_host(nn.Sequential(*layers), root())
    assert all(layer.state.codes.data_ptr() != layer.weight.data_ptr() for layer in layers)
    assert layers[-1].state.codes[0, 0] == 5
    assert layers[-1].weight[0, 0] == 0


def test_what_moves_beside_parameters_leaves_what_objects_have_of_them() -> None:
    layer = InState(codes())
    model = nn.Sequential(layer)
    move_to_host(model, root())
    address = layer.weight.data_ptr()
    move_unregistered(model, torch.device("meta"))
    assert layer.state.codes.data_ptr() == layer.weight.data_ptr() == address
    assert not layer.state.scale.is_meta


GPU = torch.device("cuda")


@pytest.fixture
def place_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], str]:
    """Where tensors would be, had moves to a GPU brought them there. They have other memory only."""
    move = Tensor.to
    # Another storage may have the identity of one that has ended.
    places: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}

    def where(tensor: Tensor) -> str:
        storage = tensor.untyped_storage()
        known = places.get(storage._cdata)
        return known[1] if known is not None and known[0]() is storage else "cpu"

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = args[0]
        if not isinstance(device, torch.device):
            return move(tensor, *args, **kwargs)
        if device.type == where(tensor):
            return tensor
        moved = tensor.detach().clone()
        places[moved.untyped_storage()._cdata] = weakref.ref(moved.untyped_storage()), device.type
        return moved

    monkeypatch.setattr(Tensor, "to", to)
    return where


@pytest.mark.cpu
def test_what_was_quantized_on_a_device_comes_to_the_host_with_its_companions(
    place_of: Callable[[Tensor], str],
) -> None:
    module = Stack().to(GPU)
    move_companions(module, GPU)
    weights: list[Any] = [layer.weight for layer in module.layers]
    assert {place_of(each) for weight in weights for each in (weight, weight.codes)} == {"cuda"}
    move_to_host(module, GPU)
    assert [layer.weight for layer in module.layers] == weights
    assert {place_of(each) for weight in weights for each in (weight, weight.codes)} == {"cpu"}
    assert all(weight.codes.data_ptr() == weight.data_ptr() for weight in weights)


@pytest.mark.cpu
@pytest.mark.parametrize("is_left_behind", [False, True])
def test_objects_come_to_the_host_with_their_weight(place_of: Callable[[Tensor], str], is_left_behind: bool) -> None:
    layer = InState(codes())
    model = nn.Sequential(layer)
    kept, scale = layer.state.codes, layer.state.scale
    move_companions(model, GPU)
    if is_left_behind:
        nn.Module._apply(layer, lambda tensor: tensor.to(torch.device("cpu")))
    assert (place_of(kept), place_of(scale)) == ("cuda", "cuda")
    move_to_host(model, GPU)
    assert (layer.state.codes is kept, layer.state.scale is scale) == (True, True)
    assert (place_of(kept), place_of(scale), place_of(layer.weight)) == ("cpu", "cpu", "cpu")
    assert kept.data_ptr() == layer.weight.data_ptr()


@pytest.mark.cpu
def test_what_the_model_itself_has_of_a_layers_weight_stays_where_it_is(place_of: Callable[[Tensor], str]) -> None:
    layer = InState(codes())
    model: Any = nn.Sequential(layer)
    model.table = State(layer.weight.data)
    move_companions(model, GPU)
    assert {place_of(layer.weight), place_of(layer.state.codes)} == {"cuda"}
    assert {place_of(model.table.codes), place_of(model.table.scale)} == {"cpu"}

"""Where a layer's code finds its tensors, and how others take their place for a while."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_harmony.engine.model.layer import SwappedLayer, buffers_of, move_buffers
from lightning_harmony.engine.model.parameter_places import places_of
from support.referring import Referring


class Counting(nn.Module):
    """Changes its buffers in place, by replacement, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.last: Tensor
        self.constant: Tensor
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))
        self.register_buffer("constant", torch.zeros(1))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.last = x
        return x + self.constant


def layer_of(module: nn.Module) -> SwappedLayer:
    return SwappedLayer(0, "layer", module, list(module.parameters()))


def copies_of(layer: SwappedLayer) -> dict[nn.Parameter, Tensor]:
    return {parameter: nn.Parameter(parameter.detach() + 1) for parameter in layer.parameters}


def found_by(module: nn.Module) -> list[Any]:
    """What is at each place now."""
    return [place.container[place.key] for place in places_of(module, list(module.parameters()))]


class TestSwappedLayer:
    def test_knows_each_parameter_once(self) -> None:
        shared = nn.Parameter(torch.zeros(1))
        assert SwappedLayer(0, "glue", None, [shared, shared]).parameters == [shared]

    def test_of_a_parameter_alone_has_no_buffers(self) -> None:
        assert SwappedLayer(0, "glue", None, [nn.Parameter(torch.zeros(1))]).buffers == []


class TestBound:
    def test_code_finds_the_copies_wherever_it_looks(self) -> None:
        module = Referring()
        layer = layer_of(module)
        copies = copies_of(layer)
        with layer.bound(copies, {}):
            found = module()
        weight, bias = copies[module.weight], copies[module.bias]
        assert all(a is b for a, b in zip(found, (weight, bias, weight, bias, weight), strict=True))

    def test_a_recurrent_layer_computes_with_the_copies(self) -> None:
        torch.manual_seed(0)
        module = nn.LSTM(2, 3)
        layer = layer_of(module)
        x = torch.randn(4, 1, 2)
        before, _ = module(x)
        with layer.bound({p: nn.Parameter(torch.zeros_like(p)) for p in layer.parameters}, {}):
            zeros, _ = module(x)
        after, _ = module(x)
        assert torch.equal(zeros, torch.zeros(4, 1, 3))
        assert torch.equal(after, before)

    def test_what_a_recurrent_layer_makes_of_the_copies_is_not_kept(self) -> None:
        module = nn.LSTM(2, 3)
        layer = layer_of(module)
        before = module._flat_weights
        with layer.bound(copies_of(layer), {}):
            module(torch.randn(4, 1, 2))
            module._flat_weights = list(module._flat_weights)
        assert module._flat_weights is before
        assert all(weight is own for weight, own in zip(before, module.parameters(), strict=True))

    def test_a_weight_that_a_hook_computes_is_not_kept(self) -> None:
        module = prune.identity(nn.Linear(2, 2), "weight")
        layer, before, parameter = layer_of(module), module.weight, module.weight_orig
        copies = copies_of(layer)
        with layer.bound(copies, {key: torch.ones(2, 2) for key in layer.buffers}):
            module(torch.ones(1, 2))
            assert torch.equal(module.weight, copies[parameter])
        assert module.weight is before

    def test_other_tensors_in_place_of_parameters_are_told(self) -> None:
        layer = layer_of(nn.Linear(2, 2))
        assert layer.module is not None
        assert not layer.is_given_weights()
        with layer.bound(copies_of(layer), {}):
            pass
        weight = layer.module._parameters.pop("weight")
        assert layer.is_given_weights()
        layer.module._parameters["weight"] = torch.ones(2, 2)  # type: ignore[assignment]
        assert layer.is_given_weights()
        layer.module._parameters["weight"] = weight
        assert not layer.is_given_weights()

    @pytest.mark.parametrize("module", [Referring(), nn.LSTM(2, 3), nn.Linear(2, 2)], ids=["own", "lstm", "linear"])
    def test_everything_is_back_afterwards(self, module: nn.Module) -> None:
        layer = layer_of(module)
        before = found_by(module)
        with layer.bound(copies_of(layer), {}):
            pass
        assert all(a is b for a, b in zip(found_by(module), before, strict=True))

    def test_everything_is_back_after_an_error(self) -> None:
        module = nn.BatchNorm1d(2)
        layer = layer_of(module)
        before, buffers = found_by(module), dict(module._buffers)
        with (
            pytest.raises(ZeroDivisionError),
            layer.bound(copies_of(layer), {key: torch.zeros(2) for key in layer.buffers}),
        ):
            raise ZeroDivisionError
        assert all(a is b for a, b in zip(found_by(module), before, strict=True))
        assert all(module._buffers[name] is buffer for name, buffer in buffers.items())

    def test_buffers_that_code_changes_or_replaces_are_handed_over(self) -> None:
        module = Counting()
        layer = layer_of(module)
        outside = dict(module._buffers)
        bound = {key: torch.full((1,), 5.0) for key in layer.buffers}
        replacement = torch.full((1,), 9.0)
        with layer.bound({}, bound) as left:
            result = module(replacement)
        assert result.item() == 14
        assert left[module, "count"] is bound[module, "count"]
        assert bound[module, "count"].item() == 6
        assert left[module, "last"] is replacement
        assert left[module, "constant"] is bound[module, "constant"]
        assert all(module._buffers[name] is buffer for name, buffer in outside.items())
        assert module.count.item() == 0

    def test_a_buffer_that_code_removes_is_handed_over_as_none(self) -> None:
        module = Counting()
        layer = layer_of(module)
        with layer.bound({}, {key: torch.zeros(1) for key in layer.buffers}) as left:
            module._buffers["last"] = None
        assert left[module, "last"] is None
        assert module.last is not None


class TestBuffers:
    def test_are_those_that_hold_a_tensor(self) -> None:
        module = nn.Sequential(Counting())
        assert [name for _, name in buffers_of(module)] == ["count", "last", "constant"]
        assert all(owner is module[0] for owner, _ in buffers_of(module))

    def test_move_to_a_device(self) -> None:
        module = Counting()
        keys = buffers_of(module)
        module._buffers["last"] = None
        move_buffers(keys, torch.device("meta"))
        assert module.count.is_meta
        assert module.constant.is_meta
        assert module._buffers["last"] is None

"""Companions: what Python code keeps of frozen weights is found, moves with them, and is on the device during a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.model.companions import Companions, beside_parameters
from lightning_harmony.errors import UnsupportedModelError


class Layer(nn.Module):
    """An object has its weight, and the scale of that; another object and an attribute have other tensors."""

    state: Any

    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.arange(12.0).view(3, 4), requires_grad=not frozen)
        self.other = SimpleNamespace(mean=torch.zeros(3))
        self.table = torch.ones(2)
        self.state = SimpleNamespace(rows=self.weight.data[1:], more={"scale": torch.ones(3)})


def companions_of(layer: nn.Module) -> Companions:
    return Companions(layer.modules(), layer.parameters())


def on_device(layer: Layer, companions: Companions) -> tuple[dict[nn.Parameter, Any], dict[Tensor, Tensor]]:
    """The weight, with a row before it in its memory, and companions, as they would be on a device."""
    memory = torch.cat([torch.zeros(4), layer.weight.detach().flatten()])
    leaf = nn.Parameter(memory[4:].view(3, 4), requires_grad=False)
    vars(leaf).update(vars(layer.weight))
    return {layer.weight: leaf}, {tensor: tensor.clone() for tensor in companions.apart.get(layer.weight, ())}


def test_views_of_frozen_weights_are_found_and_what_their_objects_hold_beside() -> None:
    layer = Layer()
    companions = companions_of(layer)
    assert companions
    assert list(map(id, companions.tensors())) == list(map(id, [layer.state.rows, layer.state.more["scale"]]))
    assert companions.parameters == {layer.weight}
    assert beside_parameters([companions, companions]) == {layer.weight: [layer.state.more["scale"]]}
    assert not companions_of(Layer(frozen=False))
    assert not companions_of(nn.Linear(2, 2).requires_grad_(False))


def test_tensors_to_which_the_attributes_of_a_frozen_weight_lead_are_found() -> None:
    layer = nn.Linear(2, 2, bias=False).requires_grad_(False)
    weight: Any = layer.weight
    weight.state = SimpleNamespace(mean=torch.zeros(2))
    assert list(map(id, companions_of(layer).tensors())) == [id(weight.state.mean)]
    weight.flat = weight.data.view(-1)
    assert list(map(id, companions_of(layer).tensors())) == list(map(id, [weight.flat, weight.state.mean]))
    layer.requires_grad_(True)
    assert not companions_of(layer)


def test_companions_follow_their_weight_and_move_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    companions = companions_of(layer)
    before = {id(tensor): tensor.clone() for tensor in (layer.weight, *companions.tensors())}
    # There is no other device: what is moved is copied.
    move, device = Tensor.to, torch.device("cpu")
    monkeypatch.setattr(Tensor, "to", lambda tensor, *args: move(tensor, *args, copy=True))
    old = [tensor.data_ptr() for tensor in (layer.weight, *companions.tensors(), layer.table, layer.other.mean)]
    companions.move(device)
    new = [tensor.data_ptr() for tensor in (layer.weight, *companions.tensors(), layer.table, layer.other.mean)]
    assert [one == other for one, other in zip(old, new, strict=True)] == [False, False, False, True, True]
    assert layer.state.rows.data_ptr() == layer.weight[1:].data_ptr()
    assert all(torch.equal(tensor, before[id(tensor)]) for tensor in (layer.weight, *companions.tensors()))


def test_during_a_call_they_are_on_the_device_and_afterwards_on_the_host() -> None:
    layer = Layer()
    companions = companions_of(layer)
    leaves, apart = on_device(layer, companions)
    rows, scale = layer.state.rows, layer.state.more["scale"]
    home = rows.data_ptr(), scale.data_ptr()
    with companions.bound(leaves, apart):
        assert rows.data_ptr() == leaves[layer.weight][1:].data_ptr()
        assert scale.data_ptr() == apart[scale].data_ptr()
        assert torch.equal(rows, layer.weight[1:])
    assert (rows.data_ptr(), scale.data_ptr()) == home


def test_views_that_a_call_leaves_in_objects_come_to_the_host_and_are_companions_from_then_on() -> None:
    layer = Layer()
    layer.state = SimpleNamespace()
    companions = companions_of(layer)
    assert not companions
    leaves, apart = on_device(layer, companions)
    with companions.bound(leaves, apart):
        layer.state.last = leaves[layer.weight].data[2]
    assert layer.state.last.data_ptr() == layer.weight[2].data_ptr()
    assert list(map(id, companions.tensors())) == list(map(id, [layer.state.last]))
    with companions.bound(leaves, apart):
        assert layer.state.last.data_ptr() == leaves[layer.weight][2].data_ptr()
    del layer.state
    with companions.bound(leaves, apart):
        pass
    assert not companions.tensors()


def test_attributes_of_parameters_that_a_call_sets_stay_and_are_as_it_found_them_when_it_runs_again() -> None:
    layer = Layer()
    layer.weight.rows, layer.weight.calls = layer.state.rows, 0
    companions = companions_of(layer)
    leaves, apart = on_device(layer, companions)
    leaf = leaves[layer.weight]
    with companions.bound(leaves, apart) as changes:
        leaf.rows, leaf.added = None, 1
    assert (layer.weight.rows, layer.weight.added, layer.weight.calls) == (None, 1, 0)
    with companions.bound(leaves, apart, changes):
        assert leaf.rows is layer.state.rows
        assert not hasattr(leaf, "added")
        leaf.calls = 5
    assert (leaf.rows, leaf.added, leaf.calls) == (None, 1, 0)
    assert layer.weight.calls == 0


def test_what_a_call_sets_in_objects_is_told() -> None:
    layer = Layer()
    companions = companions_of(layer)
    leaves, apart = on_device(layer, companions)
    with companions.bound(leaves, apart) as changes:
        layer.state.newest = torch.ones(1)
        layer.state.more["count"] = 1
    assert [(content is vars(layer.state), names) for content, names in changes.objects] == [
        (True, {"newest"}), (False, {"count"}),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["rows", "scale"])
def test_to_change_one_in_a_call_is_an_error(name: str) -> None:
    layer = Layer()
    companions = companions_of(layer)
    tensor: Tensor = {"rows": layer.state.rows, "scale": layer.state.more["scale"]}[name]
    leaves, apart = on_device(layer, companions)
    with pytest.raises(UnsupportedModelError, match="changes the data"), companions.bound(leaves, apart):
        tensor.add_(1)
    with pytest.raises(UnsupportedModelError, match="changes the data"), companions.bound(leaves, apart):
        tensor.data = tensor.data + 1


def test_other_tensors_take_the_places_of_companions_and_give_them_back() -> None:
    layer = Layer()
    companions = companions_of(layer)
    rows, scale = layer.state.rows, layer.state.more["scale"]
    others = {id(rows): torch.empty(2, 4, device="meta"), id(scale): torch.empty(3, device="meta")}
    before = companions.exchange(others)
    assert layer.state.rows is others[id(rows)]
    assert list(map(id, companions.tensors())) == list(map(id, [others[id(rows)], others[id(scale)]]))
    companions.exchange(before)
    assert layer.state.rows is rows
    assert layer.state.more["scale"] is scale

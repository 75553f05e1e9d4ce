"""Where modules hold their parameters: all places that code may look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_harmony.engine.model.parameter_places import is_replaced, places_of
from support.referring import Referring


def test_are_all_references_of_the_module() -> None:
    module = Referring()
    keys = [place.key for place in places_of(module, list(module.parameters()))]
    assert sorted(map(str, keys)) == ["0", "alias", "bias", "bias", "weight"]


def test_include_the_weights_that_a_recurrent_layer_lists() -> None:
    module = nn.LSTM(2, 3, num_layers=2)
    parameters = list(module.parameters())
    listed = [place for place in places_of(module, parameters) if place.container is module._flat_weights]
    assert [place.parameter for place in listed] == parameters


def test_include_those_of_inner_modules() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    assert len(places_of(module, list(module.parameters()))) == 3


def test_are_only_those_of_the_parameters_asked_for() -> None:
    module = Referring()
    assert {place.key for place in places_of(module, [module.bias])} == {"bias"}


def test_of_a_tied_parameter_are_all_its_owners() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    assert len(places_of(module, [module[0].weight])) == 2


class Named(NamedTuple):
    weight: Any
    factor: float


def test_include_those_within_lists_dicts_and_tuples_of_lists() -> None:
    """As libraries keep what they regularize: `[([("name", weight)], factor)]`."""
    module = nn.Linear(2, 2)
    kept: Any = [([("weight", module.weight)], 0.1), {"named": Named(module.bias, 0.2)}]
    module.kept = kept
    places = [
        place for place in places_of(module, list(module.parameters())) if place.container is not module._parameters
    ]
    assert [place.parameter for place in places] == [module.weight, module.bias]
    for place in places:
        place.container[place.key] = torch.zeros(1)
    (((name, first),), factor), second = kept[0], kept[1]["named"]
    assert (name, factor, second.factor, type(second)) == ("weight", 0.1, 0.2, Named)
    assert torch.equal(first, torch.zeros(1))
    assert torch.equal(second.weight, torch.zeros(1))
    assert all(map(is_replaced, places))
    for place in places:
        place.container[place.key] = place.parameter
    assert not any(map(is_replaced, places))
    assert kept == [([("weight", module.weight)], 0.1), {"named": Named(module.bias, 0.2)}]


def test_are_not_looked_for_in_data() -> None:
    module = nn.Linear(2, 2)
    endless: list[Any] = [module.weight]
    endless.append(endless)
    module.endless, module.data = endless, [[[module.bias]] * 1000] * 1000
    found = places_of(module, list(module.parameters()))
    assert {id(place.parameter) for place in found if place.container is endless} == {id(module.weight)}
    assert len(found) < 10


class Numbers(tuple[Any, ...]):
    """As the irreducible representations of e3nn are: neither a length nor entries one after the other."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError


def test_are_looked_for_in_tuples_that_hide_their_entries() -> None:
    """A fit ended with the error of the class, which has no message."""
    module = nn.Linear(2, 2)
    module.kept = Numbers((module.weight, 3))
    assert len(places_of(module, list(module.parameters()))) == 3

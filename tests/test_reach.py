"""Through what an object reaches parameters, and through what it doesn't."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from types import CellType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_harmony.updating.lookout import is_out_of_sight
from lightning_harmony.updating.reach import code_of
from lightning_harmony.updating.reach import reaches as reaches_wanted


def reaches(start: Any, wanted: Collection[Any], **options: Any) -> bool | None:
    return reaches_wanted(start, lambda each: any(each is one for one in wanted), **options)


class Holder:
    def __init__(self, held: Any = None) -> None:
        self.held = held

    def method(self) -> Any:
        return self.held


class Slotted:
    __slots__ = ("held",)


def closing_over(held: Any) -> Callable[[], Any]:
    return lambda: held


def with_default(held: Any) -> Callable[..., Any]:
    def function(value: Any = held) -> Any:
        return value

    return function


WAYS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda held: held,
    "an attribute": Holder,
    "containers": lambda held: [{"a": ({1, 2}, [held])}],
    "a closure": closing_over,
    "a default": with_default,
    "a bound method": lambda held: Holder(held).method,
    "a partial": lambda held: partial(print, held),
    "a loader's dataset": lambda held: DataLoader(Holder(held)),  # type: ignore[arg-type]
    "a loader's collate_fn": lambda held: DataLoader(TensorDataset(torch.ones(3)), collate_fn=closing_over(held)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of", ["module", "part", "parameter"])
def test_what_holds_parameters_reaches_them(way: str, of: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    held: Any = {"module": module, "part": module[1], "parameter": module[0].weight}[of]
    assert reaches(WAYS[way](held), frozenset(module.parameters()))


@pytest.mark.parametrize("way", WAYS)
def test_other_modules_and_tensors_do_not_count(way: str) -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    parameters: frozenset[Tensor] = frozenset(module.parameters())
    for held in (other, other.weight, torch.ones(2), None, CellType(), Slotted()):
        assert not reaches(WAYS[way](held), parameters)


def test_what_is_told_apart_is_not_looked_into() -> None:
    module = nn.Linear(2, 2)
    trainer = Holder(module)
    data = Holder([trainer, 1])
    parameters = frozenset(module.parameters())
    assert reaches(data, parameters)
    assert not reaches(data, parameters, apart_from=[trainer])


class Loads(dict[str, Any]):
    """Has to do something for what it holds."""

    def values(self) -> Any:
        raise AssertionError

    __iter__ = values


def test_what_containers_load_is_not_asked_for() -> None:
    module = nn.Linear(2, 2)
    parameters = frozenset(module.parameters())
    assert not reaches(Holder(Loads(a=1)), parameters)
    assert reaches(Holder(Loads(a=module)), parameters)


def test_a_circle_and_a_long_list_come_to_an_end() -> None:
    circle = Holder()
    circle.held = [circle, list(range(10**6))]
    assert not reaches(circle, frozenset(nn.Linear(2, 2).parameters()))


def test_of_too_many_objects_not_all_are_looked_into() -> None:
    module = nn.Linear(2, 2)
    many = [
        [list(range(each, each + 100)) for each in range(part, part + 10_000, 100)]
        for part in range(10**5, 3 * 10**5, 10**4)
    ]
    assert reaches([many, module], frozenset([module]))
    assert reaches(many, frozenset([module])) is None


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def names_what_is_looked_for() -> Any:
    return Loads


DECORATORS: dict[str, Callable[[Any], Any]] = {
    "none": lambda function: function,
    "one of one's own": wrapped,
    "torch.no_grad": torch.no_grad(),
    "staticmethod": staticmethod,
    "classmethod": classmethod,
    "property": property,
    "cached_property": cached_property,
    "two of them": lambda function: staticmethod(torch.no_grad()(wrapped(function))),
}


@pytest.mark.parametrize("decorator", DECORATORS)
def test_code_behind_decorators_is_looked_at(decorator: str) -> None:
    owner = type("Owner", (), {"method": DECORATORS[decorator](names_what_is_looked_for)})()
    found = code_of(owner, apart_from=("torch",))
    assert any(each is names_what_is_looked_for for each in found)
    assert any(each is Loads for each in found)


@dataclass
class Settings:
    width: int = 8


def test_what_python_adds_to_a_dataclass_is_not() -> None:
    assert not any(is_out_of_sight(each) for each in code_of(Settings(), apart_from=("torch",)))

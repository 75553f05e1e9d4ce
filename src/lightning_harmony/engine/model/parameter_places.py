"""Places: where modules hold their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_harmony.engine.model.keeping_places import keeping_attributes
from lightning_harmony.engine.structures.containers import copied_content
from lightning_harmony.engine.structures.tree import is_parameter, stood_for

# How deep parameters may lie in lists, dicts and tuples that are in each other, and how many entries are looked at in all.
_DEPTH, _MOST = 4, 100_000
# How many objects are looked into, of those to which the attributes of a module lead.
_MOST_OBJECTS = 1_000


class Entries:
    """The entries of a tuple that is itself an entry: another tuple takes its place where one of them is changed.

    Args:
        container: has the tuple.
        key: where.
    """

    def __init__(self, container: Any, key: Any) -> None:
        self._container, self._key = container, key

    def __iter__(self) -> Iterator[Any]:
        return iter(self._container[self._key])

    def __getitem__(self, number: int) -> Any:
        return self._container[self._key][number]

    def __setitem__(self, number: int, value: Any) -> None:
        entries = self._container[self._key]
        changed = [*entries[:number], value, *entries[number + 1 :]]
        # Of one with names, the class takes them one by one.
        make = getattr(type(entries), "_make", type(entries))
        self._container[self._key] = make(changed)


@dataclass(frozen=True)
class Place:
    """An entry that holds a parameter: of `module._parameters`, of a list like `nn.LSTM._flat_weights`, or of one within.

    Attributes:
        container: has the entry.
        key: where.
        parameter: what is there.
        is_in_object: whether an object leads to it, whose code may put anything else there.
    """

    container: Any
    key: Any
    parameter: nn.Parameter
    is_in_object: bool = False


def what_is_in(place: Place) -> Any:
    """What a place holds now; None if it is gone."""
    try:
        return place.container[place.key]
    except (KeyError, IndexError, TypeError):
        return None


def is_free(place: Place) -> bool:
    """Whether an object holds its parameter no longer, nor what stands for it."""
    now = what_is_in(place) if place.is_in_object else place.parameter
    return stood_for(now) is not place.parameter


def is_replaced(place: Place) -> bool:
    """Whether a place of a module holds its parameter no longer."""
    if place.is_in_object:
        return False
    entries = place.container if isinstance(place.container, dict) else dict(enumerate(place.container))
    return entries.get(place.key) is not place.parameter


def is_trained(place: Place) -> bool:
    """Whether gradients come to the parameter itself."""
    return place.parameter.requires_grad and place.parameter.is_leaf


def places_of(module: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Place]:
    """Every place below a module that holds one of ``parameters``: registered, or referred to by an attribute."""
    wanted = {id(parameter) for parameter in parameters}
    return [place for owner in module.modules() for place in _places_in(owner) if id(place.parameter) in wanted]


def containers_of(module: nn.Module, places: Sequence[Place]) -> list[tuple[dict[str, Any], str]]:
    """The attributes below a module that are the dicts or lists of these places. `nn.LSTM` makes its list anew."""
    wanted = {id(place.container) for place in places}
    return [
        (vars(owner), name) for owner in module.modules() for name, value in vars(owner).items() if id(value) in wanted
    ]


def _places_in(owner: nn.Module) -> Iterator[Place]:
    for name, parameter in owner._parameters.items():
        if parameter is not None:
            yield Place(owner._parameters, name, parameter)
    objects: dict[int, Any] = {}
    for name, value in vars(owner).items():
        if name not in ("_parameters", "_modules", "_buffers"):
            yield from _places_of_value(vars(owner), name, value, objects)
    # Objects may lead to each other.
    seen: set[int] = set()
    while objects:
        key, found = objects.popitem()
        seen.add(key)
        within: dict[int, Any] = {}
        for name, value in list(found.items()):
            for place in _places_of_value(found, name, value, within):
                if place.parameter.requires_grad:
                    yield replace(place, is_in_object=True)
        if len(seen) < _MOST_OBJECTS:
            objects.update((each, content) for each, content in within.items() if each not in seen)


def _places_of_value(
    container: Any, key: Any, value: Any, objects: dict[int, Any], depth: int = _DEPTH, most: int = _MOST
) -> Iterator[Place]:
    """The places in an entry.

    Args:
        container: has the entry.
        key: where.
        value: what is there.
        objects: takes the attributes of the objects that are found, by their identities.
        depth: how deep to look.
        most: how many entries to look at.
    """
    if is_parameter(value):
        yield Place(container, key, value)
        return
    kind = type(value)
    if not issubclass(kind, list | dict | tuple):
        attributes = keeping_attributes(value)
        # An optimizer is to find the parameters themselves.
        if attributes is not None and not isinstance(value, Optimizer):
            objects[id(attributes)] = attributes
        return
    if depth == 0:
        return
    # Classes of tuples may have a length and an iteration of their own, or none.
    content = tuple(tuple.__iter__(value)) if issubclass(kind, tuple) else copied_content(value)
    items = content.items() if isinstance(content, dict) else enumerate(content)
    holds = Entries(container, key) if issubclass(kind, tuple) else value
    # Of data, such as lists of tokens, not each entry is opened.
    within = most // max(len(content), 1)
    for inner, item in items:
        yield from _places_of_value(holds, inner, item, objects, depth - 1 if within else 0, within)

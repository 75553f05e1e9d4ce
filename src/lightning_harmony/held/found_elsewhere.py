"""Modules of layers that code finds elsewhere than in the tree of modules: other layers' code may look into these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch import nn

from lightning_harmony.engine.structures.nested import reachable
from lightning_harmony.held.held_state import Held, Kind
from lightning_harmony.held.within import parts_within

# What is in one place is followed through so many values.
_MOST_FOLLOWED = 10_000


class FoundElsewhere:
    """Tells of modules whether they are a layer's alone.

    Args:
        of_layers: the modules of each layer.
    """

    def __init__(self, of_layers: Iterable[Iterable[nn.Module]]) -> None:
        self._layers = defaultdict[int, set[int]](set)
        for number, modules in enumerate(of_layers):
            for module in modules:
                self._layers[id(module)].add(number)
        # By their identities.
        self._found: set[int] = set()

    def look(self, places: Sequence[Held]) -> None:
        """Find them in all places."""
        self._found = set(self._find(places))

    def is_of_layer_alone(self, module: Any) -> bool:
        """Whether it is a layer's, and its code alone finds it, as far as is known."""
        return id(module) in self._layers and id(module) not in self._found

    def _find(self, places: Sequence[Held]) -> Iterator[int]:
        trees = {id(held.owner._modules) for held in places if held.kind is Kind.MODULE}
        for held in places:
            finders = self._layers.get(id(owner_of(held)), set[int]())
            values = [] if held.key in trees else [value for _, value in held.items()]
            for found in islice(reachable(values, parts_within), _MOST_FOLLOWED):
                # By its type: others answer by the user's code.
                for module in found.modules() if issubclass(type(found), nn.Module) else ():
                    if id(module) in self._layers and not finders >= self._layers[id(module)]:
                        yield id(module)


def owner_of(held: Held) -> Any:
    """Whose attributes a place is, or whose lead to it."""
    return held.owner if held.root is None else held.root[0]


def is_attribute_of(held: Held, modules: Collection[int]) -> bool:
    """Whether a place is the attributes of one of some modules, or a container among these and nowhere else.

    Args:
        held: the place.
        modules: by identity.
    """
    return held.kind in (Kind.MODULE, Kind.CONTAINER) and not held.is_shared and id(owner_of(held)) in modules

"""Places where Python code keeps tensors of a layer: attributes of parameters and modules, and of objects that these hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.model.attributes import LONGEST
from lightning_harmony.engine.structures.packages import LIBRARIES
from lightning_harmony.engine.structures.parts import is_composed

# Objects within objects are looked into to this depth.
_DEEPEST = 3
_ATOMS = (Tensor, nn.Module, str, bytes, int, float, complex, type(None), type, ModuleType, torch.dtype, torch.device)
# Objects of these packages keep nothing of a layer.
_LIBRARIES = LIBRARIES - {"lightning_harmony"}


@dataclass(frozen=True)
class Place:
    """Attributes, or a list or dict, that may hold companions.

    Attributes:
        content: the list or dict.
        owner: tells apart what belongs together; None for attributes of modules, which hold anything.
        parameter: whose attributes lead to it, if those of one do.
    """

    content: Any
    owner: int | None
    parameter: nn.Parameter | None = None

    def tensors(self) -> Iterator[tuple[Any, Tensor]]:
        """The plain tensors in it, and where."""
        content = self.content
        for key, value in list(content.items() if isinstance(content, dict) else enumerate(content)):
            if _may_be_companion(value):
                yield key, value


def _may_be_companion(value: Any) -> bool:
    return (
        type(value) not in weakref.ProxyTypes
        and isinstance(value, Tensor)
        and not isinstance(value, nn.Parameter)
        and value.layout is torch.strided
        and not is_composed(value)
        and not (value.requires_grad or value.is_inference())
    )


def places_within(content: Any, owner: int | None, seen: set[int], depth: int) -> Iterator[Place]:
    """A place, and those in what is in it.

    Args:
        content: attributes, or a list or dict.
        owner: of the place.
        seen: the identities of what was looked into.
        depth: how many objects and containers lead to it.
    """
    yield Place(content, owner)
    for value in list(content.values() if isinstance(content, dict) else content):
        yield from places_of(value, owner, seen, depth)


def places_of(value: Any, owner: int | None, seen: set[int], depth: int) -> Iterator[Place]:
    """What a value holds: containers belong to who holds them, objects to none but themselves."""
    if type(value) in weakref.ProxyTypes or isinstance(value, _ATOMS) or id(value) in seen or depth >= _DEEPEST:
        return
    if isinstance(value, list | tuple | dict):
        if len(value) <= LONGEST:
            seen.add(id(value))
            yield from places_within(value, owner, seen, depth + 1)
        return
    if (attributes := keeping_attributes(value)) is not None:
        seen.add(id(value))
        yield from places_within(attributes, id(value), seen, depth + 1)


def keeping_attributes(value: Any) -> dict[str, Any] | None:
    """Where an object has its attributes that may keep something of a layer; None if it has none, or is of a library."""
    if type(value) in weakref.ProxyTypes or isinstance(value, _ATOMS):
        return None
    attributes = getattr(value, "__dict__", None)
    is_of_library = type(value).__module__.partition(".")[0] in _LIBRARIES
    return attributes if isinstance(attributes, dict) and not is_of_library else None

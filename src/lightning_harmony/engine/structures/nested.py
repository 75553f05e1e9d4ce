"""Nested Python values: containers and records taken apart into what they hold, and put together again, by one rule a kind.

The kinds are lists, tuples, named tuples and deques; mappings, with those of Hugging Face; dataclasses and classes of attrs;
and what is registered as a node of PyTorch's pytrees, such as `TensorDict`. Everything else is a leaf, tensors of every layout
included. What the attributes of other objects hold, `holds_tensors` alone tells.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

# Asked of each value first: these hold nothing.
_ATOMS = (Tensor, str, bytes, int, float, complex, type(None), enum.Enum, type, ModuleType, nn.Module, torch.Size)
# Objects within objects are looked into to this depth for tensors.
_DEEPEST = 8

Build = Callable[[Any, Sequence[Any]], Any]


class Node(NamedTuple):
    """A container taken apart.

    Attributes:
        value: the container.
        keys: where it holds what; equal for containers of the same type and structure.
        children: what it holds, in the order of the keys.
        rebuild: makes another one of the container and its children.
    """

    value: Any
    keys: tuple[Any, ...]
    children: list[Any]
    rebuild: Build

    def build(self, children: Sequence[Any]) -> Any:
        """A container like this one that holds other children. It is not initialized anew where a copy can be filled."""
        return self.rebuild(self.value, children)

    def has_structure_of(self, other: Node) -> bool:
        """Whether both are of one type and hold things in the same places."""
        return type(self.value) is type(other.value) and self.keys == other.keys


def open_node(value: Any) -> Node | None:
    """Take a container apart by one level; None for a leaf."""
    if isinstance(value, _ATOMS):
        return None
    if isinstance(value, list | tuple | deque):
        children = list(value)
        return Node(value, tuple(range(len(children))), children, _build_sequence)
    kind = type(value)
    if kind in SUPPORTED_NODES and not isinstance(value, dict):
        # Before mappings: a TensorDict is one, but iterates over its rows.
        children, context = SUPPORTED_NODES[kind].flatten_fn(value)
        unflatten = SUPPORTED_NODES[kind].unflatten_fn
        return Node(
            value, tuple(range(len(children))), list(children), lambda _, changed: unflatten(list(changed), context)
        )
    if isinstance(value, Mapping):
        keys = tuple(value)
        return Node(value, keys, [value[key] for key in keys], _build_mapping)
    if (names := field_names(value)) is not None:
        return Node(value, names, [getattr(value, name) for name in names], build_record)
    return None


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of a value, at any depth."""
    node = open_node(value)
    if node is None:
        yield value
        return
    for child in node.children:
        yield from leaves_of(child)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """A value with something else in the places of its tensors; the value itself if that changes none."""
    if isinstance(value, Tensor):
        return function(value)
    node = open_node(value)
    if node is None:
        return value
    children = [map_tensors(function, child) for child in node.children]
    if all(new is old for new, old in zip(children, node.children, strict=True)):
        return value
    return node.build(children)


def holds_tensors(value: Any) -> bool:
    """Whether a value holds tensors or arrays: as leaves, or in attributes of objects among them."""
    return _holds_tensors(value, set(), 0)


def reachable(starts: Iterable[Any], parts: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """All objects that some lead to, and these, each once: what is nearer comes first.

    Args:
        starts: the ones.
        parts: what an object leads to at once.
    """
    left, seen = deque(starts), dict[int, Any]()
    while left:
        each = left.popleft()
        if id(each) not in seen:
            # It is kept: no other one gets its identity.
            seen[id(each)] = each
            yield each
            left += parts(each)


def is_ndarray(value: Any) -> bool:
    """Say whether a value is an array of NumPy's."""
    numpy = sys.modules.get("numpy")  # code that made an array has imported it; we need not
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def _holds_tensors(value: Any, seen: set[int], depth: int) -> bool:
    if isinstance(value, Tensor) or is_ndarray(value):
        return True
    if isinstance(value, _ATOMS) or id(value) in seen or depth > _DEEPEST:
        return False
    seen.add(id(value))
    node = open_node(value)
    held = _attributes(value) if node is None else node.children
    return any(_holds_tensors(each, seen, depth + 1) for each in held)


def _attributes(value: Any) -> list[Any]:
    slots = (name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ())))
    # A generator or an iterator may yield anything: that it has no attributes tells nothing.
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _names(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def field_names(value: Any) -> tuple[str, ...] | None:
    """The fields of a dataclass, or of a class of attrs, that have values; None of anything else."""
    if dataclasses.is_dataclass(value):
        fields: Sequence[Any] = dataclasses.fields(value)
    else:
        fields = getattr(type(value), "__attrs_attrs__", ())
        if not fields:
            return None
    return tuple(field.name for field in fields if hasattr(value, field.name))


def _build_sequence(value: Any, children: Sequence[Any]) -> Any:
    if hasattr(value, "_make"):
        return value._make(children)
    if isinstance(value, deque):
        return type(value)(children, value.maxlen)
    return type(value)(children)


def _build_mapping(value: Mapping[Any, Any], children: Sequence[Any]) -> Any:
    items = dict(zip(value, children, strict=True))
    if isinstance(value, MutableMapping):
        # A copy keeps what its constructor may not take: a default factory, a tokenizer's encodings.
        filled = copy.copy(value)
        for key, child in items.items():  # one by one, as Hugging Face's outputs refuse update()
            filled[key] = child
        return filled
    constructor: Any = type(value)
    try:
        rebuilt = constructor(items)
    except TypeError:
        return items
    return rebuilt if list(rebuilt) == list(items) else items  # its constructor may take something else


def build_record(value: Any, children: Sequence[Any]) -> Any:
    """A record with other fields. It is not constructed anew: that could compute some of them, or refuse them."""
    rebuilt = copy.copy(value)
    for name, child in zip(field_names(value) or (), children, strict=True):
        object.__setattr__(rebuilt, name, child)  # past the guard of frozen ones
    return rebuilt

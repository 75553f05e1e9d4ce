"""What a layer returns, taken apart into leaves: as a pytree, and dataclasses count as nodes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten


def flatten(value: Any) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    """Take a value apart.

    Returns:
        Its leaves, and what puts leaves in their places together again. That holds none of these leaves.
    """
    nodes, spec = tree_flatten(value)
    parts = [_open(node) for node in nodes]
    closes = [close for _, close in parts]
    return [leaf for leaves, _ in parts for leaf in leaves], lambda leaves: tree_unflatten(
        [close(leaves) for close in closes], spec
    )


def _open(node: Any) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return [node], next
    names = [field.name for field in dataclasses.fields(node)]
    leaves, unflatten = flatten([getattr(node, name) for name in names])
    empty = _with_fields(node, dict.fromkeys(names))
    return leaves, lambda leaves: _with_fields(empty, dict(zip(names, unflatten(leaves), strict=True)))


def _with_fields(instance: Any, values: dict[str, Any]) -> Any:
    """A copy with other fields. It isn't constructed anew: that could compute some of them, or refuse them."""
    result = copy.copy(instance)
    for name, value in values.items():
        object.__setattr__(result, name, value)
    return result

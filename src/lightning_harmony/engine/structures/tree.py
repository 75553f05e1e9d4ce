"""What a layer is called with, and what it returns, taken apart into leaves: as a pytree; dataclasses count as nodes of it."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_leaves, tree_unflatten

from lightning_harmony.engine.structures.nested import build_record, field_names

# In which no tensors are.
CONSTANTS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
# What most calls have, and nothing else.
_LEAVES = CONSTANTS | {Tensor, nn.Parameter}


class Arguments:
    """How the arguments of a call are made of leaves: of the positional ones, then of the others.

    Attributes:
        structure: equal for calls that have it in common.
        are_leaves: whether there are no nodes among them, as in most calls.
    """

    def __init__(self, structure: Any, *, are_leaves: bool) -> None:
        self.structure = structure
        self.are_leaves = are_leaves

    @classmethod
    def flatten(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Arguments]:
        """The leaves of arguments, and how these are made of such."""
        values: list[Any] = [*args, *kwargs.values()]
        if _LEAVES.issuperset(map(type, values)):
            return values, cls((len(args), tuple(kwargs)), are_leaves=True)
        leaves, spec = tree_flatten((args, kwargs))
        return leaves, cls(spec, are_leaves=False)

    def of(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments, made of these."""
        if not self.are_leaves:
            args, kwargs = tree_unflatten(leaves, self.structure)
            return args, kwargs
        number, names = self.structure
        return tuple(leaves[:number]), dict(zip(names, leaves[number:], strict=True))


class WrittenTo:
    """Tells whether lists, dicts and other nodes among arguments hold other things than they did."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given = args, kwargs
        self._leaves, self._arguments = Arguments.flatten(args, kwargs)

    def now(self) -> bool:
        """Whether they do."""
        leaves, arguments = Arguments.flatten(*self._given)
        return arguments.structure != self._arguments.structure or not all(map(is_, leaves, self._leaves))


def tensors_of(*values: Any) -> list[Tensor]:
    """The tensors among values, and in lists, tuples and dicts among these."""
    if _LEAVES.issuperset(map(type, values)):
        return [value for value in values if issubclass(type(value), Tensor)]
    found: list[Tensor] = []
    for value in values:
        kind = type(value)
        # Asked of each operation: the walk over trees takes several times as long for a tuple of numbers.
        if kind is tuple or kind is list or kind is torch.Size:
            found += tensors_of(*value)
        elif kind is Tensor:
            found.append(value)
        elif kind not in _LEAVES:
            found += [leaf for leaf in tree_leaves(value) if issubclass(type(leaf), Tensor)]
    return found


def has_other_nodes(value: Any) -> bool:
    """Whether a value is, or has in it, another node than a list, tuple or dict, such as a TensorDict."""
    if isinstance(value, list | tuple | deque | dict):
        return any(map(has_other_nodes, value.values() if isinstance(value, dict) else value))
    return type(value) in SUPPORTED_NODES


def stood_for(value: Any) -> Any:
    """The parameter that a stand-in takes the place of; anything else is itself."""
    return getattr(value, "stands_for", value) if issubclass(type(value), Tensor) else value


def is_watched(kind: type) -> bool:
    """Whether it is watched who reads tensors of a class. To ask one of them in Python, even what it is, takes its time."""
    return hasattr(kind, "tells_of_reads")


def is_parameter(value: Any) -> bool:
    """Whether a value is a parameter, or stands for one, also without gradients.

    Its type comes first: other classes may answer `isinstance` themselves, and `nn.Parameter` takes its time to answer.
    """
    kind = type(value)
    if kind is Tensor or not issubclass(kind, Tensor) or is_watched(kind):
        return False
    return hasattr(kind, "stands_for") or isinstance(value, nn.Parameter)


class SwappedParameters:
    """The parameters of a model that is swapped, for as long as somebody keeps this.

    Nothing refers to them weakly: torch would not exchange their memory.
    """

    _of_models: ClassVar[WeakSet[SwappedParameters]] = WeakSet()

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._by_id = {id(parameter): parameter for parameter in parameters}
        self._of_models.add(self)

    @classmethod
    def have(cls, parameter: nn.Parameter) -> bool:
        """Whether a parameter is one of these, of any model."""
        return any(id(parameter) in each._by_id for each in cls._of_models)


def is_swapped(value: Any) -> bool:
    """Whether a value is a parameter of a model that is swapped, or stands for one.

    Other parameters, such as those of a teacher that is no submodule, are tensors as all others.
    """
    return is_parameter(value) and (hasattr(type(value), "stands_for") or SwappedParameters.have(value))


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that transforms such as torch.vmap have wrapped; itself if none has."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def flatten(value: Any) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    """Take a value apart.

    Returns:
        Its leaves, and what puts leaves in their places together again. That holds none of these leaves.
    """
    if type(value) is Tensor:
        return [value], next
    nodes, spec = tree_flatten(value)
    parts = [_open(node) for node in nodes]
    closes = [close for _, close in parts]
    return [leaf for leaves, _ in parts for leaf in leaves], lambda leaves: tree_unflatten(
        [close(leaves) for close in closes], spec
    )


def _open(node: Any) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return [node], next
    fields = [getattr(node, name) for name in field_names(node) or ()]
    leaves, unflatten = flatten(fields)
    empty = build_record(node, [None] * len(fields))
    return leaves, lambda leaves: build_record(empty, unflatten(leaves))

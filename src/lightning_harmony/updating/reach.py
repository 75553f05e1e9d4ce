"""What an object can reach: whether code that Lightning doesn't announce, such as a dataset's, may look at parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

# Of a long list of samples, the first ones tell what the others are.
_MOST_ELEMENTS = 100
_MOST_OBJECTS = 10_000
# What containers hold. Those that override this may load it, or draw it at random: they are not asked.
_ELEMENTS: Mapping[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    **{kind: kind.__iter__ for kind in (list, tuple, set, frozenset, deque)},
}


def reaches(start: Any, parameters: Collection[Tensor], *, apart_from: Any = None) -> bool:
    """Whether an object holds some of these parameters, itself or through others: attributes, containers and closures.

    Args:
        start: the object.
        parameters: the parameters.
        apart_from: what is not looked into.
    """
    left, seen = deque([start]), {id(apart_from): apart_from, id(start): start}
    while left and len(seen) < _MOST_OBJECTS:
        each = left.popleft()
        if isinstance(each, Tensor) and each in parameters:
            return True
        if isinstance(each, nn.Module) and any(parameter in parameters for parameter in each.parameters()):
            return True
        for held in _held(each):
            if id(held) not in seen:
                seen[id(held)] = held
                left.append(held)
    return False


def _held(each: Any) -> Iterator[Any]:
    if isinstance(each, (str, bytes, type, ModuleType, Tensor)):
        return
    for kind, elements in _ELEMENTS.items():
        if isinstance(each, kind):
            yield from islice(elements(each), _MOST_ELEMENTS)
    if isinstance(each, FunctionType):
        yield from each.__closure__ or ()
        yield from each.__defaults__ or ()
    elif isinstance(each, CellType):
        # It may be empty.
        with suppress(ValueError):
            yield each.cell_contents
    elif isinstance(each, MethodType):
        yield each.__self__
    elif isinstance(each, partial):
        yield from (each.func, each.args, each.keywords)
    with suppress(AttributeError):
        # Not by way of the object's own code.
        yield from list(object.__getattribute__(each, "__dict__").values())

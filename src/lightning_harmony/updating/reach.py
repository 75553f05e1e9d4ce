"""What an object can reach: whether code that Lightning doesn't announce, such as a dataset's, may look at something."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

# Of a long list of samples, the first ones tell what the others are.
_MOST_ELEMENTS = 100
_MOST_OBJECTS = 10_000
# What containers hold. Those that override this may load it, or draw it at random: they are not asked.
_ELEMENTS: Mapping[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    **{kind: kind.__iter__ for kind in (list, tuple, set, frozenset, deque)},
}


def reaches(
    start: Any, is_wanted: Callable[[Any], bool], *, apart_from: Iterable[Any] = (), if_too_many: bool = False
) -> bool:
    """Whether an object holds one that is wanted, itself or through others: attributes, containers and closures.

    Args:
        start: the object.
        is_wanted: whether an object is one that is looked for.
        apart_from: what is not looked into.
        if_too_many: what to say where it holds so many objects that they are not all looked into.
    """
    # By their types: proxies are asked nothing.
    left, seen = deque([start]), {id(each): each for each in [start, *apart_from]}
    while left and len(seen) < _MOST_OBJECTS:
        each = left.popleft()
        if is_wanted(each):
            return True
        for held in _held(each):
            if id(held) not in seen:
                seen[id(held)] = held
                left.append(held)
    return if_too_many and bool(left)


def code_of(owner: Any, *, apart_from: Collection[str]) -> list[Any]:
    """The functions of an object's classes, those that they call of the same files, and the variables that all of these name.

    Args:
        owner: the object.
        apart_from: packages whose classes are not looked at.
    """
    kinds = [kind for kind in type(owner).__mro__ if kind.__module__.partition(".")[0] not in apart_from]
    found = [value for kind in kinds for value in vars(kind).values() if issubclass(type(value), FunctionType)]
    seen = set(map(id, found))
    for each in found:
        if issubclass(type(each), FunctionType) and each.__module__.partition(".")[0] not in apart_from:
            named = [each.__globals__[name] for name in names_in(each.__code__) if name in each.__globals__]
            new = [value for value in named if id(value) not in seen and not _is_elsewhere(value, each)]
            seen.update(map(id, new))
            found += new
    return found


def _is_elsewhere(value: Any, caller: FunctionType) -> bool:
    """Whether it is a function of another file."""
    return issubclass(type(value), FunctionType) and value.__globals__ is not caller.__globals__


def names_in(code: CodeType) -> Iterator[str]:
    """What code names, as far as that can be seen without running it."""
    codes = [code]
    while codes:
        code = codes.pop()
        yield from code.co_names
        yield from (constant for constant in code.co_consts if isinstance(constant, str))
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _held(each: Any) -> Iterator[Any]:
    if issubclass(type(each), (str, bytes, type, ModuleType, Tensor)):
        return
    for kind, elements in _ELEMENTS.items():
        if issubclass(type(each), kind):
            yield from islice(elements(each), _MOST_ELEMENTS)
    if issubclass(type(each), FunctionType):
        yield from each.__closure__ or ()
        yield from each.__defaults__ or ()
    elif issubclass(type(each), CellType):
        # It may be empty.
        with suppress(ValueError):
            yield each.cell_contents
    elif issubclass(type(each), MethodType):
        yield each.__self__
    elif issubclass(type(each), partial):
        yield from (each.func, each.args, each.keywords)
    with suppress(AttributeError):
        # Not by way of the object's own code.
        yield from list(object.__getattribute__(each, "__dict__").values())

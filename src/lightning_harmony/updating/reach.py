"""What an object can reach: whether code that Lightning doesn't announce, such as a dataset's, may look at something."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from lightning_harmony.engine.structures.nested import reachable
from lightning_harmony.engine.structures.object_state import attributes_of

# Of a long list of samples, the first ones tell what the others are.
_MOST_ELEMENTS = 100
_MOST_OBJECTS = 10_000
# What containers hold. Those that override this may load it, or draw it at random: they are not asked.
_ELEMENTS: Mapping[type, Callable[[Any], Iterable[Any]]] = {
    dict: dict.values,
    **{kind: kind.__iter__ for kind in (list, tuple, set, frozenset, deque)},
}


def reaches(start: Any, is_wanted: Callable[[Any], bool], *, apart_from: Iterable[Any] = ()) -> bool | None:
    """Whether an object holds one that is wanted, itself or through others: attributes, containers and closures.

    Args:
        start: the object.
        is_wanted: whether an object is one that is looked for.
        apart_from: what is not looked into.

    Returns:
        None where it holds so many objects that they are not all looked into, and none of those is wanted.
    """
    apart = set(map(id, apart_from))
    # By their types: proxies are asked nothing.
    found = reachable([start], lambda each: (held for held in _held(each) if id(held) not in apart))
    if any(map(is_wanted, islice(found, _MOST_OBJECTS))):
        return True
    return False if next(found, None) is None else None


def code_of(owner: Any, *, apart_from: Collection[str]) -> list[Any]:
    """The functions of an object's classes, those that they call of the same files, and the variables that all of these name.

    What a decorator has made of a function counts as that function, too.

    Args:
        owner: the object.
        apart_from: packages whose classes are not looked at.
    """
    kinds = [kind for kind in type(owner).__mro__ if kind.__module__.partition(".")[0] not in apart_from]
    functions = [
        each
        for kind in kinds
        for value in vars(kind).values()
        for each in functions_of(value)
        if _is_users(each, kind, apart_from)
    ]

    def named(each: Any) -> Iterator[Any]:
        if issubclass(type(each), FunctionType) and each.__module__.partition(".")[0] not in apart_from:
            values = (each.__globals__[name] for name in names_in(each.__code__) if name in each.__globals__)
            yield from (value for value in values if not _is_elsewhere(value, each))

    return list(reachable(functions, named))


def functions_of(value: Any) -> Iterator[FunctionType]:
    """A function or a method, and what decorators have put into it, or into a property."""
    yield from (each for each in reachable([value], _decorated) if issubclass(type(each), FunctionType))


def _decorated(each: Any) -> Iterator[Any]:
    kind = type(each)
    if issubclass(kind, FunctionType | CellType | cached_property):
        yield from _held(each)
    elif issubclass(kind, MethodType | staticmethod | classmethod):
        yield each.__func__
    elif issubclass(kind, property):
        yield from (each.fget, each.fset, each.fdel)


def _is_users(function: FunctionType, kind: type, apart_from: Collection[str]) -> bool:
    """Whether the author of a class has written a function, and no decorator of Python or of a package, as `dataclass`."""
    root = str(function.__globals__.get("__name__")).partition(".")[0]
    if root == kind.__module__.partition(".")[0]:
        return True
    return root not in sys.stdlib_module_names and root not in apart_from


def _is_elsewhere(value: Any, caller: FunctionType) -> bool:
    """Whether it is a function of another file."""
    return issubclass(type(value), FunctionType) and value.__globals__ is not caller.__globals__


def names_in(code: CodeType) -> Iterator[str]:
    """What code names, as far as that can be seen without running it."""
    for each in reachable([code], lambda each: each.co_consts if isinstance(each, CodeType) else ()):
        if isinstance(each, CodeType):
            yield from each.co_names
        elif isinstance(each, str):
            yield each


def _held(each: Any) -> Iterator[Any]:
    if issubclass(type(each), (str, bytes, type, ModuleType, Tensor)):
        return
    for kind, elements in _ELEMENTS.items():
        if issubclass(type(each), kind):
            yield from islice(elements(each), _MOST_ELEMENTS)
    if issubclass(type(each), FunctionType):
        yield from each.__closure__ or ()
        yield from (*(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values())
    elif issubclass(type(each), CellType):
        # It may be empty.
        with suppress(ValueError):
            yield each.cell_contents
    elif issubclass(type(each), MethodType):
        yield each.__self__
    elif issubclass(type(each), partial):
        yield from (each.func, each.args, each.keywords)
    yield from list((attributes_of(each) or {}).values())

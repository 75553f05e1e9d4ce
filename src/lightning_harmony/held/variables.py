"""Names that no dict of Python's own holds, seen as one: variables of closures, attributes of classes, slots of objects.

Also the entries of dicts of other classes: these may make what is asked for.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, MutableMapping
from functools import cache, partial
from types import CellType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from lightning_harmony.engine.structures.containers import class_of_python, copied_content, have_same_content

MISSING = object()
_set_partial: Any = vars(partial)["__setstate__"]


def put_value(content: Any, name: Any, value: Any) -> None:
    """Let a value have a name in a dict, or in what is seen as one; none, if it is `MISSING`."""
    if value is MISSING:
        content.pop(name, None)
    else:
        content[name] = value


class StandIn:
    """What takes the place of an attribute on a class for a while.

    Attributes:
        own: what was in its place; `MISSING` if nothing was.
    """

    own: Any


class Variables(MutableMapping[str, Any]):
    """Some names of one owner, and their values.

    Attributes:
        owner: whose they are.
        entries: the dict in which they are, if they are in one.
    """

    entries: dict[Any, Any] | None = None

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def copied(self) -> dict[Any, Any]:
        """All of them, in a dict."""
        return dict(self)

    def has_content(self, before: dict[str, Any]) -> bool:
        """Whether the same objects are in it that were before."""
        return have_same_content(self.copied(), before)


class EntriesOf(Variables):
    """The entries of a dict of some class, past the code of that."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        super().__init__(entries)
        self.entries = entries
        kind: Any = type(entries)
        self._holds = class_of_python(kind)

    def copied(self) -> dict[Any, Any]:
        """All of them, in a dict."""
        return copied_content(self.owner)  # type: ignore[no-any-return]

    def __getitem__(self, name: Any) -> Any:
        value = dict.get(self.owner, name, MISSING)
        if value is MISSING:
            raise KeyError(name)
        return value

    def __setitem__(self, name: Any, value: Any) -> None:
        self._holds.__setitem__(self.owner, name, value)

    def __delitem__(self, name: Any) -> None:
        self._holds.__delitem__(self.owner, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.copied())

    def __len__(self) -> int:
        return dict.__len__(self.owner)


class Chosen(Variables):
    """Some names in the attributes of a module.

    Args:
        attributes: all of them.
        names: the ones.
    """

    def __init__(self, attributes: dict[str, Any], names: Iterable[str]) -> None:
        super().__init__(attributes)
        self._names = frozenset(names)

    def __getitem__(self, name: str) -> Any:
        return self.owner[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.owner[name] = value

    def __delitem__(self, name: str) -> None:
        del self.owner[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self.owner)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class VariableOfClosure(Variables):
    """A variable that functions share with the function in which they are defined."""

    def __init__(self, cell: CellType, name: str) -> None:
        super().__init__(cell)
        self._cell, self._name = cell, name

    def has_content(self, before: dict[str, Any]) -> bool:
        """Whether the same object is in it that was before."""
        try:
            return len(before) == 1 and self._cell.cell_contents is before[self._name]
        except ValueError:
            return not before

    def __getitem__(self, name: str) -> Any:
        if name != self._name:
            raise KeyError(name)
        try:
            return self._cell.cell_contents
        except ValueError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        try:
            _ = self._cell.cell_contents
        except ValueError:
            return
        yield self._name

    def __len__(self) -> int:
        return sum(1 for _ in self)


class PartsOf(Variables):
    """What a function holds in a tuple: the defaults of its arguments, or the arguments of a `functools.partial`."""

    def copied(self) -> dict[Any, Any]:
        """All of them, in a dict by their numbers."""
        function = self.owner
        return dict(enumerate(function.args if issubclass(type(function), partial) else function.__defaults__ or ()))

    def __getitem__(self, name: Any) -> Any:
        return self.copied()[name]

    def __setitem__(self, name: Any, value: Any) -> None:
        function = self.owner
        parts = tuple((self.copied() | {name: value}).values())
        if issubclass(type(function), partial):
            _set_partial(function, (function.func, parts, function.keywords, vars(function)))
        else:
            function.__defaults__ = parts

    def __delitem__(self, name: Any) -> None:
        raise TypeError("a function has as many arguments as it has")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.copied())

    def __len__(self) -> int:
        return len(self.copied())


class SlotsOf(Variables):
    """The slots of an object that have values."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        kind: Any = type(value)
        self._slots = slots_of(kind)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._slots[name].__get__(self.owner)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        # Past the guard of frozen ones.
        self._slots[name].__set__(self.owner, value)

    def __delitem__(self, name: str) -> None:
        self._slots[name].__delete__(self.owner)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._slots if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """The slots that objects of a class have, by the names of the descriptors that hold them."""
    classes = [vars(each) for each in reversed(kind.__mro__) if "__slots__" in vars(each)]
    return {name: slot for each in classes for name, slot in each.items() if type(slot) is MemberDescriptorType}


@cache
def _dict_of(kind: type) -> Any:
    found = (vars(each).get("__dict__") for each in kind.__mro__)
    return next(
        (each for each in found if type(each) is GetSetDescriptorType or type(each) is MemberDescriptorType), None
    )


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, past the code of its class, which may make it up; None if there is none."""
    kind: Any = type(value)
    descriptor = _dict_of(kind)
    found = None if descriptor is None else descriptor.__get__(value)
    return found if type(found) is dict else None


class AttributesOfClass(Variables):
    """The attributes of a class, but for those that Python itself gives it."""

    def __init__(self, owner: type) -> None:
        super().__init__(owner)
        # What is shown of a class refers to its dict alone.
        (self.entries,) = gc.get_referents(vars(owner))

    def copied(self) -> dict[str, Any]:
        """All of them, in a dict."""
        found = {name: value for name, value in vars(self.owner).items() if not name.startswith("__")}
        for name in [name for name, value in found.items() if issubclass(type(value), StandIn)]:
            put_value(found, name, found[name].own)
        return found

    def __getitem__(self, name: str) -> Any:
        value = vars(self.owner)[name]
        if not isinstance(value, StandIn):
            return value
        if value.own is MISSING:
            raise KeyError(name)
        return value.own

    def __setitem__(self, name: str, value: Any) -> None:
        there = vars(self.owner).get(name)
        if isinstance(there, StandIn):
            there.own = value
        else:
            type.__setattr__(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        there = vars(self.owner).get(name)
        if isinstance(there, StandIn):
            there.own = MISSING
        else:
            type.__delattr__(self.owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.copied())

    def __contains__(self, name: object) -> bool:
        value = vars(self.owner).get(name, MISSING)
        return (value.own if isinstance(value, StandIn) else value) is not MISSING

    def __len__(self) -> int:
        return sum(1 for _ in self)

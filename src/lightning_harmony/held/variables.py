"""Names that no dict of Python's own holds, seen as one: variables of closures, attributes of classes, slots of objects.

Also the entries of dicts of other classes: these may make what is asked for.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from functools import cache, partial
from types import CellType, MemberDescriptorType
from typing import Any

from lightning_harmony.engine.structures.containers import MISSING, class_of_python, copied_content, put_value

_set_partial: Any = vars(partial)["__setstate__"]


class StandIn:
    """What takes the place of an attribute on a class for a while.

    Attributes:
        own: what was in its place; `MISSING` if nothing was.
    """

    own: Any


class Variables(MutableMapping[Any, Any]):
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
        raise NotImplementedError

    def put(self, name: Any, value: Any) -> None:
        """Let a value have a name; none, if it is `MISSING`."""
        raise NotImplementedError

    def __getitem__(self, name: Any) -> Any:
        return self.copied()[name]

    def __setitem__(self, name: Any, value: Any) -> None:
        self.put(name, value)

    def __delitem__(self, name: Any) -> None:
        self.put(name, MISSING)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.copied())

    def __len__(self) -> int:
        return len(self.copied())


class EntriesOf(Variables):
    """The entries of a dict of some class, past the code of that."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        super().__init__(entries)
        self.entries = entries

    def copied(self) -> dict[Any, Any]:
        """All of them, in a dict."""
        return copied_content(self.owner)  # type: ignore[no-any-return]

    def put(self, name: Any, value: Any) -> None:
        """Let a value have a name; none, if it is `MISSING`."""
        kind: Any = type(self.owner)
        holds = class_of_python(kind)
        if value is MISSING:
            holds.__delitem__(self.owner, name)
        else:
            holds.__setitem__(self.owner, name, value)

    def __getitem__(self, name: Any) -> Any:
        value = dict.get(self.owner, name, MISSING)
        if value is MISSING:
            raise KeyError(name)
        return value


class Chosen(Variables):
    """Some names in the attributes of a module.

    Args:
        attributes: all of them.
        names: the ones.
    """

    def __init__(self, attributes: dict[str, Any], names: Iterable[str]) -> None:
        super().__init__(attributes)
        self._names = frozenset(names)

    def copied(self) -> dict[Any, Any]:
        """All of them, in a dict."""
        return {name: self.owner[name] for name in self._names if name in self.owner}

    def put(self, name: Any, value: Any) -> None:
        """Let a value have a name; none, if it is `MISSING`."""
        put_value(self.owner, name, value)


class VariableOfClosure(Variables):
    """A variable that functions share with the function in which they are defined."""

    def __init__(self, cell: CellType, name: str) -> None:
        super().__init__(cell)
        self._name = name

    def copied(self) -> dict[Any, Any]:
        """It by its name, in a dict; none if it has no value."""
        try:
            return {self._name: self.owner.cell_contents}
        except ValueError:
            return {}

    def put(self, name: Any, value: Any) -> None:
        """Let a value have a name; none, if it is `MISSING`."""
        if value is MISSING:
            del self.owner.cell_contents
        else:
            self.owner.cell_contents = value


class PartsOf(Variables):
    """What a function holds in a tuple: the defaults of its arguments, or the arguments of a `functools.partial`."""

    def copied(self) -> dict[Any, Any]:
        """All of them, in a dict by their numbers."""
        function = self.owner
        return dict(enumerate(function.args if issubclass(type(function), partial) else function.__defaults__ or ()))

    def put(self, name: Any, value: Any) -> None:
        """Let a value have a number; none, if it is `MISSING`."""
        function, parts = self.owner, self.copied()
        put_value(parts, name, value)
        if issubclass(type(function), partial):
            _set_partial(function, (function.func, tuple(parts.values()), function.keywords, vars(function)))
        else:
            function.__defaults__ = tuple(parts.values())


class SlotsOf(Variables):
    """The slots of an object that have values."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        kind: Any = type(value)
        self._slots = slots_of(kind)

    def copied(self) -> dict[Any, Any]:
        """All of them, in a dict."""
        found = {}
        for name, slot in self._slots.items():
            with suppress(AttributeError):
                found[name] = slot.__get__(self.owner)
        return found

    def put(self, name: Any, value: Any) -> None:
        """Let a value have a name; none, if it is `MISSING`."""
        # Past the guard of frozen ones.
        if value is MISSING:
            self._slots[name].__delete__(self.owner)
        else:
            self._slots[name].__set__(self.owner, value)


@cache
def slots_of(kind: type) -> dict[str, MemberDescriptorType]:
    """The slots that objects of a class have, by the names of the descriptors that hold them."""
    classes = [vars(each) for each in reversed(kind.__mro__) if "__slots__" in vars(each)]
    return {name: slot for each in classes for name, slot in each.items() if type(slot) is MemberDescriptorType}


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

    def put(self, name: Any, value: Any) -> None:
        """Let a value have a name; none, if it is `MISSING`."""
        there = vars(self.owner).get(name)
        if isinstance(there, StandIn):
            there.own = value
        elif value is MISSING:
            type.__delattr__(self.owner, name)
        else:
            type.__setattr__(self.owner, name, value)

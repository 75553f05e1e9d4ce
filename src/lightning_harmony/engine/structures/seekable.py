"""Iterators that can be set back, so that code which draws from one in a step draws the same when it runs again.

Generators and the iterators of Python's own keep how far they are out of sight: nothing tells it, and nothing sets it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from operator import is_
from types import MethodType
from typing import Any, ClassVar

from lightning_harmony.engine.structures.containers import entries_of, put_item

_METHOD: Any = type(iter(()).__next__)
_NOTHING = object()


class Position:
    """How far an iterator is: before a value, once somebody has drawn that. Who holds it can draw from there again."""

    __slots__ = ("_next", "_value")

    def __init__(self) -> None:
        self._value: Any = _NOTHING
        self._next: Position | None = None

    def draw(self, iterator: Any, *sent: Any) -> tuple[Any, Position]:
        """The value behind it, and the position behind that.

        Args:
            iterator: is asked for the value the first time.
            sent: is sent to a generator then.
        """
        if self._next is None:
            self._value = iterator.send(*sent) if sent else next(iterator)
            self._next = Position()
        return self._value, self._next


class Seekable:
    """Takes the place of an iterator, and draws from it.

    Args:
        iterator: the one.

    Attributes:
        iterator: the same.
        position: how far it is.
    """

    _all: ClassVar[weakref.WeakValueDictionary[int, Seekable]] = weakref.WeakValueDictionary()

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.position = Position()

    @classmethod
    def of(cls, iterator: Any) -> Seekable:
        """The one that stands for an iterator, wherever that is found."""
        found = cls._all.get(id(iterator))
        if found is None:
            found = cls._all[id(iterator)] = cls(iterator)
        return found

    def seek(self, position: Position) -> None:
        """Draw from a position on."""
        self.position = position

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        value, self.position = self.position.draw(self.iterator)
        return value

    def send(self, value: Any) -> Any:
        """Let a generator go on with a value."""
        drawn, self.position = self.position.draw(self.iterator, value)
        return drawn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)

    def __repr__(self) -> str:
        return repr(self.iterator)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.iterator.__reduce_ex__(protocol)


def seekable(value: Any) -> Any:
    """What takes the place of an iterator of Python's own, of its method, or of what holds such for good; or itself."""
    kind: Any = type(value)
    if is_fixed(kind):
        return _remade(value, seekable)
    if kind is _METHOD:
        of: Any = type(value.__self__)
        return Seekable.of(value.__self__).__next__ if value.__name__ == "__next__" and is_iterator(of) else value
    return Seekable.of(value) if is_iterator(kind) else value


def make_seekable(content: Any, read: Any, first: int = 0) -> bool:
    """Let iterators be seekable that are in a list, deque, dict or set, or in what is seen as a dict.

    Args:
        content: the list, deque, dict or set.
        read: a copy of what is in it.
        first: from which number on a list is looked at.

    Returns:
        Whether there were any.
    """
    return exchange(content, read, seekable, first)


def exchange(content: Any, read: Any, function: Callable[[Any], Any], first: int = 0) -> bool:
    """Let what is in a list, deque, dict or set be what a function returns of it; whether that is anything else.

    Args:
        content: the list, deque, dict or set, or what is seen as a dict.
        read: a copy of what is in it.
        function: the one.
        first: from which number on a list is looked at.
    """
    entries = entries_of(read, first)
    exchanged = [(name, value, other) for name, value in entries if (other := function(value)) is not value]
    for name, value, other in exchanged:
        if isinstance(read, set):
            set.remove(content, value)
            set.add(content, other)
        else:
            put_item(content, name, other)
    return bool(exchanged)


def given_back(value: Any) -> Any:
    """What had been in the place of a value, before `seekable` put that there; or itself."""
    kind: Any = type(value)
    if is_fixed(kind):
        return _remade(value, given_back)
    if kind is MethodType and type(value.__self__) is Seekable:
        return value.__self__.iterator.__next__
    return value.iterator if kind is Seekable else value


def holds_iterator(value: Any) -> bool:
    """Whether a value is an iterator of Python's own, or holds one for good, or what has been put into its place."""
    return seekable(value) is not value or given_back(value) is not value


@cache
def is_fixed(kind: type) -> bool:
    """Whether objects of a class hold for good what they hold: tuples, also named ones, and frozensets."""
    return issubclass(kind, tuple) or kind is frozenset


def _remade(value: Any, function: Callable[[Any], Any]) -> Any:
    """A tuple or frozenset of what a function returns of all that is in one; itself if that is the same."""
    kind: Any = type(value)
    holds: Any = frozenset if kind is frozenset else tuple
    own = list(holds.__iter__(value))
    others = list(map(function, own))
    if all(map(is_, own, others)):
        return value
    remade = holds.__new__(kind, others)
    if hasattr(remade, "__dict__"):
        vars(remade).update(vars(value))
    return remade


@cache
def is_iterator(kind: type) -> bool:
    """Whether objects of a class are generators or iterators of Python's own, and no more than that, such as files."""
    # Proxies have all methods that there are.
    if not hasattr(kind, "__next__") or issubclass(kind, weakref.ProxyTypes):
        return False
    if kind.__module__ in ("builtins", "itertools"):
        return True
    is_plain = not kind.__dictoffset__ and not any(
        callable(getattr(kind, each)) for each in dir(kind) if each[0] != "_"
    )
    return is_plain and kind.__module__.partition(".")[0] in sys.stdlib_module_names

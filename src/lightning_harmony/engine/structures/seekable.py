"""Iterators that can be set back, so that code which draws from one in a step draws the same when it runs again.

Generators and the iterators of Python's own keep how far they are out of sight: nothing tells it, and nothing sets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import MethodType
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from lightning_harmony.engine.structures.containers import put_item

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

    _all: ClassVar[WeakValueDictionary[int, Seekable]] = WeakValueDictionary()

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
    """What takes the place of an iterator of Python's own, of its method, or of a tuple with one of these; or itself."""
    kind: Any = type(value)
    if kind is tuple:
        exchanged = tuple(map(seekable, value))
        return value if all(one is other for one, other in zip(value, exchanged, strict=True)) else exchanged
    if kind is _METHOD:
        of: Any = type(value.__self__)
        return Seekable.of(value.__self__).__next__ if value.__name__ == "__next__" and is_iterator(of) else value
    return Seekable.of(value) if is_iterator(kind) else value


def make_seekable(content: Any, read: Any) -> bool:
    """Let iterators be seekable that are in a list, deque or dict, or in what is seen as one; sets are left alone.

    Args:
        content: the list, deque or dict.
        read: a copy of what is in it.

    Returns:
        Whether there were any.
    """
    if isinstance(read, set):
        return False
    found = read.items() if isinstance(read, dict) else enumerate(read)
    exchanged = [(name, other) for name, value in found if (other := seekable(value)) is not value]
    if exchanged:
        for name, value in exchanged:
            put_item(content, name, value)
    return bool(exchanged)


def given_back(value: Any) -> Any:
    """What had been in the place of a value, before `seekable` put that there; or itself."""
    kind = type(value)
    if kind is tuple:
        exchanged = tuple(map(given_back, value))
        return value if all(one is other for one, other in zip(value, exchanged, strict=True)) else exchanged
    if kind is MethodType and type(value.__self__) is Seekable:
        return value.__self__.iterator.__next__
    return value.iterator if kind is Seekable else value


@cache
def is_iterator(kind: type) -> bool:
    """Whether objects of a class are generators or iterators of Python's own."""
    return kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")

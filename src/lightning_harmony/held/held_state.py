"""What may be changed in one place in Python, and the objects there that may be changed in place."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.lanes.lock_wait import LOCKS
from lightning_harmony.engine.lanes.rng import is_of_lanes
from lightning_harmony.engine.model.attributes import OF_TORCH
from lightning_harmony.engine.structures.containers import (
    copied_content,
    entries_of,
    have_same_content,
    num_kept,
    put_content,
    put_value,
)
from lightning_harmony.engine.structures.object_state import Access, restore_of
from lightning_harmony.engine.structures.operations import version_of, versions_of
from lightning_harmony.engine.structures.seekable import (
    Position,
    Seekable,
    exchange,
    given_back,
    is_fixed,
    make_seekable,
)
from lightning_harmony.engine.structures.tree import is_swapped
from lightning_harmony.held.cached_functions import cached_in
from lightning_harmony.held.variables import EntriesOf, Variables

# What is in these, lanes can switch: of other classes nobody knows how they are changed.
SWITCHED = (list, deque, set, dict, OrderedDict, defaultdict)
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial, staticmethod, classmethod, property)
# What is looked into by itself, or does not change: nothing tells by itself that it was changed in place.
_UNMARKED = frozenset((*_PLAIN, *FUNCTIONS, *SWITCHED, tuple, type, torch.dtype, torch.device))
# In place of a name: all of a list, set or dict.
ALL = object()
Leads = Callable[[Any, Any], "Iterator[Held]"]


def is_plain(kind: type) -> bool:
    """Whether nothing that a step keeps is in objects of a class: numbers, text, and modules of Python.

    A module is of a class of its own where a library imports what is in it when that is first asked for.
    """
    return kind in _PLAIN or issubclass(kind, ModuleType)


def _nowhere(name: Any, value: Any) -> Iterator[Held]:
    return iter(())


class Kind(Enum):
    """What a space is."""

    MODULE = auto()
    CONTAINER = auto()
    HOOKS = auto()
    # An object's attributes, or a container that is in one or of another class; globals, variables and attributes of a class.
    OBJECT = auto()


class Marks:
    """What changes when objects in a place are changed in place.

    Attributes:
        tensors: those that count it.
        others: generators of random numbers, iterators, arrays and locks.
    """

    __slots__ = ("others", "tensors")

    def __init__(self, tensors: Sequence[Tensor] = (), others: Sequence[Any] = ()) -> None:
        self.tensors, self.others = tensors, others

    def now(self) -> list[Any]:
        """What is equal as long as none is changed: how often each tensor was, and the marks of the others."""
        return [self.versions(), *map(mark_of, self.others)]

    def versions(self) -> list[int | None]:
        """How often each of the tensors was changed in place."""
        return versions_of(self.tensors)

    @classmethod
    def joint(cls, several: Iterable[Marks]) -> Marks:
        """Those of all that several are of."""
        several = list(several)
        tensors = chain.from_iterable(marks.tensors for marks in several)
        return cls(list(tensors), list(chain.from_iterable(marks.others for marks in several)))

    def and_of(self, values: Iterable[Any]) -> Marks:
        """Those of some more objects, too."""
        values = list(values)
        tensors = [value for value in values if issubclass(type(value), Tensor)]
        others = [value for value in values if not issubclass(type(value), Tensor)]
        return Marks([*self.tensors, *tensors], [*self.others, *others])


def joint_marks(several: Iterable[Sequence[Any]]) -> list[Any]:
    """What `Marks.now` told of several, as the joint one tells it."""
    several = list(several)
    return [list(chain.from_iterable(each[0] for each in several)), *chain.from_iterable(each[1:] for each in several)]


class Held:
    """What may be changed in one place: the attributes of a module or object, a list, set or dict, or a module's hooks.

    Attributes:
        name: for messages.
        content: the list, set or dict itself, or the attributes, in a dict or seen as one.
        kind: what it is.
        owner: whose attributes it is, if it is any.
        root: the module or class, with the name of its attribute, that leads to it, if it is no module's own.
        is_shared: whether other ways lead to it, too, as functions share variables.
        is_of_threads: whether other threads may change it: it is, or is within, an object that keeps a lock or a thread.
        key: tells it from all others, and is the same whenever it is looked at.
        newest: a copy of what was in it when it was looked at last: the same one as long as the same things are in it.
        leads: the places in something that is in it, of some name or number.
    """

    __slots__ = (
        "_cached",
        "_described",
        "_has_tensors",
        "_is_let_go",
        "_marked",
        "_marks",
        "content",
        "is_of_threads",
        "is_shared",
        "key",
        "kind",
        "leads",
        "name",
        "newest",
        "owner",
        "root",
    )

    def __init__(self, name: str, content: Any, kind: Kind, owner: Any = None, leads: Leads | None = None) -> None:
        self.name = name
        self.content = content
        self.kind = kind
        self.owner = owner
        self.root: tuple[Any, str] | None = None
        self.is_shared = self.is_of_threads = False
        self.key = id(content.owner) if isinstance(content, Variables) else id(content)
        self.leads = leads or _nowhere
        self.newest: Any = None
        self._marked: list[tuple[Any, Any]] = []
        self._marks = Marks()
        self._cached: list[tuple[Any, Any]] = []
        self._has_tensors = False
        # The copy of which these tell, and whether tensors were taken out of it.
        self._described: Any = None
        self._is_let_go = False
        self._copy()

    @property
    def marked(self) -> list[tuple[Any, Any]]:
        """The objects in it that may be changed in place, with their names or numbers."""
        self._describe()
        return self._marked

    @property
    def marks(self) -> Marks:
        """What changes with these."""
        self._describe()
        return self._marks

    @property
    def cached(self) -> list[tuple[Any, Any]]:
        """The functions with a cache in it, with their names or numbers."""
        self._describe()
        return self._cached

    @property
    def has_tensors(self) -> bool:
        """Whether tensors are in it, or in tuples there; parameters do not count."""
        self._describe()
        return self._has_tensors

    @property
    def in_words(self) -> str:
        """Its name, in a message. The model itself has none."""
        return repr(self.name) if self.name else "the module"

    @property
    def is_named(self) -> bool:
        """Whether what is in it has names, as in a dict."""
        return isinstance(self.content, dict | Variables)

    @property
    def has_attributes(self) -> bool:
        """Whether its names are those that code has given them: attributes, globals or variables, not entries."""
        return self.owner is not None or (
            isinstance(self.content, Variables) and not isinstance(self.content, EntriesOf)
        )

    @property
    def is_of_buffers(self) -> bool:
        """Whether the buffers of a module are in it."""
        return isinstance(self.owner, nn.Module) and self.content is self.owner._buffers

    def look(self) -> Any:
        """A copy of what is in it: the same one as before, as long as the same things are in it."""
        if not self.is_as(self.newest):
            self._copy()
        return self.newest

    def is_as(self, before: Any) -> bool:
        """Whether the same objects are in it as in a copy."""
        content = self.content
        return have_same_content(content.copied() if isinstance(content, Variables) else content, before)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """What was in it when it was looked at last, with names or numbers."""
        return entries_of(self.newest)

    def come(self, before: Any) -> list[Any]:
        """The objects that are in it, and were not as in a copy."""
        old = {id(value) for _, value in entries_of(before)}
        return [value for name, value in self.items() if id(value) not in old and not self._leaves_alone(name)]

    def _copy(self) -> None:
        content, before = self.content, self.newest
        self.newest = content.copied() if isinstance(content, Variables) else copied_content(content)
        first = 0 if self._is_let_go else num_kept(before, self.newest)
        if self.kind is not Kind.HOOKS and make_seekable(content, self.newest, first):
            self.newest = content.copied() if isinstance(content, Variables) else copied_content(content)
        if self._is_let_go:
            self._described, self._is_let_go = None, False
        self._describe()

    def _describe(self) -> None:
        """Tell what is in the newest copy, if that is not known: of a list, what is behind all that was in it before."""
        if self._described is self.newest or self._is_let_go:
            return
        first = num_kept(self._described, self.newest)
        if not first:
            self._marked, self._marks, self._cached, self._has_tensors = [], Marks(), [], False
        come = list(entries_of(self.newest, first))
        found = [(name, each) for name, value in come for each in in_one(value) if mark_of(each) is not None]
        self._marked = [*self._marked, *found]
        self._marks = self._marks.and_of(each for _, each in found)
        self._cached = [*self._cached, *((name, value) for name, value in come if cached_in(value) is not None)]
        self._has_tensors = self._has_tensors or any(_holds_tensors(value) for _, value in come)
        self._described = self.newest

    def give_back(self) -> None:
        """Let iterators be what the user has put there."""
        if any(type(value) is Seekable for value in self.marks.others):
            exchange(self.content, self.newest, given_back)

    def undo_in_place(self) -> list[Callable[[], None]]:
        """What takes back, of each, changes in place of generators, iterators and arrays in it."""
        return [undo for undo in map(restore_of, self.marks.others) if undo is not None]

    def put(self, before: Any) -> None:
        """Let the same be in it as in a copy."""
        content = self.content
        if self.is_as(before):
            return
        if not self.is_named:
            put_content(content, before)
            return
        for name in [name for name in content if name not in before and not self._leaves_alone(name)]:
            del content[name]
        # One by one: to set a name in a class makes Python forget what it has cached of the class.
        for name, value in before.items():
            if (name not in content or content[name] is not value) and not self._leaves_alone(name):
                put_value(content, name, value)

    def put_known(self, values: dict[Any, Any], gone: Iterable[Any] = ()) -> None:
        """Let names have values that were looked at when they were here, or that hold nothing.

        Args:
            values: these. What is here must have been looked at just now; then it need not be looked at again.
            gone: the names that are to have none before.
        """
        content, newest = self.content, self.newest
        for name in gone:
            content.pop(name, None)
        if type(content) is dict and newest and not gone:
            content.update(values)
            self.newest = {**newest, **values}
            return
        for name, value in values.items():
            content[name] = value
        self.look()

    def _leaves_alone(self, name: Any) -> bool:
        """Whether a name is one of Python's, of a compiler's, which adds what it has compiled to globals, or of torch's."""
        return isinstance(name, str) and (name.startswith("__") or (self.kind is Kind.MODULE and name in OF_TORCH))

    def let_go(self) -> None:
        """Keep no tensors for longer than the user does."""
        if self.has_tensors:
            without = ((name, None if _holds_tensors(value) else value) for name, value in self.items())
            self.newest = dict(without) if self.is_named else type(self.newest)(value for _, value in without)
            self._marked, self._marks, self._described, self._is_let_go = [], Marks(), None, True


def in_one(value: Any) -> Iterator[Any]:
    """What may be changed in place of a value: itself, or what it is made of, as a tuple or the method of an iterator is."""
    kind: Any = type(value)
    if is_fixed(kind):
        for each in value:
            yield from in_one(each)
    elif kind is MethodType and type(value.__self__) is Seekable:
        yield value.__self__
    elif kind in (staticmethod, classmethod):
        yield from in_one(value.__func__)
    elif kind not in _UNMARKED:
        yield value


def _holds_tensors(value: Any) -> bool:
    kind = type(value)
    if kind is tuple:
        return any(map(_holds_tensors, value))
    return issubclass(kind, Tensor) and not is_swapped(value)


def mark_of(value: Any) -> Any:
    """What changes when an object is changed in place; None where that cannot be told, or of one that cannot be."""
    kind = type(value)
    if kind in _UNMARKED or issubclass(kind, (nn.Module, ModuleType)):
        return None
    if issubclass(kind, Tensor):
        return None if is_swapped(value) else version_of(value)
    if kind in LOCKS:
        return is_held(value)
    array = Access.of_array(value)
    if array is not None:
        return array.get()
    state = state_of_generator(value)
    return () if state is not None and is_of_lanes(value) else state


def state_of_generator(value: Any) -> Any:
    """What tells what a generator of random numbers, or an iterator, will draw; None of anything else."""
    access = Access.of_generator(value)
    if access is None:
        return None
    state = access.get()
    if isinstance(state, Position):
        return state
    if isinstance(state, Tensor):
        return bytes(state.numpy())
    # NumPy's hold arrays, which equal each other element by element.
    return state if isinstance(state, tuple) else pickle.dumps(state)


def is_held(value: Any) -> bool:
    """Whether a lock is held, by whichever thread."""
    kind = type(value)
    if issubclass(kind, threading.Condition):
        return is_held(value._lock)
    if issubclass(kind, threading.Semaphore):
        return bool(value._value == 0)
    return kind in LOCKS and repr(value).startswith("<locked")

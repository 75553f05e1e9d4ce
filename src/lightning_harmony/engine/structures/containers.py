"""Lists, dicts, sets and deques: whether they hold the same objects, and how to let them.

Classes of one's own may make what is asked for, or count who asks. What they hold is read and put past their code, by the
methods of the class of Python's own that holds it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import compress, islice, starmap
from operator import is_, ne
from typing import Any

from torch._C._dynamo.guards import dict_version

from lightning_harmony.engine.structures.tree import is_parameter

# In the place of a value where there is none.
MISSING = object()
_OF_PYTHON = frozenset((OrderedDict, defaultdict, dict, list, deque, set))


@cache
def class_of_python(kind: type) -> Any:
    """The class of Python's own that holds what is in a list, dict, set or deque of some class."""
    return next(each for each in (OrderedDict, dict, list, deque, set) if issubclass(kind, each))


def have_same_content(one: Any, other: Any) -> bool:
    """Whether two lists, dicts, sets or deques hold the same objects."""
    if type(one) not in _OF_PYTHON:
        one = copied_content(one)
    if type(other) not in _OF_PYTHON:
        other = copied_content(other)
    if len(one) != len(other):
        return False
    if not one:
        return True
    if isinstance(one, dict):
        return all(map(is_, one, other)) and all(map(is_, one.values(), other.values()))
    return bool(one == other) if isinstance(one, set) else all(map(is_, one, other))


def num_kept(before: Any, now: Any) -> int:
    """How many objects a list begins with that are all of what it held before; 0 where it begins otherwise.

    A list to which each batch adds becomes long, and what is behind these alone is new in it.
    """
    are_lists = type(before) is list and type(now) is list and len(before) <= len(now)
    return len(before) if are_lists and all(map(is_, before, now)) else 0


def entries_of(content: Any, first: int = 0) -> Iterator[tuple[Any, Any]]:
    """What is in a list, set or dict, with names or numbers; of a list from some number on."""
    return iter(content.items()) if isinstance(content, dict) else islice(enumerate(content), first, None)


def others_for(entries: Iterable[tuple[Any, Any]], kind: type, function: Callable[[Any], Any]) -> dict[Any, Any]:
    """What to put under which names or numbers, for something else to be there for what is of a class; not for parameters."""
    exchanged = ((name, value, _exchanged(value, kind, function)) for name, value in entries)
    return {name: other for name, value, other in exchanged if other is not value}


def _exchanged(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """A value with something else for what is of a class in it, also within tuples; itself if nothing is."""
    if issubclass(type(value), kind):
        return value if is_parameter(value) else function(value)
    if type(value) is not tuple:
        return value
    exchanged = tuple(_exchanged(each, kind, function) for each in value)
    return value if all(map(is_, exchanged, value)) else exchanged


def with_others(content: Any, others: Mapping[Any, Any]) -> Any:
    """What is in a list, set or dict, with others under some names or numbers."""
    if not others:
        return content
    if isinstance(content, dict):
        return {**content, **others}
    values = list(content)
    for number, value in others.items():
        values[number] = value
    return values


class ChangesOf:
    """Tells which of some dicts have come to hold other objects, or the same ones under other names.

    Torch counts the changes of each, but not that an empty one is filled with all of another one at once: of these is asked
    whether they still are empty, which is soon told, and most of the thousands that a model has are.

    Args:
        dicts: which count as known now.
    """

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self._dicts = list(dicts)
        self._sort({number: dict_version(each) for number, each in enumerate(self._dicts) if dict.__len__(each)})

    def _sort(self, versions: Mapping[int, int]) -> None:
        """Tell empty ones from those with versions."""
        self._filled = sorted(versions)
        self._empty = [number for number in range(len(self._dicts)) if number not in versions]
        self._filled_ones = list(map(self._dicts.__getitem__, self._filled))
        self._empty_ones = list(map(self._dicts.__getitem__, self._empty))
        self._places = {number: place for place, number in enumerate(self._filled)}
        # Numbers side by side are sooner compared than objects.
        self._versions = array("q", map(versions.__getitem__, self._filled))

    def are_none(self) -> bool:
        """Whether none has changed since it was known."""
        return not any(map(dict.__len__, self._empty_ones)) and self._versions == self._versions_now()

    def _versions_now(self) -> array[int]:
        return array("q", map(dict_version, self._filled_ones))

    def again(self) -> list[int]:
        """The numbers of those that have changed since they were known, which they are from now on."""
        before, self._versions = self._versions, self._versions_now()
        others = [] if self._versions == before else compress(self._filled, map(ne, self._versions, before))
        changed = [*compress(self._empty, map(dict.__len__, self._empty_ones)), *others]
        if changed:
            self.know(changed)
        return sorted(changed)

    def know(self, numbers: Sequence[int]) -> None:
        """What some hold now is known."""
        versions = {
            number: dict_version(self._dicts[number]) for number in numbers if dict.__len__(self._dicts[number])
        }
        if len(versions) == len(numbers) and versions.keys() <= self._places.keys():
            for number, version in versions.items():
                self._versions[self._places[number]] = version
            return
        known = dict(zip(self._filled, self._versions, strict=True))
        for number in numbers:
            known.pop(number, None)
        self._sort({**known, **versions})


class Unchanged:
    """Tells of lists, dicts, sets and deques of Python's own whether they hold what they held.

    Torch counts the changes of a dict, which is sooner asked for than a comparison. But it does not count those of an empty
    one that is filled with all of another one at once, nor when an `OrderedDict` changes its order.

    Args:
        copies: each of them, with a copy of what it holds now.
    """

    def __init__(self, copies: Sequence[tuple[Any, Any]]) -> None:
        self._empty = [content for content, held in copies if not held]
        self._counted = [each for each in copies if each[1] and type(each[0]) in (dict, defaultdict)]
        self._compared = [each for each in copies if each[1] and type(each[0]) not in (dict, defaultdict)]
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return [dict_version(content) for content, _ in self._counted]

    def holds(self) -> bool:
        """Whether they do."""
        if any(self._empty) or not all(starmap(have_same_content, self._compared)):
            return False
        versions = self._versions_now()
        if versions != self._versions:
            if not all(starmap(have_same_content, self._counted)):
                return False
            self._versions = versions
        return True


def size_of(content: Any) -> int:
    """How much is in a list, dict, set or deque."""
    kind: Any = type(content)
    return class_of_python(kind).__len__(content)  # type: ignore[no-any-return]


def copied_content(content: Any) -> Any:
    """A list, dict, set or deque as it is, in a list, dict or set."""
    kind: Any = type(content)
    if kind in _OF_PYTHON:
        return dict(content) if issubclass(kind, dict) else content.copy() if kind is set else list(content)
    holds = class_of_python(kind)
    if issubclass(holds, dict):
        return dict(holds.items(content))
    return (set if holds is set else list)(holds.__iter__(content))


def put_content(content: Any, before: Any) -> None:
    """Let a list, dict, set or deque hold what it held before, and nothing else."""
    kind: Any = type(content)
    holds = class_of_python(kind)
    holds.clear(content)
    if holds is OrderedDict:
        # `OrderedDict.update` asks the class of one's own.
        for name, value in before.items():
            OrderedDict.__setitem__(content, name, value)
    else:
        (holds.extend if holds in (list, deque) else holds.update)(content, before)


def put_item(content: Any, name: Any, value: Any) -> None:
    """Let a list, deque or dict, or what is seen as one, have another value under a number or name."""
    kind: Any = type(content)
    holds = class_of_python(kind) if issubclass(kind, list | dict | deque) else kind
    holds.__setitem__(content, name, value)


def put_value(content: Any, name: Any, value: Any) -> None:
    """Let a value have a name in a dict, or in what is seen as one; none, if it is `MISSING`."""
    if value is MISSING:
        content.pop(name, None)
    else:
        content[name] = value


@contextmanager
def attribute_replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the context, an object has another attribute of its own."""
    before = vars(owner).get(name, MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def changed_names(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """The names under which two dicts hold different objects."""
    return [name for name in {**before, **now} if now.get(name, MISSING) is not before.get(name, MISSING)]

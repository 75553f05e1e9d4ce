"""All places in which Python holds something for a step, and what is in them: looked at often, as most of it never changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

from torch import nn

from lightning_harmony.engine.model.attributes import LONGEST
from lightning_harmony.engine.structures.containers import (
    MISSING,
    ChangesOf,
    Unchanged,
    copied_content,
    entries_of,
    have_same_content,
    num_kept,
    size_of,
)
from lightning_harmony.held.held_state import SWITCHED, Held
from lightning_harmony.held.variables import Variables
from lightning_harmony.held.walk import HOOKS_OF_BACKWARD, Others, Walk, modules_of


class Together:
    """Places that are looked at together: of dicts is asked whether they were changed, the others are compared in one go.

    Attributes:
        newest: a copy of what was in each when they were looked at last.
        time: grows with each change.
        changed_at: by number, when a place that has changed did so last.
    """

    def __init__(self, places: Sequence[Held]) -> None:
        self.places = places
        self.time, self.changed_at = 0, dict[int, int]()
        self.newest = [held.look() for held in places]
        dicts = {number: _dict_of(held) for number, held in enumerate(places)}
        counted = {number: content for number, content in dicts.items() if content is not None}
        self._counted = {number: place for place, number in enumerate(counted)}
        self._numbers_of_counted = list(counted)
        self._changes = ChangesOf(counted.values())
        self._readers = {
            number: _reader(held) for number, held in enumerate(places) if number not in counted or _is_ordered(held)
        }
        self._let_go: list[int] = []
        self._numbers: dict[int, int] | None = None
        self._read = self._read_now()

    def _read_now(self) -> list[Any]:
        # With something between two of them: what goes from one to the next is not where it was.
        return list(chain.from_iterable([chain(read(), (MISSING,)) for read in self._readers.values()]))

    def look(self) -> list[int]:
        """The numbers of those that have changed since they were looked at last."""
        numbers, self._let_go = set(self._let_go), []
        numbers.update(map(self._numbers_of_counted.__getitem__, self._changes.again()))
        read = self._read_now()
        if not have_same_content(read, self._read):
            numbers.update(self._readers)
        self._read = read
        changed = [number for number in sorted(numbers) if self.places[number].look() is not self.newest[number]]
        if changed:
            self._note(changed)
            for number in changed:
                if number not in self._readers and _is_ordered(self.places[number]):
                    self._readers[number], self._read = _reader(self.places[number]), []
        return changed

    def _note(self, changed: Iterable[int]) -> None:
        self.newest = list(self.newest)
        self.time += 1
        for number in changed:
            self.newest[number], self.changed_at[number] = self.places[number].newest, self.time

    def know(self, places: Iterable[Held]) -> None:
        """What was just put in some places is known, as their newest copies tell it."""
        if self._numbers is None:
            self._numbers = {id(held): number for number, held in enumerate(self.places)}
        # What another thread has changed meanwhile would count as known, too.
        numbers = [self._numbers[id(held)] for held in places if not held.is_of_threads]
        known = [number for number in numbers if number not in self._readers]
        self._note(known)
        self._changes.know([self._counted[number] for number in known])

    def copies(self) -> list[Any]:
        """A copy of what is in each: the same list as long as nothing has changed."""
        self.look()
        return self.newest

    def let_go(self) -> None:
        """Keep no tensors for longer than the user does: until they are looked at again, they count as changed."""
        self._let_go = [number for number, held in enumerate(self.places) if held.has_tensors]
        for number in self._let_go:
            self.places[number].let_go()
        self.newest, self._read = [held.newest for held in self.places], []


class Contents:
    """What all places held at one moment.

    Args:
        together: the places.

    Attributes:
        places: the same.
        copies: of each, a copy of what was in it: the same one as before, as long as the same things are in it.
    """

    def __init__(self, together: Together) -> None:
        self._together = together
        self.places = together.places
        self.copies, self._time = together.copies(), together.time

    def __iter__(self) -> Iterator[tuple[Held, Any]]:
        return zip(self.places, self.copies, strict=True)

    def know(self, places: Iterable[Held]) -> None:
        """What was just put in some places is known, and no change to look at."""
        self._together.know(places)

    def changed(self) -> list[tuple[Held, Any, Any]]:
        """The places that have changed since, with copies of then and now."""
        now = self._together.copies()
        if now is self.copies:
            return []
        # Most never change, and to look at them takes long enough.
        later = sorted(number for number, time in self._together.changed_at.items() if time > self._time)
        each = ((self.places[number], self.copies[number], now[number]) for number in later)
        return [(held, then, newest) for held, then, newest in each if then is not newest]


def _dict_of(held: Held) -> dict[Any, Any] | None:
    """The dict in which all is that is in a place, if there is one."""
    content = held.content.entries if isinstance(held.content, Variables) else held.content
    return content if isinstance(content, dict) else None


def _is_ordered(held: Held) -> bool:
    """Whether its order may change without anything else: only that of what is in some order."""
    return bool(held.newest) and isinstance(held.content, OrderedDict)


def _reader(held: Held) -> Callable[[], Iterable[Any]]:
    """Reads what is in a place, in its order."""
    content = held.content
    if isinstance(content, Variables):
        return partial(_in_dict, content.copied)
    if isinstance(content, dict):
        return partial(_in_dict, partial(copied_content, content))
    return content.__iter__ if type(content) in SWITCHED else partial(copied_content, content)


def _in_dict(copied: Callable[[], dict[Any, Any]]) -> Iterator[Any]:
    content = copied()
    return chain(content, content.values())


class Places:
    """All places of a model, in the steps of one kind.

    They are found by a walk, which is repeated once something has come or gone that leads to others.

    Args:
        model: whose they are.
        others: what else may be changed.
    """

    def __init__(self, model: nn.Module, others: Others = lambda names: ()) -> None:
        self._model, self._others = model, others
        self._walk: Walk | None = None
        self._together = Together(())
        self._newest: Sequence[Any] = []
        self._structure = Unchanged(())

    def look(self) -> Contents:
        """All places as they are now, and what is in them."""
        if self._walk is None or self._is_outdated(self._walk):
            self._walk = Walk(self._model, self._others)
            self._together = Together(self._walk.places)
            structure = [
                each
                for _, module in modules_of(self._model)
                for each in (module._modules, *(vars(module).get(name, {}) for name in HOOKS_OF_BACKWARD))
                # Those of TorchScript stay what they are.
                if isinstance(each, dict)
            ]
            self._structure = Unchanged([(each, each.copy()) for each in structure])
        contents = Contents(self._together)
        self._newest = contents.copies
        return contents

    @property
    def too_long(self) -> Sequence[Any]:
        """The containers that are no places, as they are too long."""
        return () if self._walk is None else self._walk.too_long

    def let_go(self) -> None:
        """The step is over: keep no tensors for longer than the user does, and give the user's iterators back."""
        if self._walk is not None and self._is_outdated(self._walk):
            # What is let go would count as known.
            self._walk = None
        for held in self._together.places:
            held.give_back()
        self._together.let_go()
        self._newest = self._together.newest

    def _is_outdated(self, walk: Walk) -> bool:
        if not self._structure.holds() or any(size_of(content) <= LONGEST for content in walk.too_long):
            return True
        now = self._together.copies()
        if now is self._newest:
            return False
        changed = zip(self._together.places, self._newest, now, strict=True)
        return any(_leads_elsewhere(walk, held, one, other) for held, one, other in changed if one is not other)


def _leads_elsewhere(walk: Walk, held: Held, before: Any, now: Any) -> bool:
    """Whether something has gone that may have led to other places, or come that does."""
    if len(now) > LONGEST and not held.has_attributes:
        return True
    if isinstance(now, dict):
        gone = [value for name, value in before.items() if now.get(name, MISSING) is not value]
        come = [(name, value) for name, value in now.items() if before.get(name, MISSING) is not value]
    else:
        first = num_kept(before, now)
        ids_before, ids_now = (set(map(id, islice(values, first, None))) for values in (before, now))
        gone = [value for _, value in entries_of(before, first) if id(value) not in ids_now]
        come = [(number, value) for number, value in entries_of(now, first) if id(value) not in ids_before]
    return any(map(walk.may_lead, gone)) or any(
        walk.may_lead(value) and walk.leads_anywhere(held, name, value) for name, value in come
    )

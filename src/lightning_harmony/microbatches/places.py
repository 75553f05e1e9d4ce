"""All places in which Python holds something for a step, and what is in them: looked at often, as most of it never changes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from lightning_harmony.engine.model.attributes import LONGEST
from lightning_harmony.engine.structures.containers import copied_content, have_same_content, size_of
from lightning_harmony.microbatches.held_state import SWITCHED, Held, Kind
from lightning_harmony.microbatches.variables import MISSING, AttributesOfClass, VariableOfClosure, Variables
from lightning_harmony.microbatches.walk import HOOKS_OF_BACKWARD, Walk, modules_of

# So many places are compared in one go.
_GROUP = 64


class Together:
    """Places that are looked at together: in groups those that have not changed yet, and the others one by one.

    Attributes:
        newest: a copy of what was in each when they were looked at last.
    """

    def __init__(self, places: Sequence[Held]) -> None:
        self.places = places
        self.newest = [held.look() for held in places]
        self._changing: dict[int, Held] = {}
        numbers = range(len(places))
        self._groups = [_Group(places, numbers[start : start + _GROUP]) for start in range(0, len(places), _GROUP)]

    def look(self) -> list[int]:
        """The numbers of those that have changed since they were looked at last."""
        changed = [number for number, held in self._changing.items() if held.look() is not self.newest[number]]
        for group in self._groups:
            if group.has_changed():
                found = [number for number in group.numbers if self.places[number].look() is not self.newest[number]]
                self._changing.update((number, self.places[number]) for number in found)
                group.note(self._changing)
                changed += found
        if changed:
            self.newest = list(self.newest)
            for number in changed:
                self.newest[number] = self.places[number].newest
        return changed

    def copies(self) -> list[Any]:
        """A copy of what is in each: the same list as long as nothing has changed."""
        self.look()
        return self.newest

    def let_go(self) -> None:
        """Keep no tensors for longer than the user does: until they are looked at again, they count as changed."""
        for number, held in enumerate(self.places):
            if held.has_tensors:
                held.let_go()
                self._changing[number] = held
        for group in self._groups:
            if not self._changing.keys().isdisjoint(group.numbers):
                group.note(self._changing)
        self.newest = [held.newest for held in self.places]


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
        self.copies = together.copies()

    def __iter__(self) -> Iterator[tuple[Held, Any]]:
        return zip(self.places, self.copies, strict=True)

    def changed(self) -> list[tuple[Held, Any, Any]]:
        """The places that have changed since, with copies of then and now."""
        now = self._together.copies()
        if now is self.copies:
            return []
        return [each for each in zip(self.places, self.copies, now, strict=True) if each[1] is not each[2]]


class _Group:
    """Some places, of which is seen in one go whether anything has changed.

    Args:
        places: all places.
        numbers: of those in the group.

    Attributes:
        numbers: the same, but for those that are looked at one by one.
    """

    def __init__(self, places: Sequence[Held], numbers: Sequence[int]) -> None:
        self._places, self.numbers = places, numbers
        self.note(())

    def note(self, without: Container[int]) -> None:
        """Note what is in them now."""
        self.numbers = [number for number in self.numbers if number not in without]
        held = [self._places[number] for number in self.numbers]
        # Such as hooks that there are none of.
        empty = [not each.newest and type(each.content) in SWITCHED for each in held]
        self._empty = [each.content for each, is_empty in zip(held, empty, strict=True) if is_empty]
        self._readers = [_reader(each) for each, is_empty in zip(held, empty, strict=True) if not is_empty]
        self._values = self._read()

    def _read(self) -> list[Any]:
        return list(chain.from_iterable([read() for read in self._readers]))

    def has_changed(self) -> bool:
        """Whether anything has."""
        return not have_same_content(self._read(), self._values) or any(map(len, self._empty))


def _reader(held: Held) -> Callable[[], Iterable[Any]]:
    """Reads what is in a place, in its order."""
    content = held.content
    if isinstance(content, AttributesOfClass):
        values: Callable[[], Iterable[Any]] = vars(content.owner).values
        return values
    if isinstance(content, VariableOfClosure):
        return content.values
    if isinstance(content, Variables):
        return partial(_in_variables, content)
    if type(content) is not dict and type(content) not in SWITCHED:
        return partial(copied_content, content)
    if not isinstance(content, dict):
        return content.__iter__  # type: ignore[no-any-return]
    # Names of attributes come and go with their values.
    return content.values if held.kind is Kind.MODULE else partial(_in_dict, content)


def _in_dict(content: dict[Any, Any]) -> Iterator[Any]:
    return chain(content, content.values())


def _in_variables(content: Variables) -> Iterator[Any]:
    copied = content.copied()
    return chain(copied, copied.values())


class Places:
    """All places of a model, in the steps of one kind.

    They are found by a walk, which is repeated once something has come or gone that leads to others.

    Args:
        model: whose they are.
        others: what else may be changed, with its names.
    """

    def __init__(self, model: nn.Module, others: Sequence[tuple[str, Any]] = ()) -> None:
        self._model, self._others = model, others
        self._walk: Walk | None = None
        self._together = Together(())
        self._newest: Sequence[Any] = []
        self._structure: list[dict[Any, Any]] = []
        self._within: list[Any] = []

    def look(self) -> Contents:
        """All places as they are now, and what is in them."""
        if self._walk is None or self._is_outdated(self._walk):
            self._walk = Walk(self._model, self._others)
            self._together = Together(self._walk.places)
            self._structure = [
                each
                for _, module in modules_of(self._model)
                for each in (module._modules, *(vars(module).get(name, {}) for name in HOOKS_OF_BACKWARD))
            ]
            self._within = self._in_structure()
        contents = Contents(self._together)
        self._newest = contents.copies
        return contents

    def let_go(self) -> None:
        """Keep no tensors for longer than the user does, until they are looked at again."""
        self._together.let_go()
        self._newest = self._together.newest

    def _in_structure(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._structure)))

    def _is_outdated(self, walk: Walk) -> bool:
        if not have_same_content(self._in_structure(), self._within) or any(
            size_of(content) <= LONGEST for content in walk.too_long
        ):
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
        ids_before, ids_now = set(map(id, before)), set(map(id, now))
        gone = [value for value in before if id(value) not in ids_now]
        come = [(number, value) for number, value in enumerate(now) if id(value) not in ids_before]
    return any(map(walk.may_lead, gone)) or any(
        walk.may_lead(value) and walk.leads_anywhere(held, name, value) for name, value in come
    )

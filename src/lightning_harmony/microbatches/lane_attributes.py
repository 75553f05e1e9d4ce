"""What microbatches that take turns keep in Python between layer calls: each finds its own again."""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.model.attributes import OF_TORCH
from lightning_harmony.engine.model.derived import is_derived
from lightning_harmony.engine.structures.containers import MISSING, have_same_content, put_content
from lightning_harmony.engine.structures.tree import CONSTANTS, stood_for
from lightning_harmony.held.equal_objects import are_equal_objects
from lightning_harmony.held.held_state import ALL, Held, Kind
from lightning_harmony.held.places import Contents, Places, Together
from lightning_harmony.held.variables import VariableOfClosure

NUMBERS = (int, float)


class Draws(Enum):
    """When a microbatch draws from a generator, so that those that take turns draw in their order."""

    BEFORE_LAYERS = auto()
    BEHIND_LAYERS = auto()


@dataclass
class KnownChanges:
    """What steps were seen to change while one microbatch ran after the other.

    Attributes:
        places: the names of the places where lanes have something of their own.
        counters: by place, the numbers that count, and how far a microbatch does.
        growing: the lists and sets that each microbatch adds to.
        passed_on: those of them that it adds to between two layer calls alone: the next one finds there what it left.
        harmless: by place, what may be changed in any order, as nothing is called behind it.
        drawn: by place and name, when each microbatch draws from a generator.
        in_place: the tensors, by place and name, that are changed in place behind the last layer, and read nowhere before.
        changed: by place, all that microbatches change.
        in_backward: what they change, by place and name, when their backward runs.
        buffers: those that steps change, by their identity.
    """

    places: set[str] = field(default_factory=set)
    counters: dict[str, dict[Any, float]] = field(default_factory=dict)
    growing: set[str] = field(default_factory=set)
    passed_on: set[str] = field(default_factory=set)
    harmless: dict[str, set[Any]] = field(default_factory=dict)
    drawn: dict[tuple[str, Any], Draws] = field(default_factory=dict)
    in_place: set[tuple[str, Any]] = field(default_factory=set)
    changed: dict[str, set[Any]] = field(default_factory=dict)
    in_backward: set[tuple[str, Any]] = field(default_factory=set)
    buffers: set[int] = field(default_factory=set)


class _Space:
    """What lanes may change in one place.

    Attributes:
        held: the place.
        is_named: whether what is in it has names.
        of_layers: the attributes of a module or an object that the own code of layers sets.
        harmless, counters, grows, is_passed_on: what `KnownChanges` tell of it.
        base: a copy of it when the step began.
        seen: a copy of it when the turn began.
        own: by microbatch, what it has changed: values by name, or the whole list or set under None.

    Of microbatches that have changed nothing since, it is known what to put where one has its turn behind another: `_moves`.
    Copies tell by their identity whether something has changed, once the place was looked at: `_known` is one in which nothing
    is foreign.
    """

    def __init__(self, held: Held, base: Any, known: KnownChanges, of_layers: set[str]) -> None:
        self.held, self.is_named = held, held.is_named
        self.name, self.content, self.kind = held.name, held.content, held.kind
        self.of_layers = of_layers
        self.harmless: Collection[Any] = known.harmless.get(held.name, frozenset())
        self.counters = known.counters.get(held.name, {}) if held.is_named else {}
        self.grows = held.name in known.growing and not held.is_named
        self.is_passed_on = self.grows and held.name in known.passed_on
        self.base = self.seen = self._known = base
        self.own: dict[int, dict[Any, Any]] = {}
        self._moves: dict[tuple[int | None, int], _Values] = {}
        self._num_of_layers = len(of_layers)
        # Whether nothing is in what is put that may come and go.
        self._has_leaves_alone = True

    def switch(self, before: int | None, now: int) -> bool:
        """A microbatch has its turn behind another: note what that has changed, and put what the one is to find.

        That is all that it has changed itself, as it has left it, and counters as they are in its turn. The place was looked
        at just now.

        Returns:
            Whether something was put.
        """
        if before is not None:
            self.leave(before)
        if len(self.of_layers) != self._num_of_layers:
            self._num_of_layers = len(self.of_layers)
            self._moves.clear()
        values = self._moves.get((before, now))
        if values is None:
            values = _Values.of(({} if before is None else self._taken_back(before), self._found(now)))
            if self._has_leaves_alone:
                self._moves[before, now] = values
        newest = self.held.newest
        self._put(values)
        return self.held.newest is not newest

    def leave(self, microbatch: int) -> None:
        """Note what a microbatch has changed in its turn. The place was looked at just now."""
        newest = self.held.newest
        is_as_seen = newest is self.seen or have_same_content(newest, self.seen)
        if changed := {} if is_as_seen else self._changed():
            self.own.setdefault(microbatch, {}).update(changed)
            self._moves.clear()
            bases = map(self._base_of, changed)
            self._has_leaves_alone = self._has_leaves_alone and all(map(_is_leaf, (*changed.values(), *bases)))
        self.seen = newest

    def enter_all(self, before: int, ran: Iterable[int]) -> None:
        """Make everything what it is behind several microbatches, each of which finds what it has changed itself."""
        self._put(_Values.of((self._taken_back(before), *map(self._found, ran))))

    def _taken_back(self, microbatch: int) -> dict[Any, Any]:
        """What others find of what a microbatch has changed, in its turn or in an earlier one."""
        return {
            name: self._base_of(name) if self._goes(name, value) else self._newest(name)
            for name, value in self.own.get(microbatch, {}).items()
        }

    def _found(self, microbatch: int) -> dict[Any, Any]:
        """What a microbatch finds that is not what others find."""
        own = self.own.get(microbatch, {})
        counted = {
            name: self._base_of(name) + microbatch * step for name, step in self.counters.items() if name not in own
        }
        return {**own, **counted}

    def finish(self, microbatch: int) -> None:
        """Make everything what the microbatches leave one after the other, the last turn of all being one's."""
        self.leave(microbatch)
        self._put(_Values.of((self._taken_back(microbatch), *(self.own[each] for each in sorted(self.own)))))
        if isinstance(self.content, list | deque) and self.own and not self.is_passed_on:
            lists = [self.own[microbatch][None] for microbatch in sorted(self.own)]
            if all(len(each) >= len(self.base) and all(map(operator.is_, each, self.base)) for each in lists):
                put_content(self.content, [*self.base, *(item for each in lists for item in each[len(self.base) :])])
        elif isinstance(self.content, set) and self.grows and not self.is_passed_on:
            set.update(self.content, *(self.own[microbatch][None] for microbatch in self.own))

    def late(self, ran: Collection[int]) -> list[Any]:
        """The names of what was changed and is not known to be harmless; None for all of a list or set.

        Args:
            ran: the microbatches, each of which has what is its own.
        """
        if ALL in self.harmless or self.held.is_as(self.base):
            return []
        if not self.is_named:
            return [] if self.own else [None]
        return [name for name in {**self.base, **self.content} if self._is_late(name, ran)]

    def foreign(self, now: Any, *, is_watched: bool) -> list[Any]:
        """The names of what is changed now, and not what a microbatch is known to have of its own.

        Args:
            now: a copy of the place.
            is_watched: whether lanes switch what they have here.
        """
        if now is self._known:
            return []
        late = self.late(())
        if is_watched:
            names = [name for name in late if name not in self.counters] if self.is_named else []
            values = [(name, self.content.get(name, MISSING)) for name in names]
            late = [name for name, value in values if not self._is_switched(name, value, self._base_of(name))]
        self._known = None if late else now
        return late

    def _is_late(self, name: Any, ran: Collection[int]) -> bool:
        before, now = self._base_of(name), self.content.get(name, MISSING)
        if stood_for(now) is stood_for(before) or name in self.harmless or name in OF_TORCH or is_derived(now):
            return False
        if name in self.counters:
            return any(self.own.get(m, {}).get(name) != before + (m + 1) * self.counters[name] for m in ran)
        # Hooks that are left are those of all that follow.
        return self.kind is Kind.HOOKS or not any(name in own for own in self.own.values())

    def undo(self) -> None:
        """Make everything what it was when the step began."""
        if self.held.is_as(self.base):
            return
        names = {**self.base, **self.content} if self.is_named else {None: None}
        self._put(_Values.of(({name: self._base_of(name) for name in names},)))

    def _changed(self) -> dict[Any, Any]:
        if not self.is_named:
            has_own = self.grows or (self.kind is Kind.CONTAINER and has_tensors([*self.held.look(), *self.seen]))
            return {None: self.held.look()} if has_own and ALL not in self.harmless else {}
        values = {name: self.content.get(name, MISSING) for name in {**self.seen, **self.content}}
        return {name: value for name, value in values.items() if self._is_own(name, value)}

    def _is_own(self, name: Any, value: Any) -> bool:
        before = self.seen.get(name, MISSING)
        # While a step runs, an object has what stands for a parameter.
        if stood_for(value) is stood_for(before) or name in self.harmless or ALL in self.harmless:
            return False
        return name in self.counters or self._is_switched(name, value, before)

    def _is_switched(self, name: Any, value: Any, before: Any) -> bool:
        return is_switched(self.kind, name, value, before, of_layer=name in self.of_layers)

    def _newest(self, name: Any) -> Any:
        """What the last of the microbatches that have set it has left."""
        return self.own[max(number for number, own in self.own.items() if name in own)][name]

    def _goes(self, name: Any, value: Any) -> bool:
        """Whether others find what the step began with."""
        if self.is_passed_on:
            return False
        if name in self.counters or name == "training":
            return True
        if self.kind is Kind.OBJECT:
            return name not in self.of_layers
        if self.kind is not Kind.MODULE:
            return True
        # A mean of all so far, or what a layer has begun with in its first call, is for the next one, too.
        return name not in self.of_layers and not has_tensors([value, self._base_of(name)])

    def _base_of(self, name: Any) -> Any:
        return self.base.get(name, MISSING) if isinstance(self.base, dict) else self.base

    def _put(self, values: _Values) -> None:
        """Put values in a place that was looked at just now."""
        held, newest = self.held, self.held.newest
        if not self.is_named:
            if values.put and not held.is_as(values.put[None]):
                put_content(self.content, values.put[None])
                held.look()
        elif values.gone or any(newest.get(name, MISSING) is not value for name, value in values.put.items()):
            held.put_known(values.put, values.gone)
        if values.put or values.gone:
            self.seen = held.newest
        if self._known is newest:
            # What is put was in it at the end of a turn, and nothing was foreign then.
            self._known = held.newest


class _Values(NamedTuple):
    """What is put in a place.

    Attributes:
        gone: the names that have no values before.
        put: values by name, or a whole list or set under None.
    """

    gone: Collection[Any]
    put: dict[Any, Any]

    @classmethod
    def of(cls, several: Iterable[Mapping[Any, Any]]) -> _Values:
        """What it takes to put several, one after the other, of which `MISSING` takes a name away."""
        gone: dict[Any, None] = {}
        put: dict[Any, Any] = {}
        for values in several:
            for name, value in values.items():
                if value is MISSING:
                    gone[name] = None
                    put.pop(name, None)
                else:
                    put[name] = value
        return cls(gone, put)


def _is_leaf(value: Any) -> bool:
    """Whether nothing is in a value that may come and go."""
    return value is MISSING or type(value) in CONSTANTS or issubclass(type(value), Tensor)


def is_switched(kind: Kind, name: Any, value: Any, before: Any, *, of_layer: bool) -> bool:
    """Whether lanes have values of their own of an attribute or entry that was changed.

    Args:
        kind: of the place where it is.
        name: of the attribute.
        value: what it is now.
        before: what it was.
        of_layer: whether the own code of a layer sets it.
    """
    if kind is Kind.MODULE:
        return name not in OF_TORCH and type(value) not in NUMBERS and not is_derived(value) and not is_derived(before)
    if kind is Kind.OBJECT and of_layer and type(value) not in NUMBERS:
        return True
    has_own = kind is Kind.HOOKS or (kind is Kind.CONTAINER and has_tensors([value, before]))
    return has_own or are_equal_objects(value, before)


def has_tensors(values: Iterable[Any]) -> bool:
    """Whether tensors are among these, or in a list, tuple or dict among them."""
    return any(issubclass(type(leaf), Tensor) for leaf in tree_leaves(list(values)))


def in_words(held: Held, name: Any) -> str:
    """A place, or something in it, in words."""
    if name is ALL:
        return f"{type(held.content).__name__} {held.name!r}"
    if isinstance(held.content, VariableOfClosure):
        return f"the variable {held.name!r}"
    if held.kind is Kind.MODULE:
        kind = "number" if type(held.content.get(name)) in NUMBERS else "attribute"
        return f"the {kind} {name!r} of module {held.name!r}" if held.name else f"the {kind} {name!r} of the module"
    return f"{name!r} in {held.name!r}"


class LaneAttributes:
    """Lets microbatches that take turns change the same modules, as if each ran alone after the one before.

    An attribute that a microbatch has set, it finds as it left it, whatever others did meanwhile, such as a mask for its
    layers. What it has not set, it finds as the step began: flags, names, functions and other objects, whether a module is
    in training, its hooks, and tensors in lists, sets and dicts, where hooks collect features. A tensor that is an attribute
    is as the newest one left it, since one may leave the next a mean; so is what a layer's own code sets, such as that it has
    begun. A number that counts is what it would be if all microbatches before had ended. In the end all is what the last
    microbatch left; lists to which all have only added hold what each added.

    What else has changed when a turn ends, the next ones find: `late` tells that.

    Args:
        places: all that steps may change.
        known: what they change.
    """

    def __init__(self, places: Places, known: KnownChanges) -> None:
        self._places, self._known = places, known
        self._of_layers: dict[str, set[str]] = defaultdict(set)
        self._begun = Contents(Together(()))
        # By the identity of what is in a place. Most never change, and have none.
        self._spaces: dict[int, _Space] = {}
        self._watched: list[_Space] = []
        # By the attributes of modules and objects.
        self._names: dict[int, str] = {}
        self._current: int | None = None
        self._ran: set[int] = set()
        self._seen_late: list[str] = []

    def begin(self) -> Contents:
        """A step begins; one that did not come to its end is over. Returns what it finds."""
        self.finish()
        self._begun = self._places.look()
        self._names = {id(held.content): held.name for held in self._begun.places}
        self._watched = [self._space(held, base) for held, base in self._begun if held.name in self._known.places]
        return self._begun

    def _space(self, held: Held, base: Any) -> _Space:
        space = self._spaces.get(id(held))
        if space is None:
            space = self._spaces[id(held)] = _Space(held, base, self._known, self._of_layers[held.name])
        return space

    def switch(self, microbatch: int) -> None:
        """From now on a microbatch runs. Called in the thread of the one that had its turn before."""
        if microbatch == self._current:
            return
        self._look()
        put = [space.held for space in self._watched if space.switch(self._current, microbatch)]
        if put:
            self._begun.know(put)
        self._current = microbatch
        self._ran.add(microbatch)

    def _look(self) -> None:
        """Note what is changed now and no microbatch is known to have of its own: it may be put back before the step ends."""
        changed = self._begun.changed()
        if self._current is None or self._seen_late:
            return
        for held, base, now in changed:
            space = self._space(held, base)
            self._seen_late += _named(space, space.foreign(now, is_watched=space.name in self._known.places))

    def set_by_layer(self, attributes: dict[str, Any], names: set[str]) -> None:
        """The own code of a layer has set these of a module's attributes: one microbatch after the other comes there."""
        name = self._names.get(id(attributes))
        if name is not None:
            self._of_layers[name] |= names

    def late(self) -> list[str]:
        """What microbatches that took turns have changed for the first time, where others may have found it."""
        if self._current is None:
            return []
        self._begun.changed()
        for space in self._watched:
            space.leave(self._current)
            # What the last one leaves, as all that is not switched.
            space.enter_all(self._current, sorted(self._ran))
        spaces = [self._space(held, base) for held, base, _ in self._begun.changed()]
        late = [text for space in spaces for text in _named(space, space.late(self._ran))]
        for space in self._watched:
            space.switch(None, self._current)
        return self._seen_late + late

    def undo(self) -> None:
        """What the step has changed is what it was before."""
        for held, base, _ in self._begun.changed():
            self._space(held, base).undo()
        self._forget()

    def finish(self) -> None:
        """The step is over."""
        if self._current is not None:
            self._begun.changed()
            for space in self._watched:
                space.finish(self._current)
        self._forget()

    def _forget(self) -> None:
        self._begun, self._spaces, self._watched, self._names = Contents(Together(())), {}, [], {}
        self._current, self._ran, self._seen_late = None, set(), []


def _named(space: _Space, names: Iterable[Any]) -> list[str]:
    """What has changed in a place, in words."""
    place = space.name
    return [place if name is None else f"{place.removeprefix('the ')}.{name}" if place else str(name) for name in names]

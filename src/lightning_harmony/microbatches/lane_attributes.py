"""What microbatches that take turns keep in Python between layer calls: each finds its own again."""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.model.attributes import OF_TORCH
from lightning_harmony.engine.model.derived import is_derived
from lightning_harmony.engine.structures.containers import MISSING, put_content, put_value
from lightning_harmony.engine.structures.tree import stood_for
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
    """

    def __init__(self, held: Held, base: Any, known: KnownChanges, of_layers: set[str]) -> None:
        self.held, self.is_named = held, held.is_named
        self.name, self.content, self.kind = held.name, held.content, held.kind
        self.of_layers = of_layers
        self.harmless: Collection[Any] = known.harmless.get(held.name, frozenset())
        self.counters = known.counters.get(held.name, {}) if held.is_named else {}
        self.grows = held.name in known.growing and not held.is_named
        self.is_passed_on = self.grows and held.name in known.passed_on
        self.base = self.seen = base
        self.own: dict[int, dict[Any, Any]] = {}

    def leave(self, microbatch: int) -> None:
        """Note what a microbatch has changed in its turn, and take back what no other is to find."""
        if not self.held.is_as(self.seen):
            changed = self._changed()
            if changed:
                self.own.setdefault(microbatch, {}).update(changed)
            self.seen = self.held.look()
        # In an earlier turn, too: it has found that again in this one.
        again = {
            name: self._base_of(name) if self._goes(name, value) else self._newest(name)
            for name, value in self.own.get(microbatch, {}).items()
        }
        if again:
            self._set(again)
            self.seen = self.held.look()

    def enter(self, microbatch: int) -> None:
        """Make everything that a microbatch has changed what it made of it, and counters what they are in its turn."""
        own = self.own.get(microbatch, {})
        counted = {
            name: self._base_of(name) + microbatch * step for name, step in self.counters.items() if name not in own
        }
        if own or counted:
            self._set({**own, **counted})
            self.seen = self.held.look()

    def finish(self) -> None:
        """Make everything what the microbatches leave one after the other."""
        for microbatch in sorted(self.own):
            self._set(self.own[microbatch])
        if isinstance(self.content, list | deque) and self.own and not self.is_passed_on:
            lists = [self.own[microbatch][None] for microbatch in sorted(self.own)]
            if all(len(each) >= len(self.base) and all(map(operator.is_, each, self.base)) for each in lists):
                self._set({None: [*self.base, *(item for each in lists for item in each[len(self.base) :])]})
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

    def foreign(self, *, is_watched: bool) -> list[Any]:
        """The names of what is changed now, and not what a microbatch is known to have of its own.

        Args:
            is_watched: whether lanes switch what they have here.
        """
        late = self.late(())
        if not is_watched or not self.is_named:
            return [] if is_watched else late
        values = [(name, self.content.get(name, MISSING)) for name in late if name not in self.counters]
        return [name for name, value in values if not self._is_switched(name, value, self._base_of(name))]

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
        if self.is_named:
            self._set({name: self.base.get(name, MISSING) for name in {**self.base, **self.content}})
        else:
            self._set({None: self.base})

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

    def _set(self, values: dict[Any, Any]) -> None:
        for name, value in values.items():
            if self.is_named:
                put_value(self.content, name, value)
            else:
                put_content(self.content, value)


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
        if self._current is not None and not self._seen_late:
            self._look()
        for space in self._watched:
            if self._current is not None:
                space.leave(self._current)
            space.enter(microbatch)
        self._current = microbatch
        self._ran.add(microbatch)

    def _look(self) -> None:
        """Note what is changed now and no microbatch is known to have of its own: it may be put back before the step ends."""
        for held, base, _ in self._begun.changed():
            space = self._space(held, base)
            self._seen_late += _named(space, space.foreign(is_watched=space.name in self._known.places))

    def set_by_layer(self, attributes: dict[str, Any], names: set[str]) -> None:
        """The own code of a layer has set these of a module's attributes: one microbatch after the other comes there."""
        name = self._names.get(id(attributes))
        if name is not None:
            self._of_layers[name] |= names

    def late(self) -> list[str]:
        """What microbatches that took turns have changed for the first time, where others may have found it."""
        if self._current is None:
            return []
        for space in self._watched:
            space.leave(self._current)
            # What the last one leaves, as all that is not switched.
            for microbatch in sorted(self._ran):
                space.enter(microbatch)
        spaces = [self._space(held, base) for held, base, _ in self._begun.changed()]
        late = [text for space in spaces for text in _named(space, space.late(self._ran))]
        for space in self._watched:
            space.enter(self._current)
        return self._seen_late + late

    def undo(self) -> None:
        """What the step has changed is what it was before."""
        for held, base, _ in self._begun.changed():
            self._space(held, base).undo()
        self._forget()

    def finish(self) -> None:
        """The step is over."""
        if self._current is not None:
            for space in self._watched:
                space.leave(self._current)
                space.finish()
        self._forget()

    def _forget(self) -> None:
        self._begun, self._spaces, self._watched, self._names = Contents(Together(())), {}, [], {}
        self._current, self._ran, self._seen_late = None, set(), []


def _named(space: _Space, names: Iterable[Any]) -> list[str]:
    """What has changed in a place, in words."""
    place = space.name
    return [place if name is None else f"{place.removeprefix('the ')}.{name}" if place else str(name) for name in names]

"""What one microbatch leaves to the next, in steps in which they take turns: whether what is read is what was left.

Steps that ran one after the other have shown what microbatches change. Each of these places is compared at the ends of turns:
so it is known what each microbatch has left there. A microbatch that reads one before writing it must have found what
the microbatch before leaves in the end. One that has written it must find that again.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_harmony.engine.structures.containers import MISSING, ChangesOf, num_kept
from lightning_harmony.engine.structures.operations import version_of, versions_of
from lightning_harmony.engine.structures.tree import is_watched, tensors_of
from lightning_harmony.held.held_state import ALL, Held, Kind
from lightning_harmony.held.reads import Readers
from lightning_harmony.microbatches.carried_state import State, are_same
from lightning_harmony.microbatches.lane_attributes import KnownChanges, in_words


def _looks_same(one: State, other: State) -> bool:
    """Whether who computes nothing with the tensors finds the same."""
    return len(one.values) == len(other.values) and all(map(_look_same, one.values, other.values))


def _look_same(one: Any, other: Any) -> bool:
    return one is other or are_same([_look_of(one)], [_look_of(other)])


def _look_of(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_look_of, value))
    return (str(value.shape), str(value.dtype)) if issubclass(type(value), Tensor) else value


class _Place:
    """An attribute or entry that microbatches change, or a list.

    Attributes:
        held: what it is in.
        name: its name there; `ALL` of a list, or the names themselves of a dict.
        number: its own.
        newest: what was there when it was looked at last.
        first: what the step began with.
        entered: what the turn began with.
        left: by microbatch, what it left when it wrote it last.
        written_in: by microbatch, in which turn that was.
        fetched: by microbatch, what it has found when it asked for it.
        used: the same, when it computed with a tensor in it.
        is_lost: whether a microbatch has not found again what it had left.
    """

    def __init__(self, number: int, held: Held, name: Any) -> None:
        self.number, self.held, self.name = number, held, name
        self.is_buffer = held.is_of_buffers
        self.first = self.entered = self.newest = self.state()
        self._asked: Sequence[Any] = ()
        self.left: dict[int, State] = {}
        self.written_in: dict[int, int] = {}
        self.fetched: dict[int, State] = {}
        self.used: dict[int, State] = {}
        self.is_lost = False

    def state(self) -> State:
        return State.of(self.held, self.name)

    def is_moved(self) -> bool:
        """Whether another object is under the name than when it was looked at."""
        return self.held.content.get(self.name, MISSING) is not self.newest.values[0]

    def come_tensors(self, *, is_new: bool) -> list[Tensor]:
        """The tensors that tell of what is computed with them. Buffers do not: they may be another's meanwhile.

        Args:
            is_new: whether all are asked for; else those that it was not asked for before.
        """
        before, self._asked = self._asked, self.entered.values
        if self.is_buffer:
            return []
        come = self._asked if is_new else self._asked[num_kept(before, self._asked) :]
        return [tensor for tensor in tensors_of(*come) if type(tensor) is Tensor]

    def is_stale(self) -> bool:
        """Whether a microbatch has found something else than the one before has left."""
        looks_same = State.is_same if self.is_buffer else _looks_same
        if not all(looks_same(found, self._expected(microbatch)) for microbatch, found in self.fetched.items()):
            return True
        return self.is_lost or any(not found.is_same(self._expected(m)) for m, found in self.used.items())

    def _expected(self, microbatch: int) -> State:
        before = [m for m in self.left if m < microbatch]
        return self.left[max(before)] if before else self.first

    def is_read_by_others(self) -> bool:
        """Whether another microbatch than the first one has read it."""
        has_tensors = bool(tensors_of(*self.first.values))
        return any(microbatch > 0 for microbatch in (self.used if has_tensors else self.fetched))


class _Looks:
    """Looks at places, and again at those alone in which something may be other than it was.

    Dicts count their changes, and tensors those in place: as long as neither has counted one, the same objects are under all
    names, and hold the same. What is in other places is looked at each time: lists, what is seen as a dict, dicts of other
    classes, and tensors of these.
    """

    def __init__(self, places: Sequence[_Place]) -> None:
        self._places = places
        of_dicts: dict[int, list[_Place]] = defaultdict(list)
        for place in places:
            if place.name is not ALL and type(place.held.content) in (dict, defaultdict, OrderedDict):
                of_dicts[id(place.held.content)].append(place)
        self._of_dicts = list(of_dicts.values())
        self._changes = ChangesOf(each[0].held.content for each in self._of_dicts)
        counted = {place.number for each in self._of_dicts for place in each}
        self._others = [place for place in places if place.number not in counted]
        # By the numbers of places: tensors that count, and what they have counted.
        self._tensors: dict[int, Tensor] = {}
        self._versions: dict[int, int | None] = {}
        # Where tensors are that their own classes may answer for.
        self._uncounted: set[int] = set()
        for number in counted:
            self._look_at(places[number])

    def again(self) -> list[_Place]:
        """Look; returns the places in which something may be other than the last time."""
        numbers = set(self._uncounted)
        versions = versions_of(self._tensors.values())
        if versions != list(self._versions.values()):
            both = zip(self._versions.items(), versions, strict=True)
            numbers.update(number for (number, then), now in both if then != now)
        changed = map(self._of_dicts.__getitem__, self._changes.again())
        numbers.update(place.number for each in changed for place in each if place.is_moved())
        for number in numbers:
            self._look_at(self._places[number])
        for place in self._others:
            place.newest = place.state()
        return [*(self._places[number] for number in sorted(numbers)), *self._others]

    def _look_at(self, place: _Place) -> None:
        value, number = place.held.content.get(place.name, MISSING), place.number
        kind = type(value)
        if kind is Tensor or is_watched(kind):
            version = version_of(value)
            place.newest = State([value], [version])
            self._tensors[number], self._versions[number] = value, version
            self._uncounted.discard(number)
            return
        place.newest = place.state()
        if self._tensors.pop(number, None) is not None:
            del self._versions[number]
        (self._uncounted.add if issubclass(kind, Tensor) else self._uncounted.discard)(number)


class StaleReads:
    """Watches a step in which microbatches take turns.

    Args:
        places: what it may change in Python.
        buffers: those of modules, but for those of layers.
        known: what steps were seen to change.
    """

    def __init__(
        self, places: Iterable[Held], buffers: Iterable[tuple[Held, Sequence[str]]], known: KnownChanges
    ) -> None:
        self._known = known
        names = [(held, name) for held in places for name in _names_of(held, known)]
        names += [(held, name) for held, of_buffers in buffers for name in of_buffers]
        self._places = [_Place(number, held, name) for number, (held, name) in enumerate(names)]
        self._looks = _Looks(self._places)
        self._readers = Readers(self._places, self._note_fetched, self._note_used)
        # The numbers of places: what each microbatch has left, and what is asked for as a whole in the next turn.
        self._left: dict[int, set[int]] = defaultdict(set)
        self._asked_again: set[int] = set(range(len(self._places)))
        # Those that may be other than when the turn began.
        self._changed: list[_Place] = []
        self._turn = 0
        self._last_turn: dict[int, int] = {}
        self._current: int | None = None

    def enter(self, microbatch: int) -> None:
        """A microbatch has its turn, and finds what it is to find."""
        if not self._places:
            return
        self._turn += 1
        self._current, self._last_turn[microbatch] = microbatch, self._turn
        self._readers.renew()
        changed = [*self._changed, *self._looks.again()]
        self._changed = []
        for place in changed:
            place.entered = place.newest
        # Of what it has written itself it is not asked what it reads.
        own = self._left[microbatch]
        self._asked_again |= own
        for number in sorted({place.number for place in changed}.union(self._asked_again) - own):
            place = self._places[number]
            for tensor in place.come_tensors(is_new=number in self._asked_again):
                if not self._readers.watches(tensor):
                    self._readers.watch(tensor, place)
        self._asked_again &= own
        for place in self._readers.unseen:
            # It may be read whenever.
            if microbatch not in place.left:
                place.fetched.setdefault(microbatch, place.entered)

    def leave(self) -> None:
        """The turn ends."""
        if self._current is None:
            return
        self._changed = self._looks.again()
        for place in self._changed:
            if not place.newest.is_same(place.entered):
                place.left[self._current], place.written_in[self._current] = place.newest, self._turn
                self._left[self._current].add(place.number)
        self._current = None

    def _note_fetched(self, place: _Place) -> None:
        if self._current in place.left:
            place.is_lost = place.is_lost or not place.left[self._current].is_same(place.entered)
        grows = place.held.name in self._known.growing and place.held.name not in self._known.passed_on
        if place.name is ALL and grows and self._current and not place.state().is_same(place.first):
            # It finds there what it has added itself, but not what those before have.
            place.is_lost = True
        self._note(place, place.fetched)

    def _note_used(self, place: _Place) -> None:
        # The tensor tells of nothing any more, and is to do so for the next microbatch.
        self._asked_again.add(place.number)
        self._note(place, place.used)

    def _note(self, place: _Place, found: dict[int, State]) -> None:
        microbatch = self._current
        if microbatch is None or microbatch in place.left or microbatch in found:
            return
        if place.state().is_same(place.entered):
            found[microbatch] = place.entered

    def note_given(self, given: Sequence[Tensor]) -> None:
        """A layer is called with tensors, which count as computed with: its code reads them behind the turns of others."""
        self._readers.note(given)

    def early(self) -> str | None:
        """What is known to be changed behind the last layer alone, and was changed before, or by a later microbatch first.

        Microbatches that call other numbers of layers come to their ends in another order. None if nothing was.
        """
        self.leave()
        for place in self._places:
            harmless = self._known.harmless.get(place.held.name, ())
            is_harmless = not place.is_buffer and (place.name in harmless or ALL in harmless)
            turns = [turn for _, turn in sorted(place.written_in.items())]
            is_early = any(turn != self._last_turn[m] for m, turn in place.written_in.items())
            if is_harmless and (is_early or turns != sorted(turns)):
                return in_words(place.held, place.name)
        return None

    def stale(self) -> str | None:
        """What a microbatch has found otherwise than the one before has left it; None if it is so nowhere."""
        self.leave()
        for place in self._places:
            is_late = (place.held.name, place.name) in self._known.in_backward and place.is_read_by_others()
            if is_late or place.is_stale():
                return in_words(place.held, place.name)
        return None

    def close(self) -> None:
        """Nothing is watched any more."""
        self._current = None
        self._readers.close()
        self._places, self._looks, self._changed = [], _Looks(()), []


def _names_of(held: Held, known: KnownChanges) -> Iterator[Any]:
    """What microbatches change in a place."""
    names = known.changed.get(held.name, set()) - known.counters.get(held.name, {}).keys()
    yield from (name for name in names if held.is_named or name is ALL)
    # Entries that there were none of yet.
    if names and held.is_named and not held.has_attributes and held.kind is not Kind.HOOKS and ALL not in names:
        yield ALL

"""What one microbatch leaves to the next: state that is read before it is written, such as that of a recurrent network.

Of microbatches that take turns, the second one begins before the first one has ended. What it reads, the first one may not
have written yet. So in a step that runs one after the other, each place that the microbatch before has changed is watched:
where is it read, and where is it written? Only if both happen between the same two calls of layers, where microbatches come in
their order, do they find the same if they take turns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_harmony.engine.structures.containers import MISSING
from lightning_harmony.engine.structures.operations import version_of
from lightning_harmony.engine.structures.tree import is_swapped, tensors_of
from lightning_harmony.held.equal_objects import COMPARED, are_equal_objects
from lightning_harmony.held.held_state import ALL, Held, Kind
from lightning_harmony.held.reads import Readers, Watched
from lightning_harmony.held.walk import modules_of


class State(NamedTuple):
    """What is in a place at some moment: the values, and how often each tensor among them was changed in place."""

    values: Sequence[Any]
    versions: Sequence[int | None]

    @classmethod
    def of(cls, held: Held, name: Any) -> State:
        """What is there now under a name; all of it, for `ALL`."""
        if name is ALL:
            # A copy: the same one until something else is in it. What a dict holds under each name is a place of its own.
            newest = held.look()
            versions = [] if isinstance(newest, dict) else held.marks.versions()
            return cls(newest if type(newest) is list else list(newest), versions)
        value = held.content.get(name, MISSING)
        return cls([value], list(map(version_of, _tensors_in([value]))))

    def is_same(self, other: State) -> bool:
        """Whether nothing has changed from one to the other."""
        return self.versions == other.versions and are_same(self.values, other.values)


@dataclass(eq=False)
class Found:
    """What a microbatch has found in a place, and the one before it has left there.

    Attributes:
        held: the place.
        name: of the attribute or entry there; `ALL` of a list or set.
        begun: what was there when the microbatch began.
        newest: the same of when it was looked at last.
        fetched_at: between which calls of layers it was read first, by their number; None if it was not.
        used_at: the same of when something was computed with it.
        is_written: whether the microbatch changed it, too.
        is_apart: whether it did so elsewhere than where it was read.
        is_unseen: whether nothing tells that it is read.
        is_in_new: whether the place itself was not there before: somebody has put it where it was found.
        is_read_later: whether the microbatch read it after it had changed it, as a list to which it had added.
    """

    held: Held
    name: Any
    begun: State
    newest: State
    fetched_at: int | None = None
    used_at: int | None = None
    is_written: bool = False
    is_apart: bool = False
    is_unseen: bool = False
    is_in_new: bool = False
    is_read_later: bool = False

    def look(self, at: int | None) -> None:
        """Note whether it was changed.

        Args:
            at: between which calls of layers, by their number; None behind the forward.
        """
        now = State.of(self.held, self.name)
        if now.is_same(self.newest):
            return
        self.newest, self.is_written = now, True
        read_at = self.used_at if self.fetched_at is None else self.fetched_at
        self.is_apart = self.is_apart or self.is_unseen or read_at is None or at != read_at

    def watched_tensors(self) -> list[Tensor]:
        """The tensors in it, of which what is computed with them tells; none of those of other classes."""
        tensors = [] if self.held.is_of_buffers else tensors_of(*self.begun.values)
        are_plain = all(type(tensor) is Tensor or type(tensor) is Watched for tensor in tensors)
        return [tensor for tensor in tensors if not is_swapped(tensor)] if are_plain else []

    @property
    def is_as_begun(self) -> bool:
        """Whether it is what the microbatch has found."""
        return State.of(self.held, self.name).is_same(self.begun)


class CarriedState:
    """Watches where microbatches that run one after the other read what the one before has left.

    Args:
        model: its buffers are looked at, too.

    Attributes:
        all: what microbatches have changed, as the next ones found it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(name, module) for name, module in modules_of(model) if module._buffers]
        self._begun: dict[int, tuple[Held, Any]] = {}
        self._versions: dict[int, tuple[Tensor, int | None]] = {}
        self._found: list[Found] = []
        self.all: list[Found] = []
        self._readers = Readers((), self._note_fetched, self._note_used)
        self._segment = 0

    def begin(self, places: Sequence[tuple[Held, Any]]) -> None:
        """A microbatch begins.

        Args:
            places: all places, each with a copy of what is in it.
        """
        for found in self._found:
            found.look(None)
        self._segment = 0
        buffers = [Held(name, module._buffers, Kind.MODULE, module) for name, module in self._buffers]
        places = [*places, *((held, held.newest) for held in buffers)]
        tensors = [tensor for held, begun in places if held.has_tensors for tensor in _tensors_in(begun)]
        versions = {id(tensor): (tensor, version_of(tensor)) for tensor in tensors}
        self._found = list(self._left_by_the_one_before(places, versions)) if self._begun else []
        self._begun = {held.key: (held, begun) for held, begun in places}
        self._versions = versions
        self.all += self._found
        self._watch()

    def at_call(self) -> None:
        """It calls a layer."""
        for found in self._found:
            found.look(self._segment)
        self._segment += 1

    def note_given(self, given: Sequence[Tensor]) -> None:
        """It calls a layer with tensors, which count as computed with: its code reads them behind the turns of others."""
        self._readers.note(given)

    def end(self) -> None:
        """It has come to its loss."""
        for found in self._found:
            found.look(self._segment)
        self.close()

    def close(self) -> None:
        """Nothing is watched any more."""
        self._readers.close()

    def conclude(self) -> list[Found]:
        """The step has ended: what microbatches have read, and written, too."""
        for found in self._found:
            found.look(None)
        return [found for found in self.all if found.is_written and (found.used_at is not None or found.is_read_later)]

    def _left_by_the_one_before(
        self, places: Sequence[tuple[Held, Any]], versions: dict[int, tuple[Tensor, int | None]]
    ) -> Iterator[Found]:
        """What is other than when the microbatch before began."""
        changed = {
            key for key, (_, version) in self._versions.items() if key in versions and versions[key][1] != version
        }
        for held, begun in places:
            known = self._begun.get(held.key)
            is_in_new = known is None
            before: Any = ({} if isinstance(begun, dict) else []) if known is None else known[1]
            if before is begun and not (changed and held.has_tensors):
                continue
            if isinstance(begun, dict):
                for name, value in begun.items():
                    then = before.get(name, MISSING)
                    if (changed and id(value) in changed) or not _is_same(value, then):
                        yield Found(held, name, now := State.of(held, name), now, is_in_new=is_in_new)
            elif any(id(value) in changed for value in begun) or not are_same(list(begun), list(before)):
                yield Found(held, ALL, now := State.of(held, ALL), now, is_in_new=is_in_new)

    def _watch(self) -> None:
        """Watch where what was found is read."""
        self._readers = readers = Readers(self._found, self._note_fetched, self._note_used)
        for found in self._found:
            for tensor in found.watched_tensors():
                readers.watch(tensor, found, version_of(tensor))
        for found in readers.unseen:
            if not found.watched_tensors():
                # It may be read whenever.
                found.is_unseen, found.used_at = True, 0

    def _note_fetched(self, found: Found) -> None:
        if found.fetched_at is None and found.is_as_begun:
            found.fetched_at = self._segment
            # A layer's buffer is computed with where it is swapped in, too.
            if found.used_at is None and not found.watched_tensors():
                found.used_at = self._segment
        elif found.fetched_at is None:
            found.is_read_later = True

    def _note_used(self, found: Found) -> None:
        if found.used_at is None:
            found.used_at = self._segment


def are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects, or equal numbers and strings."""
    # What is the same object is told from other things in no time, in lists of thousands.
    return len(one) == len(other) and (all(map(is_, one, other)) or all(map(_is_same, one, other)))


def _is_same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if _keeps_nothing(one) and _keeps_nothing(other):
        return True
    # A recompute in the backward makes tuples anew.
    if type(one) is tuple:
        return are_same(one, other)
    return bool(one == other) if type(one) in COMPARED else are_equal_objects(one, other)


def _keeps_nothing(value: Any) -> bool:
    """Whether it is a list of weak references, by which recurrent networks of torch tell whether their weights are others."""
    return type(value) is list and bool(value) and all(isinstance(each, weakref.ref) for each in value)


def _tensors_in(content: Any) -> list[Tensor]:
    """The tensors in a place. Not parameters, which no step changes, and not those in containers, which are places."""
    values = content.values() if isinstance(content, dict) else content
    return [value for value in values if issubclass(type(value), Tensor) and not is_swapped(value)]

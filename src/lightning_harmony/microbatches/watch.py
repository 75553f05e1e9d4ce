"""Watching a step that runs one microbatch after the other: what Python and the process hold, and who changes it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch._C import DisableTorchFunction

from lightning_harmony.engine.lanes.ambient import OF_PROCESS
from lightning_harmony.engine.layers.runtime import FoundAtCall, ObjectsOfCall, OnCall
from lightning_harmony.engine.structures.containers import MISSING, changed_names, have_same_content
from lightning_harmony.engine.structures.operations import Versions
from lightning_harmony.held.held_state import (
    ALL,
    Held,
    Kind,
    in_one,
    is_held,
    mark_of,
    state_of_generator,
)
from lightning_harmony.held.places import Contents, Places, Together
from lightning_harmony.held.shared_settings import NOT_SWITCHED, context_now
from lightning_harmony.microbatches.carried_state import CarriedState, are_same
from lightning_harmony.microbatches.fingerprints import Fingerprints
from lightning_harmony.microbatches.lane_attributes import (
    Draws,
    KnownChanges,
    has_tensors,
    in_words,
    is_switched,
)
from lightning_harmony.microbatches.metric_states import ReadMetrics
from lightning_harmony.microbatches.seen import Seen

_OWN_PACKAGE = __name__.partition(".")[0]


def all_values(
    places: Sequence[Held], buffers: Callable[[Sequence[Held]], Iterable[tuple[Held, list[str]]]]
) -> Iterator[tuple[Held, Iterable[tuple[Any, Any]]]]:
    """What is in places, and in the buffers that no layer has, with names or numbers.

    Args:
        places: all of them.
        buffers: gives the modules among them that have such, and the names of these.
    """
    for held in places:
        yield held, ((name, each) for name, value in held.items() for each in in_one(value))
    for held, names in buffers(places):
        yield held, ((name, held.content[name]) for name in names)


class Watch:
    """Compares what Python and the process hold when a microbatch begins with what they hold when it calls a layer.

    The first microbatch may make what all others find. At calls of the second one all is looked at, and of each when it ends.

    Args:
        model: whose step it is.
        places: all that microbatches may change.
        buffers: gives, of some places, the buffers that no layer has, with their names.
    """

    def __init__(
        self,
        model: nn.Module,
        places: Places,
        buffers: Callable[[Sequence[Held]], Iterable[tuple[Held, list[str]]]],
    ) -> None:
        self._model, self._places, self._buffers = model, places, buffers
        self.seen = Seen()
        self._begun = Contents(Together(()))
        self._marks: list[tuple[Held, Any, Any, Any]] = []
        self._settings: list[Any] = []
        self._registered: list[Any] = []
        self._context: dict[int, int] = {}
        self._drawn: dict[int, Any] = {}
        # What the microbatch before has changed before its backward.
        self._left: list[tuple[Held, Any, Any]] = []
        self._microbatch = -1
        self._carried, self._metrics = CarriedState(model), ReadMetrics(model)
        self._silent = Fingerprints(())

    def begin(self, microbatch: int) -> None:
        """A microbatch begins."""
        with DisableTorchFunction():
            if microbatch == 0:
                self._versions = Versions(self._model.buffers())
            self._microbatch = microbatch
            self._begun = self._places.look()
            self._marks = [
                (held, name, value, mark_of(value)) for held in self._begun.places for name, value in held.marked
            ]
            self._lengths: dict[int, int] = {}
            self._settings = [setting.get() for setting in NOT_SWITCHED]
            self._registered = [kind.get() for kind in OF_PROCESS]
            self._context = context_now()
            self._drawn = {}
            self._silent.refuse_changed_again()
            if microbatch <= 1:
                self._silent = Fingerprints(
                    all_values(self._begun.places, self._buffers), self._model.named_parameters()
                )
            self._metrics.begin()
            self._carried.begin(list(self._begun))
            for held, name, left in self._left:
                now = held.look()
                is_left = have_same_content(now, left) if name is ALL else are_same([now.get(name, MISSING)], [left])
                # What a layer sets in objects that keep its weights, its recompute finds as the call did.
                if is_left or (held.kind is Kind.OBJECT and name in self.seen.of_layers.get(id(held.content), ())):
                    continue
                self.seen.in_backward.add((held.name, name))

    def at_call(self, layer: str) -> None:
        """The microbatch calls a layer."""
        with DisableTorchFunction():
            self._carried.at_call()
            metric = self._metrics.at_call() if self._microbatch > 0 else None
            if metric is not None:
                self._note_hazard(metric, layer)
            if self._microbatch != 1:
                return
            for lock in _locks_held(sys._getframe(1)):
                self._note_hazard(f"a lock is held ({lock})", layer)
            for held, begun, now, name in self._changed():
                self._note_change(held, begun, now, name, layer)
            for held, _, value, mark in self._marks:
                self._note_mark(held, value, mark, layer)
            for setting, before in zip(NOT_SWITCHED, self._settings, strict=True):
                if setting.get() != before:
                    self._note_hazard(f"{setting.name} is set", layer)

    def checking(self, on_call: OnCall) -> OnCall:
        """Look at what the code of layers changes when it runs again, of what nothing else tells.

        Args:
            on_call: gives what makes the context of code that runs again.
        """

        def called(objects: ObjectsOfCall) -> FoundAtCall:
            found = on_call(objects)
            is_checked = 0 <= self._microbatch <= 1
            return self._silent.checked(found) if is_checked else found

        return called

    def note_given(self, given: Sequence[Tensor]) -> None:
        """It calls a layer with tensors."""
        self._carried.note_given(given)

    def set_by_layer(self, attributes: dict[str, Any], names: set[str]) -> None:
        """The own code of a layer has set these of a module's attributes."""
        self.seen.of_layers[id(attributes)] |= names

    def end(self) -> None:
        """The microbatch has ended."""
        with DisableTorchFunction():
            self._carried.end()
            changed = list(self._changed())
            for held, begun in self._begun:
                if held.key in self._lengths:
                    self._note_growth(held, begun, held.look())
            for held, begun, now, name in changed:
                self._note_end(held, begun, now, name)
            for held, name, value, mark in self._marks:
                self._note_end_of_mark(held, name, value, mark)
            set_before = [
                *zip(OF_PROCESS, self._registered, strict=True),
                *zip(NOT_SWITCHED, self._settings, strict=True),
            ]
            for kind, before in set_before:
                if self._microbatch > 0 and kind.get() != before:
                    self.seen.note(f"{kind.name} is set for good", "the end of a microbatch")
            if self._microbatch > 0 and context_now() != self._context:
                self.seen.note("a context variable is set for good", "the end of a microbatch")
            silent, metric = self._silent.changed() if self._microbatch == 1 else None, self._metrics.end()
            if silent is not None:
                self.seen.note(f"{silent} is changed", "the end of a microbatch")
            if metric is not None and self._microbatch > 0:
                self.seen.note(metric, "the end of a microbatch")
            at_calls: dict[str, list[Any]] = defaultdict(list)
            for place, name in self.seen.at_calls:
                at_calls[place].append(name)
            at_ends = {(held.key, name) for held, _, _, name in changed}
            self._left = [
                (held, name, now if name is ALL else now.get(name, MISSING)) for held, _, now, name in changed
            ]
            self._left += [
                (held, name, begun if name is ALL else begun.get(name, MISSING))
                for held, begun in self._begun
                for name in at_calls.get(held.name, ())
                if (held.key, name) not in at_ends
            ]
            self._begun, self._marks = Contents(Together(())), []

    def _changed(self) -> Iterator[tuple[Held, Any, Any, Any]]:
        """What is another object now than when the microbatch began: where, copies of then and now, and its name, or `ALL`."""
        for held, begun, now in self._begun.changed():
            if not have_same_content(begun, now):
                for name in changed_names(begun, now) if held.is_named else [ALL]:
                    yield held, begun, now, name

    def _note_change(self, held: Held, begun: Any, now: Any, name: Any, layer: str) -> None:
        seen = self.seen
        key = held.name, name
        seen.at_calls.setdefault(key, layer)
        if name is ALL:
            if self._note_growth(held, begun, now):
                return
            if not isinstance(held.content, list | set) or not has_tensors([*now, *begun]):
                self._note_hazard(f"{in_words(held, name)} is changed", layer)
            return
        before, value = begun.get(name, MISSING), now.get(name, MISSING)
        of_layer = name in self.seen.of_layers.get(id(held.content), ())
        if is_switched(held.kind, name, value, before, of_layer=of_layer):
            seen.tells_apart.add(key)
        elif _counted(before, value) is None:
            self._note_hazard(f"{in_words(held, name)} is changed", layer)

    def _note_mark(self, held: Held, value: Any, mark: Any, layer: str) -> None:
        now = mark_of(value)
        if state_of_generator(value) is not None:
            # Before the first layer, and nowhere else, one microbatch after the other draws.
            first = self._drawn.setdefault(id(value), now)
            if now != first:
                self._note_drawn(held, f"layer {layer!r}")
        elif now != mark:
            self._note_hazard(f"a {type(value).__name__} held by {held.in_words} is changed in place", layer)

    def _note_end_of_mark(self, held: Held, name: Any, value: Any, mark: Any) -> None:
        now, end = mark_of(value), "the end of a microbatch"
        if now == mark or self._microbatch == 0:
            return
        if isinstance(value, Tensor):
            # Who reads it is watched.
            self.seen.in_place.add((held.name, name))
            return
        if state_of_generator(value) is None:
            # The next microbatch may read it before its first layer, where it would not be changed yet.
            self.seen.note(f"a {type(value).__name__} held by {held.in_words} is changed in place", end)
            return
        if self._microbatch > 1 and id(value) not in self._drawn:
            # Not looked at when it called layers: it may have been drawn from before or behind them.
            return
        first = self._drawn.get(id(value), mark)
        if first not in (mark, now):
            self._note_drawn(held, end)
        else:
            self.seen.drawn[held.name, name] = Draws.BEFORE_LAYERS if first == now else Draws.BEHIND_LAYERS

    def _note_drawn(self, held: Held, where: str) -> None:
        self.seen.note(f"a generator of random numbers, held by {held.in_words}, is drawn from again", where)

    def _note_end(self, held: Held, begun: Any, now: Any, name: Any) -> None:
        key = held.name, name
        self.seen.changed[key] = held
        if held.kind is Kind.HOOKS and self._microbatch > 0:
            # Each calls those that all before it have left.
            self.seen.note(f"hooks of {held.in_words} are registered or removed", "the end of a microbatch")
        if name is ALL:
            self._note_growth(held, begun, now)
            return
        before, value = begun.get(name, MISSING), now.get(name, MISSING)
        self.seen.steps.setdefault(key, []).append(_counted(before, value))

    def _note_growth(self, held: Held, begun: Any, now: Any) -> bool:
        """Note whether a list or set that is changed has only grown, and return that."""
        seen = self.seen
        before = self._lengths.get(held.key, 0)
        self._lengths[held.key] = len(now)
        if not _grew(begun, now) or len(now) < before:
            seen.shrank.add(held.name)
            if held.name in seen.only_grew:
                self.seen.note(f"{in_words(held, ALL)} is changed", "the end of a microbatch")
            return False
        if not isinstance(held.content, list | set) or not has_tensors([*now, *begun]):
            seen.only_grew.add(held.name)
        if self._microbatch == 1:
            seen.lengths.setdefault(held.name, {len(begun)}).add(len(now))
        return True

    def _note_hazard(self, what: str, layer: str) -> None:
        self.seen.note(what, f"layer {layer!r}")

    def conclude(self, known: KnownChanges, num_microbatches: int) -> str | None:
        """The step has ended: note what it changes; what speaks against taking turns, if anything does.

        Args:
            known: where to note it.
            num_microbatches: of the step.
        """
        self._silent.refuse_changed_again()
        known.buffers.update(map(id, self._versions.changed()))
        return self.seen.conclude(self._carried, known, num_microbatches)

    def close(self) -> None:
        """The step is over, as far as it came."""
        self._carried.close()


def _counted(before: Any, now: Any) -> Any:
    """How far a whole number, which may be a float, was counted; None of anything else."""
    kinds = {type(before), type(now)}
    is_whole = kinds == {int} or (kinds == {float} and before.is_integer() and now.is_integer())
    return now - before if is_whole else None


def _grew(before: Any, now: Any) -> bool:
    """Whether a list or set has all that it had before, in its order, and more."""
    if isinstance(now, set):
        return now.issuperset(before)
    return len(now) >= len(before) and all(map(is_, before, now))


def _locks_held(frame: FrameType | None) -> Iterator[str]:
    """The locks that code names which waits for a layer's call, and that are held: another microbatch would wait for them."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in (_OWN_PACKAGE, "torch"):
            code = frame.f_code
            named = {name: frame.f_globals.get(name) for name in code.co_names} | frame.f_locals
            for name, value in named.items():
                if is_held(value):
                    yield f"{name}, in {code.co_name}, file {code.co_filename!r}"
        elif frame.f_code.co_name == "_run_here":
            return
        frame = frame.f_back

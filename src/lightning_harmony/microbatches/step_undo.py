"""Undoing a step in which microbatches took turns: buffers, the states of metrics, and what was changed in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.structures.object_state import restore_of
from lightning_harmony.engine.structures.operations import Versions
from lightning_harmony.held.held_state import Held, Marks, state_of_generator
from lightning_harmony.held.shared_settings import NOT_SWITCHED, OFTEN_LOOKED_AT
from lightning_harmony.microbatches.lane_attributes import Draws, KnownChanges
from lightning_harmony.microbatches.metric_states import metrics_of
from lightning_harmony.microbatches.remembered import Remembered, undo_of_tensor

# Not more tensors are copied in case that a step changes them: so many are the losses of an epoch, or data.
MOST_COPIED = 512
# Buffers, and other tensors, up to this size are copied before each step in which microbatches take turns.
_SMALL_BYTES = 64 * 1024


class _Marked:
    """Objects in one place that a step may change in place, such as generators of random numbers.

    Args:
        place: what holds them, in words.
        marks: what changes with them.

    Attributes:
        is_silent: whether some of them count no changes.
    """

    def __init__(self, place: str, marks: Marks) -> None:
        self._place, self._marks = place, marks
        self.is_silent = bool(marks.others)
        self._begun = self._seen = marks.now()
        tensors = marks.tensors if len(marks.tensors) <= MOST_COPIED else ()
        self._undo = {id(each): undo for each in (*tensors, *marks.others) if (undo := undo_of(each)) is not None}

    def is_changed(self) -> bool:
        """Whether one was changed since this was last asked."""
        before, self._seen = self._seen, self._marks.now()
        return self._seen != before

    def _changed(self) -> list[Any]:
        """Those that are not what they were in the beginning."""
        now, begun = self._marks.now(), self._begun
        if now == begun:
            return []
        values = zip(self._marks.tensors, begun[0], now[0], strict=True)
        others = zip(self._marks.others, begun[1:], now[1:], strict=True)
        return [value for value, then, mark in (*values, *others) if then != mark]

    def __str__(self) -> str:
        value = next(iter((*self._changed(), *self._marks.tensors, *self._marks.others)))
        if state_of_generator(value) is not None:
            return f"a generator of random numbers, held by {self._place}, is drawn from"
        return f"a {type(value).__name__} held by {self._place} is changed in place"

    def restore(self) -> bool:
        """Make all what it was in the beginning; whether that is possible."""
        changed = self._changed()
        if not all(id(value) in self._undo for value in changed):
            return False
        for value in changed:
            self._undo[id(value)]()
        return True


def undo_of(value: Any) -> Callable[[], None] | None:
    """What makes an object that can be changed in place what it is now; None if that is not possible."""
    if isinstance(value, Tensor):
        return undo_of_tensor(value) if value.layout is torch.strided and value.nbytes <= _SMALL_BYTES else None
    return restore_of(value)


class Undo:
    """What a step that microbatches take turns in changes beside attributes.

    Args:
        model: whose step it is.
        places: what it may change in Python.
        known: what steps were seen to change in order.
        buffers: those of modules that no layer has, to which code may assign others.
    """

    def __init__(
        self,
        model: nn.Module,
        places: Iterable[Held],
        known: KnownChanges,
        buffers: Iterable[dict[str, Tensor | None]] = (),
    ) -> None:
        self._settings = [setting.get() for setting in NOT_SWITCHED]
        # Generators from which microbatches draw, what is changed in order, and what nothing changes.
        self._drawn: list[tuple[_Marked, Draws]] = []
        self._changed: list[_Marked] = []
        self._still: list[_Marked] = []
        with_changes = {place for place, _ in (*known.drawn, *known.in_place)}
        for held in places:
            if held.name not in with_changes:
                if held.marked:
                    self._still.append(_Marked(held.in_words, held.marks))
                continue
            for name, value in held.marked:
                marked, when = _Marked(held.in_words, Marks().and_of([value])), known.drawn.get((held.name, name))
                if when is not None:
                    self._drawn.append((marked, when))
                else:
                    (self._changed if (held.name, name) in known.in_place else self._still).append(marked)
        # Those that count no changes: arrays, and generators.
        self._silent = [each for each in self._still if each.is_silent]
        self._microbatch: int | None = None
        # The microbatches that have begun, and those that have drawn what they draw behind their last layers.
        self._begun: set[int | None] = set()
        self._done: dict[int | None, _Marked] = {}
        self._late: str | None = None
        self._buffers = [(each, dict(each)) for each in buffers]
        self._versions = Versions(model.buffers())
        # Of small ones no version tells that they change, as statistics of normalizations are.
        kept = [b for b in model.buffers() if id(b) in known.buffers or b.numel() * b.element_size() <= _SMALL_BYTES]
        self._kept, metrics = set(map(id, kept)), Remembered()
        for metric in metrics_of(model):
            metrics.add_attributes(metric)
        self._undo = [*map(undo_of_tensor, kept), metrics.undo]

    def note_turn(self, microbatch: int) -> None:
        """A microbatch has its turn: the one before has ended."""
        self._end_turn()
        self._microbatch = microbatch
        if microbatch in self._done:
            self._late = self._late or str(self._done[microbatch])

    def _end_turn(self) -> None:
        """See whether a turn has set what others find, or drawn though it was not its microbatch's first one, or last one."""
        # What it sets for a while may be as it was when the step ends.
        for setting, before in zip(OFTEN_LOOKED_AT, self._settings, strict=False):
            if self._late is None and setting.get() != before:
                self._late = f"{setting.name} is set"
        for each in self._silent:
            if self._late is None and each.is_changed():
                self._late = str(each)
        for each, when in self._drawn:
            if not each.is_changed():
                continue
            if when is Draws.BEHIND_LAYERS:
                self._done[self._microbatch] = each
            elif self._microbatch in self._begun:
                self._late = self._late or str(each)
        self._begun.add(self._microbatch)

    def late(self) -> str | None:
        """What microbatches that took turns have changed where others may have found it; None if nothing was."""
        self._end_turn()
        for setting, before in zip(NOT_SWITCHED, self._settings, strict=True):
            if setting.get() != before:
                return f"{setting.name} is set"
        return self._late or next((str(each) for each in self._still if each.is_changed()), None)

    def restore(self) -> bool:
        """Make all what it was; whether that is possible."""
        for setting, before in zip(NOT_SWITCHED, self._settings, strict=True):
            if setting.get() != before:
                setting.set(before)
        if not all(each.restore() for each in (*self._still, *self._changed, *(each for each, _ in self._drawn))):
            return False
        if not self._kept.issuperset(map(id, self._versions.changed())):
            return False
        with torch.no_grad():
            for undo in self._undo:
                undo()
        for buffers, assigned in self._buffers:
            buffers.clear()
            buffers.update(assigned)
        return True

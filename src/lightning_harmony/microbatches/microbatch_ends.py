"""What each microbatch has left in Python when its forward ended: its backward, in which layers run again, finds that."""

from __future__ import annotations

from typing import Any

from lightning_harmony.engine.model.attributes import OF_TORCH
from lightning_harmony.engine.structures.containers import (
    MISSING,
    copied_content,
    have_same_content,
    put_content,
    put_value,
)
from lightning_harmony.held.held_state import ALL, Held, Kind
from lightning_harmony.held.places import Contents, Places
from lightning_harmony.microbatches.lane_attributes import NUMBERS


class MicrobatchEnds:
    """Lets the backward of each microbatch find what its forward has left, where all forwards come before all backwards.

    Plain accumulation runs each backward at once. What is put back is what microbatches have left different things of:
    attributes, entries and globals. In the end all is what the last one has left, and what backwards have changed since.

    Args:
        places: all that steps may change.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._current: int | None = None
        self._found: dict[int, Contents] = {}
        # When forwards are over: of names in places, and of all of a list or set as `ALL`, what each microbatch has left, and
        # what is to be there in the end.
        self._left: list[tuple[Held, Any, dict[int, Any]]] | None = None
        self._last: list[Any] = []
        self._now: list[Any] = []

    def switch(self, microbatch: int) -> None:
        """A microbatch goes on."""
        if microbatch == self._current:
            return
        if self._left is not None:
            self._leave()
            self._now = [values[microbatch] for _, _, values in self._left]
            for (held, name, _), value in zip(self._left, self._now, strict=True):
                _put(held, name, value)
        elif self._current is not None:
            self._note_end()
        self._current = microbatch

    def end_forward(self) -> None:
        """All forwards are over."""
        if self._current is None:
            return
        self._note_end()
        contents = {held.key: held for found in self._found.values() for held in found.places}
        by_microbatch = {m: {held.key: copy for held, copy in found} for m, found in self._found.items()}
        self._left = []
        for key, held in contents.items():
            # What one alone holds, none of the others finds.
            copies = {m: copies[key] for m, copies in by_microbatch.items() if key in copies}
            if len(copies) == len(by_microbatch):
                self._left += _differing(held, copies)
        self._found = {}
        self._now = self._last = [values[self._current] for _, _, values in self._left]

    def finish(self) -> None:
        """The step is over."""
        if self._left is not None:
            self._leave()
            for (held, name, _), value in zip(self._left, self._last, strict=True):
                _put(held, name, value)
        self._left, self._current, self._found, self._last, self._now = None, None, {}, [], []

    def _note_end(self) -> None:
        assert self._current is not None
        self._found[self._current] = self._places.look()

    def _leave(self) -> None:
        """Keep what a backward has changed."""
        assert self._left is not None
        self._last = [
            last if _are_same(name, before, now := _get(held, name)) else _changed(last, before, now)
            for (held, name, _), before, last in zip(self._left, self._now, self._last, strict=True)
        ]


def _get(held: Held, name: Any) -> Any:
    return copied_content(held.content) if name is ALL else held.content.get(name, MISSING)


def _put(held: Held, name: Any, value: Any) -> None:
    if not _are_same(name, _get(held, name), value):
        if name is ALL:
            put_content(held.content, value)
        else:
            put_value(held.content, name, value)


def _are_same(name: Any, one: Any, other: Any) -> bool:
    return have_same_content(one, other) if name is ALL else one is other


def _differing(held: Held, copies: dict[int, Any]) -> list[tuple[Held, Any, dict[int, Any]]]:
    first, *others = copies.values()
    if all(first is other or have_same_content(first, other) for other in others):
        return []
    if not held.is_named:
        return [(held, ALL, copies)]
    names = {name for copy in copies.values() for name in copy}
    if held.kind is Kind.MODULE:
        names -= OF_TORCH
    by_name = {name: {m: copy.get(name, MISSING) for m, copy in copies.items()} for name in names}
    return [
        (held, name, values) for name, values in by_name.items() if len({id(value) for value in values.values()}) > 1
    ]


def _changed(last: Any, before: Any, now: Any) -> Any:
    """What is to be there in the end, where a backward has found one thing and left another."""
    if type(now) in NUMBERS and type(before) in NUMBERS and type(last) in NUMBERS:
        return last + (now - before)
    if isinstance(now, list) and isinstance(before, list) and have_same_content(now[: len(before)], before):
        return [*last, *now[len(before) :]]
    return now

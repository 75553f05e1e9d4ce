"""What was seen of a step that was watched: what its microbatches change, and whether they may take turns."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from lightning_harmony.held.held_state import ALL, Held, Kind
from lightning_harmony.microbatches.carried_state import CarriedState, Found
from lightning_harmony.microbatches.lane_attributes import Draws, KnownChanges, has_tensors, in_words


@dataclass
class Seen:
    """What was seen of the microbatches of one step.

    Attributes:
        at_calls: by place and name, before the call of which layer it differed from the beginning, and what it was.
        steps: by place and name, how far a number went in each microbatch; None of what is no whole number.
        hazard: what speaks against taking turns, and where it was seen first.
        changed: the places that a microbatch left other than it found them, with what it changed there.
        shrank: the lists and sets that did not only grow.
        only_grew: of those that grew, the ones that lanes switch for no other reason.
        lengths: of those that did, the lengths that the second microbatch saw.
        tells_apart: what lanes switch.
        drawn: by place and name, when microbatches draw from a generator.
        in_place: the tensors, by place and name, that are changed in place behind the last layer.
        in_backward: what is changed, by place and name, when the backward of a microbatch runs.
        of_layers: by the dict that holds them, the attributes that layers' own code sets.
    """

    at_calls: dict[tuple[str, Any], str] = field(default_factory=dict)
    steps: dict[tuple[str, Any], list[float | None]] = field(default_factory=dict)
    hazard: str | None = None
    changed: dict[tuple[str, Any], Held] = field(default_factory=dict)
    shrank: set[str] = field(default_factory=set)
    only_grew: set[str] = field(default_factory=set)
    lengths: dict[str, set[int]] = field(default_factory=dict)
    tells_apart: set[tuple[str, Any]] = field(default_factory=set)
    drawn: dict[tuple[str, Any], Draws] = field(default_factory=dict)
    in_place: set[tuple[str, Any]] = field(default_factory=set)
    in_backward: set[tuple[str, Any]] = field(default_factory=set)
    of_layers: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    def note(self, what: str, before: str) -> None:
        """Something speaks against taking turns: the first that does is kept.

        Args:
            what: in words.
            before: what it was seen before.
        """
        self.hazard = self.hazard or f"{what} before {before}"

    def conclude(self, carried: CarriedState, known: KnownChanges, num_microbatches: int) -> str | None:
        """Note what the step changes; what speaks against taking turns, if anything does.

        Args:
            carried: what a microbatch leaves to the next.
            known: where to note it.
            num_microbatches: of the step.
        """
        for (place, name), layer in self.at_calls.items():
            held = self.changed.get((place, name))
            if name is ALL:
                known.places.add(place)
                if place not in self.shrank:
                    known.growing.add(place)
                    if len(self.lengths.get(place, ())) == 2:
                        known.passed_on.add(place)
            elif (place, name) in self.tells_apart:
                known.places.add(place)
            else:
                step = self._step_of_count(place, name, num_microbatches)
                if step is None:
                    what = f"{name!r} of {place!r}" if held is None else in_words(held, name)
                    self.note(f"{what} is changed", f"layer {layer!r}")
                else:
                    known.places.add(place)
                    known.counters.setdefault(place, {})[name] = step
        self._conclude_ends(known)
        known.drawn.update(self.drawn)
        known.in_place |= self.in_place
        for found in carried.conclude():
            if found.name in known.counters.get(found.held.name, ()):
                # Lanes tell how far one is.
                continue
            step = self._step_of_count(found.held.name, found.name, num_microbatches) if found.is_unseen else None
            if step is not None:
                known.places.add(found.held.name)
                known.counters.setdefault(found.held.name, {})[found.name] = step
                known.harmless.get(found.held.name, set()).discard(found.name)
                continue
            is_read = found.used_at is not None or self._adds_at_several_places(found, known)
            if is_read and (found.is_apart or not self._comes_in_order(found, known)):
                what = in_words(found.held, found.name)
                self.hazard = self.hazard or f"{what} passes something on from one microbatch to the next"
        self._conclude_changes(carried, known)
        return self.hazard

    def _adds_at_several_places(self, found: Found, known: KnownChanges) -> bool:
        """Whether a list or set that a microbatch has added to, and read then, lacks what others add if they take turns."""
        place = found.held.name
        return found.name is ALL and (place, ALL) in self.at_calls and place not in known.passed_on

    def _step_of_count(self, place: str, name: Any, num_microbatches: int) -> float | None:
        """How far each microbatch has counted what is there; None if it is no such number, or its backward counts on."""
        steps = [] if (place, name) in self.in_backward else self.steps.get((place, name), [])
        return steps[0] if len(steps) == num_microbatches and len(set(steps)) == 1 else None

    def _conclude_changes(self, carried: CarriedState, known: KnownChanges) -> None:
        """Note all that was changed."""
        keys = {*self.changed, *self.at_calls, *self.in_place}
        others = [found for found in carried.all if not found.held.is_of_buffers and not found.is_in_new]
        in_backward = {(found.held.name, found.name) for found in others} - keys
        for place, name in (*keys, *in_backward):
            known.changed.setdefault(place, set()).add(name)
        known.in_backward |= self.in_backward | in_backward

    def _comes_in_order(self, found: Found, known: KnownChanges) -> bool:
        """Whether microbatches that take turns find what the one before has left, between the same two calls."""
        place, name = found.held.name, found.name
        if (place, name) not in self.at_calls:
            return True
        if name is ALL:
            return place in known.passed_on
        if name in self.of_layers.get(id(found.held.content), ()):
            return True
        return found.held.kind is Kind.MODULE and has_tensors([found.held.content.get(name), *found.begun.values])

    def _conclude_ends(self, known: KnownChanges) -> None:
        """Note what is changed behind the last call of a layer alone."""
        for (place, name), held in self.changed.items():
            # No layer is called behind it, and microbatches come there in their order; the first one's changes are all found.
            if (place, name) not in self.at_calls:
                is_plain = held.has_attributes or held.kind is Kind.HOOKS
                known.harmless.setdefault(place, set()).add(name if is_plain or name is ALL else ALL)
        for place, name in self.at_calls:
            known.harmless.get(place, set()).difference_update((name, ALL))

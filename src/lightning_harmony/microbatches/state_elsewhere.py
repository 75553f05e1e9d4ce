"""What the own code of layers keeps elsewhere than on their modules: its recompute finds and leaves it as the call did.

Objects, variables of closures, attributes of functions and classes, and globals are copied before each call of the first
step, the same copies where nothing has changed. What a recompute changes there is taken back. From then on only places are
looked at in which recomputes have changed something. Places with tensors are not copied for calls, for that would keep these
for longer than the user does: a recompute finds them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from lightning_harmony.engine.structures.containers import put_content
from lightning_harmony.microbatches.held_state import Held, Kind
from lightning_harmony.microbatches.places import Places, Together

# So many first steps of a kind are looked at for what recomputes change.
_WATCHED_STEPS = 1


class StateElsewhere:
    """What is elsewhere, in the steps of one kind.

    Args:
        places: all that steps may change.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._known: set[str] = set()
        self._num_steps = 0
        self._together: Together | None = None

    def begin(self) -> Callable[[], Callable[[], AbstractContextManager[None]]] | None:
        """A step begins.

        Returns:
            What to call before a layer's code runs, for the context in which that runs again; None if that takes none.
        """
        self._together = None
        self._num_steps += 1
        return self._at_call if self._is_watched or self._known else None

    def finish(self) -> None:
        """The step is over."""
        self._together = None

    @property
    def _is_watched(self) -> bool:
        return self._num_steps <= _WATCHED_STEPS

    def _at_call(self) -> Callable[[], AbstractContextManager[None]]:
        if self._together is None:
            # Modules' own is looked at with the layers. Hooks are not called by layers' code alone.
            held = [each for each in self._places.look().places if each.kind not in (Kind.MODULE, Kind.HOOKS)]
            self._together = Together([each for each in held if self._is_watched or each.name in self._known])
        # Those with tensors are found as they are: they are not kept for longer than the user does.
        together, copies = self._together, self._together.copies()
        if any(held.has_tensors for held in together.places):
            copies = [None if held.has_tensors else copy for held, copy in zip(together.places, copies, strict=True)]
        return partial(self._as_it_was, together, copies)

    @contextmanager
    def _as_it_was(self, together: Together, found: list[Any]) -> Iterator[None]:
        left = together.copies()
        for held, content in _differing(together, left, found):
            if content is not None:
                _put(held, content)
        begun = together.copies()
        try:
            yield
        finally:
            now = together.copies()
            self._known |= {held.name for held, _ in _differing(together, begun, now)}
            for held, content in _differing(together, now, left):
                _put(held, content)


def _differing(together: Together, one: list[Any], other: list[Any]) -> list[tuple[Held, Any]]:
    """The places that differ between two copies, and what the other one has there."""
    if one is other:
        return []
    return [(held, then) for held, now, then in zip(together.places, one, other, strict=True) if now is not then]


def _put(held: Held, before: Any) -> None:
    """Let a place be as it was."""
    content = held.content
    if held.is_as(before):
        return
    if not held.is_named:
        put_content(content, before)
        return
    for name in [name for name in content if name not in before and not _is_of_python(name)]:
        del content[name]
    # One by one: whoever sets a name in a class makes Python forget what it knows of the class.
    for name, value in before.items():
        if (name not in content or content[name] is not value) and not _is_of_python(name):
            content[name] = value


def _is_of_python(name: Any) -> bool:
    """Whether a name is one of Python's own, or of a compiler's, which adds what it has compiled to globals."""
    return isinstance(name, str) and name.startswith("__")

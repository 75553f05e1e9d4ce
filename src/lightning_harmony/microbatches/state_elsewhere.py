"""What the own code of layers keeps elsewhere than on their modules: its recompute finds and leaves it as the call did.

Objects, variables of closures, attributes of functions and classes, and globals are copied before each call of the first
steps, the same copies where nothing has changed. What a recompute changes there is taken back. From then on only places are
looked at in which recomputes have changed something. Places with tensors are not copied for calls, for that would keep these
for longer than the user does: a recompute finds them as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_harmony.microbatches.held_state import SWITCHED, Held, Kind, held_by
from lightning_harmony.microbatches.lane_attributes import has_tensors
from lightning_harmony.microbatches.variables import Variables

# So many first steps are looked at for what recomputes change.
_WATCHED_STEPS = 2


class _Place:
    """A place, and what was in it when it was copied last."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self._newest = held.copied()

    def copied(self) -> Any:
        """What is in it; the same object as long as that is the same."""
        if not self.held.is_as(self._newest):
            self._newest = self.held.copied()
        return self._newest

    def put(self, before: Any) -> None:
        """Let it be as it was."""
        content = self.held.content
        if self.held.is_named:
            for name in [name for name in content if name not in before and not _is_of_python(name)]:
                del content[name]
            # One by one: whoever sets a name in a class makes Python forget what it knows of the class.
            for name, value in before.items():
                if (name not in content or content[name] is not value) and not _is_of_python(name):
                    content[name] = value
            return
        content.clear()
        (content.extend if isinstance(content, list | deque) else content.update)(before)


class StateElsewhere:
    """What is elsewhere, in the steps of one kind.

    Args:
        model: whose layers they are.
        others: what else may be changed, with its names.
    """

    def __init__(self, model: nn.Module, others: Sequence[tuple[str, Any]] = ()) -> None:
        self._model, self._others = model, others
        self._known: set[str] = set()
        self._num_steps = 0
        self._places: list[_Place] = []

    def begin(self) -> Callable[[], Callable[[], AbstractContextManager[None]]] | None:
        """A step begins.

        Returns:
            What to call before a layer's code runs, for the context in which that runs again; None if that takes none.
        """
        is_watched = self._num_steps < _WATCHED_STEPS
        self._num_steps += 1
        self._places = []
        if is_watched or self._known:
            # Modules' own is looked at with the layers. Hooks are not called by layers' code alone.
            held = (each for each in held_by(self._model, self._others) if each.kind not in (Kind.MODULE, Kind.HOOKS))
            self._places = [
                _Place(each) for each in held if _is_plain(each.content) and (is_watched or each.name in self._known)
            ]
        return self._at_call if self._places else None

    def _at_call(self) -> Callable[[], AbstractContextManager[None]]:
        found = [(place, content) for place in self._places if not has_tensors(_values(content := place.copied()))]
        return partial(self._as_it_was, found)

    @contextmanager
    def _as_it_was(self, found: Sequence[tuple[_Place, Any]]) -> Iterator[None]:
        now = [(place, place.copied()) for place in self._places]
        for place, before in found:
            if place.copied() is not before:
                place.put(before)
        begun = [place.copied() for place, _ in now]
        try:
            yield
        finally:
            for (place, left), before in zip(now, begun, strict=True):
                if place.copied() is not before:
                    self._known.add(place.held.name)
                if place.copied() is not left:
                    place.put(left)


def _is_plain(content: Any) -> bool:
    """Whether what is in a place can be read and put back. Other classes may make it as it is asked for."""
    return isinstance(content, Variables) or type(content) in SWITCHED


def _is_of_python(name: Any) -> bool:
    """Whether a name is one of Python's own, or of a compiler's, which adds what it has compiled to globals."""
    return isinstance(name, str) and name.startswith("__")


def _values(content: Any) -> list[Any]:
    return list(content.values()) if isinstance(content, dict) else list(content)

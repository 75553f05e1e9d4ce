"""What the own code of layers keeps elsewhere than on their modules: its recompute finds and leaves it as the call did.

Objects, variables of closures, attributes of functions and classes, and globals are copied before each call of the first
step, the same copies where nothing has changed. What a recompute changes there is taken back. From then on only places are
looked at in which recomputes have changed something. Places with tensors are not copied for calls, for that would keep these
for longer than the user does: a recompute finds them as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from operator import is_, methodcaller
from types import CellType
from typing import Any

from torch import Tensor, nn

from lightning_harmony.engine.structures.containers import copied_content, put_content
from lightning_harmony.microbatches.held_state import SWITCHED, Held, Kind, held_by
from lightning_harmony.microbatches.variables import MISSING, AttributesOfClass, EntriesOf, SlotsOf, VariableOfClosure

# So many first steps of a kind are looked at for what recomputes change.
_WATCHED_STEPS = 1


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
        if self.held.is_as(before):
            return
        if self.held.is_named:
            for name in [name for name in content if name not in before and not _is_of_python(name)]:
                del content[name]
            # One by one: whoever sets a name in a class makes Python forget what it knows of the class.
            for name, value in before.items():
                if (name not in content or content[name] is not value) and not _is_of_python(name):
                    content[name] = value
            return
        put_content(content, before)


class _Places:
    """Places, and what was in them last. To see that nothing has changed, all are looked at in one go."""

    def __init__(self, places: Iterable[Held]) -> None:
        self.all = [_Place(each) for each in places]
        contents = [each.held.content for each in self.all]
        self._dicts = [each for each in contents if isinstance(each, dict)]
        self._classes = [vars(each.owner) for each in contents if isinstance(each, AttributesOfClass)]
        self._cells = [each.owner for each in contents if isinstance(each, VariableOfClosure)]
        self._mappings = [each for each in contents if isinstance(each, SlotsOf | EntriesOf)]
        lists = [each for each in contents if isinstance(each, list | deque | set)]
        self._lists = [each for each in lists if type(each) in SWITCHED]
        self._lists_of_others = [each for each in lists if type(each) not in SWITCHED]
        self._values: list[Any] = []
        self._contents: list[Any] = []

    def contents(self) -> list[Any]:
        """A copy of what is in each: the same list as long as nothing has changed."""
        now = list(chain.from_iterable(map(dict.values, self._dicts)))
        now += chain.from_iterable(map(methodcaller("values"), self._classes))
        now += chain.from_iterable(chain(self._lists, map(copied_content, self._lists_of_others)))
        now += chain.from_iterable(map(methodcaller("values"), self._mappings))
        now += map(_content_of, self._cells)
        if not self._contents or len(now) != len(self._values) or not all(map(is_, now, self._values)):
            self._values, self._contents = now, [each.copied() for each in self.all]
        return self._contents

    def differing(self, one: list[Any], other: list[Any]) -> list[tuple[_Place, Any]]:
        """The places that differ between two copies, and what the other one has there."""
        if one is other:
            return []
        return [(place, then) for place, now, then in zip(self.all, one, other, strict=True) if now is not then]


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
        self._places = _Places(())

    def begin(self) -> Callable[[], Callable[[], AbstractContextManager[None]]] | None:
        """A step begins.

        Returns:
            What to call before a layer's code runs, for the context in which that runs again; None if that takes none.
        """
        is_watched = self._num_steps < _WATCHED_STEPS
        self._num_steps += 1
        if not is_watched and not self._known:
            return None
        # Modules' own is looked at with the layers. Hooks are not called by layers' code alone.
        held = (each for each in held_by(self._model, self._others) if each.kind not in (Kind.MODULE, Kind.HOOKS))
        self._places = _Places(each for each in held if is_watched or each.name in self._known)
        return self._at_call if self._places.all else None

    def _at_call(self) -> Callable[[], AbstractContextManager[None]]:
        return partial(self._as_it_was, self._places, self._places.contents())

    @contextmanager
    def _as_it_was(self, places: _Places, found: list[Any]) -> Iterator[None]:
        left = places.contents()
        for place, content in places.differing(left, found):
            if not _has_tensors(content):
                place.put(content)
        begun = places.contents()
        try:
            yield
        finally:
            now = places.contents()
            self._known |= {place.held.name for place, _ in places.differing(begun, now)}
            for place, content in places.differing(now, left):
                place.put(content)


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _is_of_python(name: Any) -> bool:
    """Whether a name is one of Python's own, or of a compiler's, which adds what it has compiled to globals."""
    return isinstance(name, str) and name.startswith("__")


def _has_tensors(content: Any) -> bool:
    """Whether tensors are in a place, also within tuples. Lists and dicts there are places of their own."""
    values = content.values() if isinstance(content, dict) else content
    return any(issubclass(type(each), Tensor) or (type(each) is tuple and _has_tensors(each)) for each in values)

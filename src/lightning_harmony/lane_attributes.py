"""What microbatches keep on modules between layer calls, in attributes that are no buffers: each finds its own again."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_harmony.engine.attributes import HOOKS, LONGEST, OF_TORCH
from lightning_harmony.engine.containers import have_same_content
from lightning_harmony.engine.derived import OutOfReach
from lightning_harmony.errors import UnsupportedModelError

_MISSING = object()
_CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict)
_NUMBERS = (int, float)


class _Kind(Enum):
    """What a space is."""

    MODULE = auto()
    CONTAINER = auto()
    HOOKS = auto()


@dataclass
class _Space:
    """What may be changed: the attributes of a module, a list, set or dict among them, or its hooks.

    Attributes:
        name: for messages.
        content: the list, set or dict itself, or the dict of the module's attributes.
        base: a copy of it when the step began.
        seen: a copy of it when the turn began.
        own: by microbatch, what it has changed: values by name, or the whole list or set under None.
        found: by microbatch and name, the number that it found when it first changed it.
        changed_back: the name of a number that was changed for a part of a microbatch.
        of_layers: the attributes of a module that the own code of layers sets.
    """

    name: str
    content: Any
    kind: _Kind
    of_layers: set[str] = field(default_factory=set)
    base: Any = field(init=False)
    seen: Any = field(init=False)
    own: dict[int, dict[Any, Any]] = field(default_factory=dict)
    found: dict[tuple[int, str], float] = field(default_factory=dict)
    changed_back: str | None = None

    def __post_init__(self) -> None:
        self.base = self.seen = self.content.copy()

    def leave(self, microbatch: int) -> None:
        """Note what a microbatch has changed in its turn, and take back what no other is to find."""
        if not have_same_content(self.content, self.seen):
            changed = self._changed()
            if changed:
                self.own.setdefault(microbatch, {}).update(changed)
            if self.kind is _Kind.MODULE:
                self._note_numbers(microbatch)
            self.seen = self.content.copy()
        # In an earlier turn, too: it has found that again in this one.
        again = {
            name: self._base_of(name) for name, value in self.own.get(microbatch, {}).items() if self._goes(name, value)
        }
        if again:
            self._set(again)
            self.seen = self.content.copy()

    def enter(self, microbatch: int) -> None:
        """Make everything that a microbatch has changed what it made of it."""
        if microbatch in self.own:
            self._set(self.own[microbatch])
            self.seen = self.content.copy()

    def finish(self) -> None:
        """Make everything what the microbatches leave one after the other."""
        for microbatch in sorted(self.own):
            self._set(self.own[microbatch])
        if isinstance(self.content, list) and self.own:
            lists = [self.own[microbatch][None] for microbatch in sorted(self.own)]
            if all(len(each) >= len(self.base) and all(map(operator.is_, each, self.base)) for each in lists):
                self.content[:] = [*self.base, *(item for each in lists for item in each[len(self.base) :])]

    def _changed(self) -> dict[Any, Any]:
        if not isinstance(self.content, dict):
            return {None: self.content.copy()} if _has_tensors([*self.content, *self.seen]) else {}
        values = {name: self.content.get(name, _MISSING) for name in {**self.seen, **self.content}}
        return {name: value for name, value in values.items() if self._is_own(name, value)}

    def _is_own(self, name: Any, value: Any) -> bool:
        before = self.seen.get(name, _MISSING)
        if value is before:
            return False
        if self.kind is _Kind.MODULE:
            return (
                name not in OF_TORCH
                and type(value) not in _NUMBERS
                and not isinstance(value, OutOfReach)
                and not isinstance(before, OutOfReach)
            )
        return self.kind is _Kind.HOOKS or _has_tensors([value, before])

    def _goes(self, name: Any, value: Any) -> bool:
        """Whether others find what the step began with."""
        if self.kind is not _Kind.MODULE or name == "training":
            return True
        # A mean of all so far, or what a layer has begun with in its first call, is for the next one, too.
        return name not in self.of_layers and not _has_tensors([value, self._base_of(name)])

    def _note_numbers(self, microbatch: int) -> None:
        """Others have found a number that is changed back: unlike one that counts, it was meant for this microbatch."""
        for name, value in self.content.items():
            before = self.seen.get(name)
            if value is before or type(value) not in _NUMBERS or type(before) not in _NUMBERS or value == before:
                continue
            if self.found.setdefault((microbatch, name), before) == value:
                self.changed_back = name

    def tells(self) -> bool:
        """Whether a microbatch that saw another's change could compute something else."""
        return self.kind is _Kind.HOOKS or any(
            _has_tensors([value]) or isinstance(value, str | bool) or callable(value)
            for own in self.own.values()
            for value in own.values()
        )

    def _base_of(self, name: Any) -> Any:
        return self.base.get(name, _MISSING) if isinstance(self.base, dict) else self.base

    def _set(self, values: dict[Any, Any]) -> None:
        for name, value in values.items():
            if not isinstance(self.content, dict):
                self.content.clear()
                (self.content.update if isinstance(self.content, set) else self.content.extend)(value)
            elif value is _MISSING:
                self.content.pop(name, None)
            else:
                self.content[name] = value


def _containers(value: Any, seen: set[int]) -> Iterator[Any]:
    """A list, set or dict that a step may change, and those within it, each once.

    Not a vocabulary, nor one of parameters, in whose places stand-ins are while a step runs.
    """
    if type(value) not in _CONTAINERS or id(value) in seen or len(value) > LONGEST:
        return
    seen.add(id(value))
    content = list(value.values() if isinstance(value, dict) else value)
    if not any(isinstance(each, nn.Parameter) for each in content):
        yield value
    for each in content:
        yield from _containers(each, seen)


def _has_tensors(values: Iterable[Any]) -> bool:
    """Whether tensors are among these, or in a list, tuple or dict among them."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(list(values)))


class LaneAttributes:
    """Lets microbatches that take turns change the same modules, as if each ran alone after the one before.

    An attribute that a microbatch has set, it finds as it left it, whatever others did meanwhile, such as a mask for its
    layers. What it has not set, it finds as the step began: flags, names, functions and other objects, whether a module is
    in training, its hooks, and tensors in lists, sets and dicts, where hooks collect features. A tensor that is an attribute
    is as the newest one left it, since one may leave the next a mean; so is what a layer's own code sets, such as that it has
    begun. In the end all is what the last microbatch left; lists to which all have only added hold what each added. Numbers,
    and what else is in lists and dicts, are not told apart, for they count; nor is the state of metrics, which add up.

    To look at all modules in every turn takes its time: after the first step, only those are looked at that were changed in
    an earlier one. `finish` names the others.

    Args:
        model: its modules, whenever a step begins.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: set[str] | None = None
        self._of_layers: dict[str, set[str]] = {}
        self._spaces: list[_Space] = []
        self._watched: list[_Space] = []
        self._current: int | None = None

    def begin(self) -> None:
        """A step begins; one that did not come to its end is over."""
        self.finish()
        # Several modules may have the same list.
        seen: set[int] = set()
        for name, module in self._model.named_modules():
            if isinstance(module, Metric):
                continue
            self._spaces.append(_Space(name, vars(module), _Kind.MODULE, self._of_layers.setdefault(name, set())))
            for attribute, value in vars(module).items():
                label = f"{name}.{attribute}" if name else attribute
                if attribute in HOOKS:
                    self._spaces.append(_Space(label, value, _Kind.HOOKS))
                elif attribute not in OF_TORCH:
                    self._spaces += [_Space(label, content, _Kind.CONTAINER) for content in _containers(value, seen)]
        self._watched = [space for space in self._spaces if self._known is None or space.name in self._known]

    def switch(self, microbatch: int) -> None:
        """From now on a microbatch runs.

        Raises:
            UnsupportedModelError: if others have found a number that was meant for one.
        """
        if microbatch == self._current:
            return
        for space in self._watched:
            if self._current is not None:
                space.leave(self._current)
                if space.changed_back is not None:
                    raise UnsupportedModelError(
                        f"the number {space.changed_back!r} of module {space.name!r} is changed for a part of the step, while "
                        "microbatches take turns and others find it so: pass it to the layers as an argument, keep it in a "
                        "tuple, or use HarmonyStrategy(num_microbatches=1)"
                    )
            space.enter(microbatch)
        self._current = microbatch

    def set_by_layer(self, attributes: dict[str, Any], names: set[str]) -> None:
        """The own code of a layer has set these of a module's attributes: one microbatch after the other comes there."""
        for space in self._spaces:
            if space.content is attributes:
                space.of_layers |= names

    def finish(self) -> list[str]:
        """The step is over.

        Returns:
            The modules, lists and dicts that were changed, but in none of the steps before; none in the first.
        """
        if self._current is None:
            return []
        for space in self._spaces:
            space.leave(self._current)
            space.finish()
        changed = {space.name for space in self._spaces if space.own}
        grave = {space.name for space in self._spaces if space.own and space.tells()}
        late = [] if self._known is None else sorted(grave - self._known)
        self._known = changed | (self._known or set())
        self._spaces, self._watched, self._current = [], [], None
        return late

"""What microbatches keep on modules between layer calls, in attributes that are no buffers: each finds its own again."""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_harmony.engine.attributes import LONGEST, OF_TORCH
from lightning_harmony.engine.containers import have_same_content
from lightning_harmony.engine.derived import OutOfReach

_MISSING = object()
_CONTAINERS = (list, dict, OrderedDict, defaultdict)


@dataclass
class _Space:
    """What may be changed: the attributes of a module, or a list or dict among them.

    Attributes:
        name: for messages.
        content: the list or dict itself, or the dict of the module's attributes.
        base: a copy of it when the step began.
        seen: a copy of it when the turn began.
        own: by microbatch, what it has changed: values by name, or the whole list under None.
    """

    name: str
    content: Any
    is_module: bool
    base: Any = field(init=False)
    seen: Any = field(init=False)
    own: dict[int, dict[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base = self.seen = self.content.copy()

    def leave(self, microbatch: int) -> None:
        """Note what a microbatch has changed in its turn, and take back what no other is to find."""
        if not have_same_content(self.content, self.seen):
            changed = self._changed()
            if changed:
                self.own.setdefault(microbatch, {}).update(changed)
            self.seen = self.content.copy()
        # In an earlier turn, too: it has found that again in this one.
        own = self.own.get(microbatch, {})
        again = own.keys() & {"training"} if self.is_module else own.keys()
        if again:
            self._set({name: self._base_of(name) for name in again})
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
        if isinstance(self.content, list):
            return {None: self.content.copy()} if _has_tensors([*self.content, *self.seen]) else {}
        values = {name: self.content.get(name, _MISSING) for name in {**self.seen, **self.content}}
        return {name: value for name, value in values.items() if self._is_own(name, value)}

    def _is_own(self, name: Any, value: Any) -> bool:
        before = self.seen.get(name, _MISSING)
        if value is before:
            return False
        if self.is_module:
            return (
                name not in OF_TORCH
                and type(value) not in (int, float)
                and not isinstance(value, OutOfReach)
                and not isinstance(before, OutOfReach)
            )
        return _has_tensors([value, before])

    def has_own_tensors(self) -> bool:
        """Whether a microbatch that saw another's change would compute something else."""
        return any(_has_tensors(own.values()) or "training" in own for own in self.own.values())

    def _base_of(self, name: Any) -> Any:
        return self.base if isinstance(self.base, list) else self.base.get(name, _MISSING)

    def _set(self, values: dict[Any, Any]) -> None:
        for name, value in values.items():
            if isinstance(self.content, list):
                self.content[:] = value
            elif value is _MISSING:
                self.content.pop(name, None)
            else:
                self.content[name] = value


def _has_tensors(values: Iterable[Any]) -> bool:
    """Whether tensors are among these, or in a list, tuple or dict among them."""
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(list(values)))


class LaneAttributes:
    """Lets microbatches that take turns change the same modules, as if each ran alone after the one before.

    An attribute that a microbatch has set, it finds as it left it, whatever others did meanwhile, such as a mask for its
    layers. One that it has not set is as the newest one left it. Tensors in lists and dicts, where hooks collect
    features, and whether a module is in training, each microbatch finds as the step began, with its own changes. In the end
    all is what the last microbatch left; lists to which all have only added hold what each added. Numbers, and what else is
    in lists and dicts, are not told apart, for they count; nor is the state of metrics, which add up.

    To look at all modules in every turn takes its time: after the first step, only those are looked at that were changed in
    an earlier one. `finish` names the others.

    Args:
        model: its modules, whenever a step begins.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: set[str] | None = None
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
            self._spaces.append(_Space(name, vars(module), is_module=True))
            for attribute, value in vars(module).items():
                if attribute not in OF_TORCH and type(value) in _CONTAINERS and len(value) <= LONGEST:
                    if id(value) not in seen:
                        label = f"{name}.{attribute}" if name else attribute
                        self._spaces.append(_Space(label, value, is_module=False))
                    seen.add(id(value))
        self._watched = [space for space in self._spaces if self._known is None or space.name in self._known]

    def switch(self, microbatch: int) -> None:
        """From now on a microbatch runs."""
        if microbatch == self._current:
            return
        for space in self._watched:
            if self._current is not None:
                space.leave(self._current)
            space.enter(microbatch)
        self._current = microbatch

    def finish(self) -> list[str]:
        """The step is over.

        Returns:
            The modules, lists and dicts whose tensors were changed, but in none of the steps before; none in the first.
        """
        if self._current is None:
            return []
        for space in self._spaces:
            space.leave(self._current)
            space.finish()
        changed = {space.name for space in self._spaces if space.own}
        grave = {space.name for space in self._spaces if space.has_own_tensors()}
        late = [] if self._known is None else sorted(grave - self._known)
        self._known = changed | (self._known or set())
        self._spaces, self._watched, self._current = [], [], None
        return late

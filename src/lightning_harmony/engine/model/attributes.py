"""What a layer's code keeps in Python, on its modules: its recompute must find it as the forward did, and leave it alone."""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.model.staying_buffers import StayingBuffers
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.containers import (
    Unchanged,
    changed_names,
    copied_content,
    entries_of,
    have_same_content,
    others_for,
    put_content,
    with_others,
)
from lightning_harmony.engine.structures.memory_users import has_memory_among
from lightning_harmony.engine.structures.object_state import attributes_of, restore_of
from lightning_harmony.engine.structures.operations import Unseen, version_of
from lightning_harmony.engine.structures.seekable import Seekable, is_fixed, make_seekable
from lightning_harmony.engine.structures.strides import copied
from lightning_harmony.engine.structures.tree import is_parameter, is_watched
from lightning_harmony.errors import UnsupportedModelError

# What torch itself keeps on every module: hooks, parameters, buffers, submodules.
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
# Those that run around a module's forward.
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Which of them torch calls with keyword arguments, and which even if the forward fails.
_KINDS_OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
# Longer ones, such as vocabularies, are no place for what a call counts or collects, and take long to compare.
LONGEST = 4096
_NOTHING = nullcontext()
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, OrderedDict, defaultdict, Counter, set, deque)
# So many first calls of a layer are looked at for what they leave.
_WATCHED_CALLS = 8
# Tensors up to this size are copied before each call, for it may change them in place, as metrics do.
_SMALL_BYTES = 16 * 1024


class Attributes:
    """The attributes of some modules at one moment, with lists, dicts, sets and deques among them to any depth, and hooks.

    Also what is out of sight in generators of random numbers, arrays and iterators, which are made seekable. Parameters and
    the buffers that are swapped are not looked at, nor what hangs on other objects.

    Args:
        modules: those of a layer.
        swapped: of each, the names of the buffers that are swapped. What code registers, or first fills, later is not.
        staying: those of any layer that stay where they are. Tensors in their memory are left to these.
        compares: whether to note what the tensors hold, for changes that no version tells.
        notes_objects: whether to note the attributes of the other objects among them, too.

    Attributes:
        objects: these objects.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        swapped: Sequence[Collection[str]],
        staying: StayingBuffers,
        *,
        compares: bool = False,
        notes_objects: bool = False,
    ) -> None:
        self._compares = compares
        self._late_buffers = _late_buffers(modules, swapped)
        self._modules: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: dict[int, _Kept] = {}
        self._restores: list[Callable[[], None]] = []
        self.objects: list[Any] = []
        self._staying = staying.memory()
        seen: set[int] = set()
        for module in modules:
            attributes = vars(module)
            make_seekable(attributes, attributes.copy())
            self._modules.append((attributes, attributes.copy()))
            self._contents += [(attributes[name], attributes[name].copy()) for name in (*HOOKS, *_KINDS_OF_HOOKS)]
            for name, value in attributes.items():
                if name not in OF_TORCH and type(value) not in _PLAIN:
                    self._look_at(name, value, seen)
        for late in self._late_buffers:
            for name, value in late.items():
                self._look_at(name, value, seen)
        self._all_modules, self._swapped = modules, swapped
        self._has_no_late_buffers = not any(self._late_buffers)
        self._buffers, self._sizes = [module._buffers for module in modules], list(map(len, swapped))
        # They are not restored here, but it is told that the layer's own code has set them.
        of_objects = map(attributes_of, self.objects) if notes_objects else ()
        self._of_objects = [(content, content.copy()) for content in of_objects if content is not None]
        self._unchanged = Unchanged([*self._modules, *self._contents, *self._of_objects])

    def are_current(self) -> bool:
        """Whether nothing has changed since, as far as that can be told."""
        if self._restores or (self._tensors and any(kept.has_changed() for kept in self._tensors.values())):
            return False
        return self._unchanged.holds() and self._have_same_late_buffers()

    def _have_same_late_buffers(self) -> bool:
        """Whether they have, where modules have the same dicts of buffers."""
        if self._has_no_late_buffers:
            return not any(map(operator.gt, map(len, self._buffers), self._sizes))
        late = _late_buffers(self._all_modules, self._swapped)
        return all(map(have_same_content, self._late_buffers, late))

    @property
    def are_objects_as_they_were(self) -> bool:
        """Whether nobody has set the attributes of objects since, as far as these were noted."""
        return all(have_same_content(content, then) for content, then in self._of_objects)

    @property
    def are_plain(self) -> bool:
        """Whether no tensors are among them, and nothing that is restored by itself."""
        return not self._tensors and not self._restores

    def tensors(self) -> dict[str, Tensor]:
        """The tensors among them, by the names of the attributes that hold them."""
        return {kept.name: kept.tensor for kept in self._tensors.values()}

    def changes_since(self, before: Attributes) -> Iterator[tuple[dict[str, Any], set[str]]]:
        """The attributes of each module and object that have other values than before, by their names."""
        of_objects = [(content, content, then) for content, then in before._of_objects]
        pairs = zip(self._modules, before._modules, strict=True)
        for attributes, now, then in [*((each, now, then) for (each, now), (_, then) in pairs), *of_objects]:
            if names := set(changed_names(then, now)):
                yield attributes, names

    def refuse_unseen_changes(self) -> None:
        """Refuse what was changed since, and of which no version tells, in tensors that are compared.

        Raises:
            UnsupportedModelError: naming the attribute.
        """
        for kept in self._tensors.values() if self._compares else ():
            kept.refuse_unseen_change()

    def leave_own_changes(self) -> None:
        """The layer's code has run: what it has changed unseen is for others to find, which name the layer."""
        for kept in self._tensors.values() if self._compares else ():
            kept.leave_own_change()

    def restore(self) -> None:
        """Make everything what it was, tensors that were changed in place by copies that take their places.

        Raises:
            UnsupportedModelError: if a large tensor was changed in place.
        """
        self.exchange({key: kept.again() for key, kept in self._tensors.items() if kept.has_changed()})
        for restore in self._restores:
            restore()

    def exchange(self, others: Mapping[int, Tensor]) -> None:
        """Make everything but the state of objects what it was, with other tensors in the places of some.

        Args:
            others: by the identity of the tensor that each takes the place of.
        """
        if not others and self._unchanged.holds() and self._have_same_late_buffers():
            return
        now = _late_buffers(self._all_modules, self._swapped)
        for module, late, buffers in zip(self._all_modules, now, self._late_buffers, strict=True):
            for name in late.keys() - buffers.keys():
                del module._buffers[name]
            module._buffers.update(_with(others, buffers))
        for attributes, all_before in self._modules:
            if others or not have_same_content(attributes, all_before):
                before = {name: value for name, value in all_before.items() if name not in OF_TORCH}
                before = _with_weights_of(attributes, before)
                for name in attributes.keys() - all_before.keys():
                    del attributes[name]
                attributes.update(_with(others, before))
        for content, before in self._contents:
            if others or not have_same_content(content, before):
                put_content(content, _with(others, _with_weights_of(content, before)))

    def _look_at(self, name: str, value: Any, seen: set[int]) -> None:
        if id(value) in seen:
            return
        kind: Any = type(value)
        if issubclass(kind, Tensor):
            if not is_parameter(value):
                stays = has_memory_among(value, self._staying)
                self._tensors[id(value)] = _Kept(name, value, compares=self._compares, stays=stays)
        elif is_fixed(kind):
            for inner in value:
                self._look_at(name, inner, seen)
        elif kind is MethodType and type(value.__self__) is Seekable:
            self._look_at(name, value.__self__, seen)
        elif kind in _CONTAINERS:
            if len(value) <= LONGEST:
                make_seekable(value, value.copy())
                # Referred to from here, so that no other gets its id.
                self._contents.append((value, value.copy()))
                seen.add(id(value))
                for inner in value.values() if isinstance(value, dict) else value:
                    self._look_at(name, inner, seen)
        else:
            restore = restore_of(value)
            if restore is not None:
                self._restores.append(restore)
            elif kind not in _PLAIN:
                self.objects.append(value)


class AttributesOfLayer:
    """Reads the attributes of a layer's modules, and reads none twice that are as they were.

    Attributes:
        may_hold_tensors: whether tensors were ever among them, as far as is known.
        modules: those of the layer, by identity.
        staying: the buffers of any layer that stay where they are: the same for all layers.

    Args:
        modules: those of the layer.
        buffers: those that are swapped, with the modules that have them.
    """

    def __init__(self, modules: Sequence[nn.Module], buffers: Collection[tuple[nn.Module, str]]) -> None:
        self._swapped = [{name for owner, name in buffers if owner is module} for module in modules]
        self.modules, self.staying = frozenset(map(id, modules)), StayingBuffers()
        self.may_hold_tensors = True
        self._sets_objects = False
        self._num_calls = 0
        self._has_read = False
        self._modules = modules
        self._newest: Attributes | None = None

    def read(self) -> Attributes:
        """The attributes as they are."""
        newest = self._newest
        if newest is None or not newest.are_current():
            is_first = self.are_first_calls
            notes_objects = is_first or self._sets_objects
            newest = Attributes(
                self._modules, self._swapped, self.staying, compares=is_first, notes_objects=notes_objects
            )
            self.may_hold_tensors = (self._has_read and self.may_hold_tensors) or not newest.are_plain
            self._has_read = True
            # Tensors are not kept for longer than a call needs them.
            self._newest = newest if newest.are_plain else None
        return newest

    @property
    def are_first_calls(self) -> bool:
        """Whether it is not yet known what the layer's code usually does."""
        return self._num_calls < _WATCHED_CALLS

    def after_call(self, before: Attributes) -> Attributes | None:
        """The attributes as a call has left them, to be looked at; None where calls have left no tensors so far.

        Args:
            before: as it found them.
        """
        if not (self.are_first_calls or self.may_hold_tensors or self._sets_objects):
            return None
        self._num_calls += 1
        self._sets_objects = self._sets_objects or not before.are_objects_as_they_were
        before.leave_own_changes()
        return before if before.are_current() else self.read()

    @contextmanager
    def as_they_were(self, before: Attributes) -> Iterator[None]:
        """Within the context they are what they were; what is done to them there is taken back."""
        now = self.read()
        before.refuse_unseen_changes()
        if now is not before:
            before.restore()
        try:
            yield
        finally:
            now.restore()


def _late_buffers(modules: Sequence[nn.Module], swapped: Sequence[Collection[str]]) -> list[dict[str, Tensor | None]]:
    """The buffers of modules that are not swapped, by their names."""
    pairs = zip([module._buffers for module in modules], swapped, strict=True)
    return [
        {name: value for name, value in buffers.items() if name not in names} if len(buffers) > len(names) else {}
        for buffers, names in pairs
    ]


def _asking_nobody(tensor: Tensor) -> AbstractContextManager[object]:
    """The context in which to ask a tensor for what it is, though somebody watches who reads it."""
    return torch._C.DisableTorchFunctionSubclass() if is_watched(type(tensor)) else _NOTHING


class _Kept:
    """A tensor, and what it takes to have it again."""

    def __init__(self, name: str, tensor: Tensor, *, compares: bool, stays: bool) -> None:
        self.name = name
        self.tensor = tensor
        with _asking_nobody(tensor):
            # Inference tensors count no versions, and are written to in inference mode alone.
            self._version = None if stays else version_of(tensor)
            small = self._version is not None and tensor.numel() * tensor.element_size() <= _SMALL_BYTES
            self._copy = copied(tensor.detach()) if small else None
            # Fake ones hold nothing.
            is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
            self._checksum = _checksum(tensor) if compares and is_plain and self._version is not None else None

    def has_changed(self) -> bool:
        return self._version is not None and version_of(self.tensor) != self._version

    def _has_changed_unseen(self) -> bool:
        if self._checksum is None or self.has_changed():
            return False
        with torch.inference_mode(False), Unseen():
            return not torch.equal(self._checksum, _checksum(self.tensor))

    def leave_own_change(self) -> None:
        if self._has_changed_unseen():
            self._checksum = None

    def refuse_unseen_change(self) -> None:
        if self._has_changed_unseen():
            raise UnsupportedModelError(
                f"the tensor in the attribute {self.name!r} of a layer is changed between a call of the layer and its "
                "backward in a way that torch does not count, as through `.data` or NumPy, so that the call cannot run again: "
                "assign a new tensor, or change it in a hook such as on_train_batch_end"
            )

    def again(self) -> Tensor:
        if self._copy is None:
            raise UnsupportedModelError(
                f"the tensor in the attribute {self.name!r} of a layer was changed in place after the layer was called, so "
                "that its backward cannot run the call again: register it with register_buffer before the fit, or assign a "
                "new tensor"
            )
        return copied(self._copy).requires_grad_(self.tensor.requires_grad)


def _checksum(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), Unseen():
        return checksum(tensor)


def _with_weights_of(content: Any, before: Any) -> Any:
    """What was in a list, dict, set or deque, with the weights that are there now: of these, stand-ins were there before."""
    if not isinstance(before, list | dict):
        return before
    names = [name for name, value in entries_of(before) if is_parameter(value)]
    if not names:
        return before
    now = dict(entries_of(copied_content(content)))
    return with_others(before, {name: now[name] for name in names if is_parameter(now.get(name))})


def _with(others: Mapping[int, Tensor], before: Any) -> Any:
    """What was in a list, dict or set, with other tensors in the places of some, also within tuples."""
    return with_others(before, others_for(entries_of(before), Tensor, lambda each: others.get(id(each), each)))

"""What values hold at any depth, remembered: what a step changes in place is taken back, also in its batch."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.containers import copied_content, have_same_content, put_content
from lightning_harmony.engine.structures.nested import is_ndarray
from lightning_harmony.engine.structures.object_state import attributes_of, restore_of
from lightning_harmony.engine.structures.operations import version_of
from lightning_harmony.engine.structures.parts import is_composed, parts_of
from lightning_harmony.engine.structures.strides import assign, has_strides, narrowed
from lightning_harmony.engine.structures.tree import is_parameter
from lightning_harmony.held.walk import OF_THREADS

# Larger arrays are data.
_LARGEST_COUNTS = 64 * 1024 * 1024
# Classes and modules change in no step; nor do optimizers and data, which may be large.
_LEFT_ALONE = (type, ModuleType, Optimizer, Dataset, DataLoader, *weakref.ProxyTypes)
_OWN_PACKAGE = __name__.partition(".")[0]
# What a module holds its tensors and submodules in: their entries are looked after one by one, or never change in a step.
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_PLAIN = (int, float, str, bool, type(None))
_HOST = torch.device("cpu")


class Remembered:
    """What values hold at any depth, to be made so again.

    Args:
        apart_from: what is not looked into.
    """

    def __init__(self, *apart_from: Any) -> None:
        self._undo: list[Callable[[], None]] = []
        self._seen = set(map(id, apart_from))

    def undo(self) -> None:
        """Make everything what it was."""
        with torch.no_grad():
            for undo in self._undo:
                undo()

    def add_module(self, module: nn.Module) -> None:
        """Remember what a module holds itself, and what is set on its parameters, but not their values."""
        self._seen.add(id(module))
        self.add_attributes(module)
        self.add(module._buffers)
        self._undo += [_undo_of_content(vars(each)) for each in module._parameters.values() if each is not None]

    def add_attributes(self, owner: Any) -> None:
        """Remember the attributes of an object."""
        attributes = attributes_of(owner) or {}
        self._undo.append(_undo_of_content(attributes))
        for name, value in list(attributes.items()):
            if name not in _REGISTRIES:
                self.add(value)

    def add(self, value: Any) -> None:
        """Remember a value."""
        # By its type: classes of one's own may count who asks.
        kind: Any = type(value)
        if kind in _PLAIN:
            return
        if issubclass(kind, tuple):
            for inner in value:
                self.add(inner)
        elif id(value) in self._seen:
            return
        # Such as a metric in a plain dict.
        elif issubclass(kind, nn.Module):
            for module in value.modules():
                self.add_module(module)
        elif (undo := self._undo_of(value)) is not None:
            # The function that undoes refers to the value, so that no other gets its id.
            self._seen.add(id(value))
            self._undo.append(undo)
            for inner in _contents(value):
                self.add(inner)
            # Of tensors, and of dicts of classes of their own, whose entries may be attributes, too.
            if attributes_of(value) is not None and not issubclass(kind, OF_THREADS):
                self.add_attributes(value)
        elif _is_countable(value):
            self._seen.add(id(value))
            self.add_attributes(value)

    def undo_of_tensor(self, tensor: Tensor) -> Callable[[], None]:
        """What makes a tensor what it is now, which is no parameter."""
        return undo_of_tensor(tensor)

    def _undo_of(self, value: Any) -> Callable[[], None] | None:
        """What takes changes of a value back; None if nothing changes or that is not its own to say."""
        kind: Any = type(value)
        if is_parameter(value):
            return None
        if issubclass(kind, Tensor):
            return self.undo_of_tensor(value)
        if is_ndarray(value):
            return undo_of_array(value) if value.nbytes <= _LARGEST_COUNTS else None
        is_container = kind in (list, deque) or issubclass(kind, dict | set)
        return _undo_of_content(value) if is_container else restore_of(value)


class KeptBatch(Remembered):
    """A batch, or its microbatches, before a step runs that may run again, or fail: it may change what it is called with.

    Args:
        given: what it is called with, or may change besides.
        copies: whether copies are kept of tensors; without, it is only known whether they change.
        watches: whether it is known, too, where they tell nobody that they change, as through `.data` and by NumPy.
    """

    def __init__(self, given: Any, *, copies: bool, watches: bool = False) -> None:
        super().__init__()
        self._copies, self._watches = copies, watches
        self._checksums: list[tuple[Tensor, Tensor]] = []
        self._versions: list[tuple[Tensor, int | None]] = []
        self.add(given)

    def has_changed(self) -> bool:
        """Whether a tensor has been changed in place."""
        if any(version_of(tensor) != version for tensor, version in self._versions):
            return True
        with DisableTorchFunction():
            return any(not torch.equal(checksum(tensor), before) for tensor, before in self._checksums)

    def restore(self) -> bool:
        """Make everything what it was; whether that is possible."""
        if self.has_changed() and not self._copies:
            return False
        self.undo()
        return True

    @override
    def undo_of_tensor(self, tensor: Tensor) -> Callable[[], None]:
        """What makes it what it is now, if there is a copy."""
        is_inference = tensor.is_inference()
        self._versions.append((tensor, version_of(tensor)))
        if self._watches and has_strides(tensor) and not (is_inference or is_composed(tensor)):
            with DisableTorchFunction():
                self._checksums.append((tensor, checksum(tensor)))
        # On the host: a device may have no room for it. Those of inference mode do not tell whether they change.
        return undo_of_tensor(tensor, _HOST) if self._copies or is_inference else undo_of_flag(tensor)


def _is_countable(value: Any) -> bool:
    """Whether an object may hold counts of the user's own, as a meter does, and no other thread changes it."""
    kind = type(value)
    # Functions and methods say what they are in a class.
    if issubclass(kind, _LEFT_ALONE) or hasattr(kind, "__get__") or kind.__module__.startswith(_OWN_PACKAGE):
        return False
    attributes = attributes_of(value)
    return attributes is not None and not any(issubclass(type(held), OF_THREADS) for held in attributes.values())


def undo_of_tensor(value: Tensor, place: torch.device | None = None) -> Callable[[], None]:
    """What makes a tensor, which is no parameter, what it is now.

    Args:
        value: the tensor.
        place: where a copy of it is kept; None for where it is itself.
    """
    kept = [(narrowed(part.detach()).to(place or part.device, copy=True), version_of(part)) for part in parts_of(value)]
    sizes = [part.size() if has_strides(part) else None for part in parts_of(value)]
    need_again = undo_of_flag(value)

    def undo() -> None:
        need_again()
        for part, (copy, version), size in zip(parts_of(value), kept, sizes, strict=True):
            # Inference tensors count no versions, and are written to in inference mode alone.
            before, is_inference = copy.to(part.device), part.is_inference()
            # The statistics of a normalization change without a new version.
            may_be_same = has_strides(part) and not is_inference and version_of(part) == version
            if may_be_same and torch.equal(narrowed(part), before):
                continue
            # To end the mode of inference lets gradients be needed.
            with torch.inference_mode(is_inference), torch.no_grad():
                if size is not None and part.size() != size:
                    part.resize_(size)
                # Not another tensor of its memory: a sparse one gets other memory.
                assign(part, before)

    return undo


def undo_of_flag(value: Tensor) -> Callable[[], None]:
    """What makes a tensor need gradients if it does now, and none otherwise."""
    needed = value.requires_grad

    def undo() -> None:
        if value.is_leaf and value.requires_grad != needed:
            value.requires_grad_(needed)

    return undo


def undo_of_array(value: Any) -> Callable[[], None]:
    """What makes an array what it is now. A copy is kept."""
    before = value.copy()

    def undo() -> None:
        if value.flags.writeable:
            value[...] = before

    return undo


def _undo_of_content(value: Any) -> Callable[[], None]:
    before = copied_content(value)

    def undo() -> None:
        # Some classes refuse that, as that of what models of Hugging Face return: past their code.
        if not have_same_content(value, before):
            put_content(value, before)

    return undo


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | deque):
        yield from value

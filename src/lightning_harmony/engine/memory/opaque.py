"""Arguments that are objects, such as key-value caches: a layer may change them, and its recompute must not see that."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.memory.stash import Stashed
from lightning_harmony.engine.structures.tree import is_parameter

# Values of these types hold no tensor, and equal ones tell layers the same.
PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
# Asked of each argument of each call.
_TRANSPARENT = (
    Tensor, *PLAIN, bytes, enum.Enum, slice, range, type, nn.Module, torch.memory_format, torch.layout, torch.Size,
)  # fmt: skip


def is_opaque(value: Any) -> bool:
    """Whether a layer could change ``value``, and tensors may hide in it."""
    return not isinstance(value, _TRANSPARENT) and not callable(value)


class ObjectSnapshot:
    """An object as it was, its tensors shared and not copied. Modules and parameters in it are those of the model.

    Raises:
        TypeError: if the object can't be taken apart.
    """

    def __init__(self, value: Any) -> None:
        self.tensors: list[Tensor] = []
        self._kept: list[Any] = []
        file = io.BytesIO()
        try:
            _Pickler(file, self.tensors, self._kept).dump(value)
        except Exception as error:
            raise TypeError(f"cannot keep a {type(value).__name__} as it is: {error}") from error
        self._pickled = file.getvalue()

    def restore(self, tensors: list[Tensor]) -> Any:
        """A copy of the object with these tensors in place of its own."""
        return _Unpickler(io.BytesIO(self._pickled), tensors, self._kept).load()


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in an object; none where it cannot be taken apart."""
    try:
        return ObjectSnapshot(value).tensors
    except TypeError:
        return []


def with_tensors(value: Any, exchange: Callable[[Tensor], Tensor]) -> Any:
    """A copy of an object with others in the places of its tensors.

    Args:
        value: the object.
        exchange: says which takes the place of a tensor; the tensor itself, if none does.

    Returns:
        The object itself if no tensor is exchanged, or if it can't be taken apart.
    """
    if not is_opaque(value):
        return value
    try:
        snapshot = ObjectSnapshot(value)
    except TypeError:
        return value
    # What is in several places stays one tensor.
    others = {tensor: exchange(tensor) for tensor in dict.fromkeys(snapshot.tensors)}
    if all(tensor is other for tensor, other in others.items()):
        return value
    return snapshot.restore([others[tensor] for tensor in snapshot.tensors])


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Tell Hugging Face models not to fill key-value caches, which training never reads and which stay on the device.

    Transformers itself does so when it checkpoints activations.
    """
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if getattr(config, "use_cache", False) is True}
    try:
        for config in configs.values():
            config.use_cache = False
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor], kept: list[Any]) -> None:
        super().__init__(file)
        self._tensors, self._kept = tensors, kept

    def persistent_id(self, obj: Any) -> tuple[bool, int] | None:
        is_kept = is_parameter(obj) or isinstance(obj, nn.Module)
        if not is_kept and not isinstance(obj, Tensor):
            return None
        found = self._kept if is_kept else self._tensors
        found.append(obj)
        return is_kept, len(found) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor], kept: list[Any]) -> None:
        super().__init__(file)
        self._tensors, self._kept = tensors, kept

    def persistent_load(self, pid: Any) -> Any:
        is_kept, number = pid
        return (self._kept if is_kept else self._tensors)[number]


class StashedObject:
    """An opaque argument, its tensors in the stash."""

    def __init__(self, snapshot: ObjectSnapshot, stash: Callable[[Tensor], Stashed]) -> None:
        self._snapshot = snapshot
        self._requires_grad = [tensor.requires_grad for tensor in snapshot.tensors]
        self._tensors = [stash(tensor) for tensor in snapshot.tensors]
        snapshot.tensors = []

    @classmethod
    def of(cls, leaf: Any, stash: Callable[[Tensor], Stashed]) -> Any:
        """What keeps a leaf of arguments as it is: nothing of a tensor, itself what can't be changed or taken apart."""
        if not is_opaque(leaf):
            return None if isinstance(leaf, Tensor) else leaf
        try:
            return cls(ObjectSnapshot(leaf), stash)
        except TypeError:
            return leaf

    def load(self) -> Any:
        """The object again."""
        tensors = [value.load().detach() for value in self._tensors]
        for tensor, requires_grad in zip(tensors, self._requires_grad, strict=True):
            tensor.requires_grad_(requires_grad)
        return self._snapshot.restore(tensors)

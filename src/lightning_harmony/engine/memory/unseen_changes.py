"""Changes that torch does not count, as through `.data` or NumPy, of tensors that layers take or return."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.operations import Unseen, is_counted
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.engine.structures.strides import compact
from lightning_harmony.engine.structures.tree import tensors_of
from lightning_harmony.errors import UnsupportedModelError

Save = Callable[[Tensor], Any]


class _Seen(NamedTuple):
    """A tensor as it was when it was looked at last.

    Attributes:
        tensor: it.
        version: how often it was changed, as far as torch counts.
        content: what tells its elements from others.
        saved_by: the layer whose graph has saved its memory, if one has.
        memory: that memory, where the graph would not find what the tensor has in its place; None where it would.
    """

    tensor: weakref.ref[Tensor]
    version: int
    content: Tensor
    saved_by: str | None
    memory: int | None


class UnseenChanges:
    """Looks for them in the forward of a microbatch.

    What a layer took is what it was when the layer runs again. But where its graph has saved the memory itself, the backward
    of plain PyTorch finds there what is in it then.

    Args:
        on_host: the context in which tensors are read: what is measured of a layer does not count that.
        on_change: called where one was changed.
    """

    def __init__(self, on_host: Callable[[], AbstractContextManager[None]], on_change: Callable[[], None]) -> None:
        self._on_host, self._on_change = on_host, on_change
        self._seen: dict[int, _Seen] = {}

    def look(self, tensor: Tensor, *, by: str | None = None, saves: bool = False, is_made: bool = False) -> None:
        """Look at a tensor, and whether it was changed since.

        Args:
            tensor: the tensor.
            by: the layer whose own code may have changed it, which it will do again; None for the code between layers.
            saves: whether the graph of that layer has saved its memory.
            is_made: whether that layer has made it: its graph keeps the memory and not the tensor.

        Raises:
            UnsupportedModelError: if the code between layers has changed what a graph has saved.
        """
        content = self.content_of(tensor)
        if content is None:
            return
        memory, saved_by, only_in = _memory(tensor), by if saves else None, None
        seen = self._seen.get(id(tensor))
        if seen is not None and seen.tensor() is tensor and seen.version == tensor._version:
            if not torch.equal(content, seen.content):
                if by is None and seen.saved_by is not None and seen.memory in (None, memory):
                    raise _changed(seen.saved_by)
                self._on_change()
            if not saves:
                saved_by, only_in = seen.saved_by, seen.memory
        only_in = memory if is_made else only_in
        self._seen[id(tensor)] = _Seen(weakref.ref(tensor), tensor._version, content, saved_by, only_in)

    def content_of(self, tensor: Tensor) -> Tensor | None:
        """What tells the elements of a tensor from others, in the order in which they lie; None for one of another kind."""
        if not is_counted(tensor) or is_composed(tensor) or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return None
        with Unseen(), self._on_host():
            # As it lies there, or it would be copied.
            dense = compact(tensor.detach())
            return checksum(dense.as_strided((dense.numel(),), (1,)))

    def before_call(self, layer: str, tensors: Sequence[Tensor]) -> CallChanges:
        """A layer is about to be called with these.

        Raises:
            UnsupportedModelError: as `look`.
        """
        for tensor in tensors:
            self.look(tensor)
        return CallChanges(layer, self)

    def look_again(self) -> None:
        """Look at all that somebody has.

        Raises:
            UnsupportedModelError: as `look`.
        """
        for seen in list(self._seen.values()):
            if (tensor := seen.tensor()) is not None:
                self.look(tensor)


class CallChanges:
    """Looks at what a layer is called with, and at what it returns, when its call is over.

    Args:
        layer: the name of the layer.
        changes: looks at all.
    """

    def __init__(self, layer: str, changes: UnseenChanges) -> None:
        self._layer, self._changes = layer, changes
        # As these live, no other memory is taken for theirs, though it may be free.
        self._saved: dict[int, StorageWeakRef] = {}

    def noting(self, save: Save) -> Save:
        """What saves a tensor for the graph of the call, and notes its memory."""

        def note(tensor: Tensor) -> Any:
            if is_counted(tensor):
                self._saved[_memory(tensor)] = StorageWeakRef(tensor.untyped_storage())
            return save(tensor)

        return note

    def end(self, given: Sequence[tuple[Tensor, Tensor]], result: Any) -> None:
        """The call is over.

        Args:
            given: what the caller has, and what the layer had in place of that.
            result: what the layer has returned.

        Raises:
            UnsupportedModelError: if the layer has changed a copy, of what is on another device.
        """
        for tensor, own in given:
            if own is not tensor and not _are_same(*map(self._changes.content_of, (tensor, own))):
                raise _changed_copy(self._layer)
            self._changes.look(tensor, by=self._layer, saves=self._saves(own))
        known = {id(own) for _, own in given}
        for tensor in tensors_of(result):
            if id(tensor) not in known and self._saves(tensor):
                self._changes.look(tensor, by=self._layer, saves=True, is_made=True)

    def _saves(self, tensor: Tensor) -> bool:
        return is_counted(tensor) and _memory(tensor) in self._saved


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is None or other is None or torch.equal(one, other.to(one.device))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _changed(layer: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a tensor that layer {layer!r} takes or returns, and saves for its backward, was changed afterwards in a way that "
        "torch does not count, as through `.data` or NumPy, and the backward would compute with what it is then: make that "
        "operation out of place"
    )


def _changed_copy(layer: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer!r} changes an input that is on another device in a way that torch does not count, as through `.data`: "
        "make that operation out of place, or use Trainer(devices=1)"
    )

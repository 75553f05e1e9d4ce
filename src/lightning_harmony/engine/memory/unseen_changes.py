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
from lightning_harmony.engine.structures.operations import Unseen, is_counted, viewed
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
        saved_by: the calls of layers whose graphs have saved its memory.
        memory: that memory.
        is_made: whether graphs would not find what the tensor has in the place of that.
    """

    tensor: weakref.ref[Tensor]
    version: int
    content: Tensor
    saved_by: tuple[CallChanges, ...]
    memory: int
    is_made: bool


class _Saved(NamedTuple):
    """What a graph has saved.

    Attributes:
        number: which of all that it saves.
        memory: where it is.
        dtype: of its elements.
        how: its size, strides and offset there.
    """

    number: int
    memory: int
    dtype: torch.dtype
    how: tuple[Any, ...]


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
        # By their memory, the tensors that were looked at, by their identities, and what the code between layers has saved.
        self._at: dict[int, int] = {}
        self._saved_between: dict[int, StorageWeakRef] = {}
        # What the last call took and returned, as far as somebody has it when the next one comes.
        self._last: list[weakref.ref[Tensor]] = []

    def look(
        self, tensor: Tensor, *, by: CallChanges | None = None, saves: bool = False, is_made: bool = False
    ) -> None:
        """Look at a tensor, and whether it was changed since.

        Args:
            tensor: the tensor.
            by: the call of a layer that may have changed it, and will when it runs again; None for the code between layers.
            saves: whether the graph of that call has saved its memory.
            is_made: whether that call has made it: its graph keeps the memory and not the tensor.

        Raises:
            UnsupportedModelError: if other code has changed what the graph of a call has saved.
        """
        content = self.content_of(tensor)
        if content is None:
            return
        memory, saved_by = _memory(tensor), () if by is None or not saves else (by,)
        seen = self._seen.get(id(tensor))
        if seen is not None and seen.tensor() is tensor and seen.version == tensor._version:
            if not torch.equal(content, seen.content):
                others = [call for call in seen.saved_by if call is not by]
                if others and not (seen.is_made and seen.memory != memory):
                    raise _changed(f"layer {others[0].layer!r}")
                if seen.memory in self._saved_between:
                    raise _changed("code between layers")
                self._on_change()
            saved_by, is_made = (*seen.saved_by, *saved_by), is_made or (seen.is_made and not saves)
        self._at[memory] = id(tensor)
        self._seen[id(tensor)] = _Seen(weakref.ref(tensor), tensor._version, content, saved_by, memory, is_made)

    def note_saved(self, tensor: Tensor) -> None:
        """The graph of code between layers has saved a tensor, as it is now.

        Raises:
            UnsupportedModelError: as `look`.
        """
        if is_counted(tensor):
            seen = self._seen.get(self._at.get(memory := _memory(tensor), 0))
            if seen is not None and (known := seen.tensor()) is not None:
                self.look(known)
            self._saved_between[memory] = StorageWeakRef(tensor.untyped_storage())

    def content_of(self, tensor: Tensor) -> Tensor | None:
        """What tells the elements of a tensor from others, as they lie, on the host; None for one of another kind."""
        if not is_counted(tensor) or is_composed(tensor) or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return None
        with Unseen(), self._on_host():
            # As it lies there, or it would be copied.
            dense = compact(tensor.detach())
            return checksum(dense.as_strided((dense.numel(),), (1,))).cpu()

    def before_call(self, layer: str, tensors: Sequence[Tensor]) -> CallChanges:
        """A layer is about to be called with these.

        Raises:
            UnsupportedModelError: as `look`.
        """
        last = [tensor for each in self._last if (tensor := each()) is not None]
        for tensor in {id(each): each for each in [*last, *tensors]}.values():
            self.look(tensor)
        return CallChanges(layer, self)

    def after_call(self, tensors: Sequence[Tensor]) -> None:
        """A layer was called, and took and returned these."""
        self._last = list(map(weakref.ref, tensors))

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

    Attributes:
        layer: that name.
    """

    def __init__(self, layer: str, changes: UnseenChanges) -> None:
        self.layer, self._changes = layer, changes
        # As these live, no other memory is taken for theirs, though it may be free.
        self._saved: dict[int, StorageWeakRef] = {}
        self._places: list[_Saved] = []
        self._left: dict[int, Tensor] = {}

    def noting(self, save: Save) -> Save:
        """What saves a tensor for the graph of the call, and notes its memory."""
        number, self._places = 0, []

        def note(tensor: Tensor) -> Any:
            nonlocal number
            if is_counted(tensor):
                self._saved[_memory(tensor)] = StorageWeakRef(tensor.untyped_storage())
                how = tensor.size(), tensor.stride(), tensor.storage_offset()
                self._places.append(_Saved(number, _memory(tensor), tensor.dtype, how))
            number += 1
            return save(tensor)

        return note

    def end(self, given: Sequence[tuple[Tensor, Tensor]], result: Any) -> None:
        """The call is over.

        Args:
            given: what the caller has, and what the layer had in place of that.
            result: what the layer has returned.

        Raises:
            UnsupportedModelError: as `UnseenChanges.look`.
        """
        made = tensors_of(result)
        for tensor, own in given:
            self._changes.look(tensor, by=self, saves=self._saves(own))
        known = {id(own) for _, own in given}
        for tensor in made:
            if id(tensor) not in known:
                self._changes.look(tensor, by=self, saves=self._saves(tensor), is_made=True)
        self._changes.after_call([*made, *(tensor for tensor, _ in given)])
        there = {_memory(each): each for each in [*made, *(own for _, own in given)] if is_counted(each)}
        for number, memory, dtype, how in self._places:
            if memory in there and there[memory].dtype == dtype:
                content = self._changes.content_of(viewed(there[memory].detach(), Tensor.as_strided, *how))
                if content is not None:
                    self._left[number] = content

    def are_left(self, saved: Sequence[Tensor | None]) -> bool:
        """Whether a recompute that ends with the last tensor that the graph saves brings all as the call has left them.

        Args:
            saved: what the graph saves, in its order; None for what it does not need.
        """
        found = ((content, saved[number]) for number, content in self._left.items())
        return all(it is None or _are_same(content, self._changes.content_of(it)) for content, it in found)

    def _saves(self, tensor: Tensor) -> bool:
        return is_counted(tensor) and _memory(tensor) in self._saved


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is None or other is None or torch.equal(one, other)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _changed(saved_by: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a tensor that a layer takes or returns, and that {saved_by} saves for the backward, was changed afterwards in a way "
        "that torch does not count, as through `.data` or NumPy, and the backward would compute with what it is then: make "
        "that operation out of place"
    )

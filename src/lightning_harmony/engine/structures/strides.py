"""Strides: a tensor's distinct elements as a dense tensor, and back. Kernels are chosen by strides: copies keep them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_harmony.engine.structures.operations import detached, viewed
from lightning_harmony.engine.structures.parts import cloned, is_composed, made_of, parts_of


def has_strides(tensor: Tensor) -> bool:
    """Whether a tensor has a size and strides: a sparse one has not, nor one of the nested ones that torch calls strided."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one range of memory, each place once."""
    return torch.ops.aten.is_non_overlapping_and_dense(tensor)  # type: ignore[no-any-return]


def spanned_bytes(tensor: Tensor) -> int:
    """Bytes of memory from the begin of a tensor's first element to the end of its last one, gaps included."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size() if tensor.numel() else 0


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements are one place in memory, as `Tensor.expand` leaves it: such a tensor cannot be written to."""
    return narrowed(tensor) is not tensor


def narrowed(tensor: Tensor) -> Tensor:
    """The distinct elements of a tensor, where they are: expanded dimensions shrink to one element."""
    if not has_strides(tensor):
        return tensor
    for dim, (extent, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        if stride == 0 and extent > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def compact(tensor: Tensor) -> Tensor:
    """The distinct elements of a tensor as a dense one: expanded dimensions shrink to one element."""
    tensor = narrowed(tensor)
    return tensor if is_dense(tensor) else tensor.contiguous()


def assign(destination: Tensor, source: Tensor) -> None:
    """Let a tensor have the values of another one of its size, which are the same wherever the tensor is expanded."""
    target = narrowed(destination)
    for dim, extent in enumerate(target.size()) if target is not destination else ():
        if extent != destination.size(dim):
            source = source.narrow(dim, 0, extent)
    target.copy_(source)


def restore(compact: Tensor, size: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The tensor of a given size and stride with the elements of its compact form."""
    if compact.stride() == stride and compact.size() == size:
        return compact
    narrowed = torch.Size(min(extent, 1) if step == 0 else extent for extent, step in zip(size, stride, strict=True))
    if compact.size() == narrowed and _same_places(compact, stride):
        return compact.as_strided(size, stride)
    restored = torch.empty_strided(size, stride, dtype=compact.dtype, device=compact.device)
    restored.as_strided(narrowed, stride).copy_(compact)
    return restored


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides. `Tensor.clone` makes one of its own of what is not dense; a subclass may do anything."""
    if is_composed(tensor):
        return made_of(tensor, map(copied, parts_of(tensor)))
    if not has_strides(tensor) or tensor.is_contiguous():
        return Tensor.clone(tensor)
    return restore(Tensor.clone(compact(tensor)), tensor.size(), tensor.stride())


class ViewAgain:
    """A view, to be made once more of what is in the place of its base then.

    Args:
        view: the one.
        base: in whose memory it begins.
        again: gives what lies as the base did.
    """

    __slots__ = ("_again", "_dtype", "_offset", "_size", "_stride")

    def __init__(self, view: Tensor, base: Tensor, again: Callable[[], Tensor]) -> None:
        self._size, self._stride, self._dtype, self._again = view.size(), view.stride(), view.dtype, again
        self._offset = view.storage_offset() - base.storage_offset()

    def load(self) -> Tensor:
        """The same view, without a graph."""
        base = detached(self._again())
        if base.dtype is not self._dtype:
            # It has come in another type since.
            base = base.to(self._dtype)
        return viewed(base, Tensor.as_strided, self._size, self._stride, base.storage_offset() + self._offset)


def places_in_memory(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where tensors are: the identity of the memory, and bytes behind its begin; (0, 0) of one that has no strides."""
    return [
        (tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.element_size())
        if has_strides(tensor) and not is_composed(tensor)
        else (0, 0)
        for tensor in tensors
    ]


def cloned_together(tensors: Sequence[Tensor], places: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Clones of tensors, with their strides: those share memory that had places in one, as views of one tensor.

    Args:
        tensors: what is cloned.
        places: as `places_in_memory` told of what they are copies of.
    """
    clones, in_one = list(map(cloned, tensors)), defaultdict(list)
    for number, (memory, _) in enumerate(places):
        if memory:
            in_one[memory].append(number)
    for numbers in in_one.values():
        if len(numbers) > 1 or clones[numbers[0]].stride() != tensors[numbers[0]].stride():
            # As aligned as they were, since kernels are chosen by that.
            begin = min(places[number][1] for number in numbers) // 16 * 16
            # It grows with what is put there.
            shared = torch.empty(0, dtype=torch.uint8, device=clones[numbers[0]].device).untyped_storage()
            for number in numbers:
                tensor = detached(tensors[number])
                offset = (places[number][1] - begin) // tensor.element_size()
                place = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                place.set_(shared, offset, tensor.size(), tensor.stride())
                assign(place, tensor)
                clones[number].data = place
    return clones


def _same_places(compact: Tensor, stride: tuple[int, ...]) -> bool:
    """Whether elements lie where ``stride`` puts them."""
    steps = zip(compact.size(), compact.stride(), stride, strict=True)
    return all(extent == 1 or own == wanted for extent, own, wanted in steps)


def one_element(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a shape that holds one element, NaN: so results of code that gets past its stand-in are seen to be wrong.

    Code that asks for its address, such as `torch.utils.dlpack.to_dlpack` and kernels of extensions, fails.
    """
    element = torch.full((), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(element)
    return element.expand(shape)

"""Where tensors lie in memory, and how many have it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_harmony.engine.structures.operations import NO_DISPATCH
from lightning_harmony.engine.structures.parts import is_composed

_AnyTensor = TypeVar("_AnyTensor", bound=Tensor)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor is of any size, and knows where it lies."""
    return tensor.layout is torch.strided and tensor.numel() > 0


def num_users(tensor: Tensor) -> int:
    """How many tensors have the memory of a tensor, give or take a constant."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


# Of a tensor that no other has the memory of.
ALONE = num_users(torch.empty(1))


def _holders_of_base(tensor: Tensor) -> tuple[int, int] | None:
    """How many hold what a tensor is a view of, in Python and elsewhere, give or take constants; None for no view."""
    base = tensor._base
    return None if base is None else (sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]


_VIEW_ALONE = _holders_of_base(torch.empty(2)[1:])


def has_memory_alone(tensor: Tensor) -> bool:
    """Whether no other tensor has the memory of a tensor, except for one of which it is a view and which nobody else has."""
    is_hidden = tensor._base is not None and _holders_of_base(tensor) == _VIEW_ALONE
    return num_users(tensor) <= ALONE + is_hidden


def num_holders(content: Mapping[Any, Any], name: Any) -> int:
    """How many places in Python have what is in a dict under a name: that is one of them."""
    return sys.getrefcount(content[name]) - _HELD_ONCE + 1


_ONCE = {"": object()}
_HELD_ONCE = sys.getrefcount(_ONCE[""])


def begins_in(tensor: Tensor, whole: Tensor) -> bool:
    """Whether a tensor begins with an element of a dense one, or one within it. They have their storage in common."""
    begin = whole.storage_offset() * whole.element_size()
    return begin <= tensor.storage_offset() * tensor.element_size() < begin + max(whole.nbytes, 1)


def plain_tensors_in(memories: Collection[int]) -> list[Tensor]:
    """The tensors and parameters in some memories that Python code has, wherever it has them, apart from those of classes.

    It looks at all objects there are, which takes some 50 ms in a process of ordinary size.

    Args:
        memories: by the identities of their storages.
    """
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return [each for each in tensors if memory_of(each) in memories]


def with_others(tensors: Iterable[_AnyTensor], own: Collection[Tensor] = ()) -> set[_AnyTensor]:
    """Those in whose memory Python code has tensors beside them, where that begins in theirs, or the other way round.

    Args:
        tensors: of which to tell.
        own: the other tensors, which do not count.
    """
    shared: dict[int, list[_AnyTensor]] = {}
    for tensor in filter(has_other_users, tensors):
        shared.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    known = {id(each) for each in [*own, *(each for same in shared.values() for each in same)]}
    others = [each for each in plain_tensors_in(shared) if id(each) not in known] if shared else []
    pairs = ((other, each) for other in others for each in shared[other.untyped_storage()._cdata])
    return {each for other, each in pairs if begins_in(other, each) or begins_in(each, other)}


def has_other_users(tensor: Tensor) -> bool:
    """Whether other tensors may have its memory, wherever they are."""
    return has_memory(tensor) and not (is_composed(tensor) or tensor.is_meta) and num_users(tensor) > ALONE


def memory_of(tensor: Tensor) -> int | None:
    """What the memory of a tensor is told from others by; None where it has none that is its own."""
    if (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    ):
        return None
    memory: int = tensor.untyped_storage()._cdata
    return memory


def has_memory_among(tensor: Tensor, memories: Collection[int]) -> bool:
    """Whether a tensor has one of some memories, told by their identities."""
    return bool(memories) and memory_of(tensor) in memories


def place_in_memory(tensor: Tensor) -> tuple[Any, ...]:
    """What stays the same while nobody gives a tensor other data."""
    if tensor.is_meta or type(tensor).__torch_dispatch__ is not NO_DISPATCH:
        # It may have no address.
        return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size()
    # Sooner asked for than the others.
    return tensor.data_ptr(), tensor.size()

"""Parts: the tensors that a tensor of a class such as torchao's consists of, and the same tensor made of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor


def is_composed(tensor: Tensor) -> bool:
    """Whether a tensor's values are in tensors of its own, which its class tells of by ``__tensor_flatten__``."""
    kind = type(tensor)
    return kind is not Tensor and _composes(kind) and tensor.layout is torch.strided


def have_composed(kinds: Iterable[type]) -> bool:
    """Whether classes of operands are such: their own code then runs operations on their parts."""
    return any(map(_composes, kinds))


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors in which a tensor's values are, at any depth: itself, if it is not composed of others."""
    if not is_composed(tensor):
        return (tensor,)
    return tuple(part for inner in _inner(tensor).values() if isinstance(inner, Tensor) for part in parts_of(inner))


def made_of(tensor: Tensor, parts: Iterable[Tensor]) -> Tensor:
    """A tensor like another one, made of other parts, which are given as `parts_of` returns them."""
    made: Tensor = _made_of(tensor, iter(parts))
    return made


def storages_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The strided tensors that a tensor consists of, as far as they can be had."""
    if is_composed(tensor):
        return tuple(strided for part in parts_of(tensor) for strided in storages_of(part))
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def data_of(tensor: Tensor) -> Tensor:
    """A tensor in the same memory that counts its own changes: its `data`, which composed ones do not have."""
    return made_of(tensor, [part.data for part in parts_of(tensor)])


def cloned(tensor: Tensor) -> Tensor:
    """What `clone` returns; of a composed one without a graph, copies of its parts: its class may quantize anew."""
    if is_composed(tensor) and not tensor.requires_grad:
        return made_of(tensor, [part.clone() for part in parts_of(tensor)])
    return tensor.clone()


def are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and type, and are composed in the same way."""
    return bool(_structure_of(one) == _structure_of(other))


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are alike, and have the same values."""
    return are_alike(one, other) and all(map(torch.equal, parts_of(one), parts_of(other)))


def num_bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, as they lie in its parts."""
    return sum(part.numel() * part.element_size() for part in parts_of(tensor))


@cache
def _composes(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def _inner(tensor: Any) -> dict[str, Any]:
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def _structure_of(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    if not is_composed(tensor):
        return tensor.shape, tensor.dtype
    composed: Any = tensor
    _, context = composed.__tensor_flatten__()
    inner = {name: _structure_of(each) for name, each in _inner(tensor).items()}
    return type(tensor), tensor.shape, context, inner


def _made_of(tensor: Any, parts: Iterator[Tensor]) -> Any:
    if not isinstance(tensor, Tensor):
        # An object that holds no values, such as a mesh of devices.
        return tensor
    if not is_composed(tensor):
        return next(parts)
    composed: Any = tensor
    _, context = composed.__tensor_flatten__()
    inner = {name: _made_of(each, parts) for name, each in _inner(tensor).items()}
    return type(composed).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())

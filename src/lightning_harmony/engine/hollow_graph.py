"""Hollow graphs: what autograd made of a call, without the tensors it saved. To run the call again fills these in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._mode_utils import no_dispatch

from lightning_harmony.engine.layer import GRAPH_ESCAPES
from lightning_harmony.errors import UnsupportedModelError

Result = TypeVar("Result")


class _Filled(BaseException):
    """All that the graph saved is there: the rest of the call would only make what it has returned already."""


class _Looks(NamedTuple):
    """What tells tensors apart that a graph saves.

    Runs that make other graphs may save tensors of the same shapes in another order: a product of square matrices saves its
    factors in this order or that, by their strides.
    """

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...] | None
    place_in_weights: int | None

    @classmethod
    def of(cls, tensor: Tensor, weights: int) -> _Looks:
        """What a tensor looks like beside the weights in this storage."""
        if tensor.layout is not torch.strided:
            return cls(tensor.shape, tensor.dtype, None, None)
        place = int(tensor.storage_offset()) if storage_of(tensor) == weights else None
        return cls(tensor.shape, tensor.dtype, tensor.stride(), place)


class _Place:
    """Where a graph saves a tensor.

    Args:
        tensor: what it saved.
        weights: the storage of the layer's weights.
    """

    __slots__ = ("_looks", "_tensor", "_version")

    def __init__(self, tensor: Tensor, weights: int) -> None:
        self._looks = _Looks.of(tensor, weights)
        self._tensor: Tensor | None = None

    def fits(self, tensor: Tensor, weights: int) -> bool:
        """Whether a tensor looks like the one that was saved."""
        return self._looks == _Looks.of(tensor, weights)

    def fill(self, tensor: Tensor) -> None:
        """Here it is again."""
        self._tensor, self._version = tensor, tensor._version

    def load(self) -> Tensor:
        """The tensor, for the backward."""
        if self._tensor is None:
            raise UnsupportedModelError(GRAPH_ESCAPES)
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._looks.shape)} that the backward needs was modified in place after autograd "
                "had saved it"
            )
        return self._tensor


class HollowGraph:
    """The graph of one call.

    It costs no memory of the device. Its backward can follow once the call was run again, and that run ends where the last
    tensor is saved, as with `torch.utils.checkpoint`: for a block that ends with a product, one product earlier.
    """

    def __init__(self) -> None:
        # The graph holds what it is saved with: that must not lead back to the graph.
        self._places: list[_Place] = []
        self._leaves: list[Tensor] = []
        self.inputs: list[GradientEdge] = []
        self.outputs: Sequence[Tensor | GradientEdge | None] = []

    def passed(self, tensor: Tensor) -> Tensor:
        """A leaf as the call may have it: user code may keep that, and the leaf itself is emptied."""
        if not tensor.requires_grad:
            return tensor
        self._leaves.append(tensor)
        passed = tensor.view_as(tensor)
        self.inputs.append(get_gradient_edge(passed))
        return passed

    def saving(self, weights: Tensor) -> AbstractContextManager[Any]:
        """The context of the call that makes the graph.

        Args:
            weights: the memory of the weights that it uses.
        """
        # By its number: the graph holds these functions, and must not hold the weights.
        return saved_tensors_hooks(partial(_save, self._places, storage_of(weights)), _Place.load)

    def close(self, outputs: Sequence[Tensor]) -> bool:
        """The call has returned these; whether its graph can be filled later on."""
        ends = [end_of(output) for output in outputs]
        if not self._places or any(isinstance(end, Tensor) for end in ends):
            return False
        self.outputs = ends
        for leaf in self._leaves:
            empty(leaf)
        self._leaves.clear()
        return True

    def fill(self, run: Callable[[], Result], weights: Tensor) -> Result | None:
        """Run the call again.

        Args:
            run: does so.
            weights: the memory of the weights that it uses now.

        Returns:
            None if the graph is full now. If the call saves other tensors than before, what it returned, with a graph of
            its own.
        """
        filling = _Filling(self._places, storage_of(weights))
        try:
            with saved_tensors_hooks(filling.take, given):
                result = run()
        # User code may have caught it, or wrapped it in an error of its own.
        except (_Filled, Exception):
            if not filling.is_full:
                raise
        # From now on only the graph holds the tensors, and lets go of each as soon as it has no use for it.
        self._places.clear()
        return None if filling.is_full else result


class _Filling:
    """A run that fills places in."""

    def __init__(self, places: Sequence[_Place], weights: int) -> None:
        self._remaining = list(reversed(places))
        self._weights = weights
        self._fits = True
        self.is_full = False

    def take(self, tensor: Tensor) -> Tensor:
        """A tensor is saved."""
        tensor = keep(tensor)
        self._fits = self._fits and bool(self._remaining) and self._remaining[-1].fits(tensor, self._weights)
        if self._fits:
            self._remaining.pop().fill(tensor)
            self.is_full = not self._remaining
        if self.is_full:
            raise _Filled
        return tensor


def empty(leaf: Tensor) -> None:
    """Take a leaf's memory away, though a graph leads to it."""
    with torch.no_grad(), no_dispatch():
        leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)


def end_of(output: Tensor) -> Tensor | GradientEdge | None:
    """Where the backward of an output begins: without the tensor, where its graph lives without that."""
    if not output.requires_grad:
        return None
    # A node in Python lives no longer than the tensors that it made.
    is_bound = output.grad_fn is None or isinstance(output.grad_fn, torch._C._FunctionBase)
    return output if is_bound else get_gradient_edge(output)


def edge_of(leaf: Tensor) -> GradientEdge:
    """Where the gradient of a leaf leaves graphs."""
    with no_dispatch():
        return get_gradient_edge(leaf)


def _save(places: list[_Place], weights: int, tensor: Tensor) -> _Place:
    place = _Place(tensor, weights)
    places.append(place)
    return place


def storage_of(tensor: Tensor) -> int:
    """Which storage a tensor has, by a number that is its own as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


def keep(tensor: Tensor) -> Tensor:
    """What a graph may save of a tensor: without the node that made it, which would hold itself where it saves its result."""
    return tensor.detach()


def given(tensor: Tensor) -> Tensor:
    """What was kept."""
    return tensor

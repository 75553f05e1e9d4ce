"""A tensor that a layer's code finds, kept for the backward, in which that code runs again."""

from __future__ import annotations

from torch import Tensor

from lightning_harmony.engine.memory.stash import Stashed, is_small
from lightning_harmony.engine.memory.tensor_class import TensorClass
from lightning_harmony.engine.structures.operations import detached
from lightning_harmony.engine.structures.strides import copied


class KeptTensor:
    """A tensor that a layer's code finds, kept for the backward.

    Args:
        stashed: it, in the stash.
        tensor: the same.
    """

    def __init__(self, stashed: Stashed, tensor: Tensor) -> None:
        self.stashed = stashed
        self._requires_grad = tensor.requires_grad
        self._class = TensorClass.of(tensor)

    def load(self) -> Tensor:
        """The tensor as it was, without its graph."""
        return self._like(detached(self.stashed.load()))

    def read(self) -> Tensor:
        """The same for who does not change it in place."""
        return self._like(detached(self.stashed.read()))

    def again(self) -> Tensor:
        """Another one like it, which may be changed in place; a large one is so in the stash alone."""
        tensor = detached(self.stashed.load())
        return self._like(copied(tensor) if is_small(tensor) else tensor)

    def _like(self, tensor: Tensor) -> Tensor:
        Tensor.requires_grad_(tensor, self._requires_grad)
        return tensor if self._class is None else self._class.on(tensor)

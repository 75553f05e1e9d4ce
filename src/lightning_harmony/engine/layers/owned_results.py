"""What a call returns or keeps and that outlives its visit: tensors that lie in the memory of weights are copied."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import Tensor

from lightning_harmony.engine.layers.narrow_weight import NarrowWeight, really
from lightning_harmony.engine.memory.opaque import with_tensors
from lightning_harmony.engine.memory.tensor_class import TensorClass
from lightning_harmony.engine.model.attributes import Attributes
from lightning_harmony.engine.model.host_store import lies_in
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.model.weight_copies import WeightCopies
from lightning_harmony.engine.structures.parts import cloned, is_composed
from lightning_harmony.engine.structures.tree import flatten


class OwnedResults:
    """Takes what a call of a layer returns and keeps. Copies are differentiated to what they are copies of.

    Args:
        residency: the layer's weights.
        copies: told of those that are copies of weights.
    """

    def __init__(self, residency: Residency, copies: WeightCopies) -> None:
        self._residency = residency
        self._copies = copies

    def value(self, value: Any) -> Any:
        """What the call returns."""
        if type(value) is Tensor and not value.__dict__:
            return self._tensor(value)
        leaves, unflatten = flatten(value)
        given, leaves = leaves, list(map(really, leaves))
        for leaf in leaves:
            if isinstance(leaf, Tensor) and TensorClass.of(leaf) is not None:
                leaf.__dict__.update({name: self._leaf(inner) for name, inner in leaf.__dict__.items()})
        owned = list(map(self._leaf, leaves))
        return value if all(map(is_, given, owned)) else unflatten(iter(owned))

    def attributes(self, left: Attributes) -> None:
        """What the call has left on the layer's modules."""
        copies = {id(each): self._tensor(each) for each in left.tensors().values() if self._is_borrowed(each)}
        if copies:
            left.exchange(copies)

    def _leaf(self, leaf: Any) -> Any:
        return self._tensor(leaf) if isinstance(leaf, Tensor) else self._object(leaf)

    def _tensor(self, tensor: Tensor) -> Tensor:
        tensor = really(tensor)
        if not lies_in(tensor, self._residency.weights):
            return tensor
        # Not in the lane's own work: what takes the weights' place waits for what the last lane did, and for what computed.
        with self._residency.device.computing():
            if is_composed(tensor):
                return cloned(tensor)
            copy = Tensor.clone(tensor)
        if (parameter := self._residency.parameter_at(tensor)) is not None:
            self._copies.note(copy, tensor, parameter, self._residency.leaves[parameter])
        return copy

    def _object(self, value: Any) -> Any:
        return with_tensors(value, self._tensor)

    def _is_borrowed(self, tensor: Tensor) -> bool:
        return isinstance(tensor, NarrowWeight) or lies_in(tensor, self._residency.weights)

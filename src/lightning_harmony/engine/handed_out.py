"""What a call hands out and that will outlive its visit: what lies in the weights' memory is copied out of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_harmony.engine.attributes import Attributes
from lightning_harmony.engine.guise import Guise
from lightning_harmony.engine.host_store import lies_in
from lightning_harmony.engine.opaque import with_tensors
from lightning_harmony.engine.pack import Residency


class HandedOut:
    """Takes what a call of a layer returns and keeps.

    Args:
        residency: the layer's weights.
        with_graph: whether the call has a graph. Tensors that need gradients, in objects and attributes, are left in it then:
            a backward that comes to them is refused, where a copy would end it in silence.
    """

    def __init__(self, residency: Residency, *, with_graph: bool) -> None:
        self._residency = residency
        self._with_graph = with_graph

    def tensor(self, tensor: Tensor) -> Tensor:
        """One that the call returns."""
        if not lies_in(tensor, self._residency.weights):
            return tensor
        # Not in the lane's own work: what takes the weights' place waits for what the last lane did, and for what computed.
        with self._residency.device.computing():
            return Tensor.clone(tensor)

    def object(self, value: Any) -> Any:
        """Something else that the call returns, in which tensors may be."""
        return with_tensors(value, self._kept)

    def guise(self, guise: Guise) -> Guise:
        """What a tensor of the call looks like, in whose attributes tensors may be."""
        copies = self._copies(value for value in guise.attributes.values() if isinstance(value, Tensor))
        values = {name: copies.get(id(value), value) for name, value in guise.attributes.items()}
        return guise._replace(attributes={name: self.object(value) for name, value in values.items()})

    def attributes(self, left: Attributes) -> None:
        """What the call has left on the layer's modules."""
        copies = self._copies(left.tensors().values())
        if copies:
            left.exchange(copies)

    def _copies(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """What takes the places of some, by their identity."""
        return {id(tensor): kept for tensor in tensors if (kept := self._kept(tensor)) is not tensor}

    def _kept(self, tensor: Tensor) -> Tensor:
        """One in an object or an attribute."""
        return tensor if self._with_graph and tensor.requires_grad else self.tensor(tensor)

"""What a layer's call has to leave alone: its weights on the device, of which swapping would lose what it made."""

from __future__ import annotations

from lightning_harmony.engine.hollow_graph import storage_of
from lightning_harmony.engine.layer import SwappedLayer, changes_data
from lightning_harmony.engine.pack import Residency
from lightning_harmony.errors import UnsupportedModelError


class UnchangedWeights:
    """The weights of a layer before a call of it.

    Args:
        layer: what is called.
        residency: its weights.
    """

    def __init__(self, layer: SwappedLayer, residency: Residency) -> None:
        self._layer, self._residency = layer, residency
        self._memory, self._gathered = self._memory_now()
        # All weights of a pack are views of one buffer, and count their changes together.
        self._version = residency.weights._version

    def check(self) -> None:
        """The call is over.

        Raises:
            UnsupportedModelError: if it changed a weight.
        """
        memory, gathered = self._memory_now()
        if memory != self._memory:
            raise UnsupportedModelError(changes_data(self._layer))
        # In inference mode, to gather weights counts as a change of them.
        if gathered == self._gathered and self._residency.weights._version != self._version:
            raise UnsupportedModelError(
                f"layer {self._layer.name!r} modifies a parameter in place in its forward, which swapping would lose; "
                "do that in a hook such as on_train_batch_start"
            )

    def _memory_now(self) -> tuple[list[int], list[int]]:
        """In which storage each weight is, and each that may be gathered: one whose `.data` is assigned moves."""
        leaves, gathered = self._residency.leaves, self._layer.gathered
        found: tuple[list[int], list[int]] = [], []
        for parameter in self._layer.parameters:
            found[parameter in gathered].append(storage_of(leaves[parameter]))
        return found

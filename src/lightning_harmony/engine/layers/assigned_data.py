"""Data that a layer's code assigns to its weights: `weight.data = ...`, as code does that initialises or bounds them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_harmony.engine.layers.saved_tensors import Saves
from lightning_harmony.engine.model.host_store import lies_in
from lightning_harmony.engine.model.layer import OwnCodeOf, SwappedLayer
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.model.weight_copies import WeightCopies
from lightning_harmony.engine.structures.memory_users import num_users
from lightning_harmony.engine.structures.operations import Unseen


class AssignedData:
    """Changes a trained weight in place where code assigns to its data, which in plain PyTorch gives it other memory.

    Nobody can tell one from the other but who has the old memory, or the new one. What is assigned is noted as a copy of the
    weight, which follows it.

    Args:
        residency: of the layer's pack.
        saves: what the graph of the call saves.
        copies: of the layer's weights; None where its code runs again.
    """

    __slots__ = ("_copies", "_num_users", "_residency", "_saves")

    def __init__(self, residency: Residency, saves: Saves, copies: WeightCopies | None) -> None:
        self._residency, self._saves, self._copies = residency, saves, copies
        self._num_users = num_users(residency.weights)

    def assign(self, weight: Tensor, value: Tensor) -> bool:
        """Give a weight what is in a tensor, if it is trained, and lies as that does; say whether it has it."""
        weights = self._residency.weights
        parameter = self._residency.parameter_at(weight) if lies_in(weight, weights) else None
        if parameter is None or not (weight.requires_grad and _are_alike(weight, value)) or lies_in(value, weights):
            return False
        # Code or a graph that has the old memory would see it change.
        if self._copies is not None and self._has_others(parameter):
            return False
        with torch.inference_mode(False), Unseen():
            weight.detach().copy_(value)
            if self._copies is not None:
                self._copies.note(value, weight.detach(), parameter, self._residency.leaves[parameter])
        return True

    def _has_others(self, parameter: nn.Parameter) -> bool:
        """Whether anybody has tensors in the memory of a parameter that were not there when the code began."""
        return parameter in self._saves.weights or num_users(self._residency.weights) > self._num_users


def own_code(layer: SwappedLayer, residency: Residency, saves: Saves, *, is_again: bool) -> OwnCodeOf:
    """The context of a layer's own code, which may assign to the data of its weights.

    Args:
        layer: the layer.
        residency: of its pack.
        saves: what the graph of the call saves.
        is_again: whether the code runs again.
    """
    return OwnCodeOf(layer, AssignedData(residency, saves, None if is_again else layer.copies).assign)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    both = [(each.layout, each.dtype, each.device, each.size(), each.stride()) for each in (one, other)]
    return type(other) is Tensor and both[0] == both[1]

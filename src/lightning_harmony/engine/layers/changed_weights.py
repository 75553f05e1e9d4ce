"""What the code of a layer does to its weights in a call: swapping would lose that. Frozen ones become buffers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lightning_harmony.engine.layers.call_weights import CallWeights
from lightning_harmony.engine.model.layer import DataAssignedError, SwappedLayer
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.structures.operations import Unseen
from lightning_harmony.engine.structures.parts import are_equal, parts_of
from lightning_harmony.errors import UnsupportedModelError


class DifferentiatesError(UnsupportedModelError):
    """The code of a layer begins a backward in its forward.

    Args:
        layer: which one.
    """

    def __init__(self, layer: SwappedLayer) -> None:
        super().__init__(
            f"a backward starts inside a layer's forward, that of {layer.name!r}, whose saved tensors are not kept, or which "
            "comes to its parameters: compute that gradient in the training_step instead"
        )


class WeightsBefore:
    """The weights of a layer before its code runs.

    Args:
        layer: what is called.
        residency: of its pack.
    """

    def __init__(self, layer: SwappedLayer, residency: Residency) -> None:
        self._layer, self._residency = layer, residency
        self._version = residency.weights._version
        self._gathered = self._storages_of(layer.gathered) if layer.gathered else []
        self._composed = self._storages_of(layer.composed) if layer.composed else []

    def has_to_run_again(
        self, weights: CallWeights, error: DataAssignedError | DifferentiatesError | None, *, may_again: bool
    ) -> bool:
        """Whether the code does for the first time what takes preparations.

        It has changed frozen parameters, as averages of a codebook are: they are buffers of the layer from now on. Or it has
        begun a backward: what its graph saves is kept from now on, while it runs.

        Args:
            weights: as the code found them.
            error: what has ended the code.
            may_again: whether it can run again.

        Raises:
            UnsupportedModelError: if it has changed others, or cannot run again.
        """
        layer, residency = self._layer, self._residency
        is_written, has_changed_wide = residency.weights._version != self._version, weights.have_changed_wide()
        if error is None and not (is_written or has_changed_wide or self._composed):
            return False
        if isinstance(error, DifferentiatesError):
            if not may_again or layer.differentiates:
                raise error
            layer.differentiates = True
            return True
        has_written = is_written and self._gathered == self._storages_of(layer.gathered)
        is_changed = (has_written and not residency.is_as_it_came()) or self._composed != self._storages_of(
            layer.composed
        )
        if error is None and not is_changed and not has_changed_wide:
            return False
        if may_again and not has_changed_wide and self._hold_changed(error):
            return True
        raise error or UnsupportedModelError(
            f"layer {layer.name!r} modifies a parameter in place in its forward, or its data, which swapping would lose; "
            "do that in a hook such as on_train_batch_start, or run the model once before the fit if its first call alone does"
        )

    def _hold_changed(self, error: DataAssignedError | None) -> bool:
        """Make buffers of the frozen parameters that were changed; whether no others were."""
        layer, residency = self._layer, self._residency
        with torch.inference_mode(False), torch.no_grad(), Unseen():
            pairs = [(p, residency.leaves[p]) for p in layer.parameters]
            if any(leaf.dtype is not p.dtype for p, leaf in pairs) or layer.composed or layer.companions:
                return False
            changed = {
                p: leaf
                for p, leaf in pairs
                if (error is not None and leaf is error.weight) or not are_equal(leaf.detach().to(p.device), p.detach())
            }
            found = layer.hold_as_buffers(changed)
            for key in found:
                changed[key.parameter].detach().copy_(key.parameter)
                residency.buffers[key] = key.parameter.detach().to(residency.weights.device, copy=True)
        layer.note_host_buffers(found)
        return bool(found)

    def _storages_of(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """Where weights lie. That cuDNN gathers some counts as a change in inference mode; code may compose others anew."""
        leaves = self._residency.leaves
        return [part.untyped_storage()._cdata for p in parameters for part in parts_of(leaves[p])]

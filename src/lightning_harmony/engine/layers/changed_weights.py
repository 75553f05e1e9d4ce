"""What a layer's code does to its weights in a call: frozen ones become buffers, the host gets what it makes of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_harmony.engine.layers.call_weights import CallWeights
from lightning_harmony.engine.layers.runtime import Runtime
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.model.resident_weight import DataAssignedError
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.operations import Unseen
from lightning_harmony.engine.structures.parts import are_equal, is_composed, parts_of
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


class FoundWeights:
    """The weights that a call of a layer has found.

    Args:
        layer: what is called.
        replaced: what those were, on the host, that its code has changed.
        residency: of its pack, as the code has left it.
        with_graph: whether a backward may come to the call.
    """

    def __init__(
        self, layer: SwappedLayer, replaced: Mapping[nn.Parameter, Tensor], residency: Residency, *, with_graph: bool
    ) -> None:
        self._layer, self.replaced = layer, replaced
        self._num_changes = layer.num_changes
        # In a step, nobody changes any. Where they are not compared at all, no step is real.
        may_change = with_graph and not layer.is_training and residency.checksum is not None
        self._checksums = _checksums(layer, residency) if may_change else {}

    def refuse_changed(self) -> None:
        """Refuse a backward that finds other weights than its forward.

        Raises:
            UnsupportedModelError: if a later call has changed them.
        """
        if self._num_changes != self._layer.num_changes:
            raise UnsupportedModelError(
                f"layer {self._layer.name!r} modifies a parameter in its forward between another call of it and the backward "
                "of that, which would run with other weights than its forward: call the layer once before each backward, or "
                "change its parameters in a hook such as on_train_batch_start"
            )

    def _refuse_changed_by_others(self, residency: Residency) -> None:
        """Refuse weights that others have changed where no step runs. No version tells of it where that was past autograd."""
        now = _checksums(self._layer, residency) if self._checksums else {}
        with torch.inference_mode(False), Unseen(), residency.device.on_host():
            changed = [p for p, then in self._checksums.items() if p in now and not torch.equal(then, now[p])]
        if changed:
            raise UnsupportedModelError(
                f"a parameter of layer {self._layer.name!r}, of shape {tuple(changed[0].shape)}, is changed between a call of "
                "it and the backward of that, which would run with other weights than its forward: change it behind the "
                "backward, or before the forward"
            )

    @contextmanager
    def again(self, residency: Residency) -> Iterator[None]:
        """The context in which the layer's code runs again, and finds them so.

        Raises:
            UnsupportedModelError: if it cannot.
        """
        self.refuse_changed()
        self._refuse_changed_by_others(residency)
        _fill(residency, self.replaced)
        yield
        # The code may have ended behind the last tensor that it saves, and before that change.
        _fill(residency, dict.fromkeys(self.replaced))


class WeightsBefore:
    """The weights of a layer before its code runs.

    Args:
        layer: what is called.
        residency: of its pack.
        runtime: the engine.
        is_compiled: whether the code is compiled.
    """

    def __init__(self, layer: SwappedLayer, residency: Residency, runtime: Runtime, *, is_compiled: bool) -> None:
        self._layer, self._residency, self._runtime = layer, residency, runtime
        self._may_change = not (is_compiled or runtime.is_spread(layer))
        self._version = residency.weights._version
        self._gathered = self._storages_of(layer.gathered) if layer.gathered else []
        self._composed = self._storages_of(layer.composed) if layer.composed else []

    def after(
        self, weights: CallWeights, error: DataAssignedError | DifferentiatesError | None, *, with_graph: bool
    ) -> tuple[FoundWeights, bool]:
        """What the code has found, and whether it has to run again, as it does for the first time what takes preparations.

        It has changed frozen parameters, as averages of a codebook are: they are buffers of the layer from now on. Or it has
        begun a backward: what its graph saves is kept from now on, while it runs. What it makes of trained parameters, as one
        that masks them does, goes to the host at once.

        Args:
            weights: as the code found them.
            error: what has ended the code.
            with_graph: whether a graph is made of it: else it does not run again.

        Raises:
            UnsupportedModelError: if it has changed others, or cannot run again.
        """
        replaced = self._replaced(weights, error, may_again=self._may_change and with_graph)
        return FoundWeights(self._layer, replaced or {}, self._residency, with_graph=with_graph), replaced is None

    def _replaced(
        self, weights: CallWeights, error: DataAssignedError | DifferentiatesError | None, *, may_again: bool
    ) -> Mapping[nn.Parameter, Tensor] | None:
        """What parameters were that the code has changed; None if it has to run again."""
        layer, residency = self._layer, self._residency
        is_written, has_changed_wide = residency.weights._version != self._version, weights.have_changed_wide()
        if error is None and not (is_written or has_changed_wide or self._composed):
            return {}
        if isinstance(error, DifferentiatesError):
            if not may_again or layer.differentiates:
                raise error
            layer.differentiates = True
            return None
        has_written = is_written and self._gathered == self._storages_of(layer.gathered)
        is_changed = (has_written and not residency.is_as_it_came()) or self._composed != self._storages_of(
            layer.composed
        )
        if error is None and not is_changed and not has_changed_wide:
            return {}
        changed = None if has_changed_wide else self._changed(error)
        if changed is not None:
            if not changed and error is None:
                return {}
            if may_again and self._hold(changed):
                return None
            is_its_own = self._may_change and all(layer.num_owners[parameter] == 1 for parameter in changed)
            replaced = self._runtime.keep_changed(changed, residency) if error is None and is_its_own else None
            if replaced is not None:
                layer.num_changes += 1
                return replaced
            _fill(residency, dict.fromkeys(changed))
        raise error or UnsupportedModelError(
            f"layer {layer.name!r} modifies a parameter in place in its forward, or its data, which swapping would lose where "
            "the parameter is not the layer's alone, is used by code between layers in the same microbatch, or is cast or "
            "compiled, or where microbatches of one layer are on several devices; do that in a hook such as "
            "on_train_batch_start, or run the model once before the fit if its first call alone does"
        )

    def _changed(self, error: DataAssignedError | None) -> dict[nn.Parameter, nn.Parameter] | None:
        """The parameters that were changed, as they are on the device; None if that cannot be told."""
        layer, leaves = self._layer, self._residency.leaves
        if any(leaves[p].dtype is not p.dtype for p in layer.parameters) or layer.composed or layer.companions:
            return None
        with torch.inference_mode(False), Unseen():
            return {
                p: leaf
                for p, leaf in ((p, leaves[p]) for p in layer.parameters)
                if (error is not None and leaf is error.weight) or not are_equal(leaf.detach().to(p.device), p.detach())
            }

    def _hold(self, changed: Mapping[nn.Parameter, nn.Parameter]) -> bool:
        """Make buffers of what was changed, if all of that is frozen."""
        layer, residency = self._layer, self._residency
        found = layer.hold_as_buffers(changed)
        if found:
            _fill(residency, dict.fromkeys(changed))
        with torch.inference_mode(False), Unseen():
            for key in found:
                residency.buffers[key] = key.parameter.detach().to(residency.weights.device, copy=True)
        layer.note_host_buffers(found)
        return bool(found)

    def _storages_of(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """Where weights lie. That cuDNN gathers some counts as a change in inference mode; code may compose others anew."""
        leaves = self._residency.leaves
        return [part.untyped_storage()._cdata for p in parameters for part in parts_of(leaves[p])]


def _checksums(layer: SwappedLayer, residency: Residency) -> dict[nn.Parameter, Tensor]:
    """Of a layer's weights as they are on the device, of those that are of the type that they have on the host."""
    with torch.inference_mode(False), Unseen(), residency.device.on_host():
        return {
            p: checksum(residency.leaves[p])
            for p in layer.parameters
            if not is_composed(residency.leaves[p]) and residency.leaves[p].dtype is p.dtype
        }


def _fill(residency: Residency, values: Mapping[nn.Parameter, Tensor | None]) -> None:
    """Give parameters on a device these values, or what the host has of them."""
    if values:
        with torch.inference_mode(False), Unseen():
            for parameter, value in values.items():
                residency.leaves[parameter].detach().copy_(parameter if value is None else value)

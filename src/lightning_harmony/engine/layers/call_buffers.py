"""The buffers of a layer in one of its calls: it may change them, and its recompute must find them as the call did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.structures.strides import copied


class CallBuffers:
    """What a call finds in the layer's buffers, and leaves there.

    Args:
        layer: what is called.
        residency: of its pack.
        copies: whether to copy them before the call. Else they are compared for as long as it isn't known which ones calls
            change.
    """

    def __init__(self, layer: SwappedLayer, residency: Residency, *, copies: bool) -> None:
        self._layer = layer
        self.bound = {key: residency.buffers[key] for key in layer.buffers}
        copies = copies or layer.has_unknown_buffers()
        self._before = {key: copied(tensor) for key, tensor in self.bound.items()} if copies else {}
        self._versions = {key: tensor._version for key, tensor in self.bound.items()}

    def take_over(self, residency: Residency, left: Mapping[BufferKey, Tensor | None]) -> list[BufferKey]:
        """Let the pack have those that the layer changed or replaced.

        Args:
            residency: of the pack.
            left: what the layer had after the call.

        Returns:
            Which ones.
        """
        resident, layer = residency.buffers, self._layer
        if layer.has_unknown_buffers():
            layer.note_calls(self._before, left)
        changed = [
            key
            for key, tensor in left.items()
            if tensor is not None
            and (
                tensor is not resident[key]
                or tensor._version != self._versions[key]
                or _is_statistic(key)
                or key in layer.unversioned_buffers
            )
        ]
        resident.update({key: tensor.detach() for key in changed if (tensor := left[key]) is not None})
        residency.dirty_buffers.update(changed)
        layer.changed_buffers.update(changed)
        self._keep(changed)
        return changed

    def _keep(self, changed: Iterable[BufferKey]) -> None:
        """Keep what a recompute must find."""
        self._before = {key: self._before[key] for key in changed if key in self._before}
        self.bound = {}

    def as_they_were(self, residency: Residency) -> dict[BufferKey, Tensor]:
        """What the recompute finds; what it does to those that calls change is dropped."""
        buffers = {key: residency.buffers[key] for key in self._layer.buffers}
        return buffers | {key: copied(tensor) for key, tensor in self._before.items()}


def _is_statistic(key: BufferKey) -> bool:
    """Whether a buffer is one that batch and instance norm kernels update, which count no version."""
    owner, name = key
    return owner.training and name in ("running_mean", "running_var")

"""The buffers of a layer in one of its calls: it may change them, and its recompute must find them as the call did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from lightning_harmony.engine.layer import BufferKey, SwappedLayer
from lightning_harmony.engine.pack import Residency


class CallBuffers:
    """Binds them for the call, and again for its recompute.

    Attributes:
        given_gradients: those that the layer's code has made leaves of its graph, such as a zero that losses are added to.
            Nobody reads their gradients.

    Args:
        layer: what is called.
    """

    def __init__(self, layer: SwappedLayer) -> None:
        self.given_gradients: list[Tensor] = []
        self._layer = layer
        self._before: dict[BufferKey, Tensor] = {}
        self._versions: dict[BufferKey, int] = {}

    def copies(self, residency: Residency) -> dict[BufferKey, Tensor]:
        """Copies of the layer's own: its pack may have those of many layers."""
        return {key: residency.buffers[key].clone() for key in self._layer.buffers}

    @contextmanager
    def bound(self, residency: Residency) -> Iterator[dict[BufferKey, Tensor | None]]:
        """The context of the call; when it is left, what is yielded holds what the layer has then."""
        buffers = {key: residency.buffers[key] for key in self._layer.buffers}
        with self._layer.bound(residency.leaves, buffers) as left:
            self._versions = {key: tensor._version for key, tensor in buffers.items()}
            yield left
        self._note_leaves(buffers)

    def take_over(
        self, residency: Residency, left: Mapping[BufferKey, Tensor | None], before: Mapping[BufferKey, Tensor]
    ) -> list[BufferKey]:
        """Let the pack have those that the layer changed or replaced.

        Args:
            residency: of the pack.
            left: what the layer had after the call.
            before: copies from before the call, where it is not yet known which ones calls change.

        Returns:
            Which ones.
        """
        resident, layer = residency.buffers, self._layer
        if layer.has_unknown_buffers():
            layer.note_calls(before, left)
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
        return changed

    def keep(self, before: Mapping[BufferKey, Tensor], changed: Iterable[BufferKey]) -> None:
        """Keep what a recompute must find."""
        self._before = {key: before[key] for key in changed}

    @contextmanager
    def as_they_were(self, residency: Residency) -> Iterator[None]:
        """The context of the recompute; what it does to them is dropped."""
        buffers = {key: residency.buffers[key] for key in self._layer.buffers}
        buffers |= {key: tensor.clone() for key, tensor in self._before.items()}
        with self._layer.bound(residency.leaves, buffers):
            yield
        self._note_leaves(buffers)

    def _note_leaves(self, bound: Mapping[BufferKey, Tensor]) -> None:
        self.given_gradients = [
            tensor
            for (owner, name), tensor in bound.items()
            if tensor.requires_grad and (own := owner._buffers[name]) is not None and not own.requires_grad
        ]


def _is_statistic(key: BufferKey) -> bool:
    """Whether a buffer is one that batch and instance norm kernels update, which count no version."""
    owner, name = key
    return owner.training and name in ("running_mean", "running_var")

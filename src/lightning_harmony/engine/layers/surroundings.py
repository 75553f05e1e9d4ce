"""The contexts of a layer's own code."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import Residency


class Surroundings:
    """Those of layers on one device, where all that their code finds is at hand."""

    def takes_whole(
        self, layer: SwappedLayer, residency: Residency, tensors: Sequence[Tensor], *, has_objects: bool
    ) -> bool:
        """Whether the inputs of a call that are on other devices come as a whole, and not for each use.

        Args:
            layer: what is called.
            residency: of its pack.
            tensors: what it is called with.
            has_objects: whether tensors may hide among the arguments.
        """
        return True

    def running(self, residency: Residency) -> AbstractContextManager[None]:
        """The context of a layer's own code."""
        return nullcontext()

    def reaching(
        self,
        layer: SwappedLayer,
        residency: Residency,
        given: Sequence[Tensor],
        *,
        takes_objects: bool,
        is_compiled: bool,
    ) -> AbstractContextManager[None]:
        """The context of a layer's forward: it may use tensors of its own wherever they are.

        Args:
            layer: the layer.
            residency: of its pack.
            given: what it is called with, if it does not run again.
            takes_objects: whether it is called with objects, in which tensors may be.
            is_compiled: whether its code is.
        """
        return nullcontext()

    def differentiating(self, residency: Residency) -> AbstractContextManager[None]:
        """The context in which a backward runs through a layer, from node to node."""
        return nullcontext()

    def compiling(self) -> AbstractContextManager[None]:
        """The context of a compiled layer, whatever becomes of compiled code around it."""
        return nullcontext()

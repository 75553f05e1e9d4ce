"""What a rehearsed step was seen to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.engine.rehearsal.fakes import FakeStore
from lightning_harmony.engine.rehearsal.work_by_layer import WorkByLayer
from lightning_harmony.plan.outlook.work import LayerProfile, StepProfile


@dataclass
class RehearsedStep:
    """A step that has run on fake tensors.

    Attributes:
        layers: of the model, with those that its code between layers uses parameters of.
        by_layer: what counts to each.
        store: where parameters would live.
        num_parameters: their elements.
        buffer_bytes: of all buffers.
        microbatch_bytes: of the batch.
    """

    layers: Sequence[SwappedLayer]
    by_layer: WorkByLayer
    store: FakeStore
    num_parameters: int
    buffer_bytes: int
    microbatch_bytes: int

    def profile(self, first: RehearsedStep) -> StepProfile:
        """What was seen, for predictions.

        Args:
            first: the rehearsal of a first step, with weights as they are.
        """
        seen: set[nn.Parameter] = set()
        layers = []
        for layer, wide in zip(self.layers, first.layers, strict=True):
            trained = [p for p in layer.parameters if p.requires_grad and p not in seen]
            seen.update(layer.parameters)
            totals = self.by_layer.totals[layer.index]
            layers.append(
                LayerProfile(
                    cost=self.by_layer.work.cost(layer, self.store),
                    first_cost=first.by_layer.work.cost(wide, first.store),
                    swapped_bytes=self._swapped_bytes(layer),
                    trained_bytes=sum(p.numel() * p.element_size() for p in trained),
                    num_trained=sum(p.numel() for p in trained),
                    held=totals.held,
                    first_held=first.by_layer.totals[layer.index].held,
                    input_bytes=totals.input_bytes,
                    stash_bytes=totals.stash_bytes,
                    num_calls=totals.num_calls,
                    forward=totals.forward,
                    backward=totals.backward,
                    recompute=totals.recompute,
                )
            )
        return StepProfile(
            layers=tuple(layers),
            calls=tuple(self.by_layer.calls),
            weight_bytes=self.store.num_bytes,
            num_parameters=self.num_parameters,
            buffer_bytes=self.buffer_bytes,
            microbatch_bytes=self.microbatch_bytes,
            start_bytes=self.by_layer.start_bytes,
            loss_bytes=max(self.by_layer.loss_bytes, first.by_layer.loss_bytes),
        )

    def _swapped_bytes(self, layer: SwappedLayer) -> int:
        """What crosses the bus to bring a layer."""
        pack = SwappedPack(-1, [layer], self.store)
        return pack.layout.copied_bytes + pack.buffer_bytes

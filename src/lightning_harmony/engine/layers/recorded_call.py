"""A call of a recorded layer: one node in the caller's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_harmony.engine.devices.recording import RecordingError
from lightning_harmony.engine.lanes.rng import RandomState
from lightning_harmony.engine.layers.call_weights import double_backward, second_backward
from lightning_harmony.engine.layers.recorded_layer import Backward, Gradients, RecordedLayer
from lightning_harmony.engine.layers.recordings import Recordings
from lightning_harmony.engine.layers.runtime import Runtime
from lightning_harmony.engine.memory.kept_tensor import KeptTensor
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.structures.strides import copied
from lightning_harmony.engine.updates.requested_gradients import requested_gradients
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.plan.values.task import Phase


class RecordedCall:
    """One call of a recorded layer: nothing of its code runs.

    Args:
        recorded: what runs in the place of the layer.
        recordings: keep that.
        runtime: the engine.

    Attributes:
        have_gradients: whether each tensor that it returns has one.
    """

    def __init__(self, recorded: RecordedLayer, recordings: Recordings, runtime: Runtime) -> None:
        self._layer, self._recorded, self._recordings, self._runtime = recorded.layer, recorded, recordings, runtime
        self.have_gradients = recorded.have_gradients
        self._inputs: list[KeptTensor] | None = None

    def run(self, anchor: Tensor, tensors: Sequence[Tensor], residency: Residency) -> Any:
        """What the call returns.

        Args:
            anchor: makes the call part of the graph.
            tensors: that it is called with, on the layer's device.
            residency: of the layer's pack.
        """
        recorded, runtime = self._recorded, self._runtime
        self._layer.is_in_graph = True
        inputs, is_compared = [tensor.detach() for tensor in tensors], self._recordings.has_compared(recorded)
        random = None if is_compared and not recorded.draws else RandomState.capture(residency.cuda_index)
        self._random = random if recorded.draws else None
        # First: to keep inputs may take room, for which what is recorded would go.
        outputs = recorded.forward(residency, inputs)
        if random is not None and not is_compared:
            self._recordings.compare(recorded, residency, inputs, random, outputs)
        self._is_announced = bool(recorded.trained)
        self._use = runtime.expect_backward(self._layer) if self._is_announced else 0
        self._inputs = [KeptTensor(runtime.stash(tensor), tensor) for tensor in tensors]
        used = [tensors[number] for number in recorded.uses]
        return recorded.returned(_Node.apply(anchor, self, outputs, *used))

    def backward(self, gradients: Sequence[Tensor | None], anchor: Any) -> Sequence[Tensor | None]:
        """The gradients of the inputs' uses; those of weights go to the pack's sum.

        Args:
            gradients: of what the call has returned.
            anchor: the node that knows whose gradients are asked for.
        """
        layer, runtime, recorded = self._layer, self._runtime, self._recorded
        if torch.is_grad_enabled():
            raise double_backward(layer)
        summed = requested_gradients(anchor, layer.parameters, f"layer {layer.name!r}")
        with runtime.calling(), runtime.visit(layer, Phase.BACKWARD) as residency:
            with runtime.surroundings.running(residency):
                found = self._differentiated(residency, gradients)
            weights = found.weights
            if runtime.is_spread(layer) or any(parameter._backward_hooks for parameter in recorded.trained):
                # The next replay writes there: who adds them up beside what computes, or keeps one, has a copy.
                weights = [None if each is None else copied(each) for each in weights]
            pairs = zip(recorded.trained, weights, strict=True)
            runtime.accumulate(layer, self._use, [(p, g) for p, g in pairs if g is not None and p in summed])
            if runtime.is_last_backward():
                if self._is_announced:
                    runtime.end_backward(layer)
                self._is_announced, self._inputs = False, None
        return found.uses

    def _differentiated(self, residency: Residency, gradients: Sequence[Tensor | None]) -> Gradients:
        layer = self._layer
        if self._inputs is None:
            raise second_backward(layer)
        coming = Backward(residency, [each.read() for each in self._inputs], gradients, self._random)
        try:
            found = self._recorded.backward(coming)
        except RecordingError as error:
            raise UnsupportedModelError(
                f"layer {layer.name!r} does something else when it runs again than when it was recorded ({error}): use "
                "HarmonyStrategy(cuda_graphs=False)"
            ) from error
        self._recordings.note_backward(self._recorded, coming, found)
        return found


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: RecordedCall, outputs: Sequence[Tensor], *used: Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        pairs = zip(outputs, call.have_gradients, strict=True)
        ctx.mark_non_differentiable(*[output for output, has_gradient in pairs if not has_gradient])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, None, *ctx.call.backward(gradients, ctx.next_functions[0][0])

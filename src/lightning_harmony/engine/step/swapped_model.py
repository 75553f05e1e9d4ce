"""The model as it is swapped: its layers, and what of it no layer owns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from lightning_harmony.engine.glue.buffer_stand_in import BufferStandIn
from lightning_harmony.engine.glue.runtime import Runtime
from lightning_harmony.engine.model.derived import DerivedWeight
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import (
    BufferKey,
    ParameterKey,
    SwappedLayer,
    buffers_of,
    host_buffer,
    move_buffers,
)
from lightning_harmony.engine.model.staying_buffers import StayingBuffers
from lightning_harmony.engine.structures.tree import SwappedParameters
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.plan.values.plan import visits_of


class SwappedModel:
    """A model whose layers are swapped.

    Args:
        module: the model. Buffers that no layer owns are on the root device from now until `close`.
        layers: those of its modules that are scheduled.
        store: where its parameters live.
        root: the device where its own code runs.
        compute_dtype: the type in which layers compute; None for those of their parameters.

    Attributes:
        layers: the same layers, and those that parameters are when glue uses them.
        glue_layers: the latter, by their parameters.
        names: of its parameters.
        derived: the weights that hooks of layers compute, by their qualified names.
        compute_dtype: the type in which layers compute.
        held: frozen parameters that layers set in their forward, with these, and the buffers that they are.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[SwappedLayer],
        store: HostStore,
        root: torch.device,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.layers = list(layers)
        self.compute_dtype = compute_dtype
        self.glue_layers: dict[nn.Parameter, SwappedLayer] = {}
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self._module = module
        self._store = store
        self._root = root
        writes: Counter[BufferKey] = Counter()
        self._changed_buffers: set[BufferKey] = set()
        self._shown_buffers: dict[BufferKey, BufferStandIn] = {}
        self._parameters = SwappedParameters(module.parameters())
        self._num_owners = Counter(p for layer in layers for p in layer.parameters)
        self.held: dict[nn.Parameter, tuple[SwappedLayer, ParameterKey]] = {}
        # What those were before the step that microbatches take turns in.
        self._held_before: dict[nn.Parameter, Tensor] = {}
        staying = StayingBuffers([key for layer in self.layers for key in layer.staying_buffers])
        for layer in self.layers:
            layer.attributes.staying = staying
            layer.buffer_writes, layer.changed_buffers = writes, self._changed_buffers
            layer.held, layer.num_owners = self.held, self._num_owners
        # They stay on the device throughout.
        move_buffers(self._unowned_buffers(), root)
        self.derived = self._derived_weights()

    def _unowned_buffers(self) -> list[BufferKey]:
        owned = {key for layer in self.layers for key in layer.buffers}
        return [key for key in buffers_of(self._module) if key not in owned]

    def _derived_weights(self) -> dict[str, DerivedWeight]:
        names = {id(owner): name for name, owner in self._module.named_modules()}
        weights = [weight for layer in self.layers for weight in layer.derived]
        return {f"{names[id(weight.owner)]}.{weight.name}": weight for weight in weights}

    def is_shared(self, parameter: nn.Parameter) -> bool:
        """Whether several layers own a parameter."""
        return self._num_owners[parameter] + (parameter in self.glue_layers) > 1

    def is_only_user(self, layer: SwappedLayer, parameter: nn.Parameter) -> bool:
        """Whether of those that own a parameter the step uses this one alone, so far."""
        if not self.is_shared(parameter):
            return True
        owners = (each for each in self.layers if any(parameter is own for own in each.parameters))
        return [each for each in owners if each.is_in_graph] == [layer]

    def add_glue_layer(self, parameter: nn.Parameter) -> SwappedLayer:
        """Make a layer of a parameter that glue uses."""
        layer = SwappedLayer(len(self.layers), self.names[parameter], None, [parameter], self.compute_dtype)
        layer.held = self.held
        self.glue_layers[parameter] = layer
        self.layers.append(layer)
        return layer

    def has_other_parameters(self) -> bool:
        """Whether the model has parameters that it had not when it was set up."""
        return any(parameter not in self._store for parameter in self._module.parameters())

    def catch_up(self) -> None:
        """Before a step, see to what was done to parameters since the last one.

        Raises:
            UnsupportedModelError: if one has another type or shape, or something that is kept of one has.
        """
        self.follow(self.names)
        self.bring_copies_up()
        for parameter, name in self.names.items():
            if parameter._post_accumulate_grad_hooks:
                raise UnsupportedModelError(
                    f"parameter {name!r} has a hook that waits for its gradient (register_post_accumulate_grad_hook), but "
                    "gradients are summed elsewhere: use on_after_backward, or leave the update just in time to the strategy"
                )

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """See where parameters are now.

        Raises:
            UnsupportedModelError: if one has another type or shape.
        """
        misfits = self._store.follow(parameters)
        if misfits:
            raise UnsupportedModelError(
                f"parameter {self.names[misfits[0]]!r} was given another type or shape during the fit, or other data than an "
                "object has of it, but layers are swapped as they were at its start; do that before the fit"
            )

    def keeps_copies(self) -> bool:
        """Whether somebody keeps what layers have left of their weights."""
        return any(layer.copies for layer in self.layers)

    def bring_copies_up(self) -> None:
        """What layers have left of their weights becomes what these are now."""
        for layer in self.layers:
            layer.copies.follow()

    def begin_step(self, *, is_training: bool, runtime: Runtime) -> None:
        """Lanes run from now on: nobody but the layers may change their buffers in a training step.

        Args:
            is_training: whether it is a training step.
            runtime: reads buffers for the code between layers.
        """
        host_buffers: dict[BufferKey, tuple[Tensor, int | None]] = {}
        self._changed_buffers.clear()
        self._held_before.clear()
        for layer in self.layers:
            layer.is_training, layer.host_buffers, layer.is_in_graph = is_training, host_buffers, False
            buffers = [(key, host_buffer(key)) for key in layer.buffers]
            self.show_buffers(layer, {key: buffer for key, buffer in buffers if _is_plain(buffer)}, runtime)

    def show_buffers(
        self, layer: SwappedLayer, newest: Mapping[BufferKey, Tensor], runtime: Runtime, *, keeps: bool = False
    ) -> None:
        """Let stand-ins take the places of a layer's buffers until the step ends: the layer has them where it computes.

        Args:
            layer: whose they are.
            newest: what is in them.
            runtime: reads them.
            keeps: whether to keep what parameters are on the host that are among them, until the next step.
        """
        for key, tensor in newest.items():
            if isinstance(key, ParameterKey):
                if keeps and key.parameter not in self._held_before:
                    self._held_before[key.parameter] = key.parameter.detach().clone()
                continue
            host, known = host_buffer(key), self._shown_buffers.get(key)
            assert host is not None
            if known is None or known.is_kept or (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                with torch.inference_mode(False):
                    known = BufferStandIn.of(host, tensor, self._root, layer, key, runtime)
                self._shown_buffers[key] = known
            known.host_buffer = host
            key[0]._buffers[key[1]] = known

    def end_step(self) -> None:
        """No lane runs any more."""
        for key, stand_in in self._shown_buffers.items():
            if key[0]._buffers.get(key[1]) is stand_in:
                key[0]._buffers[key[1]] = stand_in.host_buffer
        for layer in self.layers:
            layer.is_training, layer.host_buffers = False, {}

    def take_back_parameters(self) -> None:
        """Make parameters that layers have set what they were before the step in which microbatches took turns."""
        with torch.no_grad():
            for parameter, before in self._held_before.items():
                parameter.copy_(before)

    def refuse_changed_buffers(self) -> None:
        """Refuse a step in which others than the layers change their buffers.

        Raises:
            UnsupportedModelError: naming the buffer.
        """
        for layer in self.layers:
            layer.refuse_changed_buffers()

    def buffer_of_several_visits(self, calls: Sequence[int]) -> str | None:
        """A buffer that layers change in one visit of a microbatch and find in another; None if there is none.

        Of microbatches that take turns, each would find there what the others have left.

        Args:
            calls: of a microbatch, the layers by their indices.
        """
        found: set[BufferKey] = set()
        for index in visits_of(calls) if self._changed_buffers else ():
            layer = self.layers[index]
            own = [key for key in layer.buffers if key in self._changed_buffers]
            for key in own:
                if key in found:
                    return f"buffer {key[1]!r} of layer {layer.name!r}"
            found.update(own)
        return None

    def close(self) -> None:
        """Bring back the buffers that were moved, and those that the code between layers has made on a GPU."""
        move_buffers(buffers_of(self._module), torch.device("cpu"))


def _is_plain(buffer: Tensor | None) -> TypeGuard[Tensor]:
    return type(buffer) is Tensor and buffer.layout is torch.strided

"""Recompute: a layer's code runs again as it ran in one call, with the inputs, buffers and settings that it found then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.lanes.ambient import AmbientState
from lightning_harmony.engine.lanes.rng import RandomState
from lightning_harmony.engine.layers.call_arguments import CallArguments
from lightning_harmony.engine.layers.call_buffers import CallBuffers
from lightning_harmony.engine.layers.runtime import FoundAtCall, ObjectsOfCall, Runtime
from lightning_harmony.engine.layers.saved_tensors import Saves, checkpoint_around
from lightning_harmony.engine.memory.kept_tensor import KeptTensor
from lightning_harmony.engine.memory.opaque import StashedObject, is_opaque
from lightning_harmony.engine.model.attributes import Attributes
from lightning_harmony.engine.model.companions import CallChanges
from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.structures.operations import is_counted, version_counter, version_of
from lightning_harmony.engine.structures.strides import cloned_together, places_in_memory
from lightning_harmony.errors import UnsupportedModelError


class Recompute:
    """What it takes to run a layer's code again as it ran in one call.

    Args:
        layer: what is called.
        runtime: the engine.
        arguments: what it is called with.

    Attributes:
        attributes: of the layer's modules, as the call found them.
        changes: of attributes of parameters and objects, once the call has run.
        has_inputs: whether it has inputs of its own, and not only those of the caller.
        counts: whether what the recompute in the backward makes of buffers counts: the layer changes them, and is called in
            a checkpoint, for which plain PyTorch would call it again. A checkpoint that does so for what is between layers
            changes nothing more.
    """

    def __init__(self, layer: SwappedLayer, runtime: Runtime, arguments: CallArguments) -> None:
        self._layer, self._runtime, self._arguments = layer, runtime, arguments
        self._inputs: list[KeptTensor] = []
        self._objects: list[Any] = []
        self._places: list[tuple[int, int]] = []
        self.has_inputs = False
        self.changes = CallChanges()
        self.attributes: Attributes = layer.attributes.read()
        checkpoint, self._is_again = checkpoint_around() if layer.buffers else (None, False)
        changes = bool(layer.changing_buffers) or layer.has_unknown_buffers()
        self._checkpoint = None if checkpoint is None or self._is_again else weakref.ref(checkpoint)
        self.counts = self._checkpoint is not None and changes

    def keep_inputs(self, residency: Residency) -> None:
        """Stash what the layer is called with."""
        arguments, layer, runtime = self._arguments, self._layer, self._runtime
        self.note_later_changes()
        self._inputs = [
            KeptTensor(runtime.stash(runtime.at_layer(tensor, residency)), tensor) for tensor in arguments.tensors
        ]
        if layer.changes_inputs is not False:
            for each in self._inputs:
                each.stashed.settle()
            self._places = places_in_memory(arguments.tensors)
        self._objects = [StashedObject.of(leaf, runtime.stash) for leaf in arguments.leaves]
        self.has_inputs = True

    def begin(self, residency: Residency, *, with_graph: bool, is_certain: bool) -> None:
        """The layer's code is about to run: note what it finds.

        Args:
            residency: of the layer's pack.
            with_graph: whether a graph is made of it.
            is_certain: whether it will run again: else the state of the process and of generators may not be needed.
        """
        found = FoundAtCall()
        if is_certain:
            again = [leaf for leaf in self._objects if not isinstance(leaf, StashedObject | NoneType)]
            given = self._arguments.given if with_graph else ()
            own, stash = self._layer.attributes, self._runtime.stash
            objects = ObjectsOfCall(given, again, self.attributes.objects, stash, own.staying.memory(), own.modules)
            found = self._runtime.listeners.on_call(objects)
            self._random, self._ambient = RandomState.capture(residency.cuda_index), AmbientState()
        self._restore, self._elsewhere = found
        self._states = list(map(_state, self._arguments.tensors))
        self._staying = self._layer.attributes.staying.look()
        last_filled = self._runtime.last_filled() if self._layer.buffers else {}
        self._buffers = CallBuffers(self._layer, residency, last_filled, copies=with_graph, drops=self._is_again)

    def take_back(self, residency: Residency) -> None:
        """Make all that the layer's code finds what it was before it ran: it runs once more, as if it had not.

        Raises:
            UnsupportedModelError: if it changes what is not taken back.
        """
        name = "one of its inputs" if self._have_inputs_changed() else self._restore()
        if name is not None:
            raise _runs_twice(self._layer, name)
        self.attributes.restore()
        self._random.restore(residency.cuda_index)
        self._buffers.restore(residency)
        last_filled = self._runtime.last_filled()
        self._buffers = CallBuffers(self._layer, residency, last_filled, copies=True, drops=self._is_again)

    @property
    def buffers(self) -> Mapping[BufferKey, Tensor]:
        """Those that the call finds."""
        return self._buffers.bound

    def take_over(self, residency: Residency, left: Mapping[BufferKey, Tensor | None], saves: Saves) -> bool:
        """Let the pack have the buffers that the layer has changed; whether it has changed any, or maybe an input."""
        changed = self._buffers.take_over(residency, left, saves) if left else {}
        self._refuse_buffers_of_earlier_calls()
        if changed:
            self._runtime.show_changed_buffers(self._layer, changed, False)
        has_changed = bool(changed) or self._have_inputs_changed()
        # Of an object it takes a copy to tell.
        has_changed |= any(is_opaque(leaf) or callable(leaf) for leaf in self._arguments.leaves)
        # It has the caller's tensors.
        del self._restore
        return has_changed

    def _have_inputs_changed(self) -> bool:
        """Whether some were changed in place so far, or freed as reversible layers do with their inputs."""
        return list(map(_state, self._arguments.tensors)) != self._states

    def _refuse_buffers_of_earlier_calls(self) -> None:
        """Refuse to change within a checkpoint what another call there finds: the backward runs them in the other order.

        Raises:
            UnsupportedModelError: naming the layers.
        """
        layer, checkpoint = self._layer, self._checkpoint and self._checkpoint()
        if checkpoint is None:
            return
        called = _called_in.setdefault(checkpoint, {})
        for other in called:
            both = set(layer.buffers).intersection(other.buffers)
            if not both.isdisjoint(layer.changing_buffers | other.changing_buffers):
                raise _called_twice(layer, other)
        called[layer] = None

    def note_inputs(self) -> None:
        """See whether the layer has changed inputs in place, which it must find as they were when it runs again.

        Raises:
            UnsupportedModelError: if it does so for the first time, and inputs were not kept for that.
        """
        layer, has_changed = self._layer, self._have_inputs_changed()
        if has_changed and layer.changes_inputs is False and self._inputs:
            raise UnsupportedModelError(
                f"layer {layer.name!r} modifies one of its inputs in place, or frees it, for the first time when it has been "
                "called before without: its backward could not run it again; make that operation out of place (for example "
                "nn.ReLU(inplace=False))"
            )
        if layer.changes_inputs is None:
            layer.first_inputs = [(version_counter(t), t._version) for t in self._arguments.tensors if is_counted(t)]
        layer.changes_inputs = bool(layer.changes_inputs) or has_changed

    def note_later_changes(self) -> None:
        """See whether what the layer was first called with was changed in place since: others are then copied in time, too."""
        layer = self._layer
        if any(counter._version != version for counter, version in layer.first_inputs):
            layer.changes_inputs = True

    @contextmanager
    def bound(self, residency: Residency, weights: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
        """The context of the layer's code in the backward, with these weights: the pack has what that changes of buffers."""
        layer = self._layer
        beside = layer.companions.bound(residency.leaves, residency.companions, self.changes)
        with beside, layer.bound(weights, self._buffers.as_they_are(residency)) as left:
            yield
        changed = self._buffers.take_over_again(residency, left) if left else {}
        if changed:
            self._runtime.show_changed_buffers(layer, changed, True)

    def run(self, residency: Residency, own: Callable[..., Any], in_backward: bool = False) -> Any:
        """Run the layer's code once more, within `bound`.

        Args:
            residency: of the layer's pack.
            own: the code.
            in_backward: whether that is the backward's.
        """
        counts, self.counts = self.counts and in_backward, self.counts and not in_backward
        if not self.has_inputs:
            inputs = [self._runtime.at_layer(tensor, residency) for tensor in self._arguments.tensors]
            leaves = self._arguments.leaves
        else:
            inputs = [each.load() for each in self._inputs]
            if self._layer.changes_inputs:
                # Leaves may not be changed in place, nor what is in the stash.
                inputs = cloned_together(inputs, self._places)
            leaves = [leaf.load() if isinstance(leaf, StashedObject) else leaf for leaf in self._objects]
        args, kwargs = self._arguments.again(inputs, leaves)
        del inputs, leaves
        with (
            self._random.entered(residency.cuda_index),
            self._layer.holding({} if counts else self._buffers.as_they_were()),
        ):
            attributes = self._layer.attributes.as_they_were(self.attributes)
            staying = self._layer.attributes.staying.as_they_were(self._staying)
            with self._ambient.entered(), self._runtime.recomputing(), attributes, self._elsewhere(), staying:
                return self._ambient.run(own, *args, **kwargs)

    def fill_again(self, saves: Saves) -> None:
        """Let what a graph has saved of buffers be as the backward of plain PyTorch finds it."""
        self._buffers.fill_again(saves)

    def forget_inputs(self) -> None:
        """It runs no more."""
        self._inputs, self._objects = [], []


def _called_twice(layer: SwappedLayer, other: SwappedLayer) -> UnsupportedModelError:
    twice = "is called twice" if layer is other else f"shares buffers with {other.name!r}, and both are called"
    return UnsupportedModelError(
        f"layer {layer.name!r} {twice} within a torch.utils.checkpoint that changes its buffers: the backward would do that "
        "once more, in the other order. Leave the checkpoint out, for layers are recomputed without it"
    )


# The layers that were called within a checkpoint, in its first run, and have buffers.
_called_in = weakref.WeakKeyDictionary[Any, dict[SwappedLayer, None]]()


def _runs_twice(layer: SwappedLayer, changed: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer.name!r} runs twice, as it sets a frozen parameter or computes a gradient in its forward for the first "
        f"time, and changes {changed} in place: return that, or do it in the training_step"
    )


def _state(tensor: Tensor) -> tuple[int | None, int]:
    return version_of(tensor), tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0

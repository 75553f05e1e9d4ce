"""A rehearsal: the step of one microbatch on fake tensors, which tells what each layer takes without taking it.

The model's layers are intercepted by the same calls as in training, so what they allocate is counted in the same way. A
layer is run, forth and back, when a layer of its structure is first called; equal ones only leave the same marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_harmony.engine.devices.stream import Happened
from lightning_harmony.engine.glue.functions import functions_as_operations
from lightning_harmony.engine.glue.glue import Glue
from lightning_harmony.engine.lanes.rng import RandomState
from lightning_harmony.engine.layers.narrow import CastWatch, autocast_dtype
from lightning_harmony.engine.layers.open_call import OpenCall
from lightning_harmony.engine.layers.runtime import Runtime
from lightning_harmony.engine.layers.structure import structure_of
from lightning_harmony.engine.layers.surroundings import Surroundings
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.measure.step_recorder import StepRecorder
from lightning_harmony.engine.memory.opaque import without_caches
from lightning_harmony.engine.memory.stash import Alias, LaneStash, Stash, Stashed, is_small
from lightning_harmony.engine.memory.tensor_class import parameter_like
from lightning_harmony.engine.memory.transfer import Transfers
from lightning_harmony.engine.model.decompose import Layer
from lightning_harmony.engine.model.findings import Findings
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import lies_in
from lightning_harmony.engine.model.layer import COMPARED_CALLS, SwappedLayer
from lightning_harmony.engine.model.pack import HasGraph, Residency, SwappedPack
from lightning_harmony.engine.model.parameter_places import places_of
from lightning_harmony.engine.rehearsal.fakes import (
    FakeDevice,
    FakeStore,
    FakeWatch,
    fake,
    faked_companions,
    faked_others,
)
from lightning_harmony.engine.rehearsal.rehearsed_call import CallProfile, Measured, RehearsedForward
from lightning_harmony.engine.rehearsal.work_by_layer import WorkByLayer
from lightning_harmony.engine.rehearsal.work_counter import WorkCounter
from lightning_harmony.engine.structures.strides import copied
from lightning_harmony.errors import BorrowsModuleError, UnswappableBufferError
from lightning_harmony.plan.outlook.work import LayerProfile, StepProfile, Work
from lightning_harmony.plan.values.task import Phase

CPU = torch.device("cpu")


def rehearse(
    model: nn.Module,
    layers: Sequence[Layer],
    step: Callable[[Any], Tensor],
    microbatch: Any,
    casting: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> StepProfile:
    """Run a step on fake tensors.

    Args:
        model: whose parameters may be on the meta device. They are not touched.
        layers: its layers, as `find_layers` returns them.
        step: takes the microbatch, and returns its loss.
        microbatch: its tensors tell shapes and types only.
        casting: the context of the step, such as autocast.
    """
    random, findings = RandomState.capture(None), Findings()
    while True:
        applied = findings.applied(layers)
        try:
            first = Rehearsal(model, applied, {})
            first.run(step, microbatch, casting)
            if not any(first.narrow.values()):
                return first.profile(first)
            second = Rehearsal(model, applied, first.narrow)
            second.run(step, microbatch, casting)
            return second.profile(first)
        except (BorrowsModuleError, UnswappableBufferError) as error:
            if not findings.note(model, error):
                raise
        finally:
            random.restore(None)


class Rehearsal(Runtime):
    """The runtime of intercepted calls and of the glue, for one microbatch, in one thread, on one device without a limit."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], narrow: dict[int, tuple[int, ...]]) -> None:
        self._model = model
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._layers = [layer.swapped(index) for index, layer in enumerate(layers)]
        for layer in self._layers:
            # Fake tensors have no contents to compare.
            layer.num_compared_calls = COMPARED_CALLS
        self._num_layers = len(self._layers)
        self.narrow: dict[int, tuple[int, ...]] = {}
        self._given_narrow = narrow
        in_order = dict.fromkeys([p for layer in self._layers for p in layer.parameters] + list(model.parameters()))
        self._store = FakeStore(list(in_order), [layer.companions for layer in self._layers])
        self._places = places_of(model, list(in_order))
        self.device = FakeDevice()
        self.counter = WorkCounter(self.device)
        self._glue = Glue(self._places, CPU, self)
        self._glue_layers: dict[nn.Parameter, SwappedLayer] = {}
        self._tokens: dict[nn.Parameter, Tensor] = {}
        traffic = Traffic()
        stash = Stash(self.device, HostPool(self.device.host_buffer), traffic)
        self._stash = LaneStash(stash)
        self._by_layer = WorkByLayer(self.device, self.counter, stash, traffic)
        self._residencies: dict[int, Residency] = {}
        self._fakes: dict[Any, tuple[list[nn.Parameter], list[Tensor]]] = {}
        self._known: dict[Any, CallProfile] = {}
        self._structures: dict[int, Any] = {}
        self._measured: Measured | None = None
        self.open_call = OpenCall(self.visit)
        alone = Transfers([self.device], traffic, lambda to, size: None, lambda *copy: nullcontext())
        self.surroundings = Surroundings(lambda: None, alone, StepRecorder([self.device]))
        self._buffer_bytes = 0
        self._microbatch_bytes = 0
        self._dtype: torch.dtype | None = None
        self._watches: list[tuple[SwappedLayer, FakeWatch]] = []

    # ---- the step ------------------------------------------------------------------------------------------------------

    def run(self, step: Callable[[Any], Tensor], microbatch: Any, casting: Callable[[], Any]) -> None:
        """Run the step and its backward."""
        with casting():
            self._dtype = autocast_dtype(CPU)
        for layer in self._layers:
            numbers = self._given_narrow.get(layer.index, ())
            layer.narrow = {layer.parameters[n]: self._dtype for n in numbers if self._dtype is not None}
        self._structures = {layer.index: structure_of(layer) for layer in self._layers}
        intercepted = [RehearsedForward(layer, self) for layer in self._layers]
        try:
            # Stand-ins are made of real elements, which nothing computes with.
            with self._glue.stand_ins(), without_caches(self._model), torch.autograd.set_multithreading_enabled(False):
                self._run_on_fakes(step, microbatch, casting)
        finally:
            for each in intercepted:
                each.remove()

    def _run_on_fakes(self, step: Callable[[Any], Tensor], microbatch: Any, casting: Callable[[], Any]) -> None:
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        with (
            fakes,
            faked_companions(self._layers),
            faked_others(self._model, self._layers, self._count),
            torch.enable_grad(),
        ):
            self._buffer_bytes = self.device.allocated_bytes()
            batch = tree_map_only(Tensor, fake, microbatch)
            for leaf in tree_leaves(batch):
                self._count(leaf)
            self._by_layer.resident_bytes = self.device.allocated_bytes()
            self._microbatch_bytes = self._by_layer.resident_bytes - self._buffer_bytes
            for layer in self._layers:
                self._residency(layer)
            with self.counter:
                self._by_layer.begin(None, Phase.FORWARD)
                with self._glue.stashing(), functions_as_operations(), casting():
                    loss = step(batch)
                # Where autograd begins, the executor lets a lane wait: what follows counts to the last layer. In the step that
                # is measured, none is known yet of a parameter that glue uses.
                last = self._layers[self._num_layers - 1] if self._by_layer.calls else None
                self._by_layer.begin(last, Phase.BACKWARD)
                if loss.requires_grad:
                    torch.autograd.backward(loss, torch.ones_like(loss))
                del loss
                self._by_layer.end()
        self._by_layer.work.note_calls(self._by_layer.calls)
        for layer, watch in self._watches:
            self.narrow[layer.index] = tuple(n for n, p in enumerate(layer.parameters) if p in watch.found())

    def _count(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            self.device.count(leaf)

    def _residency(self, layer: SwappedLayer) -> Residency:
        """The layer's weights and buffers, which take no part in what is counted."""
        if layer.index not in self._residencies:
            # Layers of one structure can have the same fakes, unless their code keeps some of them.
            key = layer if layer.companions else self._structures.get(layer.index, layer)
            if key not in self._fakes:
                self._fakes[key] = self._make_fakes(layer)
            parameters, buffers = self._fakes[key]
            self._residencies[layer.index] = Residency(
                self.device,
                torch.empty(0, device="meta"),
                Happened(),
                dict(zip(layer.parameters, parameters, strict=True)),
                dict(zip(layer.buffers, buffers, strict=True)),
                {tensor: tensor for tensors in layer.companions.apart.values() for tensor in tensors},
            )
        return self._residencies[layer.index]

    def _make_fakes(self, layer: SwappedLayer) -> tuple[list[nn.Parameter], list[Tensor]]:
        before = self.device.allocated_bytes()

        def attribute(tensor: Tensor) -> Tensor:
            return tensor if tensor in layer.companions else fake(tensor)

        parameters = [parameter_like(p, fake(p, layer.narrow.get(p, p.dtype)), attribute) for p in layer.parameters]
        buffers = [fake(owner.get_buffer(name)) for owner, name in layer.buffers]
        for tensor in (*parameters, *buffers):
            self._count(tensor)
        self._by_layer.resident_bytes += self.device.allocated_bytes() - before
        return parameters, buffers

    def profile(self, first: Rehearsal) -> StepProfile:
        """What was seen, for predictions.

        Args:
            first: that of a first step, with weights as they are.
        """
        seen: set[nn.Parameter] = set()
        layers = []
        for layer, wide in zip(self._layers, first._layers, strict=True):
            trained = [p for p in layer.parameters if p.requires_grad and p not in seen]
            seen.update(layer.parameters)
            totals = self._by_layer.totals[layer.index]
            layers.append(
                LayerProfile(
                    cost=self._by_layer.work.cost(layer, self._store),
                    first_cost=first._by_layer.work.cost(wide, first._store),
                    swapped_bytes=self._swapped_bytes(layer),
                    trained_bytes=sum(p.numel() * p.element_size() for p in trained),
                    num_trained=sum(p.numel() for p in trained),
                    held=totals.held,
                    first_held=first._by_layer.totals[layer.index].held,
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
            calls=tuple(self._by_layer.calls),
            weight_bytes=self._store.num_bytes,
            num_parameters=sum(p.numel() for p in self._names),
            buffer_bytes=self._buffer_bytes,
            microbatch_bytes=self._microbatch_bytes,
            start_bytes=self._by_layer.start_bytes,
            loss_bytes=max(self._by_layer.loss_bytes, first._by_layer.loss_bytes),
        )

    def _swapped_bytes(self, layer: SwappedLayer) -> int:
        """What crosses the bus to bring a layer."""
        pack = SwappedPack(-1, [layer], self._store)
        return pack.layout.copied_bytes + pack.buffer_bytes

    # ---- what layers and glue ask for ----------------------------------------------------------------------------------

    @contextmanager
    def visit(self, layer: SwappedLayer, phase: Phase) -> Iterator[Residency]:
        """The layer's turn."""
        self.open_call.leave()
        with self._by_layer.visiting(layer, phase) if self._measured is None else nullcontext():
            yield self._residency(layer)

    def stash(self, tensor: Tensor) -> Stashed:
        """Keep what a layer takes for the backward; as in training, of what is small a copy on the device."""
        if is_small(tensor):
            tensor = copied(Tensor.detach(tensor))
        return self.stash_unchanged(tensor)

    def stash_unchanged(self, tensor: Tensor) -> Stashed:
        """Keep a tensor that nobody may change."""
        stash = self._stash if self._measured is None else self._measured.stash
        return stash.put(tensor) or Alias(tensor)

    def watch(self, layer: SwappedLayer, residency: Residency) -> CastWatch | None:
        """What the layer does with its weights."""
        if self._dtype is None or self._given_narrow or layer.index in self.narrow:
            return None
        watch = FakeWatch(residency, self._dtype)
        if self._measured is None:
            # Without gradients, a layer runs each time; what its watch found is read at the end.
            self.narrow[layer.index] = ()
            self._watches.append((layer, watch))
        else:
            self._measured.watch = watch
        return watch

    @contextmanager
    def measuring_graph(self, layer: SwappedLayer) -> Iterator[None]:
        """Around the recompute."""
        before, done = self.device.allocated_bytes(), self.counter.take()
        yield
        recompute = self.counter.take()
        if self._measured is not None:
            self._measured.graph_bytes, self._measured.recompute = self.device.allocated_bytes() - before, recompute
        self.counter.add(done)
        self.counter.add(recompute)

    def keep_graph(self, layer: SwappedLayer, call: HasGraph) -> bool:
        """Never: what recompute takes is to be seen."""
        return False

    def set_gradient_flag(self, parameter: nn.Parameter, stand_in: Tensor, flag: bool) -> bool:
        """No other microbatch finds it."""
        with torch._C.DisableTorchFunction():
            for tensor in (parameter, stand_in):
                tensor.requires_grad_(flag)
        return True

    def hides_gradients(self) -> bool:
        """No step was before, and this one is refused where a real one would be."""
        return True

    def glue_layer(self, parameter: nn.Parameter) -> SwappedLayer:
        """The layer that a parameter is when glue uses it."""
        layer = self._glue_layers.get(parameter)
        if layer is None:
            layer = SwappedLayer(len(self._layers), self._names[parameter], None, [parameter])
            self._glue_layers[parameter] = layer
            self._layers.append(layer)
        return layer

    def tokens(self) -> dict[nn.Parameter, Tensor]:
        """What the uses of each parameter are differentiated to."""
        return self._tokens

    def resident_parameter(self, tensor: Tensor) -> tuple[SwappedLayer, Tensor] | None:
        """The glue layer of whose parameter a tensor is a view."""
        for layer in self._glue_layers.values():
            leaf = self._residency(layer).leaves[layer.parameters[0]]
            if lies_in(tensor, leaf):
                return layer, leaf
        return None

    # ---- calls of one kind ---------------------------------------------------------------------------------------------

    def known(self, layer: SwappedLayer, signature: Any, measure: Callable[[], CallProfile]) -> CallProfile:
        """What a call leaves behind; measured when the first of its kind comes."""
        key = self._structures[layer.index], signature, self._dtype, torch.is_autocast_enabled("cpu")
        if key not in self._known:
            self._known[key] = measure()
        call = self._known[key]
        self.narrow.setdefault(layer.index, call.narrow)
        return call

    @contextmanager
    def apart(self) -> Iterator[Measured]:
        """A context in which a layer runs as if alone."""
        assert self._measured is None
        stash = Stash(self.device, HostPool(self.device.host_buffer), Traffic())
        self._measured = measured = Measured(LaneStash(stash))
        work = self.counter.take()
        try:
            with self.device.apart():
                yield measured
                if measured.watch is not None:
                    measured.narrow = measured.watch.found()
        finally:
            self._measured = None
            stash.drain()
            self.counter.take()
            self.counter.add(work)

    def redo(self, work: Work, num_bytes: int) -> None:
        """Leave the marks of work that isn't done."""
        self.counter.add(work)
        torch.empty(num_bytes, dtype=torch.uint8)

    def redo_backward(self, layer: SwappedLayer, call: CallProfile) -> None:
        """Leave the marks of a backward."""
        self._by_layer.work.note_graph(layer, call.graph_bytes)
        self._by_layer.totals[layer.index].recompute += call.recompute
        self.redo(call.backward, call.backward_bytes)

"""The runtime: what calls of layers and glue ask for, in a lane or outside of any step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.device import NO_CONTEXT, Device
from lightning_harmony.engine.glue.one_device import OneDevice
from lightning_harmony.engine.glue.views import Views
from lightning_harmony.engine.layers.call_arguments import CallArguments
from lightning_harmony.engine.layers.narrow import CastWatch, autocast_dtype
from lightning_harmony.engine.layers.open_call import OpenCall
from lightning_harmony.engine.layers.recordings import Recordings
from lightning_harmony.engine.layers.runtime import Listeners
from lightning_harmony.engine.layers.surroundings import Surroundings
from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.memory.stash import Alias, Stashed, is_small
from lightning_harmony.engine.memory.transfer import LaneTransfers, Launched, Transfers
from lightning_harmony.engine.model.host_store import lies_in
from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer, buffer_of, layer_of_caller
from lightning_harmony.engine.model.pack import HasGraph, Residency
from lightning_harmony.engine.step.changed_parameters import changing, keep
from lightning_harmony.engine.step.gradient_sums import GradientSums
from lightning_harmony.engine.step.lone_calls import LoneCalls
from lightning_harmony.engine.step.observer import Observer
from lightning_harmony.engine.step.pack_preparation import PackPreparation
from lightning_harmony.engine.step.step import Step
from lightning_harmony.engine.step.swapped_model import SwappedModel
from lightning_harmony.engine.structures.memory_users import begins_in
from lightning_harmony.engine.structures.operations import Unseen
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.engine.structures.tree import tensors_of
from lightning_harmony.errors import UnsupportedModelError, UnswappableBufferError
from lightning_harmony.plan.values.task import Phase


@dataclass(eq=False, repr=False)
class Runtime:
    """Serves calls of layers and glue, each in the lane that asks.

    Args:
        model: whose layers and parameters they are.
        step: the step that runs.
        placement: of its packs.
        preparation: makes packs ready for lanes.
        lone_calls: all others.
        sums: of gradients.
        transfers: between devices.
        observer: of what is not known yet.
        surroundings: of layers' own code.
        recomputing: gives the context of a layer's own code when it runs again, and has been heard before.
        recordings: of the work of layers.
    """

    _model: SwappedModel
    _step: Step
    _placement: Placement
    _preparation: PackPreparation
    _lone_calls: LoneCalls
    _sums: GradientSums
    _transfers: Transfers
    _observer: Observer
    surroundings: Surroundings
    recomputing: Callable[[], AbstractContextManager[Sequence[str]]]
    _recordings: Recordings

    def __post_init__(self) -> None:
        self._devices = self._transfers.devices
        self._has_one_device = len(self._devices) == 1
        self.open_call = OpenCall(self.visit)

    def visit(self, layer: SwappedLayer, phase: Phase) -> AbstractContextManager[Residency]:
        """Wait for a layer's turn; within the context it resides on the device."""
        self.open_call.leave()
        progress = self._step.current()
        if progress is None:
            if self._step.granted is not None:
                raise UnsupportedModelError(
                    f"layer {layer.name!r} is called in the thread {threading.current_thread().name!r} while a step runs in "
                    "another one, as with a ThreadPoolExecutor: call layers in the thread that runs the training_step"
                )
            return self._lone_calls.visit(self._placement.pack_of[layer.index], phase)
        return self._preparation.visit(progress, layer, phase)

    def go_over(self, number: int) -> None:
        """A gradient goes to a device: the lane's turn is over, if its next one is there and no layer waits for more."""
        progress = self._step.current()
        if progress is None or self.open_call.call is not None:
            return
        if (request := self._preparation.turn_on(progress, number)) is not None:
            with self.calling():
                progress.lane.park(request)

    @property
    def listeners(self) -> Listeners:
        """Who is told of the step."""
        return self._step.listeners

    # ---- devices -------------------------------------------------------------------------------------------------------

    def brought(self, tensor: Tensor, residency: Residency, *, at_once: bool) -> Tensor:
        """A tensor for a layer: one on its device, or one that needs a gradient where it is, with a copy for the layer."""
        progress = self._step.current()
        if progress is None and self._transfers.home(tensor) is None:
            # Who calls a layer outside of a step may have made its inputs beside the parameters, on the host.
            return tensor.to(residency.device.torch_device)
        if self._has_one_device:
            return tensor
        number = self._devices.index(residency.device)
        transfers = LaneTransfers(Launched(self._transfers)) if progress is None else progress.transfers
        if at_once or progress is None or not (tensor.requires_grad and torch.is_grad_enabled()):
            return transfers.moved(tensor, number)
        transfers.copy(tensor, number)
        return tensor

    def note_given(self, layer: SwappedLayer, arguments: CallArguments) -> None:
        """A layer is called with these, and waits for its turn."""
        self.listeners.on_given(arguments.tensors)
        progress = self._step.current()
        if progress is not None and progress.unseen_changes is not None:
            arguments.changes = progress.unseen_changes.before_call(layer.name, arguments.tensors)

    def note_made(self, result: Any) -> None:
        """A layer's code has returned something: what is sent to another device waits for that alone."""
        if not self._has_one_device and (progress := self._step.current()) is not None:
            progress.transfers.launched.note_made(tensors_of(result))

    def at_layer(self, tensor: Tensor, residency: Residency) -> Tensor:
        """A tensor on a layer's device, without its graph."""
        progress = None if self._has_one_device else self._step.current()
        return tensor if progress is None else progress.transfers.copy(tensor, self._devices.index(residency.device))

    def make_room(self, num_bytes: int, device: Device) -> None:
        """Let what isn't needed now make way for what a layer allocates beside its usual work."""
        with Unseen():
            self._placement.residents[self._devices.index(device)].admit(num_bytes)

    def sent(self, tensor: Tensor, home: int | None) -> Tensor:
        """The tensor at another one's home."""
        if home is None:
            return tensor.cpu()
        return tensor if len(self._devices) == 1 else self._transfers.copy(tensor, home)

    def calling(self) -> AbstractContextManager[None]:
        """The context of a layer's call."""
        glue = self._current_glue()
        return NO_CONTEXT if glue is None else glue.off()

    def _current_glue(self) -> OneDevice | None:
        progress = None if self._has_one_device else self._step.current()
        return None if progress is None else progress.glue

    def on_one_device(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation of the glue whose operands may be on several devices."""
        glue = self._current_glue()
        return func(*args, **kwargs) if glue is None else glue.run(func, args, kwargs)

    def device_of(self, layer: SwappedLayer) -> torch.device:
        """Where a layer runs for the current lane."""
        return self._devices[self._placement.device_of(self._placement.pack_of[layer.index])].torch_device

    # ---- buffers that glue reads ---------------------------------------------------------------------------------------

    def show_changed_buffers(self, layer: SwappedLayer, buffers: Mapping[BufferKey, Tensor], again: bool) -> None:
        """The code between layers sees what a layer has left in some of its buffers, which the host's are not yet."""
        if again or self._step.in_backward:
            self._step.note_changed_in_backward(layer.name, next(iter(buffers))[1])
        if self._step.current() is not None:
            self._model.show_buffers(layer, buffers, self, keeps=not self._step.is_sequential)

    def read_buffer(self, layer: SwappedLayer, key: BufferKey) -> Tensor:
        """A copy of what is in a layer's buffer, for the code between layers or for another layer.

        Raises:
            UnsupportedModelError: if a layer reads what changes in the step, which it would not find again in the backward; or
                if it is the backward that does, and another microbatch has changed it since.
        """
        caller, has_changed = layer_of_caller(), key in layer.changed_buffers
        if caller is not None and has_changed:
            does = f"layer {caller.name!r} reads buffer {key[1]!r} of layer {layer.name!r}, which has changed it in this step"
            way_out = "pass it to the layer as a tensor, make a layer of what has both with HarmonyStrategy(layers=...)"
            raise UnswappableBufferError(does, f"may be another when the code runs again: {way_out}", *key)
        step = self._step
        if has_changed and step.in_backward and not step.runs_whole and len(step.turns.running) > 1:
            raise UnsupportedModelError(
                f"buffer {key[1]!r} of layer {layer.name!r} is read in the backward, as by a hook of a gradient, for the "
                "first time when microbatches take turns: it holds what the last of them has left there. Read it so from the "
                "first step on, or use num_microbatches=1"
            )
        step.read_buffers[key] = layer
        reader = self._devices[0].torch_device if caller is None else self.device_of(caller)
        return step.buffer_copies.read(layer, key, reader, lambda: self._copy_of_buffer(layer, key, reader))

    def _copy_of_buffer(self, layer: SwappedLayer, key: BufferKey, reader: torch.device) -> Tensor:
        index = self._placement.pack_of[layer.index]
        places = [(residents, residents.packs[index]) for residents in self._placement.residents]
        places += [each for _, pack in places[:1] for each in self._placement.others_with_buffers_of(pack)]
        with torch.inference_mode(False), torch.no_grad():
            for _, pack in places:
                if pack.residency is not None and key in pack.residency.dirty_buffers:
                    return pack.residency.buffers[key].detach().to(reader, copy=True)
            for residents, pack in places:
                residents.swapper.finish_write_back(pack)
            return buffer_of(key).detach().to(reader, copy=True)

    def filled_since(self, tensor: Tensor) -> Callable[[], Tensor | None]:
        """What tells the content of a tensor that glue saves, in the backward: of a buffer that calls fill meanwhile."""
        progress = self._step.current()
        if progress is not None and progress.unseen_changes is not None:
            progress.unseen_changes.note_saved(tensor)
        return self._step.buffer_copies.filled_since(tensor, self.last_filled)

    # ---- parameters that glue uses -------------------------------------------------------------------------------------

    def glue_layer(self, parameter: nn.Parameter) -> SwappedLayer:
        """The layer that a parameter is when glue uses it; made when it is first used."""
        layer = self._model.glue_layers.get(parameter) or self._model.add_glue_layer(parameter)
        # A plan does not know one that came up since its layers were seen, as in the check of the split, in evaluation mode.
        if layer.index not in self._placement.pack_of:
            self._placement.add(layer)
            self._sums.expect(layer)
        return layer

    def find_glue_layer(self, name: str) -> SwappedLayer | None:
        """The layer that a parameter with a name is when glue uses it."""
        return next((self.glue_layer(parameter) for parameter, own in self._model.names.items() if own == name), None)

    def tokens(self) -> dict[nn.Parameter, Tensor] | None:
        """Of the parameters that glue used in the current microbatch; None where none runs."""
        progress = self._step.current()
        return None if progress is None else progress.tokens

    def views(self) -> Views | None:
        """Those of parameters that the current microbatch has been given; None where none runs."""
        progress = self._step.current()
        return None if progress is None else progress.views

    def give(self, parameter: nn.Parameter) -> None:
        """An autograd function of the user's own is given a parameter."""
        if (progress := self._step.current()) is not None:
            progress.given.add(parameter)

    def hides_gradients(self) -> bool:
        """Whether a step runs whose code would not find the gradients of earlier ones, of whose updates some use them up."""
        return self._step.is_running and (self._observer.is_training or self._step.has_trained)

    def resident_parameter(self, tensor: Tensor) -> tuple[SwappedLayer, Tensor] | None:
        """The glue layer, and its parameter on the device, of which a tensor is a view."""
        for parameter, layer in self._model.glue_layers.items():
            if layer.index not in self._placement.pack_of:
                continue
            for pack in self._placement.copies(self._placement.pack_of[layer.index]):
                # All weights of a pack are views of one buffer.
                if pack.residency is not None and lies_in(tensor, pack.residency.weights):
                    leaf = pack.residency.leaves[parameter]
                    if not (is_composed(leaf) or is_composed(tensor)) and begins_in(tensor, leaf):
                        return layer, leaf
        return None

    def set_gradient_flag(self, parameter: nn.Parameter, stand_in: Tensor, flag: bool) -> bool:
        """The current microbatch says whether a parameter needs gradients; whether one may."""
        if (progress := self._step.current()) is None:
            return False
        self._step.gradient_flags.set(progress.lane.microbatch, (parameter, stand_in), flag)
        return True

    def note_attribute(self, parameter: nn.Parameter) -> None:
        """The code between layers is about to set something on a parameter."""
        self._step.note_attribute(self._model.names.get(parameter, ""))

    def changing(self, parameter: nn.Parameter, *, in_place: bool) -> AbstractContextManager[Tensor] | None:
        """The context in which a parameter is on the root device, to be changed there; behind it, the host has that.

        None where others use it meanwhile: other microbatches, unless these run one after the other, or a backward; or where
        the microbatch has a view, which would change with it, or has used one that is trained, or called a layer that has it.
        An evaluation of one microbatch may change all parameters.

        Args:
            parameter: which one.
            in_place: whether what has its memory is changed, too.
        """
        step, views = self._step, self.views()
        if not (step.is_running and step.is_sequential) or is_composed(parameter) or parameter in self._model.held:
            return None
        if in_place and views is not None and views.has_of(parameter):
            return None
        if not self._observer.is_training:
            return self._changing(parameter) if len(step.turns.running) == 1 else None
        having = [layer for layer in self._model.layers if any(each is parameter for each in layer.parameters)]
        is_read, progress = any(layer.is_in_graph for layer in having), step.current()
        if parameter.requires_grad and step.has_optimizer(parameter):
            called = set() if progress is None else set(progress.calls)
            is_used = any(layer.module is not None and layer.index in called for layer in having)
            if is_used or progress is None or parameter in progress.tokens:
                return None
            # The backwards of other microbatches are over.
            is_read = is_read and not step.runs_whole
        if is_read:
            return None
        step.changed_parameter = self._model.names.get(parameter, "")
        return self._changing(parameter)

    @contextmanager
    def _changing(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        root = self._devices[0]
        with self.calling(), root.selected(), changing(parameter, root.torch_device, self._placement) as there:
            yield there

    def keep_changed(
        self, changed: Mapping[nn.Parameter, Tensor], residency: Residency
    ) -> Mapping[nn.Parameter, Tensor] | None:
        """Give the host what a layer's code has made of its parameters, unless others use them meanwhile."""
        step, views, progress = self._step, self.views(), self._step.current()
        may_change = step.is_sequential and (self._observer.is_training or len(step.turns.running) == 1)
        if step.is_running and not may_change:
            return None
        tokens = {} if progress is None else progress.tokens
        if any(each in tokens or (views is not None and views.has_of(each)) for each in changed):
            return None
        step.changed_parameter = self._model.names.get(next(iter(changed)), "")
        return keep(changed, residency, self._placement)

    # ---- what a forward keeps ------------------------------------------------------------------------------------------

    def stash(self, tensor: Tensor) -> Stashed:
        """Keep what a layer takes for the backward: on the host, unless it is small or needed again at once."""
        if not is_small(tensor):
            stashed = self.stash_unchanged(tensor)
            if not self._placement.residents[0].stash.shares:
                # It may change at once, and nothing would tell.
                stashed.settle()
            return stashed
        # These are counters and the like, which code between layers may change afterwards.
        is_there = any(device.owns(tensor) for device in self._devices)
        with nullcontext() if is_there else self._devices[0].on_host():
            return Alias.of_copy(tensor)

    def stash_unchanged(self, tensor: Tensor) -> Stashed:
        """Keep a tensor that nobody may change, such as those that autograd saves."""
        progress = self._step.current()
        number = self._transfers.home(tensor) or 0
        if progress is None:
            return self._placement.residents[number].stash.put(tensor) or Alias(tensor)
        if self._preparation.keeps_graphs_in(progress.task):
            return Alias(tensor)
        return progress.stashes[number].put(tensor) or Alias(tensor)

    def watch(self, layer: SwappedLayer, residency: Residency) -> CastWatch | None:
        """What a layer does with its weights, if that isn't known yet: the watch, to be active during its call."""
        dtype = autocast_dtype(self._devices[0].torch_device)
        if dtype is None or not self._observer.start_watching(layer):
            return None
        return CastWatch(residency, dtype)

    def last_filled(self) -> dict[BufferKey, Tensor | None]:
        """Of the current microbatch."""
        progress = self._step.current()
        return {} if progress is None else progress.last_filled

    def keep_graph(self, layer: SwappedLayer, call: HasGraph) -> bool:
        """Whether a call may keep its graph, where there is room, and while its pack stays."""
        index = self._placement.pack_of[layer.index]
        if not self._preparation.keeps_graphs_in((Phase.FORWARD, index)):
            return False
        residents, work = self._placement.residents_of(index), self._observer.work
        if not residents.device.room_for(work.graph_bytes([layer]) + work.bytes([layer], Phase.FORWARD)):
            return False
        residency = residents.packs[index].residency
        assert residency is not None
        residency.graphs.add(call)
        return True

    def measuring_graph(self, layer: SwappedLayer) -> AbstractContextManager[None]:
        """The context in which a layer's graph is made again."""
        if not self._observer.is_measuring:
            return NO_CONTEXT
        device = self._placement.residents_of(self._placement.pack_of[layer.index]).device
        return self._observer.measuring_graph(layer, device)

    # ---- backward ------------------------------------------------------------------------------------------------------

    def expect_backward(self, layer: SwappedLayer) -> int:
        """Announce a backward of a layer."""
        progress = self._step.current()
        if progress is None:
            return 0
        if progress.differentiating:
            if layer.module is not None and not progress.given.isdisjoint(layer.parameters):
                raise UnsupportedModelError(
                    f"an autograd function between layers is given parameters of layer {layer.name!r}, and calls the layer in "
                    "its backward, where their gradients come to p.grad alone: make a layer of a module that calls the "
                    "function with HarmonyStrategy(layers=...)"
                )
            self._sums.refuse_late_call(layer)
        progress.pending[self._placement.pack_of[layer.index]] += 1
        use = progress.uses[layer.index]
        progress.uses[layer.index] += 1
        return use

    def recordings(self) -> Recordings | None:
        """What may be recorded, and run in the place of layers' code; None where neither is."""
        progress, recordings = self._step.current(), self._recordings
        if not recordings.is_on or progress is None or progress.differentiating:
            return None
        # There, the graph of the code is kept, and nothing runs again.
        return None if self._preparation.keeps_graphs_in(progress.task) else recordings

    def is_spread(self, layer: SwappedLayer) -> bool:
        """Whether the gradients of a layer come from several devices."""
        return self._placement.pack_of[layer.index] in self._placement.plan.spread

    def is_last_backward(self) -> bool:
        """Whether the current lane differentiates its loss."""
        progress = self._step.current()
        return progress is not None and progress.differentiating

    def end_backward(self, layer: SwappedLayer) -> None:
        """An announced backward is over."""
        if (progress := self._step.current()) is not None:
            progress.pending[self._placement.pack_of[layer.index]] -= 1

    def accumulate(self, layer: SwappedLayer, use: int, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Take the gradients of one announced backward, as torch does: none of what has been frozen since its forward."""
        gradients = [each for each in gradients if each[0].requires_grad]
        for parameter, _ in gradients:
            if not self._step.gradient_flags.needed(parameter):
                raise UnsupportedModelError(
                    f"parameter {self._model.names[parameter]!r} gets a gradient, but needed none when the step began: say so "
                    "before, as in on_train_batch_start"
                )
        progress = self._step.current()
        if progress is not None:
            if gradients and not progress.differentiating:
                raise UnsupportedModelError(
                    "the step runs a backward of its own, whose gradients of parameters must not add to those of the batch's "
                    "loss: ask for the gradients of inputs alone with torch.autograd.grad(loss, inputs), or optimize manually "
                    "(self.automatic_optimization = False)"
                )
        elif gradients:
            self._lone_calls.flush_after_this_backward()
        if gradients:
            self._sums.add(layer, use, gradients)

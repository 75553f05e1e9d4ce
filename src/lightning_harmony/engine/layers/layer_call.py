"""The call of a layer: its own code runs in the caller's graph, swapped in, and again when a backward comes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

from lightning_harmony.engine.devices.device import NO_CONTEXT
from lightning_harmony.engine.devices.hidden_shortages import hidden_shortage
from lightning_harmony.engine.layers.assigned_data import own_code
from lightning_harmony.engine.layers.call_arguments import CallArguments
from lightning_harmony.engine.layers.call_weights import (
    CallWeights,
    double_backward,
    second_backward,
)
from lightning_harmony.engine.layers.changed_weights import DifferentiatesError, WeightsBefore
from lightning_harmony.engine.layers.contexts import Contexts
from lightning_harmony.engine.layers.narrow import CastWatch
from lightning_harmony.engine.layers.narrow_weight import really
from lightning_harmony.engine.layers.owned_results import OwnedResults
from lightning_harmony.engine.layers.recompute import Recompute
from lightning_harmony.engine.layers.recorded_call import RecordedCall
from lightning_harmony.engine.layers.runtime import Runtime
from lightning_harmony.engine.layers.saved_tensors import (
    SavedTensor,
    Saves,
    drop,
    refuse_hooks_of_others,
)
from lightning_harmony.engine.memory.tensor_class import parameter_like
from lightning_harmony.engine.model.derived import keeping_derived
from lightning_harmony.engine.model.layer import (
    BufferKey,
    SwappedLayer,
)
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.model.resident_weight import DataAssignedError, make_resident
from lightning_harmony.engine.structures.parts import are_equal
from lightning_harmony.engine.structures.strides import ViewAgain
from lightning_harmony.engine.structures.tree import flatten, tensors_of
from lightning_harmony.errors import CapacityError, UnsupportedModelError
from lightning_harmony.plan.values.task import Phase


class OwnForward(NamedTuple):
    """What a layer runs when it is called.

    Attributes:
        layer: the layer.
        run: its own code.
        is_compiled: whether that is compiled.
    """

    layer: SwappedLayer
    run: Callable[..., Any]
    is_compiled: bool


class LayerCall:
    """One call of a layer: what it takes to run it, and to run it again when a backward comes to it.

    Autograd runs the nodes that it has made last first, and so those of one call behind each other. The first one that asks
    for a saved tensor opens the call: the lane waits for its turn in the pack, and a recompute brings all saved tensors. The
    node of the weights was made first: when their gradients have come, the backward leaves the call.

    Attributes:
        layer: what is called.
        runtime: the engine.
        use: which call of the layer in its microbatch this is.
        residency: of its pack, while the call or a backward is in it.
    """

    residency: Residency

    def __init__(self, original: OwnForward, runtime: Runtime, anchor: Tensor) -> None:
        self.layer, self._original, self._is_compiled = original
        self.runtime = runtime
        self._saves, self._contexts, self._anchor = Saves(), Contexts(), anchor
        self._with_graph = torch.is_grad_enabled()
        self._weights = CallWeights(
            self.layer, runtime, anchor, is_compiled=self._is_compiled, with_graph=self._with_graph
        )
        self._begun: DifferentiatesError | None = None
        self._keeps = self._is_running = self._is_announced = self._is_over = False
        self.use = 0

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer."""
        runtime, layer = self.runtime, self.layer
        refuse_hooks_of_others(f"layer {layer.name!r}")
        self._arguments = arguments = CallArguments(args, kwargs, layer.compute_dtype)
        runtime.note_given(layer, arguments)
        with runtime.calling(), runtime.visit(layer, Phase.FORWARD) as residency:
            self.residency = residency
            try:
                self._takes_objects = arguments.have_objects
                whole = runtime.surroundings.takes_whole(
                    layer, residency, arguments.tensors, has_objects=self._takes_objects
                )
                # The compiler knows nothing of several devices.
                bring = partial(runtime.brought, residency=residency, at_once=whole or self._is_compiled)
                args, kwargs = arguments.brought(bring)
                with runtime.surroundings.running(residency):
                    result = self._recorded(args, kwargs) if whole else self._run_in_graph(args, kwargs)
                if (kind := arguments.written_to()) is not None:
                    raise _writes_into(layer, kind)
                runtime.note_made(result)
                return arguments.with_originals(result)
            finally:
                arguments.give_back()
                del self.residency

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the layer returns, by what is recorded of it, if that may be."""
        runtime, layer, residency, arguments = self.runtime, self.layer, self.residency, self._arguments
        recordings = runtime.recordings() if self._with_graph and not self._is_compiled else None
        needs_gradients = self._weights.trained or any(tensor.requires_grad for tensor in arguments.tensors)
        if recordings is None or not needs_gradients:
            return self._run_in_graph(args, kwargs)
        recorded = recordings.find(layer, arguments, residency)
        if recorded is not None:
            return RecordedCall(recorded, recordings, runtime).run(self._anchor, arguments.tensors, residency)
        before = recordings.begin_call(layer, residency, runtime)
        result = self._run_in_graph(args, kwargs)
        if before is not None:
            recordings.end_call(layer, self._original, runtime, arguments, residency, before, result)
        return result

    # ---- forward -------------------------------------------------------------------------------------------------------

    def _run_in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer, residency, with_graph = self.layer, self.residency, self._with_graph
        # What a compiler makes of narrow weights may round at other places in the backward.
        is_watched = not (self._is_compiled or layer.differentiates)
        watch = self.runtime.watch(layer, residency) if is_watched else None
        self._recompute = recompute = Recompute(layer, self.runtime, self._arguments)
        if with_graph:
            self._prepare_backward()
        recompute.begin(residency, with_graph=with_graph, is_certain=with_graph or watch is not None)
        self._is_running = True
        result, left, is_again = self._run_watched(args, kwargs, watch)
        while is_again:
            watch, self._saves, self._begun = None, Saves(), None
            recompute.take_back(residency)
            result, left, is_again = self._run_watched(args, kwargs, None)
        self._is_running = False
        if layer.differentiates and not self._keeps:
            self._saves.clear()
        if with_graph:
            recompute.note_inputs()
        has_changed = recompute.take_over(residency, left, self._saves)
        if watch is not None and not self._found.replaced and (recompute.has_inputs or not has_changed):
            self._try_narrow(watch, flatten(result)[0])
        owned = self._owned(result)
        self._weights.forget_uses()
        return owned

    def _run_watched(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], watch: CastWatch | None
    ) -> tuple[Any, Mapping[BufferKey, Tensor | None], bool]:
        """What the layer returns, how it leaves its buffers, and whether it has to run again, with more of them."""
        layer, residency, recompute = self.layer, self.residency, self._recompute
        before = WeightsBefore(layer, residency, self.runtime, is_compiled=self._is_compiled)
        save, result, failed, left = self._arguments.noting(self._save), None, None, dict[BufferKey, Tensor | None]()
        try:
            with _saving(save, is_compiled=self._is_compiled) if self._with_graph else NO_CONTEXT:
                bound = self._weights.bind(self)
                beside = layer.companions.bound(residency.leaves, residency.companions)
                kept = keeping_derived(layer.derived, layer.varies) if layer.derived else NO_CONTEXT
                found = layer.bound(bound, recompute.buffers)
                with beside as recompute.changes, found as left, watch or NO_CONTEXT, kept:
                    try:
                        result = self._run(*args, **kwargs)
                    except (DataAssignedError, DifferentiatesError) as error:
                        failed = error
        except Exception as error:
            is_ours = isinstance(error, UnsupportedModelError | CapacityError | torch.OutOfMemoryError)
            # The step may catch it and go on: what the layer has changed until then is changed.
            if not is_ours and hidden_shortage(error) is None:
                recompute.take_over(residency, left, self._saves)
            raise
        self._found, is_again = before.after(self._weights, failed or self._begun, with_graph=self._with_graph)
        return result, left, is_again

    def _prepare_backward(self) -> None:
        """Keep what a recompute needs."""
        layer, runtime = self.layer, self.runtime
        if parametrize._cache_enabled and layer.is_parametrized:
            raise _within_cache(layer)
        if self._weights.trained or self._arguments.may_require_gradients():
            self._keep_inputs()
        if self._weights.trained:
            self.use, self._is_announced = runtime.expect_backward(layer), True

    def _keep_inputs(self) -> None:
        self.layer.is_in_graph = True
        self._keeps = not self._recompute.counts and self.runtime.keep_graph(self.layer, self)
        self._recompute.keep_inputs(self.residency)

    def _save(self, tensor: Tensor) -> SavedTensor | ViewAgain:
        """Keep what finds a tensor again that autograd saves."""
        if not self._recompute.has_inputs:
            # It comes from a tensor that is no argument.
            self._keep_inputs()
        # Of weights composed of others, what is saved comes again with the rest.
        parameter = self.residency.parameter_at(tensor) if tensor.layout is torch.strided else None
        if parameter is not None and (leaf := self.residency.leaves[parameter]).dtype is tensor.dtype:
            self._saves.add(None, of=parameter)
            return ViewAgain(tensor, leaf, partial(_weight_again, self, parameter))
        # Modes that are active in the layer are not to see this.
        with DisableTorchFunction():
            saved = SavedTensor(
                tensor, f"layer {self.layer.name!r}", self.open, keep=self._keeps or self.layer.differentiates
            )
        self._saves.add(saved)
        return saved

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        given = self._arguments.tensors if self._is_running else []
        reaching = self.runtime.surroundings.reaching(
            self.layer, self.residency, given, takes_objects=self._takes_objects, is_compiled=self._is_compiled
        )
        with reaching, own_code(self.layer, self.residency, self._saves, is_again=not self._is_running):
            if not self._is_compiled:
                return self._original(*args, **kwargs)
            with self.runtime.surroundings.compiling():
                return self.residency.device.run_compiled(self._original, args, kwargs)

    def _owned(self, result: Any) -> Any:
        """What the call returns and leaves on modules, without what lies in the weights' memory."""
        owned = OwnedResults(self.residency, self.layer.copies)
        for attributes, names in self._recompute.changes.objects:
            self.runtime.listeners.on_set(attributes, names)
        left = self.layer.attributes.after_call(self._recompute.attributes)
        if left is not None:
            if left is not self._recompute.attributes:
                for attributes, names in left.changes_since(self._recompute.attributes):
                    self.runtime.listeners.on_set(attributes, names)
            owned.attributes(left)
        returned, result = result, owned.value(result)
        if self._with_graph:
            made = [*tensors_of(result), *(left.tensors().values() if left is not None else ())]
            ends = {tensor.grad_fn for tensor in self._arguments.tensors}
            self._contexts.find(self.layer, returned, made, ends, self._open_before_node, is_compiled=self._is_compiled)
            if not self._keeps:
                self._contexts.clear()
        return result

    def _open_before_node(self, gradients: Any) -> None:
        if torch.is_grad_enabled():
            raise double_backward(self.layer)
        with self.runtime.calling():
            self.enter()
            if self._contexts.are_absent:
                self._refill()

    # ---- narrow weights ------------------------------------------------------------------------------------------------

    def _try_narrow(self, watch: CastWatch, outputs: Sequence[Any]) -> None:
        """Run the layer once more with narrow weights: only if it returns the same bits will it get them from now on."""
        dtype, leaves = watch.dtype, self.residency.leaves
        again: list[Any] = []
        try:
            with saved_tensors_hooks(drop, _unpack):
                casts = watch.narrow() - self.layer.companions.parameters
                if not casts:
                    return
                with torch.no_grad():
                    narrow = {p: make_resident(parameter_like(p, leaves[p].detach().to(dtype))) for p in casts}
                self.residency.leaves = {**leaves, **narrow}
                found, uses = self._weights.tried(narrow, leaves, self.residency)
                with self._recompute.bound(self.residency, found):
                    again = flatten(self._recompute.run(self.residency, self._run))[0]
        except torch.OutOfMemoryError:
            # No room to try in: they stay as they are.
            return
        finally:
            self.residency.leaves = leaves
        pairs = zip(outputs, map(really, again), strict=True)
        if all(are_equal(one, other) for one, other in pairs if isinstance(one, Tensor)):
            # Functions of which it isn't known what they make of the weight get it as it is.
            self.layer.narrow = {p: dtype for p, use in uses.items() if use.is_cast and not use.is_read}

    # ---- backward ------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Let the graph go: the backward will recompute."""
        self._keeps = False
        self._saves.clear()
        self._contexts.clear()

    def open(self, saved: SavedTensor | None = None) -> None:
        """A backward has come to the call, and asks for a saved tensor, or for a weight: that is where the weights are."""
        if self._is_running:
            if self.layer.differentiates:
                return
            # The layer's code may catch it.
            self._begun = DifferentiatesError(self.layer)
            raise self._begun
        if torch.is_grad_enabled() and not isinstance(torch._C._current_autograd_node(), torch._C._FunctionBase):
            raise double_backward(self.layer)
        if saved is None:
            self._found.refuse_changed()
        if self.runtime.open_call.call is self and (saved is None or saved.content is not None):
            return
        with self.runtime.calling(), _out_of_transforms():
            self.enter()
            if saved is not None and saved.content is None:
                self._refill()

    def is_through(self) -> bool:
        """Whether no backward can ask for a saved tensor any more: each node lets go of what it saved when it has run."""
        return not self._saves.alive()

    def enter(self) -> None:
        """The backward is in the call from now on, until it goes on elsewhere."""
        if self._is_running:
            raise DifferentiatesError(self.layer)
        self.runtime.open_call.enter(self, self.layer, self._entered)

    @contextmanager
    def _entered(self, residency: Residency) -> Iterator[None]:
        """The context in which the backward is in the call."""
        self.residency = residency
        self._recompute.note_later_changes()
        self._recompute.fill_again(self._saves)
        if self.runtime.is_last_backward():
            self.layer.first_inputs = []
        try:
            surroundings = self.runtime.surroundings.differentiating(residency)
            # For as long as the backward is here: a checkpoint within the layer runs a part of it again.
            with surroundings, self._recompute.bound(residency, self._weights.bind_again(residency)):
                yield
        finally:
            self._weights.forget_uses()
            del self.residency
            self._saves.clear()
            self._contexts.clear()
            if self.runtime.is_last_backward():
                if self._is_announced:
                    self.runtime.end_backward(self.layer)
                self._is_announced = False
                if self.is_through():
                    # The nodes live as long as their graph; what the call kept need not.
                    self._recompute.forget_inputs()
                    self._found.replaced, self._is_over = {}, True

    def _refill(self) -> None:
        if self._is_over:
            raise second_backward(self.layer)
        weights, running = self._found.again(self.residency), self.runtime.surroundings.running(self.residency)
        run = self._contexts.noting(partial(self._recompute.run, self.residency, self._run, True))
        with weights, running, self.runtime.measuring_graph(self.layer), torch.enable_grad():
            fill = partial(self._saves.fill, run, is_compiled=self._is_compiled, keeps=self.layer.differentiates)
            is_same = self._arguments.filled(self.layer, self._saves, fill, to_end=self._contexts.are_absent)
            if not (is_same and self._contexts.fill()):
                raise _other_saves(self.layer)
        self._recompute.fill_again(self._saves)


def _weight_again(call: LayerCall, parameter: nn.Parameter) -> Tensor:
    """A weight of a call, of which a backward asks for a view that was saved."""
    call.open()
    return call.residency.leaves[parameter]


def _out_of_transforms() -> AbstractContextManager[Any]:
    """The context in which a backward that is vectorized over gradients, by torch.vmap, finds what one alone does."""
    return temporarily_clear_interpreter_stack() if torch._C._are_functorch_transforms_active() else NO_CONTEXT


def _saving(save: Callable[[Tensor], Any], *, is_compiled: bool) -> AbstractContextManager[Any]:
    """The context of a call in which its graph saves tensors."""
    if is_compiled:
        # What happens to saved tensors is not to be traced.
        return saved_tensors_hooks(torch.compiler.disable(save), torch.compiler.disable(_unpack))
    return saved_tensors_hooks(save, _unpack)


def _writes_into(layer: SwappedLayer, kind: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer.name!r} writes into a {kind} that it is called with, whose tensors were cast or are on "
        "another device: return a new one, or use HarmonyPrecision('bf16-mixed') and Trainer(devices=1)"
    )


def _within_cache(layer: SwappedLayer) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer.name!r} is called within torch.nn.utils.parametrize.cached(), which would keep its "
        "weight for other calls, and with it the graph of this one: call it outside of that, or make a layer of the "
        "module that does so with HarmonyStrategy(layers=...)"
    )


def _other_saves(layer: SwappedLayer) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer.name!r} saves other tensors for its backward when it runs again than it saved in its forward: it "
        "depends on something beside its arguments, parameters, buffers, attributes and random numbers, such as a global "
        "variable or a tensor that was changed in place; pass that as an argument, or make a larger module the layer with "
        "HarmonyStrategy(layers=...)"
    )


_unpack: Callable[[Any], Tensor] = methodcaller("load")

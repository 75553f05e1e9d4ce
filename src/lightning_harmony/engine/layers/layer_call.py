"""The call of a layer: its own code runs in the caller's graph, swapped in, and again when a backward comes to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

from lightning_harmony.engine.layers.call_arguments import CallArguments
from lightning_harmony.engine.layers.narrow import CastWatch
from lightning_harmony.engine.layers.narrow_weight import NarrowUse, NarrowWeight, can_show, really, show
from lightning_harmony.engine.layers.owned_results import OwnedResults
from lightning_harmony.engine.layers.recompute import Recompute, note_use
from lightning_harmony.engine.layers.runtime import Runtime
from lightning_harmony.engine.layers.saved_tensors import SavedTensor, Saves
from lightning_harmony.engine.memory.tensor_class import parameter_like
from lightning_harmony.engine.model.host_store import begins_in, lies_in
from lightning_harmony.engine.model.layer import (
    DataAssignedError,
    SwappedLayer,
    changes_data,
    make_resident,
    own_code_of,
)
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.structures.operations import detached, viewed
from lightning_harmony.engine.structures.parts import num_bytes_of, parts_of
from lightning_harmony.engine.structures.tree import flatten, tensors_of
from lightning_harmony.engine.updates.requested_gradients import requested_gradients
from lightning_harmony.errors import UnsupportedModelError
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
    """

    residency: Residency
    use = 0

    def __init__(self, original: OwnForward, runtime: Runtime, anchor: Tensor) -> None:
        self.layer, self._original, self._is_compiled = original
        self.runtime = runtime
        self._anchor = anchor
        self._saves = Saves()
        self._with_graph = torch.is_grad_enabled()
        # What the running code does with narrow weights.
        self._uses: dict[nn.Parameter, NarrowUse] = {}
        self._trained = [parameter for parameter in self.layer.parameters if parameter.requires_grad]
        # In the graph, too: with it the node of the weights lives where no other node is behind that.
        self._end: Tensor | None = None
        self._keeps = self._is_running = self._is_announced = self._is_over = False

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer."""
        runtime, layer = self.runtime, self.layer
        self._arguments = arguments = CallArguments(args, kwargs, layer.compute_dtype)
        with runtime.calling(), runtime.visit(layer, Phase.FORWARD) as residency:
            self.residency = residency
            try:
                # The compiler knows nothing of several devices.
                bring = partial(runtime.brought, residency=residency, at_once=self._is_compiled)
                args, kwargs = arguments.brought(bring)
                self._takes_objects = arguments.have_objects
                tensors = arguments.tensors
                self._away = [each for each in tensors if runtime.at_layer(each, residency) is not each]
                with runtime.running(layer, residency, takes_objects=self._takes_objects or bool(self._away)):
                    result = self._run_in_graph(args, kwargs)
                tensors = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
                runtime.hand_out(tensors, residency)
                return result
            finally:
                arguments.give_back()
                del self.residency, self._away

    # ---- forward -------------------------------------------------------------------------------------------------------

    def _run_in_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer, residency, with_graph = self.layer, self.residency, self._with_graph
        # What a compiler makes of narrow weights may round at other places in the backward.
        watch = None if self._is_compiled else self.runtime.watch(layer, residency)
        self._recompute = recompute = Recompute(layer, self.runtime, self._arguments)
        if with_graph:
            self._prepare_backward()
        recompute.begin(residency, with_graph=with_graph, is_certain=with_graph or watch is not None)
        version = residency.weights._version
        gathered, composed = self._storages_of(layer.gathered), self._storages_of(layer.composed)
        self._is_running = True
        with self._saving() if with_graph else nullcontext():
            bound = self._shown(self._weights() if with_graph else residency.leaves)
            with recompute.beside(residency), layer.bound(bound, recompute.buffers) as left, watch or nullcontext():
                result = self._run(*args, **kwargs)
        self._is_running = False
        has_written = gathered == self._storages_of(layer.gathered) and residency.weights._version != version
        if has_written or self._has_changed_wide() or composed != self._storages_of(layer.composed):
            raise UnsupportedModelError(
                f"layer {layer.name!r} modifies a parameter in place in its forward, or its data, which swapping would lose; "
                "do that in a hook such as on_train_batch_start"
            )
        if with_graph:
            recompute.note_inputs()
        has_changed = recompute.take_over(residency, left)
        if watch is not None and (recompute.has_inputs or not has_changed):
            self._try_narrow(watch, flatten(result)[0])
        owned = self._owned(result)
        self._forget_uses()
        if with_graph and layer.companions:
            self._open_before(owned)
        return owned

    def _prepare_backward(self) -> None:
        """Keep what a recompute needs."""
        layer, runtime = self.layer, self.runtime
        leaves = self.residency.leaves
        # Of those composed of others, what is saved comes again with the rest.
        plain = [leaves[parameter] for parameter in layer.parameters if parameter not in layer.composed]
        self._storages = {leaf.untyped_storage()._cdata for leaf in plain}
        if parametrize._cache_enabled and layer.is_parametrized:
            raise UnsupportedModelError(
                f"layer {layer.name!r} is called within torch.nn.utils.parametrize.cached(), which would keep its "
                "weight for other calls, and with it the graph of this one: call it outside of that, or make a layer of the "
                "module that does so with HarmonyStrategy(layers=...)"
            )
        tensors = self._arguments.tensors
        if self._trained or any(tensor.requires_grad for tensor in tensors):
            self._keep_inputs()
        if self._trained:
            self.use, self._is_announced = runtime.expect_backward(layer), True

    def _keep_inputs(self) -> None:
        self._keeps = self.runtime.keep_graph(self.layer, self)
        self._recompute.keep_inputs(self.residency)

    def _weights(self) -> Mapping[nn.Parameter, Tensor]:
        """The weights for the layer's code, in the caller's graph: their gradients go to the pack's sum."""
        trained, leaves = self._trained, self.residency.leaves
        if not trained:
            return leaves
        self._gradients = WeightGradients(self, trained)
        weights = [detached(leaves[parameter]) for parameter in trained]
        with saved_tensors_hooks(self._gradients.save, self._gradients.load):
            *taps, self._end = _Weights.apply(self._anchor, self._gradients, weights)
        return self._as_found(trained, taps)

    def _weights_again(self) -> Mapping[nn.Parameter, Tensor]:
        """The same weights, in the same graph: code that runs in the backward may differentiate to them."""
        if self._end is None or not self._with_graph:
            return self._shown(self.residency.leaves)
        node: Any = self._end.grad_fn
        return self._shown(self._as_found(self._gradients.parameters, node.saved_tensors))

    def _shown(self, weights: Mapping[nn.Parameter, Tensor]) -> Mapping[nn.Parameter, Tensor]:
        """The weights, each as wide as the parameter is: what is shown of narrow ones computes as they are needed."""
        narrow = {} if self._is_compiled or self.layer.compute_dtype is not None else self.layer.narrow
        shown = [
            p
            for p in narrow
            if (dtype := weights[p].dtype) is not p.dtype and dtype is narrow[p] and can_show(p, weights[p])
        ]
        if not shown:
            return weights
        self._uses = {parameter: self._use_of(parameter, weights[parameter]) for parameter in shown}
        return {**weights, **{parameter: self._show(parameter).of(use) for parameter, use in self._uses.items()}}

    def _show(self, parameter: nn.Parameter) -> NarrowWeight:
        """What all calls are shown of a narrow weight while it is there."""
        known, leaf = self.residency.shown, self.residency.leaves[parameter]
        if parameter not in known:
            with torch.inference_mode(False):
                known[parameter] = show(parameter, leaf, partial(_refuse_gradient, self.layer))
        found: NarrowWeight = known[parameter]
        return found

    def _forget_uses(self) -> None:
        for use in self._uses.values():
            use.close()
        self._uses = {}

    def _use_of(self, parameter: nn.Parameter, narrow: Tensor) -> NarrowUse:
        # Not the weight itself, which would be kept with what code keeps.
        runtime, device, place = self.runtime, self.residency.device, narrow.device

        def load() -> Tensor:
            self.layer.read_wide.add(parameter)
            # For its gradient, too.
            runtime.make_room(2 * num_bytes_of(parameter), device)
            with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction():
                return parameter.detach().to(place, copy=True)

        if narrow.is_leaf or not narrow.requires_grad:
            return NarrowUse(narrow, load)
        end, take = self._end, partial(self._gradients.take_wide, parameter)

        def attach(value: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(_drop, _unpack):
                tap: Tensor = _Widened.apply(end, value, take)
            return tap

        return NarrowUse(narrow, load, attach)

    def _has_changed_wide(self) -> bool:
        """Whether the code has changed what it was given as a parameter in the place of a narrow weight."""
        return any(use.has_changed() for use in self._uses.values())

    def _as_found(self, parameters: Sequence[nn.Parameter], taps: Sequence[Tensor]) -> Mapping[nn.Parameter, Tensor]:
        """The weights, some of them in a graph: of the classes that the layer's code finds, and with the same attributes."""
        leaves = self.residency.leaves
        for parameter, tap in zip(parameters, taps, strict=True):
            # The compiler knows no classes of ours.
            kind = type(parameter) if self._is_compiled else type(leaves[parameter])
            if kind is not nn.Parameter:
                tap.__class__ = kind
            vars(tap).update(vars(leaves[parameter]))
        return {**leaves, **dict(zip(parameters, taps, strict=True))}

    def _saving(self) -> AbstractContextManager[Any]:
        """The context of the call in which its graph saves tensors."""
        save, load = self._save, _unpack
        if self._is_compiled:
            # What happens to saved tensors is not to be traced.
            save, load = torch.compiler.disable(save), torch.compiler.disable(load)
        return saved_tensors_hooks(save, load)

    def _save(self, tensor: Tensor) -> SavedTensor | SavedWeight:
        """Keep what finds a tensor again that autograd saves."""
        if not self._recompute.has_inputs:
            # It comes from a tensor that is no argument.
            self._keep_inputs()
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._storages:
            for parameter in self.layer.parameters:
                leaf = self.residency.leaves[parameter]
                if leaf.dtype == tensor.dtype and lies_in(tensor, leaf) and begins_in(tensor, leaf):
                    self._saves.add(None)
                    return SavedWeight(self, parameter, leaf, tensor)
        # Modes that are active in the layer are not to see this.
        with DisableTorchFunction():
            saved = SavedTensor(tensor, f"layer {self.layer.name!r}", self.open, keep=self._keeps)
        self._saves.add(saved)
        return saved

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        away = self._away if self._is_running else []
        reaching = self.runtime.reaching(self.layer, self.residency, away, takes_objects=self._takes_objects)
        try:
            with reaching, own_code_of(self.layer):
                if not self._is_compiled:
                    return self._original(*args, **kwargs)
                with self.runtime.compiling(tensors_of(*args, *kwargs.values())):
                    return self.residency.device.run_compiled(self._original, args, kwargs)
        except DataAssignedError as error:
            raise UnsupportedModelError(changes_data(self.layer)) from error

    def _owned(self, result: Any) -> Any:
        """What the call returns and leaves on modules, without what lies in the weights' memory."""
        owned = OwnedResults(self.residency)
        for attributes, names in self._recompute.changes.objects:
            self.runtime.note_set(attributes, names)
        left = self.layer.attributes.after_call(self._recompute.attributes)
        if left is not None:
            if left is not self._recompute.attributes:
                for attributes, names in left.changes_since(self._recompute.attributes):
                    self.runtime.note_set(attributes, names)
            owned.attributes(left)
        return owned.value(result)

    def _storages_of(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """Where weights lie. That cuDNN gathers some counts as a change in inference mode; code may compose others anew."""
        leaves = self.residency.leaves
        return [part.untyped_storage()._cdata for p in parameters for part in parts_of(leaves[p])]

    def _open_before(self, result: Any) -> None:
        """Let a backward that comes from what the call has returned or left on modules open the call.

        A function of the layer's code may keep an object that has companions, and may have saved no tensor.
        """
        arguments = {tensor.grad_fn for tensor in self._arguments.tensors}
        left = self.layer.attributes.read().tensors().values()
        outputs = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
        nodes: set[Any] = {tensor.grad_fn for tensor in (*outputs, *left)}
        for node in nodes - arguments - {None}:
            node.register_prehook(self._open_before_node)

    def _open_before_node(self, gradients: Any) -> None:
        if torch.is_grad_enabled():
            raise _double_backward(self.layer)
        with self.runtime.calling():
            self.enter()

    # ---- narrow weights ------------------------------------------------------------------------------------------------

    def _try_narrow(self, watch: CastWatch, outputs: Sequence[Any]) -> None:
        """Run the layer once more with narrow weights: only if it returns the same bits will it get them from now on."""
        dtype, leaves = watch.dtype, self.residency.leaves
        again: list[Any] = []
        try:
            with saved_tensors_hooks(_drop, _unpack):
                casts = watch.narrow() - self.layer.companions.parameters
                if not casts:
                    return
                with torch.no_grad():
                    narrow = {p: make_resident(parameter_like(p, leaves[p].detach().to(dtype))) for p in casts}
                self.residency.leaves = {**leaves, **narrow}
                trained = self._trained if self._with_graph else []
                # Leaves of no graph, and else what the layer found.
                weights = [self.residency.leaves[parameter].detach().requires_grad_() for parameter in trained]
                found = self._as_found(trained, weights)
                uses = {
                    p: NarrowUse(found[p], partial(Tensor.detach, leaves[p])) for p in casts if can_show(p, found[p])
                }
                refuse = partial(_refuse_gradient, self.layer)
                found = {**found, **{p: show(p, narrow[p], refuse).of(use) for p, use in uses.items()}}
                with self._recompute.bound(self.residency, found):
                    again = flatten(self._recompute.run(self.residency, self._run))[0]
        except torch.OutOfMemoryError:
            # No room to try in: they stay as they are.
            return
        finally:
            self.residency.leaves = leaves
        if all(_same(one, really(other)) for one, other in zip(outputs, again, strict=True)):
            # Functions of which it isn't known what they make of the weight get it as it is.
            self.layer.narrow = {p: dtype for p, use in uses.items() if use.is_cast and not use.is_read}

    # ---- backward ------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Let the graph go: the backward will recompute."""
        self._keeps = False
        self._saves.clear()

    def open(self, saved: SavedTensor | None = None) -> None:
        """A backward has come to the call, and asks for a saved tensor."""
        if self._is_running:
            raise UnsupportedModelError(
                f"a backward starts inside a layer's forward, that of {self.layer.name!r}, whose saved tensors are not kept: "
                "compute that gradient in the training_step instead"
            )
        in_function = isinstance(torch._C._current_autograd_node(), torch._C._FunctionBase)
        if torch.is_grad_enabled() and not in_function:
            raise _double_backward(self.layer)
        with self.runtime.calling():
            self.enter()
            if saved is not None:
                if saved.content is None:
                    self._refill()
                assert saved.content is not None
                note_use([saved.content], self.residency)

    def is_through(self) -> bool:
        """Whether no backward can ask for a saved tensor any more: each node lets go of what it saved when it has run."""
        return not self._saves.alive()

    def enter(self) -> None:
        """The backward is in the call from now on, until it goes on elsewhere."""
        self.runtime.open_call.enter(self, self.layer, self._enter)

    def _enter(self, residency: Residency, stack: ExitStack) -> None:
        """The backward enters the call, and leaves it with the stack.

        Args:
            residency: of its pack.
            stack: takes contexts that last until the backward leaves the call.
        """
        self.residency = residency
        stack.callback(self._leave)
        stack.enter_context(self.runtime.differentiating(residency))
        # For as long as the backward is here: a checkpoint within the layer runs a part of it again.
        stack.enter_context(self._recompute.bound(residency, self._weights_again()))

    def _leave(self) -> None:
        self._forget_uses()
        del self.residency
        self._saves.clear()
        if self.runtime.is_last_backward():
            if self._is_announced:
                self.runtime.end_backward(self.layer)
            self._is_announced = False
            if self.is_through():
                # The nodes live as long as their graph; what the call kept need not.
                self._recompute.forget_inputs()
                self._is_over = True

    def _refill(self) -> None:
        if self._is_over:
            raise UnsupportedModelError(
                f"a second backward comes to one call of layer {self.layer.name!r}: losses of two microbatches come of it, "
                "as of a tensor that one of them left where the other found it, in a closure or an object; use "
                "num_microbatches=1"
            )
        running = self.runtime.running(self.layer, self.residency, takes_objects=self._takes_objects)
        with running, self.runtime.measuring_graph(self.layer), torch.enable_grad():
            if not self._saves.fill(lambda: self._recompute.run(self.residency, self._run)):
                raise UnsupportedModelError(
                    f"layer {self.layer.name!r} saves other tensors for its backward when it runs again than it saved in its "
                    "forward: it depends on something beside its arguments, parameters, buffers, attributes and random "
                    "numbers, such as a global variable or a tensor that was changed in place; pass that as an argument, or "
                    "make a larger module the layer with HarmonyStrategy(layers=...)"
                )


class SavedWeight:
    """A view of a weight that autograd saved: where it lies in the weight."""

    __slots__ = ("_call", "_dtype", "_offset", "_parameter", "_size", "_stride")

    def __init__(self, call: LayerCall, parameter: nn.Parameter, leaf: Tensor, tensor: Tensor) -> None:
        self._call, self._parameter = call, parameter
        self._size, self._stride, self._dtype = tensor.size(), tensor.stride(), tensor.dtype
        self._offset = tensor.storage_offset() - leaf.storage_offset()

    def load(self) -> Tensor:
        """The same view of the weight, swapped in again."""
        self._call.open()
        # It may have come in another type since.
        leaf = detached(self._call.residency.leaves[self._parameter]).to(self._dtype)
        return viewed(leaf, Tensor.as_strided, self._size, self._stride, leaf.storage_offset() + self._offset)


class WeightGradients:
    """The other end of the node that has a layer's weights in the graph of one call: takes their gradients.

    The node holds it, and the call holds the node. So it does not hold the call: nothing would free the three where no
    backward comes, as where a checkpoint around layers runs them again for the sake of another tensor.

    Args:
        call: the call.
        parameters: those that need gradients.
    """

    def __init__(self, call: LayerCall, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._layer, self._runtime, self._use = call.layer, call.runtime, call.use
        self._call = weakref.ref(call)
        self._unsaved = iter(parameters)
        # Of parameters that were needed as they are, where the weights are narrow.
        self._wide: dict[nn.Parameter, Tensor] = {}

    def save(self, weight: Tensor) -> tuple[nn.Parameter, torch.dtype]:
        """The node saves the next weight."""
        return next(self._unsaved), weight.dtype

    def load(self, saved: tuple[nn.Parameter, torch.dtype]) -> Tensor:
        """The weight for the call, while a backward is in it."""
        call, (parameter, dtype) = self._call(), saved
        assert call is not None
        # It may have come in another type since.
        leaf = detached(call.residency.leaves[parameter])
        return leaf if leaf.dtype is dtype else leaf.to(dtype)

    def take_wide(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """The gradient of a parameter that was needed as it is. That of the narrow weight comes last, if one does."""
        earlier = self._wide.get(parameter)
        self._wide[parameter] = gradient if earlier is None else earlier + gradient

    def _summed(self, parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
        wide = self._wide.pop(parameter, None)
        return gradient if wide is None else wide if gradient is None else wide + gradient

    def take(self, gradients: Sequence[Tensor | None], anchor: Any) -> None:
        """Gradients have come.

        Args:
            gradients: of each parameter; None for one that the backward has not come to.
            anchor: the node that knows whose gradients are asked for.
        """
        layer, runtime, call = self._layer, self._runtime, self._call()
        if torch.is_grad_enabled():
            raise _double_backward(layer)
        summed = requested_gradients(anchor, layer.parameters, f"layer {layer.name!r}")
        pairs = [(p, self._summed(p, gradient)) for p, gradient in zip(self.parameters, gradients, strict=True)]
        wanted = [(p, gradient) for p, gradient in pairs if gradient is not None and p in summed]
        with runtime.calling():
            if call is not None:
                call.enter()
                runtime.accumulate(layer, self._use, wanted)
                if call.is_through():
                    runtime.open_call.leave()
                return
            # It saved nothing.
            with runtime.visit(layer, Phase.BACKWARD):
                runtime.accumulate(layer, self._use, wanted)
                if runtime.is_last_backward():
                    runtime.end_backward(layer)


class _Weights(torch.autograd.Function):
    """The weights of a layer in the graph of one call."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradients: WeightGradients, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights)
        return *weights, torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.gradients.take(gradients[:-1], ctx.next_functions[0][0])
        return None, None, None


class _Widened(torch.autograd.Function):
    """A parameter as it is in the graph of a call whose weight is narrow: behind the node of the weights, which runs later."""

    @staticmethod
    def forward(ctx: Any, end: Tensor, value: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.take(gradient)
        return None, None, None


def _refuse_gradient(layer: SwappedLayer, gradient: Tensor) -> None:
    raise UnsupportedModelError(
        f"a gradient of a parameter of layer {layer.name!r} comes to what stands for it while it is narrow: code that torch "
        "tells nobody of, such as torch.jit.script, a function that is vectorized over the parameter (torch.vmap) or an "
        "extension, computes with the parameter itself. Give it a copy, parameter.clone()"
    )


def _double_backward(layer: SwappedLayer) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"double backward (create_graph=True) goes through swapped layer {layer.name!r}, which recomputes and "
        "keeps no graph: use Trainer(strategy='auto'), or penalize a difference of two outputs instead of a gradient"
    )


def _same(one: Any, other: Any) -> bool:
    return not isinstance(one, Tensor) or (one.dtype == other.dtype and torch.equal(one, other))


def _unpack(saved: SavedTensor | SavedWeight) -> Tensor:
    return saved.load()


def _drop(tensor: Tensor) -> None:
    return None

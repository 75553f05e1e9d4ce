"""The call of a layer: run swapped in and stashed, as an autograd function that runs it again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.utils import parametrize

from lightning_harmony.engine.ambient import AmbientState
from lightning_harmony.engine.asked import asked_for
from lightning_harmony.engine.call_arguments import CallArguments
from lightning_harmony.engine.call_buffers import CallBuffers
from lightning_harmony.engine.graph_size import num_nodes_made
from lightning_harmony.engine.guise import Guise, parameter_like
from lightning_harmony.engine.handed_out import HandedOut
from lightning_harmony.engine.hollow_graph import HollowGraph, end_of, given, keep
from lightning_harmony.engine.layer import (
    GRAPH_ESCAPES,
    SwappedLayer,
    own_code_of,
    refuse_accumulation,
)
from lightning_harmony.engine.narrow import CastWatch
from lightning_harmony.engine.opaque import ObjectSnapshot, StashedObject, is_opaque
from lightning_harmony.engine.pack import Residency
from lightning_harmony.engine.rng import RandomState
from lightning_harmony.engine.stash import Stashed
from lightning_harmony.engine.strides import is_sparse
from lightning_harmony.engine.tree import flatten
from lightning_harmony.engine.unchanged_weights import UnchangedWeights
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.plan.task import Phase


class Runtime(Protocol):
    """What an intercepted call asks of the engine."""

    def visit(self, layer: SwappedLayer, phase: Phase) -> AbstractContextManager[Residency]:
        """Wait for the turn of a layer; it resides on the device within the context."""

    def stash(self, tensor: Tensor) -> Stashed:
        """Keep a tensor for the backward, on the host or as an alias."""

    def brought(self, tensors: Sequence[Tensor], residency: Residency) -> list[Tensor]:
        """The tensors on the device of a layer: those from elsewhere as copies without their graph."""

    def home(self, tensor: Tensor) -> int | None:
        """Where a tensor is."""

    def hand_out(self, tensors: Sequence[Tensor], residency: Residency) -> None:
        """What a layer made goes to its caller."""

    def sent(self, tensor: Tensor, home: int | None) -> Tensor:
        """The tensor at another one's home."""

    def calling(self) -> AbstractContextManager[None]:
        """The context of a layer's call."""

    def note_set(self, attributes: dict[str, Any], names: set[str]) -> None:
        """A layer's own code has set some of the attributes of a module."""

    def reaching(
        self, layer: SwappedLayer, residency: Residency, *, takes_objects: bool
    ) -> AbstractContextManager[None]:
        """The context of a layer's forward: it may use tensors that its attributes or objects hold, wherever they are."""

    def running(
        self, layer: SwappedLayer, residency: Residency, *, takes_objects: bool
    ) -> AbstractContextManager[None]:
        """The context of a layer's own code."""

    def compiling(self) -> AbstractContextManager[None]:
        """The context of a compiled layer."""

    def watch(self, layer: SwappedLayer, residency: Residency) -> CastWatch | None:
        """What a layer does with its weights, if that isn't known yet: the watch, to be active during its call."""

    def expect_backward(self, layer: SwappedLayer) -> int:
        """Announce a backward of a layer; return which use of the layer in its microbatch this is."""

    def keep_graph(self, layer: SwappedLayer, call: LayerCall) -> bool:
        """Whether a call may keep its graph, for its backward comes at once. It is told to `forget` if it doesn't."""

    def measuring_graph(self, layer: SwappedLayer) -> AbstractContextManager[None]:
        """The context in which a layer's inputs are loaded and its graph is made again."""

    def recomputing(self) -> AbstractContextManager[None]:
        """The context of a layer's own code when it runs again."""

    def is_last_backward(self) -> bool:
        """Whether no other backward of the current microbatch will follow."""

    def accumulate(self, layer: SwappedLayer, use: int, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Take the gradients of one announced backward."""

    def may_fill(self, layer: SwappedLayer, num_nodes: int) -> bool:
        """Whether the graph of a call may be filled in: one of its size was looked at, and holds nothing by itself."""

    def verify(self, layer: SwappedLayer, num_nodes: int, outputs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """Check, once for each size of a layer's graph, that it can be trained while it is swapped."""


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


class CallGraph(NamedTuple):
    """What a call's backward runs through.

    Attributes:
        inputs: where it ends: the inputs that need gradients.
        outputs: where it begins: the tensors that the call returned, None for those without gradients.
        hidden: tensors in objects and attributes, of which no gradient must come.
        leaves: the parameters that need gradients.
    """

    inputs: Sequence[Tensor | GradientEdge]
    outputs: Sequence[Tensor | GradientEdge | None]
    hidden: Sequence[Tensor]
    leaves: Mapping[nn.Parameter, Tensor | GradientEdge]


class LayerCall:
    """One call of a layer: what it takes to run it, and to run it again in backward."""

    residency: Residency
    _graph: CallGraph | None = None
    _hollow: tuple[HollowGraph, Mapping[nn.Parameter, GradientEdge]] | None = None
    _distinct: list[int] | None = None
    _is_over = False
    _num_nodes = 0
    _returned_guises: Sequence[Guise | None] = ()

    def __init__(self, original: OwnForward, runtime: Runtime, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._layer, self._original, self._is_compiled = original
        self._runtime = runtime
        self._buffers = CallBuffers(self._layer)
        self._arguments, self._leaves, self.tensors = CallArguments.taken_apart(args, kwargs, self._layer.compute_dtype)

    @property
    def layer(self) -> SwappedLayer:
        """What is called."""
        return self._layer

    def needs_gradients(self) -> bool:
        """Whether a backward can come of it."""
        return torch.is_grad_enabled() and (
            any(tensor.requires_grad for tensor in self.tensors)
            or any(parameter.requires_grad for parameter in self._layer.parameters)
        )

    def calling(self) -> AbstractContextManager[None]:
        """The context of all that the call does."""
        return self._runtime.calling()

    @contextmanager
    def _visit(self, phase: Phase) -> Iterator[None]:
        """The layer resides on the device within the context. The call must not keep it there for longer."""
        with self._runtime.visit(self._layer, phase) as self.residency:
            try:
                yield
            finally:
                del self.residency

    def run(self, anchor: Tensor) -> Any:
        """Run the layer, and let a backward come of it.

        Args:
            anchor: makes the call part of a graph where no input needs gradients.
        """
        with self._visit(Phase.FORWARD):
            outputs = _LayerFunction.apply(self, anchor, *self.tensors)
        self.tensors = []
        guises, self._returned_guises = self._returned_guises, ()
        if any(guises):
            outputs = [leaf if guise is None else guise.on(leaf) for leaf, guise in zip(outputs, guises, strict=True)]
        return self._returned(self._unflatten(iter(outputs)))

    def run_without_gradients(self) -> Any:
        """Only swap."""
        with self._visit(Phase.FORWARD):
            self.tensors = self._runtime.brought(self.tensors, self.residency)
            with self._runtime.running(self._layer, self.residency, takes_objects=self._arguments.have_objects):
                leaves, unflatten = self._flatten(self._run_only())
                handed_out = HandedOut(self.residency, with_graph=False)
                guises = self._guises_of(leaves, handed_out)
                leaves = [
                    handed_out.tensor(leaf) if isinstance(leaf, Tensor) else handed_out.object(leaf) for leaf in leaves
                ]
                leaves = [leaf if guise is None else guise.on(leaf) for leaf, guise in zip(leaves, guises, strict=True)]
                self._hand_out_attributes(handed_out)
            self._runtime.hand_out([leaf for leaf in leaves if isinstance(leaf, Tensor)], self.residency)
            return self._returned(unflatten(iter(leaves)))

    def _run_only(self) -> tuple[Any, list[Any]]:
        watch = self._runtime.watch(self._layer, self.residency)
        self._attributes = self._layer.attributes.read()
        if watch is not None:
            self._random = self._capture_random()
        made = self._arguments.made_of(self.tensors, self._leaves)
        before = self._buffers.copies(self.residency) if self._layer.has_unknown_buffers() else {}
        weights = UnchangedWeights(self._layer, self.residency)
        with self._buffers.bound(self.residency) as left, self._explaining(), self._watching(watch):
            result = self._run(*made.args, **made.kwargs), made.contents()
        weights.check()
        self._arguments.leave_attributes(made.tensors, HandedOut(self.residency, with_graph=False))
        changed = self._buffers.take_over(self.residency, left, before)
        if watch is not None and not changed:
            self._ambient, self._objects = AmbientState.capture(), self._leaves
            self._requires_grad = [False] * len(self.tensors)
            # Without gradients, a layer may change its inputs in place.
            self._try_narrow(watch, [Tensor.clone(tensor) for tensor in self.tensors], self._flatten(result)[0])
        return result

    def forward(self) -> tuple[Any, ...]:
        """Run the layer on `tensors` and stash what its recompute needs."""
        self._use = self._runtime.expect_backward(self._layer)
        self._requires_grad = [tensor.requires_grad for tensor in self.tensors]
        if any(tensor.requires_grad and is_sparse(tensor) for tensor in self.tensors):
            raise UnsupportedModelError(
                f"layer {self._layer.name!r} is given a sparse tensor that needs gradients, whose graph cannot be made "
                "anew: pass its values, and make it within the layer, or train where the model fits"
            )
        self._homes = [self._runtime.home(tensor) for tensor in self.tensors]
        self.tensors = self._runtime.brought(self.tensors, self.residency)
        with self._runtime.running(self._layer, self.residency, takes_objects=self._arguments.have_objects):
            return self._run_and_stash()

    def _run_and_stash(self) -> tuple[Any, ...]:
        if parametrize._cache_enabled and self._layer.is_parametrized:
            raise UnsupportedModelError(
                f"layer {self._layer.name!r} is called within torch.nn.utils.parametrize.cached(), which would keep its "
                "weight for other calls, and with it the graph of this one: call it outside of that, or make a layer of the "
                "module that does so with HarmonyStrategy(layers=...)"
            )
        stashed = [self._runtime.stash(tensor) for tensor in self.tensors]
        if not self._layer.holds_tensors:
            # It might free one while that is copied.
            for each in stashed:
                each.settle()
        self._inputs = stashed
        hidden: list[Tensor] = []
        self._objects = [self._snapshot(leaf, hidden) for leaf in self._leaves]
        self._attributes = self._layer.attributes.read()
        self._random = self._capture_random()
        self._ambient = AmbientState.capture()
        before_run = [_state(tensor) for tensor in self.tensors]
        weights = UnchangedWeights(self._layer, self.residency)
        before = self._buffers.copies(self.residency)
        keeps = self._runtime.keep_graph(self._layer, self)
        hollow = HollowGraph() if not keeps and self._may_be_hollow(hidden) else None
        inputs = self._as_given([Tensor.detach(tensor) for tensor in self.tensors])
        for tensor in inputs:
            refuse_accumulation(tensor)
        # With grad enabled, even if nothing is kept: under no_grad other kernels would run.
        with torch.enable_grad(), self._saving(hollow, keeps=keeps):
            if hollow is not None:
                inputs = [hollow.passed(tensor) for tensor in inputs]
            made = self._arguments.made_of(inputs, self._leaves)
            watch = self._runtime.watch(self._layer, self.residency)
            with self._buffers.bound(self.residency) as left, self._explaining(), self._watching(watch):
                result = self._run(*made.args, **made.kwargs), made.contents()
        self._buffers.keep(before, self._buffers.take_over(self.residency, left, before))
        if [_state(tensor) for tensor in self.tensors] != before_run:
            raise UnsupportedModelError(self._in_place_message())
        weights.check()
        flat, self._unflatten = self._flatten(result)
        handed_out = HandedOut(self.residency, with_graph=True)
        self._arguments.leave_attributes(made.tensors, handed_out)
        self._returned_guises = self._guises_of(flat, handed_out)
        flat = [leaf if isinstance(leaf, Tensor) else handed_out.object(leaf) for leaf in flat]
        self._hand_out_attributes(handed_out)
        self._graph = self._graph_between(inputs, flat, self._hidden(hidden)) if keeps else None
        if hollow is not None and hollow.close([leaf for leaf in flat if isinstance(leaf, Tensor)]):
            self._hollow = hollow, self.residency.edges(self._trained())
        if watch is not None:
            self._try_narrow(watch, [Tensor.detach(tensor) for tensor in self.tensors], flat)
        self._leaves = []
        return tuple(flat)

    def _may_be_hollow(self, hidden: Sequence[Tensor]) -> bool:
        """Whether the graph without what it saves holds nothing of the device, and leads to nothing but known leaves."""
        return not (self._is_compiled or any(self._layer.holds_tensors.values()) or self._hidden(hidden))

    def _hidden(self, in_objects: Sequence[Tensor]) -> list[Tensor]:
        return [*self._attributes.needing_gradients(), *in_objects]

    def _saving(self, hollow: HollowGraph | None, *, keeps: bool) -> AbstractContextManager[Any]:
        """What becomes of the tensors that autograd saves in the forward."""
        if hollow is not None:
            return hollow.saving(self.residency.weights)
        return torch.autograd.graph.saved_tensors_hooks(*((keep, given) if keeps else (_drop, _dropped)))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        reaching = self._runtime.reaching(self._layer, self.residency, takes_objects=self._arguments.have_objects)
        with reaching, own_code_of(self._layer):
            before = num_nodes_made()
            if self._is_compiled:
                with self._runtime.compiling():
                    result = self.residency.device.run_compiled(self._original, args, kwargs)
            else:
                result = self._original(*args, **kwargs)
            self._num_nodes = num_nodes_made() - before
            return result

    def _watching(self, watch: CastWatch | None) -> AbstractContextManager[Any]:
        """Watch the call itself, unless it runs compiled."""
        return watch if watch is not None and not self._is_compiled else nullcontext()

    def _watch_eager(self, watch: CastWatch, inputs: list[Tensor]) -> None:
        """Compiled code can't be watched: see what the layer does without."""
        with torch.compiler.set_stance("force_eager"), watch:
            self._recompute(inputs, self._original)

    def _try_narrow(self, watch: CastWatch, inputs: list[Tensor], outputs: Sequence[Any]) -> None:
        """Run the layer once more with narrow weights: only if it returns the same bits will it get them from now on."""
        dtype, leaves = watch.dtype, self.residency.leaves
        try:
            if self._is_compiled:
                with torch.autograd.graph.saved_tensors_hooks(_drop, _dropped):
                    self._watch_eager(watch, [tensor.clone() for tensor in inputs])
            casts = watch.narrow()
            if not casts:
                return
            with torch.no_grad():
                narrow = {p: parameter_like(p, leaves[p].detach().to(dtype)) for p in casts}
            self.residency.leaves = {**leaves, **narrow}
            with torch.autograd.graph.saved_tensors_hooks(_drop, _dropped):
                again, _ = self._recompute(inputs)
        except torch.OutOfMemoryError:
            # No room to try in: they stay as they are.
            return
        finally:
            self.residency.leaves = leaves
        if all(_same(one, other) for one, other in zip(outputs, again, strict=True)):
            self._layer.narrow = dict.fromkeys(casts, dtype)

    def hand_out(self, outputs: Sequence[Any]) -> tuple[Any, ...]:
        """The outputs for the caller, without their graph."""
        own = HandedOut(self.residency, with_graph=True).tensor
        handed = tuple(own(Tensor.detach(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in outputs)
        self._runtime.hand_out([leaf for leaf in handed if isinstance(leaf, Tensor)], self.residency)
        return handed

    def _hand_out_attributes(self, handed_out: HandedOut) -> None:
        """What the layer's code has left on its modules goes to whoever reads it there."""
        left = self._layer.attributes.after_call(self._attributes)
        if left is None:
            return
        if left is not self._attributes:
            for attributes, names in left.changes_since(self._attributes):
                self._runtime.note_set(attributes, names)
        handed_out.attributes(left)

    def forget(self) -> None:
        """Let the graph go: the backward will recompute."""
        self._graph = None

    def _returned(self, result: tuple[Any, list[Any]]) -> Any:
        returned, contents = result
        self._arguments.write_back(contents)
        return returned

    def backward(self, gradients: Sequence[Tensor | None], summed: frozenset[nn.Parameter]) -> list[Tensor | None]:
        """Recompute, and return the gradients of the tensors that it was called with, each where that is.

        Args:
            gradients: of the tensors that it returned.
            summed: the parameters to whose sums it adds.
        """
        with self._visit(Phase.BACKWARD):
            given = iter(self._runtime.brought([g for g in gradients if g is not None], self.residency))
            brought = [None if gradient is None else next(given) for gradient in gradients]
            with self._runtime.running(self._layer, self.residency, takes_objects=self._arguments.have_objects):
                found = self._recompute_and_differentiate(brought, summed)
            self._runtime.hand_out([gradient for gradient in found if gradient is not None], self.residency)
        homes = zip(found, self._homes, strict=True)
        return [None if gradient is None else self._runtime.sent(gradient, home) for gradient, home in homes]

    def _recompute_and_differentiate(
        self, gradients: Sequence[Tensor | None], summed: frozenset[nn.Parameter]
    ) -> list[Tensor | None]:
        if self._is_over:
            raise UnsupportedModelError(
                f"a second backward comes to one call of layer {self._layer.name!r}: losses of two microbatches come of it, "
                "as of a tensor that one of them left where the other found it, in a closure or an object; use "
                "num_microbatches=1"
            )
        graph = self._graph_of_forward()
        # A checkpoint within the layer runs a part of it again now, and must find the weights here, too;
        # what it does to buffers has been done.
        with self._layer.bound(self.residency.leaves, self._buffers.copies(self.residency)):
            found = _gradients(graph.outputs, gradients, [*graph.inputs, *graph.hidden, *graph.leaves.values()])
        of_inputs = iter(found[: len(graph.inputs)])
        self._refuse_hidden(found[len(graph.inputs) : len(graph.inputs) + len(graph.hidden)])
        if summed:
            of_parameters = zip(graph.leaves, found[len(graph.inputs) + len(graph.hidden) :], strict=True)
            wanted = [(p, gradient) for p, gradient in of_parameters if gradient is not None and p in summed]
            self._runtime.accumulate(self._layer, self._use, wanted)
        if self._runtime.is_last_backward():
            # The node lives as long as its graph; what it kept need not.
            self._inputs, self._objects, self._is_over = [], [], True
            self._arguments.forget()
            del self._attributes
        return [next(of_inputs) if requires_grad else None for requires_grad in self._requires_grad]

    def _graph_of_forward(self) -> CallGraph:
        """The graph of the forward: kept, or filled in again; or that of another run."""
        kept, self._graph = self._graph, None
        hollow, self._hollow = self._hollow, None
        if kept is not None:
            return kept
        with self._runtime.measuring_graph(self._layer):
            inputs = [Tensor.detach(value.load()) for value in self._inputs]
            # The first graph of its size is looked at: it has to be a whole one.
            if hollow is None or not self._runtime.may_fill(self._layer, self._num_nodes):
                return self._graph_between(inputs, *self._recompute(inputs))
            graph, leaves = hollow
            run = graph.fill(lambda: self._recompute(inputs), self.residency.weights)
            if run is not None:
                return self._graph_between(inputs, *run)
            return CallGraph(graph.inputs, graph.outputs, [], leaves)

    def _graph_between(self, inputs: Sequence[Tensor], flat: Sequence[Any], hidden: Sequence[Tensor]) -> CallGraph:
        outputs = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        leaves = {parameter: self.residency.leaves[parameter] for parameter in self._trained()}
        known = [*wanted, *hidden, *leaves.values(), *self._buffers.given_gradients]
        self._runtime.verify(self._layer, self._num_nodes, outputs, known)
        return CallGraph(wanted, [end_of(output) for output in outputs], hidden, leaves)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._layer.parameters if parameter.requires_grad]

    def _recompute(self, inputs: list[Tensor], run: Callable[..., Any] | None = None) -> tuple[list[Any], list[Tensor]]:
        """Run the forward again as it ran; return its flat result, and the tensors hidden in objects."""
        hidden = self._attributes.needing_gradients()
        leaves = [self._restored(leaf, hidden) for leaf in self._objects]
        now = self._capture_random()
        self._random.restore(self._cuda_device(), now)
        try:
            with self._ambient.entered(), torch.enable_grad(), self._runtime.recomputing():
                made = self._arguments.made_of(self._as_given(inputs), leaves)
                as_they_were = self._buffers.as_they_were(self.residency)
                with self._layer.attributes.as_they_were(self._attributes), as_they_were:
                    result = self._ambient.run(run or self._run, *made.args, **made.kwargs), made.contents()
        finally:
            now.restore(self._cuda_device())
        return self._flatten(result)[0], hidden

    def _flatten(self, result: tuple[Any, list[Any]]) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
        """Like `flatten`; a tensor that is in several places is one leaf, and comes back as one to each of them."""
        (of_returned, returned), (of_contents, contents) = map(flatten, result)
        leaves = [*of_returned, *of_contents]

        def unflatten(values: Iterator[Any]) -> Any:
            return returned(values), contents(values)

        first: dict[int, int] = {}
        places = [first.setdefault(id(leaf), place) for place, leaf in enumerate(leaves)]
        if self._distinct is None:
            self._distinct = [place for place, at in enumerate(places) if place == at]
        if len(self._distinct) == len(leaves):
            return leaves, unflatten
        distinct = self._distinct

        def unflatten_all(values: Iterator[Any]) -> Any:
            by_place = dict(zip(distinct, values, strict=True))
            return unflatten(iter([by_place[place] for place in places]))

        return [leaves[place] for place in distinct], unflatten_all

    def _as_given(self, tensors: list[Tensor]) -> list[Tensor]:
        for tensor, requires_grad in zip(tensors, self._requires_grad, strict=True):
            Tensor.requires_grad_(tensor, requires_grad)
        return tensors

    @staticmethod
    def _guises_of(leaves: Sequence[Any], handed_out: HandedOut) -> list[Guise | None]:
        guises = [Guise.of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        return [None if guise is None else handed_out.guise(guise) for guise in guises]

    def _capture_random(self) -> RandomState:
        return RandomState.capture(self._cuda_device())

    def _cuda_device(self) -> int | None:
        return self.residency.device.torch_device.index

    def _snapshot(self, leaf: Any, hidden: list[Tensor]) -> Any:
        if not is_opaque(leaf):
            return None if isinstance(leaf, Tensor) else leaf
        try:
            snapshot = ObjectSnapshot(leaf)
        except TypeError:
            return leaf
        hidden += [tensor for tensor in snapshot.tensors if tensor.requires_grad]
        stashed = [self._runtime.stash(tensor) for tensor in snapshot.tensors]
        return StashedObject(snapshot, stashed, [tensor.requires_grad for tensor in snapshot.tensors])

    def _restored(self, leaf: Any, hidden: list[Tensor]) -> Any:
        return leaf.load(hidden) if isinstance(leaf, StashedObject) else leaf

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say what it means that an input is a leaf of the layer's own graph."""
        try:
            yield
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise UnsupportedModelError(self._in_place_message()) from error
            raise

    def _in_place_message(self) -> str:
        return (
            f"layer {self._layer.name!r} modifies one of its inputs in place, or frees it, so that its backward could not run "
            "it again; make that operation out of place (for example nn.ReLU(inplace=False))"
        )

    def _refuse_hidden(self, gradients: Sequence[Tensor | None]) -> None:
        if any(gradient is not None for gradient in gradients):
            raise UnsupportedModelError(
                f"layer {self._layer.name!r} takes a tensor that needs gradients inside an object, or from an attribute; "
                "pass it as an argument of its own, or in a tuple, list or dict, or make a layer of the module around this "
                "one and the one that it comes from with HarmonyStrategy(layers=...)"
            )


def _state(tensor: Tensor) -> tuple[int, int]:
    """How often a tensor was changed in place, and the bytes of its memory: reversible layers free their inputs'."""
    return tensor._version, tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0


def _same(one: Any, other: Any) -> bool:
    return not isinstance(one, Tensor) or (one.dtype == other.dtype and torch.equal(one, other))


def _gradients(
    outputs: Sequence[Tensor | GradientEdge | None],
    gradients: Sequence[Tensor | None],
    wanted: Sequence[Any],
) -> Sequence[Tensor | None]:
    # Torch takes tensors and edges side by side, though it is typed for the one or the other.
    pairs: list[tuple[Any, Tensor]] = [
        (o, g) for o, g in zip(outputs, gradients, strict=True) if o is not None and g is not None
    ]
    if not pairs or not wanted:
        return [None] * len(wanted)
    return torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)


class _LayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: LayerCall, anchor: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = call.forward()
        ctx.is_tensor = [isinstance(leaf, Tensor) for leaf in outputs]
        detached = call.hand_out(outputs)
        constant = [
            new for new, old in zip(detached, outputs, strict=True) if isinstance(old, Tensor) and not old.requires_grad
        ]
        ctx.mark_non_differentiable(*constant)
        return detached

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: LayerCall = ctx.call
        if torch.is_grad_enabled():
            raise UnsupportedModelError(
                f"double backward (create_graph=True) goes through swapped layer {call.layer.name!r}, which recomputes and "
                "keeps no graph: use Trainer(strategy='auto'), or penalize a difference of two outputs instead of a gradient"
            )
        # torch.autograd.grad with respect to activations runs this node, but wants no gradients of parameters.
        summed = asked_for(ctx.next_functions[0][0], call.layer.parameters, f"layer {call.layer.name!r}")
        of_tensors = [g for g, is_tensor in zip(gradients, ctx.is_tensor, strict=True) if is_tensor]
        with call.calling():
            return None, None, *call.backward(of_tensors, summed)


def _drop(tensor: Tensor) -> None:
    return None


def _dropped(nothing: None) -> Tensor:
    raise UnsupportedModelError(GRAPH_ESCAPES)

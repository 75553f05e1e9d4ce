"""A recorded layer: its forward, and its recompute with the backward behind it, as recorded work of its device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_harmony.engine.devices.recording import OtherBitsError, Recording, RecordingError
from lightning_harmony.engine.lanes.ambient import AmbientState
from lightning_harmony.engine.lanes.rng import RandomState
from lightning_harmony.engine.layers.call_arguments import CallArguments
from lightning_harmony.engine.layers.call_weights import CallWeights
from lightning_harmony.engine.layers.fixed_memory import FixedMemory, signature
from lightning_harmony.engine.layers.input_uses import InputUses
from lightning_harmony.engine.layers.recordable import Foreign, graph_of, has_drawn, hooks_within, refuse_draws
from lightning_harmony.engine.layers.runtime import Runtime
from lightning_harmony.engine.layers.same_bits import are_same, bits_differ, differ_as_runs_do
from lightning_harmony.engine.layers.saved_tensors import drop
from lightning_harmony.engine.model.layer import OwnCodeOf, SwappedLayer
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.engine.structures.operations import Unseen, detached
from lightning_harmony.engine.structures.parts import are_alike
from lightning_harmony.engine.structures.strides import copied, is_dense
from lightning_harmony.engine.structures.tree import CONSTANTS, WrittenTo, flatten


class CallKey(NamedTuple):
    """What calls have in common that run the same recorded work.

    Attributes:
        structure: of the arguments.
        constants: those that are no tensors.
        tensors: the layouts of the tensors, and whether each needs a gradient.
    """

    structure: Any
    constants: list[Any]
    tensors: list[Any]

    @classmethod
    def of(cls, arguments: CallArguments, device: torch.device) -> CallKey | None:
        """That of a call; None if nothing can be recorded for it."""
        constants = [leaf for leaf in arguments.leaves if not isinstance(leaf, Tensor)]
        if arguments.have_objects or not all(type(each) in CONSTANTS for each in constants):
            return None
        tensors = []
        for tensor in arguments.tensors:
            if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != device:
                return None
            tensors.append((tensor.dtype, tensor.size(), tensor.stride(), tensor.requires_grad))
        # That 1, 1.0 and True are equal would not do.
        kinds = [(type(each), each) for each in constants]
        return cls((arguments.structure, arguments.numbers), kinds, tensors)


class Backward(NamedTuple):
    """A backward that comes to a call.

    Attributes:
        residency: of the layer's pack.
        inputs: the call's.
        gradients: of what it returned.
        random: the generators' state, as the call found it; None if it draws nothing.
    """

    residency: Residency
    inputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    random: RandomState | None

    def layouts(self) -> list[Any]:
        """Of the gradients, which tell backwards apart that launch something else."""
        return [None if each is None else (each.dtype, each.size(), each.stride()) for each in self.gradients]

    def drawing(self) -> AbstractContextManager[None]:
        """The context of code that draws what the call has drawn."""
        return nullcontext() if self.random is None else self.random.entered(self.residency.cuda_index)


class Gradients(NamedTuple):
    """What a backward of a layer brings.

    Attributes:
        uses: of each use of an input, None for one that has none.
        weights: of each trained parameter.
    """

    uses: list[Tensor | None]
    weights: list[Tensor | None]

    def both(self) -> list[Tensor | None]:
        """The ones behind the others."""
        return [*self.uses, *self.weights]


class RecordedLayer:
    """A layer, recorded for calls of one key.

    Args:
        layer: which one.
        own: its own code.
        runtime: the engine.
        memory: where what is recorded finds what changes.
        arguments: of the call that it is recorded at, its tensors on the layer's device.
        residency: of the layer's pack.
        draws: whether that call has drawn random numbers.

    Attributes:
        layer: the same.
        key: of calls that it is for.
        uses: the numbers of the inputs that are used, in the order in which a backward comes to the uses.
        trained: the parameters that need gradients.
        have_gradients: whether each tensor that a call returns has one.
        draws: whether it draws random numbers.
    """

    def __init__(
        self,
        layer: SwappedLayer,
        own: Callable[..., Any],
        runtime: Runtime,
        memory: FixedMemory,
        key: CallKey,
        arguments: CallArguments,
        residency: Residency,
        *,
        draws: bool,
    ) -> None:
        self.key, self.uses, self.draws = key, list[int](), draws
        self.layer, self._own, self._runtime, self._memory = layer, own, runtime, memory
        self._again = arguments.again
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in arguments.leaves]
        self._needs = [tensor.requires_grad for tensor in arguments.tensors]
        self.trained = [parameter for parameter in layer.parameters if parameter.requires_grad]
        self._ambient, self._attributes = AmbientState(), layer.attributes.read()
        self._device, self._narrow = residency.device, layer.narrow
        self._signature = signature(layer, residency)
        self._hooks, self._around_companions = hooks_within(layer.whole), layer.companions.surroundings()
        # The last one that it fits: what it refers to makes way for others.
        self._known: Callable[[], Residency | None] = lambda: None
        self.have_gradients: list[bool] = []
        # The graph that its code makes.
        self._graph: list[Any] = []
        self._close: Callable[[Iterator[Any]], Any] = next
        # Whether each leaf of what it returns is a tensor, and what it is if not.
        self._results: list[tuple[bool, Any]] = []
        self._inputs: list[Tensor] = []
        self._are_dense = True
        self._forward: Recording | None = None
        self._backward: Recording | None = None
        # Which results have gradients in the recorded backward, and the layouts of these.
        self._given: list[Any] = []

    # ---- which calls it is for -----------------------------------------------------------------------------------------

    def is_for(self, key: CallKey, residency: Residency) -> bool:
        """Whether a call of the layer, as all is now, would launch what is recorded."""
        return (
            key == self.key
            and self._fits(residency)
            and self._ambient.is_as(AmbientState())
            and self.layer.attributes.read() is self._attributes
            and not any(self._hooks)
        )

    def _fits(self, residency: Residency) -> bool:
        """Whether weights are of the types and in the places that it knows, and companions what they were."""
        if residency is not self._known():
            is_as_known = residency.device is self._device and self._narrow is self.layer.narrow
            if not (is_as_known and signature(self.layer, residency) == self._signature):
                return False
            self._known = weakref.ref(residency)
        return not residency.dirty_buffers and self._around_companions.holds()

    def forget(self) -> None:
        """Let the recorded work go: backwards that come run the code."""
        self._forward = self._backward = None
        self._inputs = []

    # ---- forward -------------------------------------------------------------------------------------------------------

    def record_forward(self, residency: Residency, tensors: Sequence[Tensor], result: Any) -> None:
        """Record the forward, and see that it makes the same bits as the call that has just been.

        Args:
            residency: of the layer's pack.
            tensors: the call's.
            result: what it has returned.

        Raises:
            RecordingError: if that cannot be; it says why.
        """
        expected, self._close = flatten(result)
        self._results = _kinds_of(expected)
        _refuse_results(expected, tensors)
        if self._signature is None or not self._attributes.are_plain:
            raise RecordingError("tensors that are no buffers are among what it has")
        index = residency.cuda_index
        random = RandomState.capture(index)
        self._memory.hold(residency)
        twin, inputs = self._memory.twin(residency), self._memory.tensors("input", tensors)
        found: list[int] = []
        watch: list[AbstractContextManager[Any]] = [Foreign(self._memory)]

        def work() -> list[Tensor]:
            given = self._fresh(inputs)
            with watch.pop() if watch else nullcontext():
                leaves, self._graph, found[:] = self._run_forward(twin, given)
            return [each.detach() for each in leaves if isinstance(each, Tensor)]

        self._forward = residency.device.recorded(work)
        refuse_draws(random, RandomState.capture(index))
        self.uses, self._inputs = found, [each for each in inputs if each is not None]
        self._are_dense = all(map(is_dense, self._inputs))
        outputs = [each for each in expected if isinstance(each, Tensor)]
        self.have_gradients = [each.requires_grad for each in outputs]
        random.restore(index)
        self._forward.replay()
        made = self._forward.made
        if len(made) != len(outputs) or not all(map(are_same, outputs, made)):
            raise OtherBitsError("what is recorded returns other bits than its code")
        self._memory.refuse_gone()

    def differs(
        self, residency: Residency, tensors: Sequence[Tensor], before: RandomState, made: Sequence[Tensor]
    ) -> Tensor:
        """Run the code of a call whose tensors are made, and see whether it does something else. A flag on the device.

        Args:
            residency: of the layer's pack.
            tensors: the call's.
            before: the generators' state, as the call found it.
            made: the tensors that it returns.
        """
        index, changes = residency.cuda_index, self._runtime.listeners.elsewhere()
        try:
            with before.entered(index):
                leaves, graph, uses = self._run_forward(residency, self._fresh(tensors))
                after = RandomState.capture(index)
            refuse_draws(before, after)
        except RecordingError:
            return torch.ones((), dtype=torch.bool)
        outputs = [each for each in leaves if isinstance(each, Tensor)]
        is_as_known = _kinds_of(leaves) == self._results and graph == self._graph and uses == self.uses
        if (
            changes() is not None
            or not is_as_known
            or has_drawn(before, after) != self.draws
            or not all(map(are_alike, outputs, made))
        ):
            return torch.ones((), dtype=torch.bool)
        with Unseen():
            return torch.stack([bits_differ(one, other) for one, other in zip(outputs, made, strict=True)]).any()

    def _run_forward(self, residency: Residency, given: Sequence[Tensor]) -> tuple[list[Any], list[Any], list[int]]:
        """Run the code, and keep nothing of its graph: what it returns, what that graph is, and the inputs that it uses.

        Raises:
            RecordingError: if functions of its own use inputs.
        """
        uses = InputUses([(n, each) for n, each in enumerate(given) if each.requires_grad])
        with saved_tensors_hooks(drop, _nothing), torch.enable_grad():
            leaves = flatten(self._run(residency, given, uses))[0]
        graph = graph_of([each for each in leaves if isinstance(each, Tensor)], given)
        return leaves, graph, [use.number for use in uses.in_order]

    def forward(self, residency: Residency, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that a call returns."""
        recording = self._forward
        assert recording is not None
        self._give(residency, tensors)
        recording.replay()
        with torch.no_grad():
            return [each.clone() for each in recording.made if each is not None]

    def _give(self, residency: Residency, tensors: Sequence[Tensor]) -> None:
        """Have a pack and the inputs of a call in fixed memory."""
        self._memory.hold(residency)
        with Unseen():
            if self._are_dense:
                torch._foreach_copy_(self._inputs, list(tensors))
            else:
                self._memory.tensors("input", tensors)

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """What a call returns, made of its tensors."""
        tensors = iter(outputs)
        return self._close(next(tensors) if is_tensor else leaf for is_tensor, leaf in self._results)

    # ---- backward ------------------------------------------------------------------------------------------------------

    @property
    def lacks_backward(self) -> bool:
        """Whether no backward is recorded yet."""
        return self._backward is None

    def backward(self, coming: Backward) -> Gradients:
        """Recompute a call and run its backward; recorded, if it is as the one that was."""
        residency, inputs, gradients, _ = coming
        with coming.drawing():
            recording = self._backward
            if recording is None or coming.layouts() != self._given or not self._fits(residency):
                return self._differentiate(residency, self._fresh(inputs), gradients)
            self._give(residency, inputs)
            self._memory.tensors("gradient", gradients)
            recording.replay()
            with torch.no_grad():
                uses = [None if each is None else copied(each) for each in recording.made[: len(self.uses)]]
            return Gradients(uses, recording.made[len(self.uses) :])

    def record_backward(self, coming: Backward, found: Gradients) -> None:
        """Record the backward of a call, and see that it makes the same bits as the one that has just been.

        Some kernels add up in any order, as torch's attention does on a GPU: where the code's own gradients differ from run to
        run, those of what is recorded may differ no more than that.

        Raises:
            RecordingError: if that cannot be; it says why.
        """
        residency = coming.residency
        with coming.drawing():
            self._memory.hold(residency)
            twin, fixed = self._memory.twin(residency), self._memory.tensors("input", coming.inputs)
            fixed_gradients = self._memory.tensors("gradient", coming.gradients)

            def work() -> list[Tensor | None]:
                return self._differentiate(twin, self._fresh(fixed), fixed_gradients).both()

            def again() -> list[Tensor | None]:
                with coming.drawing():
                    return self._differentiate(residency, self._fresh(coming.inputs), coming.gradients).both()

            recording = residency.device.recorded(work)
            with coming.drawing():
                recording.replay()
            if not differ_as_runs_do(found.both(), recording.made, again):
                raise OtherBitsError("what is recorded has other gradients than its code")
            self._memory.refuse_gone()
            self._backward, self._given = recording, coming.layouts()

    def _differentiate(
        self, residency: Residency, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> Gradients:
        """Run the code with a graph, and differentiate it."""
        weights = [detached(residency.leaves[p]).requires_grad_() for p in self.trained]
        uses = InputUses([(n, each) for n, each in enumerate(inputs) if each.requires_grad])
        with torch.enable_grad():
            outputs = [e for e in flatten(self._run(residency, inputs, uses, weights))[0] if isinstance(e, Tensor)]
        in_order = uses.in_order
        if [use.number for use in in_order] != self.uses:
            raise RecordingError("it uses its inputs in another way when it runs again")
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        ends = [*(use.tensor for use in in_order), *weights]
        found: Sequence[Tensor | None] = [None] * len(ends)
        if pairs and ends:
            starts, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(starts, ends, given, allow_unused=True)
        return Gradients(list(found[: len(in_order)]), list(found[len(in_order) :]))

    # ---- running it ----------------------------------------------------------------------------------------------------

    def _fresh(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Leaves with the memory of inputs."""
        given = [each for each in tensors if each is not None]
        return [detached(each).requires_grad_(needs) for each, needs in zip(given, self._needs, strict=True)]

    def _run(
        self, residency: Residency, inputs: Sequence[Tensor], uses: InputUses, weights: Sequence[Tensor] | None = None
    ) -> Any:
        """Run the layer's own code as it ran when it was recorded."""
        layer, bound = self.layer, CallWeights(self.layer, self._runtime)
        if weights is None:
            weights = [detached(residency.leaves[p]).requires_grad_() for p in self.trained]
        args, kwargs = self._again(inputs, self._leaves)
        written_to = WrittenTo(args, kwargs)
        attributes = layer.attributes.as_they_were(self._attributes)
        beside = layer.companions.bound(residency.leaves, residency.companions)
        with self._ambient.entered(), self._runtime.recomputing() as logged, attributes, beside, _casting_anew():
            found = bound.of_leaves(weights, residency)
            with layer.bound(found, residency.buffers), OwnCodeOf(layer), uses, torch.enable_grad():
                result = self._ambient.run(self._own, *args, **kwargs)
            has_set = layer.attributes.read() is not self._attributes
        if logged:
            raise RecordingError(f"its code logs {logged[0]!r}")
        if has_set:
            raise RecordingError("its calls change attributes")
        if written_to.now():
            raise RecordingError("it writes into what it is called with")
        if bound.have_read_wide():
            raise RecordingError("it reads weights that are narrow here")
        return result


@contextmanager
def _casting_anew() -> Iterator[None]:
    """The context in which autocast keeps no casts of weights. It does of leaves, which stand for taps of graphs here."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _kinds_of(results: Sequence[Any]) -> list[tuple[bool, Any]]:
    """Of what a call returns: whether each is a tensor, and what it is if not."""
    return [(True, None) if isinstance(each, Tensor) else (False, each) for each in results]


def _refuse_results(results: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Refuse what a call returns that could not be made of recorded tensors.

    Args:
        results: what it returns.
        tensors: those that it was called with.

    Raises:
        RecordingError: saying why.
    """
    memories = [each.untyped_storage()._cdata for each in tensors]
    for each in results:
        if not isinstance(each, Tensor):
            if type(each) not in CONSTANTS:
                raise RecordingError(f"it returns an object of {type(each).__name__}")
            continue
        if type(each) is not Tensor or each.layout is not torch.strided or not is_dense(each):
            raise RecordingError("it returns a tensor of another kind")
        if each.untyped_storage()._cdata in memories:
            raise RecordingError("it returns what it is called with, or two views of one tensor")
        memories.append(each.untyped_storage()._cdata)


def _nothing(saved: None) -> Tensor:
    raise RecordingError("its code runs a backward")

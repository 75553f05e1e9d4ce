"""The rehearsed call: of calls of a layer that do the same, only the first one runs, and others leave its marks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_harmony.engine.layers.call_arguments import CallArguments
from lightning_harmony.engine.layers.intercept import InterceptedForward
from lightning_harmony.engine.layers.layer_call import LayerCall, OwnForward
from lightning_harmony.engine.layers.structure import Shape
from lightning_harmony.engine.memory.opaque import PLAIN
from lightning_harmony.engine.memory.stash import LaneStash
from lightning_harmony.engine.model.host_store import lies_in
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.rehearsal.fakes import FakeWatch
from lightning_harmony.engine.structures.tree import flatten
from lightning_harmony.plan.outlook.work import Work
from lightning_harmony.plan.values.task import Phase

if TYPE_CHECKING:
    from lightning_harmony.engine.rehearsal.rehearse import Rehearsal


@dataclass(frozen=True)
class Output:
    """A leaf of what a layer returns: a tensor of its own, a view of one of its inputs, or no tensor."""

    shape: Shape | None
    input: int | None = None
    offset: int = 0
    value: Any = None

    def make(self, inputs: Sequence[Tensor]) -> Any:
        """The leaf of a call with these inputs."""
        if self.shape is None:
            return self.value
        if self.input is not None:
            return inputs[self.input].detach().as_strided(self.shape.size, self.shape.stride, self.offset)
        return self.shape.empty()


@dataclass(frozen=True)
class CallProfile:
    """One call of a layer, forth and back."""

    outputs: list[Output]
    unflatten: Callable[[Iterator[Any]], Any]
    gradients: list[Shape | None]
    forward: Work
    backward: Work
    recompute: Work
    forward_bytes: int
    backward_bytes: int
    graph_bytes: int
    narrow: tuple[int, ...]
    # What the signature names by identity must not end before it.
    arguments: list[Any]


@dataclass
class Measured:
    """What a call tells the runtime while it is measured."""

    stash: LaneStash
    graph_bytes: int = 0
    recompute: Work = field(default_factory=Work)
    narrow: set[nn.Parameter] = field(default_factory=set)
    watch: FakeWatch | None = None


class RehearsedForward(InterceptedForward):
    """Takes the place of a layer's forward."""

    def __init__(self, layer: SwappedLayer, rehearsal: Rehearsal) -> None:
        super().__init__(layer, rehearsal)
        self._rehearsal = rehearsal

    def _run(self, anchor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = CallArguments(args, kwargs)
        needs = [*arguments.tensors, *self.layer.parameters]
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in needs)):
            return super()._run(anchor, args, kwargs)
        # Nobody asks for gradients of the user's own parameters here.
        return RehearsedCall(self.original, self._rehearsal, arguments, self._anchor).run()


class RehearsedCall:
    """One call of a layer, of which only the first of its kind is run."""

    def __init__(self, original: OwnForward, rehearsal: Rehearsal, arguments: CallArguments, anchor: Tensor) -> None:
        self._original, self._layer, self._rehearsal = original, original.layer, rehearsal
        self._arguments, self._anchor = arguments, anchor

    def run(self) -> Any:
        """Leave the marks of the forward; those of the backward follow when it comes."""
        rehearsal, tensors = self._rehearsal, self._arguments.tensors
        with rehearsal.visit(self._layer, Phase.FORWARD):
            self._known = rehearsal.known(self._layer, self._signature(tensors), self._measure)
            self._inputs = [rehearsal.stash(tensor) for tensor in tensors]
            rehearsal.redo(self._known.forward, self._known.forward_bytes)
            outputs = _Marks.apply(self, self._anchor, *tensors)
        self._arguments.give_back()
        return self._known.unflatten(iter(outputs))

    def outputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        """What a call with these tensors returns."""
        return [output.make(tensors) for output in self._known.outputs]

    def constant(self, outputs: Sequence[Any]) -> list[Tensor]:
        """Those that have no gradients."""
        pairs = zip(self._known.outputs, outputs, strict=True)
        return [leaf for output, leaf in pairs if output.shape is not None and not output.shape.requires_grad]

    def backward(self) -> list[Tensor | None]:
        """Leave the marks of the backward."""
        with self._rehearsal.visit(self._layer, Phase.BACKWARD):
            self._rehearsal.redo_backward(self._layer, self._known)
            self._inputs = []
            return [None if shape is None else shape.empty() for shape in self._known.gradients]

    def _signature(self, tensors: Sequence[Tensor]) -> Any:
        """What calls that do the same have in common."""
        arguments = self._arguments
        leaves = [
            leaf if isinstance(leaf, PLAIN) else ("object", id(leaf))
            for number, leaf in zip(arguments.numbers, arguments.leaves, strict=True)
            if number is None
        ]
        shapes = tuple(Shape.of(tensor) for tensor in tensors)
        return str(arguments.structure), tuple(arguments.numbers), tuple((type(leaf), leaf) for leaf in leaves), shapes

    def _measure(self) -> CallProfile:
        """Run the layer forth and back, apart from all else."""
        device, counter, arguments = self._rehearsal.device, self._rehearsal.counter, self._arguments
        others = [leaf for leaf in arguments.leaves if not isinstance(leaf, Tensor)]
        with self._rehearsal.apart() as measured:
            inputs = [Tensor.detach(tensor).requires_grad_(tensor.requires_grad) for tensor in arguments.tensors]
            # A layer may change its inputs in place, which leaves may not be.
            passed = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in inputs]
            args, kwargs = arguments.again(passed, arguments.leaves)
            before, peak = device.allocated_bytes(), device.watch_peak()
            result = LayerCall(self._original, self._rehearsal, self._anchor).run(args, kwargs)
            forward, forward_bytes = counter.take(), peak() - before
            outputs, unflatten = flatten(result)
            described = [_describe(leaf, passed) for leaf in outputs]
            starts = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
            edges, of_outputs = list(map(get_gradient_edge, starts)), list(map(torch.empty_like, starts))
            del result, outputs, starts, args, kwargs, passed
            before, peak = device.allocated_bytes(), device.watch_peak()
            counter.take()
            if edges:
                torch.autograd.backward(edges, of_outputs)
            backward, backward_bytes = counter.take(), peak() - before
        return CallProfile(
            described,
            unflatten,
            [None if tensor.grad is None else Shape.of(tensor.grad) for tensor in inputs],
            forward,
            backward,
            measured.recompute,
            forward_bytes,
            backward_bytes,
            measured.graph_bytes,
            tuple(number for number, p in enumerate(self._layer.parameters) if p in measured.narrow),
            others,
        )


class _Marks(torch.autograd.Function):
    """A call that isn't run, in the caller's graph."""

    @staticmethod
    def forward(ctx: Any, call: RehearsedCall, anchor: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
        ctx.call = call
        outputs = call.outputs(tensors)
        ctx.mark_non_differentiable(*call.constant(outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.call.backward()


def _describe(leaf: Any, inputs: Sequence[Tensor]) -> Output:
    if not isinstance(leaf, Tensor):
        return Output(None, value=leaf)
    same = [number for number, tensor in enumerate(inputs) if lies_in(leaf, tensor)]
    if same:
        return Output(Shape.of(leaf), same[0], int(leaf.storage_offset()))
    return Output(Shape.of(leaf))

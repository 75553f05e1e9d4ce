"""The rehearsed call: of calls of a layer that do the same, only the first one runs, and others leave its marks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_harmony.engine.fakes import FakeDevice, FakeWatch
from lightning_harmony.engine.hollow_graph import given, keep
from lightning_harmony.engine.host_store import lies_in
from lightning_harmony.engine.intercept import InterceptedForward
from lightning_harmony.engine.layer import SwappedLayer
from lightning_harmony.engine.layer_call import LayerCall, OwnForward, Runtime
from lightning_harmony.engine.opaque import PLAIN
from lightning_harmony.engine.stash import LaneStash
from lightning_harmony.engine.stock import Stock
from lightning_harmony.engine.structure import Shape
from lightning_harmony.plan.task import Phase
from lightning_harmony.plan.work import Work


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


class Rehearsal(Runtime, Protocol):
    """What a rehearsed call asks of the rehearsal.

    Attributes:
        device: counts what is allocated.
        stock: counts what is computed.
    """

    device: FakeDevice
    stock: Stock

    def known(self, layer: SwappedLayer, signature: Any, measure: Callable[[], CallProfile]) -> CallProfile:
        """What a call leaves behind; measured when the first of its kind comes."""

    def apart(self, layer: SwappedLayer) -> AbstractContextManager[Measured]:
        """A context in which a layer runs as if alone."""

    def redo(self, work: Work, num_bytes: int) -> None:
        """Leave the marks of work that isn't done."""

    def redo_backward(self, layer: SwappedLayer, call: CallProfile) -> None:
        """Leave the marks of a backward."""


class RehearsedForward(InterceptedForward):
    """Takes the place of a layer's forward."""

    def __init__(self, layer: SwappedLayer, rehearsal: Rehearsal) -> None:
        super().__init__(layer, rehearsal)
        self._rehearsal = rehearsal

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        return RehearsedCall(self.original, self._rehearsal, args, kwargs)


class RehearsedCall(LayerCall):
    """One call of a layer, of which only the first of its kind is run."""

    _known: CallProfile

    def __init__(
        self, original: OwnForward, rehearsal: Rehearsal, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(original, rehearsal, args, kwargs)
        self._rehearsal = rehearsal

    def forward(self) -> tuple[Any, ...]:
        """Leave the marks of the forward."""
        rehearsal, tensors = self._rehearsal, self.tensors
        self._known = rehearsal.known(self._layer, self._signature(tensors), lambda: self._measure(tensors))
        self._inputs = [rehearsal.stash(tensor) for tensor in self.tensors]
        rehearsal.redo(self._known.forward, self._known.forward_bytes)
        self._unflatten, self._leaves = self._known.unflatten, []
        outputs = []
        for output in self._known.outputs:
            leaf = output.make(tensors)
            if isinstance(leaf, Tensor) and output.shape is not None:
                # Only asked whether it can be differentiated; what follows is detached from it.
                leaf.requires_grad_(output.shape.requires_grad)
            outputs.append(leaf)
        return tuple(outputs)

    def backward(self, gradients: Sequence[Tensor | None], summed: frozenset[nn.Parameter]) -> list[Tensor | None]:
        """Leave the marks of the backward."""
        with self._visit(Phase.BACKWARD):
            self._rehearsal.redo_backward(self._layer, self._known)
            self._inputs = []
            return [None if shape is None else shape.empty() for shape in self._known.gradients]

    def _signature(self, tensors: Sequence[Tensor]) -> Any:
        """What calls that do the same have in common."""
        leaves = [
            leaf if isinstance(leaf, PLAIN) else ("object", id(leaf))
            for number, leaf in zip(self._arguments.numbers, self._leaves, strict=True)
            if number is None
        ]
        shapes = tuple(Shape.of(tensor) for tensor in tensors)
        return (
            str(self._arguments.structure),
            tuple(self._arguments.numbers),
            tuple((type(leaf), leaf) for leaf in leaves),
            shapes,
        )

    def _measure(self, tensors: Sequence[Tensor]) -> CallProfile:
        """Run the layer forth and back, apart from all else."""
        device, stock = self._rehearsal.device, self._rehearsal.stock
        arguments = [leaf for leaf in self._leaves if not isinstance(leaf, Tensor)]
        residency = self.residency
        with self._rehearsal.apart(self._layer) as measured:
            before, peak = device.allocated_bytes(), device.watch_peak()
            outputs = super().forward()
            forward, forward_bytes = stock.take(), peak() - before
            described = [_describe(leaf, tensors) for leaf in outputs]
            of_tensors = [
                torch.empty_like(leaf) if leaf.requires_grad else None for leaf in outputs if isinstance(leaf, Tensor)
            ]
            del outputs
            before, peak = device.allocated_bytes(), device.watch_peak()
            stock.take()
            # What the glue saves goes to the stash, but no glue is left when a layer recomputes.
            with torch.autograd.graph.saved_tensors_hooks(keep, given):
                found = super().backward(of_tensors, frozenset(self._layer.parameters))
            backward, backward_bytes = stock.take(), peak() - before
        # The visit goes on, of which that of the backward was a part.
        self.residency = residency
        return CallProfile(
            described,
            self._unflatten,
            [None if gradient is None else Shape.of(gradient) for gradient in found],
            forward,
            backward,
            measured.recompute,
            forward_bytes,
            backward_bytes,
            measured.graph_bytes,
            tuple(number for number, p in enumerate(self._layer.parameters) if p in measured.narrow),
            arguments,
        )


def _describe(leaf: Any, inputs: Sequence[Tensor]) -> Output:
    if not isinstance(leaf, Tensor):
        return Output(None, value=leaf)
    same = [number for number, tensor in enumerate(inputs) if lies_in(leaf, tensor)]
    if same:
        return Output(Shape.of(leaf), same[0], int(leaf.storage_offset()))
    return Output(Shape.of(leaf))

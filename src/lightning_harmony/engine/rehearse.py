"""A rehearsal: the step of one microbatch on fake tensors, which tells what each layer takes without taking it.

The model's layers are intercepted by the same calls as in training, so what they allocate is counted in the same way. A
layer is run, forth and back, when a layer of its structure is first called; equal ones only leave the same marks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_harmony.engine.decompose import Layer
from lightning_harmony.engine.device import VirtualDevice
from lightning_harmony.engine.glue import Glue
from lightning_harmony.engine.hollow_graph import given, keep
from lightning_harmony.engine.host_store import HostPool, HostStore, Slot, lay_out, lies_in
from lightning_harmony.engine.intercept import InterceptedForward, LayerCall
from lightning_harmony.engine.layer import COMPARED_CALLS, SwappedLayer, buffers_of, places_of
from lightning_harmony.engine.narrow import CastWatch, autocast_dtype
from lightning_harmony.engine.opaque import without_caches
from lightning_harmony.engine.report import Traffic
from lightning_harmony.engine.rng import RandomState
from lightning_harmony.engine.stash import Alias, LaneStash, Stash, Stashed
from lightning_harmony.engine.stream import Event, Happened, HostMoment
from lightning_harmony.engine.swap import Residency, SwappedPack
from lightning_harmony.engine.workspace import WorkSpace
from lightning_harmony.plan.task import Phase
from lightning_harmony.plan.work import LayerProfile, StepProfile, Work

_CPU = torch.device("cpu")
_aten = torch.ops.aten


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
    random = RandomState.capture(None)
    try:
        first = _Rehearsal(model, layers, {})
        first.run(step, microbatch, casting)
        if not any(first.narrow.values()):
            return first.profile(first)
        second = _Rehearsal(model, layers, first.narrow)
        second.run(step, microbatch, casting)
        return second.profile(first)
    finally:
        random.restore(None)


class _NoCopies:
    """A stream that does nothing: fake tensors hold nothing to copy."""

    def submit(self, work: Callable[[], None], after: Sequence[Event] = ()) -> Happened:
        """Leave it."""
        return Happened()

    def moment(self) -> HostMoment:
        """Now."""
        return HostMoment()

    def close(self) -> None:
        """Nothing is left to do."""


class _FakeDevice(VirtualDevice):
    """Counts the storages of fake tensors."""

    def __init__(self) -> None:
        super().__init__(None)
        self.swap_in = self.swap_out = self.stash_in = _NoCopies()

        self._is_counting = True

    @contextmanager
    def computing(self) -> Iterator[None]:
        """All operations are seen anyway."""
        yield

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count nothing."""
        before, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = before

    def run_compiled(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """In sight of what counts it runs uncompiled: fake tensors have nothing to compile for."""
        return function(*args, **kwargs)

    def count_results(self, result: Any) -> None:
        """Count the tensors that an operation returned."""
        if self._is_counting:
            super().count_results(result)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is allocated within the context does not count for the peak that is watched."""
        watched = self._watched_bytes
        yield
        self._watched_bytes = watched


class _FakeStore(HostStore):
    """Where parameters would lie in the arena."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        slots, self.num_bytes = lay_out(parameters)
        self._slots: dict[nn.Parameter, Slot] = dict(zip(parameters, slots, strict=True))


class _Stock(TorchDispatchMode):
    """Takes stock of all operations: what they allocate and what they compute."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self._device = device
        self._flops: Counter[str] = Counter()
        self._moved_bytes = 0
        self._num_operations = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # There is nothing to compile in it.
        return False

    def take(self) -> Work:
        """The work since it was last taken."""
        work = Work(dict(self._flops), self._moved_bytes, self._num_operations)
        self._flops, self._moved_bytes, self._num_operations = Counter(), 0, 0
        return work

    def add(self, work: Work) -> None:
        """Count work that isn't done."""
        self._flops.update(work.flops)
        self._moved_bytes += work.moved_bytes
        self._num_operations += work.num_operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func is _aten.equal.default:
            return True
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not _aten._local_scalar_dense.default:
                raise
            # A number that is logged, most likely.
            return {torch.bool: False}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        self._device.count_results(result)
        self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = func._overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if _is_view(func) or packet.__name__ in _ALLOCATIONS:
            return
        self._num_operations += 1
        if packet in _FLOPS and tensors:
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            self._flops[dtype] += int(_FLOPS[packet](*args, **kwargs, out_val=result))
            return
        if packet is _aten.embedding:
            # It reads no more of the table than it returns.
            tensors = results
        moved = {id(tensor): tensor for tensor in tensors}
        self._moved_bytes += sum(t.numel() * t.element_size() for t in (*moved.values(), *results))


_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh"}
)


def _is_view(func: Any) -> bool:
    """Whether an operation returns a view and changes nothing."""
    return not func._schema.is_mutable and any(result.alias_info is not None for result in func._schema.returns)


def _sdpa_for_cpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _sdpa_for_cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(grad_out.shape, query.shape, key.shape, value.shape))


# The formulas of torch's own FlopCounterMode, and what they lack: attention on a CPU.
_FLOPS: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_for_cpu_backward,
    **flop_registry,
}


class _Watch(CastWatch):
    """Watches fake weights, which have no addresses, and lets nobody try them."""

    def __init__(self, residency: Residency, dtype: torch.dtype) -> None:
        TorchDispatchMode.__init__(self)
        self.dtype = dtype
        self._owners = {
            leaf.untyped_storage()._cdata: parameter
            for parameter, leaf in residency.leaves.items()
            if leaf.is_floating_point() and leaf.element_size() > dtype.itemsize and leaf.numel() > 0
        }
        self._num_casts = Counter()
        self._used = set()

    def narrow(self) -> set[nn.Parameter]:
        """None to be tried: on fake tensors, nothing could come of it."""
        return set()

    def found(self) -> set[nn.Parameter]:
        """The parameters that would be tried."""
        return super().narrow()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Fake tensors are even asked for their device in this way.
        if func is torch.ops.prim.device.default:
            return func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _parameter(self, tensor: Tensor) -> nn.Parameter | None:
        if tensor.layout is not torch.strided:
            return None
        return self._owners.get(tensor.untyped_storage()._cdata)


@dataclass(frozen=True)
class _Shape:
    """A tensor without its elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Shape:
        return cls(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=_CPU)


@dataclass(frozen=True)
class _Output:
    """A leaf of what a layer returns: a tensor of its own, a view of one of its inputs, or no tensor."""

    shape: _Shape | None
    input: int | None = None
    offset: int = 0
    value: Any = None

    def make(self, inputs: Sequence[Tensor]) -> Any:
        if self.shape is None:
            return self.value
        if self.input is not None:
            return inputs[self.input].detach().as_strided(self.shape.size, self.shape.stride, self.offset)
        return self.shape.empty()


@dataclass(frozen=True)
class _CallProfile:
    """One call of a layer, forth and back."""

    outputs: list[_Output]
    unflatten: Callable[[Iterator[Any]], Any]
    gradients: list[_Shape | None]
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
class _Turn:
    """From a layer's call to the next.

    Attributes:
        layer: what it counts to; None for the code before the first layer.
        phase: forward or backward.
        is_visit: whether it began with a call.
        before: what was allocated then.
        measured: gives the most that was since.
    """

    layer: SwappedLayer | None
    phase: Phase
    is_visit: bool
    before: int
    measured: Callable[[], int]


@dataclass
class _Totals:
    """What one layer was seen to do."""

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    recompute: Work = field(default_factory=Work)
    live_bytes: int = 0
    input_bytes: int = 0
    stash_bytes: int = 0
    num_calls: int = 0


class _RehearsedForward(InterceptedForward):
    """Takes the place of a layer's forward."""

    def __init__(self, layer: SwappedLayer, rehearsal: _Rehearsal) -> None:
        super().__init__(layer, rehearsal)
        self._rehearsal = rehearsal

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        return _RehearsedCall(self, self._rehearsal, args, kwargs)


class _RehearsedCall(LayerCall):
    """One call of a layer, of which only the first of its kind is run."""

    _known: _CallProfile

    def __init__(
        self, intercepted: InterceptedForward, rehearsal: _Rehearsal, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__(intercepted, rehearsal, args, kwargs)
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
        with self.visit(Phase.BACKWARD):
            self._rehearsal.redo_backward(self._layer, self._known)
            self._inputs = []
            return [None if shape is None else shape.empty() for shape in self._known.gradients]

    def _signature(self, tensors: Sequence[Tensor]) -> Any:
        """What calls that do the same have in common."""
        leaves = [
            leaf if isinstance(leaf, _PLAIN) else ("object", id(leaf))
            for number, leaf in zip(self._numbers, self._leaves, strict=True)
            if number is None
        ]
        shapes = tuple(_Shape.of(tensor) for tensor in tensors)
        return str(self._spec), tuple(self._numbers), tuple((type(leaf), leaf) for leaf in leaves), shapes

    def _measure(self, tensors: Sequence[Tensor]) -> _CallProfile:
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
        return _CallProfile(
            described,
            self._unflatten,
            [None if gradient is None else _Shape.of(gradient) for gradient in found],
            forward,
            backward,
            measured.recompute,
            forward_bytes,
            backward_bytes,
            measured.graph_bytes,
            tuple(number for number, p in enumerate(self._layer.parameters) if p in measured.narrow),
            arguments,
        )


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def _describe(leaf: Any, inputs: Sequence[Tensor]) -> _Output:
    if not isinstance(leaf, Tensor):
        return _Output(None, value=leaf)
    same = [number for number, tensor in enumerate(inputs) if lies_in(leaf, tensor)]
    if same:
        return _Output(_Shape.of(leaf), same[0], int(leaf.storage_offset()))
    return _Output(_Shape.of(leaf))


@dataclass
class _Measured:
    """What a call tells the runtime while it is measured."""

    stash: LaneStash
    graph_bytes: int = 0
    recompute: Work = field(default_factory=Work)
    narrow: set[nn.Parameter] = field(default_factory=set)
    watch: _Watch | None = None


class _Rehearsal:
    """The runtime of intercepted calls and of the glue, for one microbatch, in one thread."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], narrow: dict[int, tuple[int, ...]]) -> None:
        self._model = model
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._layers = [
            SwappedLayer(index, layer.name, layer.module, list(layer.module.parameters()))
            for index, layer in enumerate(layers)
        ]
        for layer in self._layers:
            # As in all steps after the first.
            layer.holds_tensors = False
            # Fake tensors have no contents to compare.
            layer.num_compared_calls = COMPARED_CALLS
        self._num_layers = len(self._layers)
        self.narrow: dict[int, tuple[int, ...]] = {}
        self._given_narrow = narrow
        in_order = dict.fromkeys([p for layer in self._layers for p in layer.parameters] + list(model.parameters()))
        self._store = _FakeStore(list(in_order))
        self._places = places_of(model, list(in_order))
        self.device = _FakeDevice()
        self.stock = _Stock(self.device)
        self._glue = Glue(self._places, _CPU, self)
        self._glue_layers: dict[nn.Parameter, SwappedLayer] = {}
        self._tokens: dict[nn.Parameter, Tensor] = {}
        self._traffic = Traffic()
        self._stash = Stash(self.device, HostPool(self.device.host_buffer), self._traffic)
        self._lane_stash = LaneStash(self._stash)
        self._work = WorkSpace()
        self._residencies: dict[int, Residency] = {}
        self._fakes: dict[Any, tuple[list[nn.Parameter], list[Tensor]]] = {}
        self._known: dict[Any, _CallProfile] = {}
        self._structures: dict[int, Any] = {}
        self._totals: defaultdict[int, _Totals] = defaultdict(_Totals)
        self._calls: list[int] = []
        self._turn: _Turn | None = None
        self._loss_layer: SwappedLayer | None = None
        self._measured: _Measured | None = None
        self._resident_bytes = 0
        self._buffer_bytes = 0
        self._microbatch_bytes = 0
        self._start_bytes = 0
        self._dtype: torch.dtype | None = None
        self._watches: list[tuple[SwappedLayer, _Watch]] = []

    # ---- the step ------------------------------------------------------------------------------------------------------

    def run(self, step: Callable[[Any], Tensor], microbatch: Any, casting: Callable[[], Any]) -> None:
        """Run the step and its backward."""
        with casting():
            self._dtype = autocast_dtype(_CPU)
        for layer in self._layers:
            numbers = self._given_narrow.get(layer.index, ())
            layer.narrow = {layer.parameters[n]: self._dtype for n in numbers if self._dtype is not None}
        self._structures = {layer.index: _structure(layer) for layer in self._layers}
        intercepted = [_RehearsedForward(layer, self) for layer in self._layers]
        try:
            # Stand-ins are made of real elements, which nothing computes with.
            with self._glue.stand_ins(), without_caches(self._model), torch.autograd.set_multithreading_enabled(False):
                self._run_on_fakes(step, microbatch, casting)
        finally:
            for each in intercepted:
                each.remove()

    def _run_on_fakes(self, step: Callable[[Any], Tensor], microbatch: Any, casting: Callable[[], Any]) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True), self._fake_others(), torch.enable_grad():
            self._buffer_bytes = self.device.allocated_bytes()
            batch = tree_map_only(Tensor, _fake, microbatch)
            for leaf in tree_leaves(batch):
                self._count(leaf)
            self._resident_bytes = self.device.allocated_bytes()
            self._microbatch_bytes = self._resident_bytes - self._buffer_bytes
            for layer in self._layers:
                self._residency(layer)
            with self.stock:
                self._begin(None, Phase.FORWARD)
                with self._glue.stashing(), casting():
                    loss = step(batch)
                # Where autograd begins, the executor lets a lane wait: what follows counts to the layer before.
                last = self._calls[-1] if self._given_narrow and self._calls else self._num_layers - 1
                self._begin(self._layers[last] if self._calls else None, Phase.BACKWARD)
                if loss.requires_grad:
                    torch.autograd.backward(loss, torch.ones_like(loss))
                del loss
                self._end()
        self._work.note_calls(self._calls)
        for layer, watch in self._watches:
            self.narrow[layer.index] = tuple(n for n, p in enumerate(layer.parameters) if p in watch.found())

    @contextmanager
    def _fake_others(self) -> Iterator[None]:
        """Fakes take the place of the tensors that no layer owns: buffers, and what modules refer to by an attribute."""
        owned = {key for layer in self._layers for key in layer.buffers}
        places: list[tuple[Any, str, Tensor]] = [
            (owner._buffers, name, tensor)
            for owner, name in buffers_of(self._model)
            if (owner, name) not in owned and (tensor := owner._buffers[name]) is not None
        ]
        for module in self._model.modules():
            places += [
                (vars(module), name, value)
                for name, value in vars(module).items()
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            ]
        for container, name, tensor in places:
            container[name] = _fake(tensor)
            self._count(container[name])
        try:
            yield
        finally:
            for container, name, tensor in places:
                container[name] = tensor

    def _count(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            self.device.count(leaf)

    def _residency(self, layer: SwappedLayer) -> Residency:
        """The layer's weights and buffers, which take no part in what is counted."""
        if layer.index not in self._residencies:
            # Layers of one structure can have the same fakes.
            key = self._structures.get(layer.index, layer)
            if key not in self._fakes:
                self._fakes[key] = self._make_fakes(layer)
            parameters, buffers = self._fakes[key]
            self._residencies[layer.index] = Residency(
                self.device,
                torch.empty(0, device="meta"),
                Happened(),
                dict(zip(layer.parameters, parameters, strict=True)),
                dict(zip(layer.buffers, buffers, strict=True)),
            )
        return self._residencies[layer.index]

    def _make_fakes(self, layer: SwappedLayer) -> tuple[list[nn.Parameter], list[Tensor]]:
        before = self.device.allocated_bytes()
        parameters = [
            nn.Parameter(_fake(p, layer.narrow.get(p, p.dtype)), requires_grad=p.requires_grad)
            for p in layer.parameters
        ]
        buffers = [_fake(owner.get_buffer(name)) for owner, name in layer.buffers]
        for tensor in (*parameters, *buffers):
            self._count(tensor)
        self._resident_bytes += self.device.allocated_bytes() - before
        return parameters, buffers

    # ---- turns ---------------------------------------------------------------------------------------------------------

    def _begin(self, layer: SwappedLayer | None, phase: Phase, *, is_visit: bool = False) -> None:
        """A turn begins, as where a lane parks."""
        self._end()
        self._stash.retire()
        before = self.device.allocated_bytes()
        if layer is not None:
            totals = self._totals[layer.index]
            totals.live_bytes = max(totals.live_bytes, before - self._resident_bytes)
        self._turn = _Turn(layer, phase, is_visit, before, self.device.watch_peak())

    def _end(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        num_bytes, work = turn.measured() - turn.before, self.stock.take()
        stashed = self._traffic.swapped_out["stash"]
        self._traffic.reset()
        if turn.layer is None:
            self._start_bytes = max(self._start_bytes, num_bytes)
            return
        if turn.phase is Phase.BACKWARD and not turn.is_visit:
            self._loss_layer = turn.layer
            self._work.loss_bytes = self.device.allocated_bytes() - turn.before
        elif turn.phase is Phase.BACKWARD and turn.layer is self._loss_layer:
            num_bytes += self._work.loss_bytes
        self._work.note([turn.layer], turn.phase, num_bytes)
        totals = self._totals[turn.layer.index]
        totals.stash_bytes += stashed
        if turn.phase is Phase.FORWARD:
            totals.forward += work
        else:
            totals.backward += work

    # ---- what layers and glue ask for ----------------------------------------------------------------------------------

    @contextmanager
    def visit(self, layer: SwappedLayer, phase: Phase) -> Iterator[Residency]:
        """The layer's turn."""
        if self._measured is None:
            if phase is Phase.FORWARD:
                self._calls.append(layer.index)
                self._totals[layer.index].num_calls += 1
            turn = self._turn
            if turn is None or not turn.is_visit or (turn.layer, turn.phase) != (layer, phase):
                self._begin(layer, phase, is_visit=True)
        stashed = self._traffic.swapped_out["stash"]
        yield self._residency(layer)
        if self._measured is None and phase is Phase.FORWARD:
            totals = self._totals[layer.index]
            totals.input_bytes = max(totals.input_bytes, self._traffic.swapped_out["stash"] - stashed)

    def stash(self, tensor: Tensor) -> Stashed:
        """Keep a tensor for the backward."""
        stash = self._lane_stash if self._measured is None else self._measured.stash
        return stash.put(tensor) or Alias(tensor)

    stash_unchanged = stash

    def brought(self, tensors: Sequence[Tensor], residency: Residency) -> list[Tensor]:
        """All are on the one device."""
        return list(tensors)

    def home(self, tensor: Tensor) -> int | None:
        """The one device."""
        return None

    def hand_out(self, tensors: Sequence[Tensor], residency: Residency) -> None:
        """It is there."""
        residency.device.hand_out(tensors)

    def sent(self, tensor: Tensor, home: int | None) -> Tensor:
        """It is there."""
        return tensor

    def calling(self) -> AbstractContextManager[None]:
        """One device: glue needs no help."""
        return nullcontext()

    def running(self, residency: Residency) -> AbstractContextManager[None]:
        """Nothing changes."""
        return nullcontext()

    def on_one_device(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """All operands are."""
        return func(*args, **kwargs)

    def device_of(self, layer: SwappedLayer) -> torch.device:
        """The one device."""
        return _CPU

    def watch(self, layer: SwappedLayer, residency: Residency) -> CastWatch | None:
        """What the layer does with its weights."""
        if self._dtype is None or self._given_narrow or layer.index in self.narrow:
            return None
        watch = _Watch(residency, self._dtype)
        if self._measured is None:
            # Without gradients, a layer runs each time; what its watch found is read at the end.
            self.narrow[layer.index] = ()
            self._watches.append((layer, watch))
        else:
            self._measured.watch = watch
        return watch

    def expect_backward(self, layer: SwappedLayer) -> int:
        """Announce a backward of a layer."""
        return 0

    def keep_graph(self, layer: SwappedLayer, call: LayerCall) -> bool:
        """Never: what recompute takes is to be seen."""
        return False

    def recomputing(self) -> AbstractContextManager[None]:
        """Nobody hears it."""
        return nullcontext()

    @contextmanager
    def measuring_graph(self, layer: SwappedLayer) -> Iterator[None]:
        """Around the recompute."""
        before, done = self.device.allocated_bytes(), self.stock.take()
        yield
        recompute = self.stock.take()
        if self._measured is not None:
            self._measured.graph_bytes, self._measured.recompute = self.device.allocated_bytes() - before, recompute
        self.stock.add(done)
        self.stock.add(recompute)

    def is_last_backward(self) -> bool:
        """There is one."""
        return True

    def accumulate(self, layer: SwappedLayer, use: int, gradients: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Sums count as gradients, not as work."""

    def verify(self, layer: SwappedLayer, outputs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """Nothing to check without data."""

    def glue_layer(self, parameter: nn.Parameter) -> SwappedLayer:
        """The layer that a parameter is when glue uses it."""
        layer = self._glue_layers.get(parameter)
        if layer is None:
            layer = SwappedLayer(len(self._layers), self._names[parameter], None, [parameter])
            self._glue_layers[parameter] = layer
            self._layers.append(layer)
        return layer

    def token(self, parameter: nn.Parameter) -> Tensor | None:
        """What the uses of a parameter are differentiated to."""
        return self._tokens.get(parameter)

    def keep_token(self, parameter: nn.Parameter, token: Tensor) -> None:
        """Use it for the rest of the forward."""
        self._tokens[parameter] = token

    def resident_parameter(self, tensor: Tensor) -> tuple[SwappedLayer, Tensor] | None:
        """The glue layer of whose parameter a tensor is a view."""
        for layer in self._glue_layers.values():
            leaf = self._residency(layer).leaves[layer.parameters[0]]
            if lies_in(tensor, leaf):
                return layer, leaf
        return None

    # ---- calls of one kind ---------------------------------------------------------------------------------------------

    def known(self, layer: SwappedLayer, signature: Any, measure: Callable[[], _CallProfile]) -> _CallProfile:
        """What a call leaves behind; measured when the first of its kind comes."""
        key = self._structures[layer.index], signature, self._dtype, torch.is_autocast_enabled("cpu")
        if key not in self._known:
            self._known[key] = measure()
        call = self._known[key]
        self.narrow.setdefault(layer.index, call.narrow)
        return call

    @contextmanager
    def apart(self, layer: SwappedLayer) -> Iterator[_Measured]:
        """A context in which a layer runs as if alone."""
        assert self._measured is None
        stash = Stash(self.device, HostPool(self.device.host_buffer), Traffic())
        self._measured = measured = _Measured(LaneStash(stash))
        work = self.stock.take()
        try:
            with self.device.apart():
                yield measured
                if measured.watch is not None:
                    measured.narrow = measured.watch.found()
        finally:
            self._measured = None
            stash.drain()
            self.stock.take()
            self.stock.add(work)

    def redo(self, work: Work, num_bytes: int) -> None:
        """Leave the marks of work that isn't done."""
        self.stock.add(work)
        torch.empty(num_bytes, dtype=torch.uint8)

    def redo_backward(self, layer: SwappedLayer, call: _CallProfile) -> None:
        """Leave the marks of a backward."""
        self._work.note_graph(layer, call.graph_bytes)
        self._totals[layer.index].recompute += call.recompute
        self.redo(call.backward, call.backward_bytes)

    # ---- the result ----------------------------------------------------------------------------------------------------

    def profile(self, first: _Rehearsal) -> StepProfile:
        """What was seen.

        Args:
            first: the rehearsal of a first step, with weights as they are.
        """
        seen: set[nn.Parameter] = set()
        layers = []
        for layer, wide in zip(self._layers, first._layers, strict=True):
            trained = [p for p in layer.parameters if p.requires_grad and p not in seen]
            seen.update(layer.parameters)
            totals = self._totals[layer.index]
            layers.append(
                LayerProfile(
                    cost=self._work.cost(layer, self._store),
                    first_cost=first._work.cost(wide, first._store),
                    swapped_bytes=self._swapped_bytes(layer),
                    trained_bytes=sum(p.numel() * p.element_size() for p in trained),
                    num_trained=sum(p.numel() for p in trained),
                    live_bytes=max(totals.live_bytes, first._totals[layer.index].live_bytes),
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
            calls=tuple(self._calls),
            weight_bytes=self._store.num_bytes,
            num_parameters=sum(p.numel() for p in self._names),
            buffer_bytes=self._buffer_bytes,
            microbatch_bytes=self._microbatch_bytes,
            start_bytes=self._start_bytes,
        )

    def _swapped_bytes(self, layer: SwappedLayer) -> int:
        """What crosses the bus to bring a layer."""
        pack = SwappedPack(-1, [layer], self._store)
        return pack.layout.copied_bytes + pack.buffer_bytes


# Attributes that number layers tell no two of them apart.
_NUMBERING = ("idx", "index", "_id", "number")


def _structure(layer: SwappedLayer) -> Any:
    """What layers that do the same have in common."""
    assert layer.module is not None
    numbers = {parameter: number for number, parameter in enumerate(layer.parameters)}

    def of_module(module: nn.Module) -> Any:
        parameters = [(name, p) for name, p in module._parameters.items() if p is not None]
        buffers = [(name, b) for name, b in module._buffers.items() if b is not None]
        plain = [(n, v) for n, v in vars(module).items() if isinstance(v, _PLAIN) and not n.endswith(_NUMBERING)]
        return (
            type(module),
            tuple((name, numbers[p], _Shape.of(p), layer.narrow.get(p)) for name, p in parameters),
            tuple((name, _Shape.of(b)) for name, b in buffers),
            tuple(plain),
        )

    return tuple((name, of_module(module)) for name, module in layer.module.named_modules())


def _fake(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A fake tensor on the CPU of the shape of another; within a fake mode."""
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=_CPU)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device=_CPU)

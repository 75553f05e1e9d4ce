"""A layer's tensors, and the places where its code finds them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_harmony.engine.model.attributes import AttributesOfLayer
from lightning_harmony.engine.model.companions import Companions
from lightning_harmony.engine.model.derived import derived_weights
from lightning_harmony.engine.model.parameter_places import Place, containers_of, is_free, places_of, what_is_in
from lightning_harmony.engine.model.weight_copies import WeightCopies
from lightning_harmony.engine.structures.memory_users import has_other_users, num_holders
from lightning_harmony.engine.structures.operations import version_of
from lightning_harmony.engine.structures.parts import are_equal, is_composed, num_bytes_of
from lightning_harmony.engine.structures.strides import copied
from lightning_harmony.errors import UnswappableBufferError

BufferKey = tuple[nn.Module, str]
Assign = Callable[[Tensor, Tensor], bool]
# So many calls of a layer are looked at for changes that no version tells.
COMPARED_CALLS = 8


class ParameterKey(tuple[nn.Module, str]):
    """A frozen parameter that the code of its layer sets: it comes and goes as a buffer does.

    Attributes:
        parameter: the user's own.
    """

    parameter: nn.Parameter


def _is_its_own(place: Place) -> bool:
    """Whether a place holds its parameter, or what stands in for it."""
    try:
        value = place.container[place.key]
    except LookupError:
        return False
    return value is place.parameter or getattr(value, "_parameter", None) is place.parameter


def _tensors_of(key: BufferKey) -> dict[str, Any]:
    """The tensors of a module among which one is."""
    return key[0]._parameters if isinstance(key, ParameterKey) else key[0]._buffers


def host_buffer(key: BufferKey) -> Tensor | None:
    """The user's own buffer, also while something stands in for it."""
    if isinstance(key, ParameterKey):
        return key.parameter
    buffer = key[0]._buffers.get(key[1])
    return getattr(buffer, "host_buffer", buffer)


def buffer_of(key: BufferKey) -> Tensor:
    """The user's own buffer."""
    buffer = host_buffer(key)
    assert buffer is not None
    return buffer


def set_host_buffer(key: BufferKey, tensor: Tensor) -> None:
    """Let another tensor be the user's own buffer, or what a parameter of theirs holds."""
    if isinstance(key, ParameterKey):
        key.parameter.data = tensor
        return
    stand_in: Any = key[0]._buffers[key[1]]
    if hasattr(stand_in, "host_buffer"):
        stand_in.host_buffer = tensor
    else:
        key[0]._buffers[key[1]] = tensor


def bytes_of(keys: Iterable[BufferKey]) -> int:
    """Bytes of buffers."""
    buffers = map(host_buffer, keys)
    return sum(num_bytes_of(buffer) for buffer in buffers if buffer is not None)


class SwappedLayer:
    """What is scheduled: a module whose calls are intercepted, or a parameter that glue uses on its own.

    Attributes:
        index: its number among all layers.
        name: qualified name in the model.
        module: the module, None for a parameter of the glue.
        whole: that, or what has it and the modules elsewhere that its code uses, too.
        parameters: its parameters, each once.
        buffers: owner and name of each of its buffers, but for those that may not be swapped: as attributes, these are
            wherever its code puts them.
        staying_buffers: the others.
        held: frozen parameters that layers set, which are buffers of them, too: one dict for all layers.
        differentiates: whether its code computes gradients in its forward.
        num_changes: how often its code has changed trained parameters in its forward.
        keeps_on_contexts: whether its code was seen to call autograd functions that keep tensors on their contexts.
        num_owners: how many modules that are layers have each parameter: one counter for all layers.
        compute_dtype: the type in which its floating parameters and inputs are on the device; None for their own.
        attributes: what its code keeps on its modules beside.
        companions: the tensors that its code keeps of frozen parameters.
        copies: what its code has left of trained ones.
        buffer_writes: how often each of the host's buffers was written by what layers changed on a device: one counter for all
            layers, which may share modules.
        is_training: whether a training step runs, in which nobody else may change its buffers.
        num_compared_calls: how many of its calls were looked at for changes that no version tells.
        changed_buffers: those that layers have changed in this step: one set for all layers, which may share modules.
        host_buffers: in a training step, the host's buffers as they should be, and their versions: one dict for all layers.
        changes_by_others: how often others have changed buffers where no step runs.
        changes_inputs: whether its code changes inputs in place, or its caller does so behind it; None before the first call.
        first_inputs: what counts how often those of its first call are changed in place, and that number at its end, until its
            backward comes.
        shares_inputs: whether others used what it was called with after it, before the next call.
        reaches_elsewhere: whether its code has used tensors of other devices than its own.
        unversioned_buffers: those that its code changes through `.data`, of which no version tells.
        changing_buffers: those that its code has changed so far.
        refilled_buffers: those of them that it has changed in place.
        runs_to_end: whether its code changes what its graph has saved in a way that torch does not count.
        seen_buffers: those that others had before the first step, in plain Lightning, too: one set for all layers.
        gathered: parameters of recurrent modules, which cuDNN copies to one memory and leaves there.
        composed: the parameters whose values are in tensors of their own.
        derived: the weights that its hooks compute from parameters.
        is_parametrized: whether modules of it compute weights with `torch.nn.utils.parametrize`.
        narrow: the parameters that are narrower on the device: with a compute type all that it narrows, else those that
            the layer reads through a cast alone. And to which type.
        is_in_graph: whether the backward of the step runs its code again, or reads its weights.
        read_wide: those of them that its code needed as they are, in this step.
    """

    def __init__(
        self,
        index: int,
        name: str,
        module: nn.Module | None,
        parameters: Sequence[nn.Parameter],
        compute_dtype: torch.dtype | None = None,
        whole: nn.Module | None = None,
        unswapped: Collection[tuple[type, str]] = (),
        seen_buffers: Collection[BufferKey] = (),
    ) -> None:
        self.index = index
        self.name = name
        self.module = module
        self.whole = module = whole or module
        self.parameters = list(dict.fromkeys(parameters))
        self.gathered = _of_recurrent_modules(module) if module is not None else frozenset()
        self.composed = frozenset(filter(is_composed, self.parameters))
        buffers = buffers_of(module) if module is not None else []
        self.buffers = [key for key in buffers if (type(key[0]), key[1]) not in unswapped]
        self._own_buffers = frozenset(self.buffers)
        self.held: dict[nn.Parameter, tuple[SwappedLayer, ParameterKey]] = {}
        self.num_owners: Counter[nn.Parameter] = Counter()
        self.staying_buffers = [key for key in buffers if key not in self._own_buffers]
        self.attributes = AttributesOfLayer([] if module is None else list(module.modules()), self.buffers)
        self.buffer_writes: Counter[BufferKey] = Counter()
        self.unversioned_buffers: set[BufferKey] = set()
        self.changing_buffers: set[BufferKey] = set()
        self.refilled_buffers: set[BufferKey] = set()
        self.seen_buffers = seen_buffers
        self.num_compared_calls = 0
        self.changes_inputs: bool | None = None
        self.first_inputs: list[tuple[Tensor, int]] = []
        self.is_training = self.is_in_graph = self.reaches_elsewhere = self.shares_inputs = False
        self.changed_buffers: set[BufferKey] = set()
        self.host_buffers: dict[BufferKey, tuple[Tensor, int | None]] = {}
        self.changes_by_others = Counter[BufferKey]()
        self.differentiates = self.keeps_on_contexts = self.runs_to_end = False
        self.num_changes = 0
        self.compute_dtype = compute_dtype
        self.companions = Companions((), ()) if module is None else Companions(module.modules(), self.parameters, name)
        self.copies = WeightCopies(name)
        with_companions = self.companions.parameters
        alone = [parameter for parameter in self.parameters if parameter not in with_companions]
        types = {parameter: dtype_on_device(parameter, compute_dtype) for parameter in alone}
        self.narrow = {parameter: dtype for parameter, dtype in types.items() if dtype != parameter.dtype}
        self.read_wide: set[nn.Parameter] = set()
        places = places_of(module, self.parameters) if module is not None else []
        self._places = [place for place in places if not place.is_in_object]
        self._places_in_objects = [place for place in places if place.is_in_object]
        self._containers = containers_of(module, self._places) if module is not None else []
        self.derived = derived_weights(module) if module is not None else []
        self.is_parametrized = module is not None and any(map(parametrize.is_parametrized, module.modules()))

    def uses(self, module: nn.Module) -> bool:
        """Whether its code has a module's weights where it runs."""
        return self.whole is not None and any(each is module for each in self.whole.modules())

    def varies(self, module: nn.Module) -> bool:
        """Whether its calls change what they find of a module's weights and buffers."""
        return self.num_changes > 0 or any(owner is module for owner, _ in self.changing_buffers)

    def has_unknown_buffers(self) -> bool:
        """Whether its calls are still looked at for buffers that are changed through `.data`."""
        return bool(self.buffers) and self.num_compared_calls < COMPARED_CALLS

    def hold_as_buffers(self, parameters: Collection[nn.Parameter]) -> list[ParameterKey]:
        """Have some parameters as buffers from now on, if all are frozen, and in one place each. What they are held as."""
        found: list[ParameterKey] = []
        modules = [] if self.whole is None else list(self.whole.modules())
        for parameter in parameters:
            places = [place for place in self._places if place.parameter is parameter]
            owners = [each for each in modules if each._parameters is places[0].container]
            if parameter.requires_grad or self.num_owners[parameter] > 1 or len(places) > 1 or not owners:
                return []
            key = ParameterKey((owners[0], places[0].key))
            key.parameter = parameter
            found.append(key)
        self.held.update((key.parameter, (self, key)) for key in found)
        self.buffers += found
        self._own_buffers = frozenset(self.buffers)
        self.changing_buffers.update(found)
        return found

    def note_calls(self, before: Mapping[BufferKey, Tensor], after: Mapping[BufferKey, Tensor | None]) -> None:
        """Compare its buffers before and after a call."""
        self.num_compared_calls += 1
        for key, tensor in after.items():
            old = before.get(key)
            if tensor is not None and old is not None and not are_equal(tensor, old):
                self.unversioned_buffers.add(key)

    def note_host_buffers(self, keys: Iterable[BufferKey]) -> None:
        """These buffers of the host are as they should be for the rest of the step."""
        for key in keys:
            if key in self._own_buffers and (buffer := host_buffer(key)) is not None:
                self.host_buffers[key] = buffer, version_of(buffer)

    def note_written_buffers(self, keys: Collection[BufferKey]) -> None:
        """These buffers of the host were made what the layer, or one that shares them, made of them on a device."""
        self.buffer_writes.update(key for key in keys if key in self._own_buffers)
        self.note_host_buffers(keys)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of its buffers."""
        return bytes_of(self.buffers)

    def buffers_that_others_changed(self) -> list[BufferKey]:
        """Buffers that others than the layer have changed in this step since the pack brought them."""
        found = []
        for key in self.buffers if self.host_buffers else ():
            buffer, version = self.host_buffers.get(key) or (None, 0)
            if buffer is not None and (host_buffer(key) is not buffer or version_of(buffer) != version):
                found.append(key)
        return found

    def follow_host_buffers(self) -> None:
        """No step runs: the host's buffers are what the call that begins is to find. A backward of another one may not."""
        if not self.is_training:
            self.changes_by_others.update(self.buffers_that_others_changed())
            self.host_buffers = {}
            self.changed_buffers.difference_update(self.buffers)

    def refuse_changed_buffers(self) -> None:
        """Refuse a step in which others than the layer change its buffers.

        Raises:
            UnsupportedModelError: naming the buffer.
        """
        for key in self.buffers_that_others_changed():
            self.buffer_to_change(key)

    def buffer_to_change(self, key: BufferKey) -> Tensor:
        """The host's buffer, for others than the layer to change: in an evaluation, while the layer has not changed it.

        Raises:
            UnsupportedModelError: in a training step, or if the layer has.
        """
        buffer = host_buffer(key)
        assert buffer is not None
        if not self.is_training and key not in self.changed_buffers:
            return buffer
        raise self.refusal_of_change(key)

    def refusal_of_change(self, key: BufferKey) -> UnswappableBufferError:
        """The refusal of what others do to a buffer."""
        does = f"buffer {key[1]!r} of layer {self.name!r} is changed within a step, outside of the layer's call"
        way_out = "change it in the layer's forward, in a hook such as on_train_batch_end"
        return UnswappableBufferError(does, f"calls for other microbatches would not find that: {way_out}", *key)

    def seen_change(self, key: BufferKey) -> UnswappableBufferError:
        """What is raised where it changes or replaces a buffer that others have, or have tensors in the memory of."""
        does = f"layer {self.name!r} changes its buffer {key[1]!r}, which other code has, too"
        return UnswappableBufferError(
            does, "what that has would not change as it does: let it have buffer.clone()", *key
        )

    def is_given_weights(self) -> bool:
        """Whether other tensors take the place of its parameters, as `torch.func.functional_call` puts them there."""
        return not all(map(_is_its_own, self._places))

    def bound(
        self, parameters: Mapping[nn.Parameter, Tensor], buffers: Mapping[BufferKey, Tensor]
    ) -> AbstractContextManager[dict[BufferKey, Tensor | None]]:
        """Let the layer's code find these tensors.

        Returns:
            The context, with a dict that holds, once it is left, the buffers as the code left them.
        """
        return _Bound(self, parameters, buffers)

    @contextmanager
    def holding(self, buffers: Mapping[BufferKey, Tensor]) -> Iterator[None]:
        """Let the layer's code find these buffers, and then what it found before."""
        outside = {key: _tensors_of(key)[key[1]] for key in buffers}
        try:
            for key, tensor in buffers.items():
                _tensors_of(key)[key[1]] = tensor
            yield
        finally:
            for key, before in outside.items():
                _tensors_of(key)[key[1]] = before

    def bound_weight(self, parameter: nn.Parameter) -> Tensor | None:
        """What the layer's code finds in a parameter's place, while it runs; None if it has none."""
        found = (place.container[place.key] for place in self._places if place.parameter is parameter)
        return next(found, None)


class _Bound:
    """The context in which a layer's code finds other tensors, as `SwappedLayer.bound` says."""

    __slots__ = ("_buffers", "_containers", "_derived", "_outside", "_outside_buffers", "_parameters", "_places")

    def __init__(
        self, layer: SwappedLayer, parameters: Mapping[nn.Parameter, Tensor], buffers: Mapping[BufferKey, Tensor]
    ) -> None:
        self._places, self._parameters, self._buffers = layer._places, parameters, buffers
        if layer._places_in_objects:
            self._places = [*self._places, *(place for place in layer._places_in_objects if not is_free(place))]
        self._containers: Any = layer._containers
        self._derived: Any = layer.derived

    def __enter__(self) -> dict[BufferKey, Tensor | None]:
        self._outside = [place.container[place.key] for place in self._places]
        if self._containers:
            self._containers = [(attributes, name, attributes[name]) for attributes, name in self._containers]
        if self._derived:
            self._derived = [(weight, weight.get()) for weight in self._derived]
        # What was there; once the context is left, what the code left.
        self._outside_buffers: dict[BufferKey, Tensor | None] = {}
        parameters = self._parameters
        for place in self._places:
            place.container[place.key] = parameters[place.parameter]
        for key, tensor in self._buffers.items():
            tensors = _tensors_of(key)
            self._outside_buffers[key], tensors[key[1]] = tensors[key[1]], tensor
        return self._outside_buffers

    def __exit__(self, *error: object) -> None:
        for key, value in self._outside_buffers.items():
            tensors = _tensors_of(key)
            self._outside_buffers[key] = tensors.get(key[1])
            tensors[key[1]] = value
        for place, value in zip(self._places, self._outside, strict=True):
            # The layer's code may have put something else into an object.
            if not place.is_in_object or what_is_in(place) is self._parameters[place.parameter]:
                place.container[place.key] = value
        # What the code made of the weights would keep them on the device.
        for attributes, name, container in self._containers:
            attributes[name] = container
        for weight, value in self._derived:
            weight.set(value)


class OwnCodeOf:
    """The context of a layer's own code, which finds its own parameters and must use no others.

    Their gradients would not leave the layer, and a lane that waited for them would wait with the layer's weights bound.

    Args:
        layer: the layer.
        assign: gives a weight other data where that may be, and says whether it has.
    """

    __slots__ = ("_assign", "_before", "_layer")

    def __init__(self, layer: SwappedLayer, assign: Assign | None = None) -> None:
        self._layer, self._assign = layer, assign

    def __enter__(self) -> None:
        self._before = _within.layer, _within.assign
        _within.layer, _within.assign = self._layer, self._assign

    def __exit__(self, *error: object) -> None:
        _within.layer, _within.assign = self._before


class _Within(threading.local):
    layer: SwappedLayer | None = None
    assign: Assign | None = None


# Of each lane.
_within = _Within()


def layer_of_caller() -> SwappedLayer | None:
    """The layer whose own code the calling thread is in, if it is in one's."""
    return _within.layer


def assign_in_caller(weight: Tensor, value: Tensor) -> bool:
    """Give a weight other data in the code of a layer that the calling thread is in; whether that may be."""
    return _within.assign is not None and _within.assign(weight, value)


def dtype_on_device(parameter: nn.Parameter, compute_dtype: torch.dtype | None) -> torch.dtype:
    """The type of a parameter where it is computed with: the one to compute in, if that is narrower than its own."""
    if compute_dtype is None or not parameter.is_floating_point() or is_composed(parameter):
        return parameter.dtype
    if parameter.element_size() <= compute_dtype.itemsize:
        return parameter.dtype
    return compute_dtype


def _of_recurrent_modules(module: nn.Module) -> frozenset[nn.Parameter]:
    return frozenset(p for each in module.modules() if isinstance(each, nn.RNNBase) for p in each.parameters())


def buffers_of(module: nn.Module) -> list[BufferKey]:
    """Owner and name of every buffer below a module, as far as it holds a tensor."""
    return [
        (owner, name) for owner in module.modules() for name, buffer in owner._buffers.items() if buffer is not None
    ]


def part_buffers(module: nn.Module) -> None:
    """Let each buffer be a tensor of its own, which nobody else has: as plain Lightning leaves them on another device."""
    for owner, name in buffers_of(module):
        is_shared = num_holders(owner._buffers, name) > 1
        buffer = owner._buffers[name]
        if type(buffer) is Tensor and (is_shared or has_other_users(buffer)):
            owner._buffers[name] = copied(buffer)


def move_buffers(keys: Sequence[BufferKey], device: torch.device) -> None:
    """Move buffers to a device, as far as they are still there."""
    for owner, name in keys:
        buffer = owner._buffers.get(name)
        if buffer is not None:
            owner._buffers[name] = buffer.to(device)

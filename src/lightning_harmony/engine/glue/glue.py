"""Glue: the user's code between layer calls. It sees stand-ins for swapped parameters, and its graph goes to the stash."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_harmony.engine.glue.equal_stand_ins import COMPARING, equal_stand_ins
from lightning_harmony.engine.glue.pickled import Pickled
from lightning_harmony.engine.glue.refusals import (
    GRADIENTS_ASKED,
    SETTING_FLAGS,
    changed_in_step,
    changes_nothing,
    gradient_in_step,
    made_into_parameter,
    not_its_own,
    refuse_gradients_of,
    refuse_lost_gradient,
    used_by_compiled_code,
)
from lightning_harmony.engine.glue.runtime import Runtime
from lightning_harmony.engine.glue.untold import Itself, Untold
from lightning_harmony.engine.glue.uses import Token, Use
from lightning_harmony.engine.memory.stash import Stashed
from lightning_harmony.engine.model.host_store import lies_in
from lightning_harmony.engine.model.layer import SwappedLayer, dtype_on_device, layer_of_caller
from lightning_harmony.engine.model.parameter_places import Place, is_free, is_replaced, is_trained, what_is_in
from lightning_harmony.engine.structures.operations import Versioned, changes_first, state_for
from lightning_harmony.engine.structures.parts import cloned, is_composed, parts_of
from lightning_harmony.engine.structures.strides import ViewAgain, copied, one_element
from lightning_harmony.engine.structures.tree import unwrapped
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.plan.values.task import Phase


class StandIn(Pickled, Untold):
    """What glue sees in place of a swapped parameter: device, dtype and shape of the real one, and one element.

    What is asked of it that needs no element is answered; for anything else the parameter is swapped in.
    """

    # Apart from what user code has set on the parameter, which is set on the stand-in, too.
    __slots__ = ("_is_detached", "_parameter", "_runtime")

    @staticmethod
    def of(
        parameter: nn.Parameter, device: torch.device, dtype: torch.dtype, runtime: Runtime, *, requires_grad: bool
    ) -> StandIn:
        """A stand-in for a parameter on a device, in the type that it has there."""
        stand_in = Tensor._make_subclass(StandIn, one_element(parameter.shape, dtype, device), requires_grad)
        stand_in._parameter, stand_in._runtime, stand_in._is_detached = parameter, runtime, False
        if requires_grad:
            # A hook that referred to it would keep it, and the engine, for good: nobody sees through the graph to it.
            itself = weakref.ref(stand_in)
            with torch._C.DisableTorchFunctionSubclass():
                stand_in.register_hook(lambda gradient: refuse_lost_gradient(itself()))
        return stand_in

    # Nothing may be traced through what waits for other lanes.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what needs no element, and swap the parameter in for the rest."""
        kwargs = kwargs or {}
        if not args and (first := next((name for name in _FIRST if name in kwargs), None)) is not None:
            args, kwargs = (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}
        if func in _GRADIENT:
            return gradient_in_step(args[0])
        if func in ANSWERED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _DETACHING:
            return args[0].detached()
        if changes_nothing(func, *args, **kwargs):
            return args[0]
        if func in SETTING_FLAGS and _has_set_flag(*args, **kwargs):
            return args[0]
        if func in COMPARING and (equal := equal_stand_ins(with_parameters, *args)) is not None:
            return equal
        if func is Tensor.__deepcopy__:
            return args[0].copied(args[1])
        if func is torch.autograd.grad:
            raise UnsupportedModelError(GRADIENTS_ASKED)
        if func in _REFUSED or changes_first(getattr(func, "__name__", "")):
            changed = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, StandIn)]
            if changed:
                return _changed(changed, func, args, kwargs)
        result = with_parameters(func, args, kwargs, copy=func in SHARING)
        if func is Tensor.numpy:
            # What is written there would be lost, and nothing counts it.
            result.flags.writeable = False
        return result

    def __hash__(self) -> int:
        return id(self.stands_for)

    def __setattr__(self, name: str, value: Any) -> None:
        # Not what torch itself keeps of tensors.
        if not (hasattr(StandIn, name) or self._is_detached):
            self._runtime.note_attribute(self._parameter)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if not self._is_detached:
            self._runtime.note_attribute(self._parameter)
        super().__delattr__(name)

    @property
    def _is_param(self) -> bool:
        """Whether it counts as a parameter, as torch asks: what is detached from one is none."""
        return not self._is_detached

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        raise UnsupportedModelError(made_into_parameter(self))

    @property
    def stands_for(self) -> Tensor:
        """What dicts and sets find it as."""
        return self if self._is_detached else self._parameter

    def use(self) -> Tensor:
        """The parameter on the device, differentiable where it needs gradients. Its memory belongs to the caller."""
        clone = cloned if is_composed(self._parameter) else Tensor.clone
        result: Tensor = with_parameters(clone, (self,), {})
        return result

    @override
    def content(self, *, to_change: bool) -> Tensor:
        if to_change:
            raise UnsupportedModelError(changed_in_step(self))
        return _swapped_in(self, copy=True).detach()

    @override
    def refuse_compiler(self) -> None:
        raise UnsupportedModelError(used_by_compiled_code(self))

    @override
    def note_view(self, view: Tensor, content: Tensor) -> None:
        _note_copy(self, view, view, content)

    def detached(self) -> StandIn:
        """A stand-in for the same parameter without gradients."""
        detached = StandIn.of(self._parameter, self.device, self.dtype, self._runtime, requires_grad=False)
        detached._is_detached = True
        return detached

    def copied(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter with the same value that is the copier's own."""
        copy = memo[id(self)] = nn.Parameter(self.detached().use(), self.requires_grad)
        return copy

    @property
    def parameter(self) -> nn.Parameter:
        """The user's parameter."""
        return self._parameter


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}


# What needs no element.
ANSWERED = _getters(
    "device", "dtype", "shape", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse",
    "is_quantized", "is_nested", "is_mkldnn", "names", "grad", "grad_fn", "itemsize", "nbytes", "_version",
    "is_mps", "is_xpu", "is_sparse_csr", "is_vulkan", "is_xla", "retains_grad", "_base", "output_nr",
) | {
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.__len__, Tensor.__hash__, Tensor.get_device,
    Tensor.is_contiguous, Tensor.storage_offset, Tensor.is_inference, torch.is_floating_point, torch.is_complex, torch.numel,
    torch._has_compatible_shallow_copy_type,
}  # fmt: skip
_GRADIENT, _SET_DATA = _getters("grad"), Tensor.data.__set__  # type: ignore[attr-defined]
_DETACHING = {*_getters("data"), Tensor.detach}
_REFUSED = {
    *(getattr(Tensor, name).__set__ for name in ("data", "requires_grad", "grad")),
    Tensor.requires_grad_,
    Tensor.register_hook,
}

# What functions call their first argument, which callers may give by its name, as those of `torch.nn.init` do.
_FIRST = ("input", "tensor", "self")

# What they return shares the memory of what they are called with, and nobody sees it.
SHARING = {
    Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.storage, Tensor.untyped_storage, Tensor._typed_storage,
    Tensor.data_ptr, Tensor.__reduce_ex__,
}  # fmt: skip


def _has_set_flag(stand_in: StandIn, flag: bool = True, *, requires_grad: bool | None = None) -> bool:
    """Say whether a parameter needs gradients, in the microbatch that does; whether that may be."""
    flag = bool(flag if requires_grad is None else requires_grad)
    return stand_in._runtime.set_gradient_flag(stand_in.parameter, stand_in, flag)


def _changed(stand_ins: Sequence[StandIn], func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that changes parameters in place.

    Raises:
        UnsupportedModelError: if others use them meanwhile, or it changes more than their values.
    """
    there: dict[nn.Parameter, Tensor] = {}
    with ExitStack() as stack:
        for stand_in in stand_ins:
            # Of one that would be differentiated, autograd refuses that, too. Functions that initialise differentiate nothing.
            has_graph = torch.is_grad_enabled() and getattr(func, "__module__", None) != nn.init.__name__
            may_be = func == _SET_DATA and _is_like(args[1], stand_in)
            may_be = may_be or not (func in _REFUSED or (has_graph and stand_in.requires_grad))
            context = stand_in._runtime.changing(stand_in.parameter, in_place=func != _SET_DATA) if may_be else None
            if context is None:
                raise UnsupportedModelError(changed_in_step(stand_in))
            if stand_in.parameter not in there:
                there[stand_in.parameter] = stack.enter_context(context)
        if func == _SET_DATA:
            parameter, value = args[0].parameter, args[1].use() if isinstance(args[1], StandIn) else args[1]
            now = there[parameter].copy_(value)
            # It would share its memory.
            _note_copy(args[0], value, now, now)
            return None
        before = [_layout_of(tensor) for tensor in there.values()]
        func(tree_map_only(StandIn, lambda each: there[each.parameter], args[0]), *args[1:], **kwargs)
        if before != [_layout_of(tensor) for tensor in there.values()]:
            raise UnsupportedModelError(changed_in_step(stand_ins[0]))
    return args[0]


def _is_like(value: Any, stand_in: StandIn) -> bool:
    """Whether a parameter may get a tensor's content in place of its memory."""
    return isinstance(value, Tensor) and value.shape == stand_in.shape and value.dtype == stand_in.dtype


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.data_ptr()


def with_parameters(func: Any, args: Any, kwargs: Any, *, copy: bool = False) -> Any:
    """Call a function with the parameters on the device in place of their stand-ins.

    Args:
        func: what to call.
        args: what with.
        kwargs: what with, too.
        copy: whether each parameter is to be the caller's own, and not what is swapped out when another is swapped in.
    """
    stand_ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
    if torch._guards.TracingContext.try_get() is not None:
        # The compiler holds a lock that the next lane would wait for.
        raise UnsupportedModelError(used_by_compiled_code(stand_ins[0]))
    unique = list({id(stand_in): stand_in for stand_in in stand_ins}.values())
    # One after the other: with several at a time, each is copied out of its residency.
    # And out of sight of transforms, such as torch.vmap: it is a constant to them.
    copy = copy or len(unique) > 1 or not _keeps_what_is_saved()
    with temporarily_clear_interpreter_stack():
        real = {id(s): _swapped_in(s, copy=copy) for s in unique}
    args, kwargs = tree_map_only(StandIn, lambda stand_in: real[id(stand_in)], (args, kwargs))
    state = state_for(getattr(func, "__name__", ""))
    states = {key: state(tensor) for key, tensor in real.items()}
    result = stand_ins[0]._runtime.on_one_device(func, args, kwargs)
    changed = next((each for each in unique if state(real[id(each)]) != states[id(each)]), None)
    if changed is not None:
        raise UnsupportedModelError(changed_in_step(changed))

    def owned(tensor: Tensor) -> Tensor:
        """A view of the parameter would change under the user's hands when the parameter is swapped out."""
        held = unwrapped(tensor)
        of = next((each for each in unique if any(lies_in(held, part) for part in parts_of(real[id(each)]))), None)
        if of is None:
            return tensor
        view = cloned(tensor)
        _note_copy(of, view, held, real[id(of)])
        return view

    return tree_map_only(Tensor, owned, result)


def _note_copy(stand_in: StandIn, copy: Tensor, original: Tensor, parameter: Tensor) -> None:
    """Code has a copy in the place of a view of a parameter that is on the device: it is not to change, and to follow that."""
    runtime = stand_in._runtime
    if not (is_composed(copy) or is_composed(original)):
        runtime.glue_layer(stand_in.parameter).copies.note(copy, original, stand_in.parameter, parameter)
    if (views := runtime.views()) is not None:
        views.note(copy, stand_in.parameter, partial(changed_in_step, stand_in))


def _keeps_what_is_saved() -> bool:
    """Whether glue's hooks are given what autograd saves, or nothing is saved.

    They are not in a backward, where an autograd function may run a graph of its own, and under others' hooks. A weight that
    is saved there would be used when it is swapped out.
    """
    if not torch.is_grad_enabled():
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), Glue)


def _swapped_in(stand_in: StandIn, *, copy: bool) -> Tensor:
    runtime, parameter = stand_in._runtime, stand_in.parameter
    layer = runtime.glue_layer(parameter)
    tensor: Tensor | None
    if (caller := layer_of_caller()) is not None:
        # An object that the layer is called with may hold what its modules have.
        if (tensor := caller.bound_weight(parameter)) is None:
            raise not_its_own(caller, layer)
        if tensor.requires_grad and not stand_in.requires_grad:
            tensor = tensor.detach()
        return tensor.clone() if copy else tensor
    if parameter in layer.held:
        return runtime.read_buffer(*layer.held[parameter])
    if not (torch.is_grad_enabled() and stand_in.requires_grad):
        # Kernels ask whether a weight needs gradients, with or without a graph, and sum in another order if it does.
        with runtime.visit(layer, Phase.FORWARD) as residency, torch.inference_mode(False), torch.no_grad():
            tensor = residency.leaves[parameter].detach()
            return (cloned(tensor) if copy else tensor).requires_grad_(stand_in.requires_grad)
    tokens = runtime.tokens()
    if tokens is None:
        # It was kept from a step, and stands for what the parameter is between steps.
        return parameter.clone() if copy else parameter
    token = tokens.get(parameter)
    if token is None:
        anchor = torch.zeros((), requires_grad=True)
        tokens[parameter] = token = Token.apply(anchor, layer, runtime.device_of(layer), stand_in.dtype, runtime)
    with runtime.visit(layer, Phase.FORWARD) as residency:
        tensor = Use.apply(token, residency.leaves[parameter].detach())
        return tensor.clone() if copy else tensor


class Glue:
    """Shows stand-ins in place of all parameters of a model, and keeps what the glue's graph saves.

    Args:
        places: where the model holds its parameters.
        device: where glue computes.
        runtime: the engine.
        compute_dtype: in which type glue computes with parameters; None for that of each.
    """

    def __init__(
        self, places: Sequence[Place], device: torch.device, runtime: Runtime, compute_dtype: torch.dtype | None = None
    ) -> None:
        self._places = places
        self._device = device
        self._compute_dtype = compute_dtype
        self._runtime = runtime
        self._stand_ins: dict[nn.Parameter, StandIn] = {}

    def is_outdated(self) -> bool:
        """Whether parameters are no longer where they were when the model was set up."""
        return any(is_replaced(place) for place in self._places)

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Stand-ins take the parameters' places within the context."""
        held = [place for place in self._places if not is_free(place)]
        shown = [(place, self._stand_in(place.parameter)) for place in held]
        guards = [refuse_gradients_of(place.parameter, self._runtime) for place in self._places if is_trained(place)]
        for place, stand_in in shown:
            place.container[place.key] = stand_in
        left: list[Any] = []
        try:
            yield
        finally:
            for guard in guards:
                guard.remove()
            for place, _ in shown:
                left.append(what_is_in(place))
                if not is_free(place):
                    place.container[place.key] = place.parameter
            for place in self._places:
                # An object may have taken another parameter.
                if place.is_in_object and isinstance(now := what_is_in(place), StandIn):
                    place.container[place.key] = now.stands_for
        for (place, stand_in), now in zip(shown, left, strict=True):
            if isinstance(place.container, dict) and not (place.is_in_object or now is stand_in):
                raise UnsupportedModelError(changed_in_step(stand_in))

    def _stand_in(self, parameter: nn.Parameter) -> StandIn:
        known = self._stand_ins.get(parameter)
        if known is None or known.requires_grad != parameter.requires_grad:
            # A validation must leave nothing behind that a later fit can't differentiate.
            with torch.inference_mode(False):
                dtype = dtype_on_device(parameter, self._compute_dtype)
                requires_grad = parameter.requires_grad
                known = StandIn.of(parameter, self._device, dtype, self._runtime, requires_grad=requires_grad)
            self._stand_ins[parameter] = known
        if is_composed(parameter):
            # Its class has put the values there, too.
            vars(known).update(vars(parameter))
        else:
            # What is set on one is on both.
            known.__dict__ = parameter.__dict__
        return known

    def stashing(self) -> AbstractContextManager[Any]:
        """What autograd saves within the context goes to the stash; weights are swapped in again instead."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    # What autograd saves of the code of a compiled container that is left to Python: what happens to it is not to be traced.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pack(self, tensor: Tensor) -> Any:
        if isinstance(tensor, Untold):
            return Itself(tensor)
        found = self._runtime.resident_parameter(tensor)
        if found is None:
            return _Saved(tensor, self._runtime.stash_unchanged(tensor), self._runtime.filled_since(tensor))
        layer, leaf = found
        layer.is_in_graph = True
        if tensor.dtype != leaf.dtype:
            # Elements of another size, as those of a view of complex numbers.
            return _Saved(tensor, self._runtime.stash_unchanged(copied(tensor.detach())), lambda: None)
        return ViewAgain(tensor, leaf, partial(_parameter_again, layer, self._runtime))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _unpack(self, saved: Any) -> Tensor:
        with self._runtime.calling():
            tensor: Tensor = saved.load()
        return tensor


class _Saved(Versioned):
    """A tensor that autograd saved, in the stash."""

    __slots__ = ("_filled_since", "_stashed")

    def __init__(self, tensor: Tensor, stashed: Stashed, filled_since: Callable[[], Tensor | None]) -> None:
        super().__init__(tensor, "code between layers")
        self._stashed, self._filled_since = stashed, filled_since

    def load(self) -> Tensor:
        self.refuse_changed()
        filled = self._filled_since()
        return self._stashed.load() if filled is None else filled


def _parameter_again(layer: SwappedLayer, runtime: Runtime) -> Tensor:
    """The parameter of a layer of the glue, swapped in for the backward."""
    with runtime.visit(layer, Phase.BACKWARD) as residency:
        return residency.leaves[layer.parameters[0]]

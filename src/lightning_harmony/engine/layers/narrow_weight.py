"""Narrow weights in a layer's code: it sees them as wide as they are, and only what autocast casts gets the cast.

Whether autocast alone reads a weight is learned in the first steps, and code may do otherwise in a later one. So in the place
of a narrow weight the code finds a tensor of the parameter's own type, without its elements. A function that autocast would
cast the weight for computes with the narrow one. To any other the parameter comes as it is, from the host, in that very call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from types import EllipsisType, new_class
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_harmony.engine.glue.glue import ANSWERED
from lightning_harmony.engine.layers.handed_on import handing_on
from lightning_harmony.engine.layers.narrow import autocast_dtype
from lightning_harmony.engine.model.shown_wide import ShownWide, take_mode
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.operations import NO_DISPATCH, detached
from lightning_harmony.engine.structures.strides import one_element

_NO_FUNCTION = torch._C._disabled_torch_function_impl


class NarrowUse:
    """What one call of a layer does with a narrow weight.

    Gradients of a weight are summed as in plain training, in the order in which autograd comes to its uses, the last one
    first. So the narrow one is the first use or none: where a second follows, its sum comes before, and where the weight was
    read as it is, it is cast by autocast itself. Uses without a gradient are in no order.

    Args:
        narrow: the weight on the device.
        load: brings the parameter as it is, without a graph, which the host waits for.
        attach: puts that in the call's graph; None where it has none.

    Attributes:
        narrow: the weight on the device.
        is_cast: whether autocast would have cast the parameter.
        like: looks as the narrow weight, and has no memory.
    """

    like: Tensor

    def __init__(
        self, narrow: Tensor, load: Callable[[], Tensor], attach: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.narrow = narrow
        self.is_cast = self._has_gradient = self._is_closed = False
        self._load, self._attach = load, attach
        self._value: Tensor | None = None
        self._attached: Tensor | None = None
        self._before: Tensor | None = None

    @property
    def is_read(self) -> bool:
        """Whether the parameter was needed as it is."""
        return self._value is not None

    def close(self) -> None:
        """The call is over: keep no memory and no graph of it, where code keeps what it was shown.

        What is used from then on is the parameter, without a gradient.
        """
        self.narrow, self._is_closed = self.like, True
        self._attach = self._value = self._attached = None

    def cast(self) -> Tensor:
        """For what autocast casts the weight for."""
        if self._is_closed:
            return self.wide()
        if torch.is_grad_enabled() and self.narrow.requires_grad:
            if self._has_gradient or self._attached is not None:
                return self.wide()
            self._has_gradient = True
        self.is_cast = True
        return self.narrow

    def wide(self) -> Tensor:
        """For all else."""
        if self._value is None:
            self._value = self._load()
            self._before = checksum(self._value)
        if self._attach is None or not (torch.is_grad_enabled() and self.narrow.requires_grad):
            # Kernels ask whether a weight needs gradients, with or without a graph.
            return detached(self._value).requires_grad_(self.narrow.requires_grad)
        if self._attached is None:
            self._attached = self._attach(self._value)
        return self._attached

    def has_changed(self) -> bool:
        """Whether the code has changed what it was given as the parameter."""
        return self._value is not None and self._before is not None and not checksum(self._value).equal(self._before)


class _ViewUse(NarrowUse):
    """What is done with a view of a narrow weight: whatever makes that makes it of either."""

    def __init__(self, of: NarrowUse, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__(view(detached(of.narrow)), lambda: view(of.wide()))
        self._of, self._view = of, view

    def cast(self) -> Tensor:
        return self._view(self._of.cast())

    def wide(self) -> Tensor:
        return self._view(self._of.wide())


class NarrowWeight(ShownWide):
    """What is shown of a narrow weight. `show` makes it a tensor, of the class of the weight, too."""

    _harmony_use: NarrowUse
    _harmony_like: Tensor

    def of(self, use: NarrowUse) -> Tensor:
        """What is shown in a call that uses the weight so."""
        self._harmony_use, use.like = use, self._harmony_like
        itself: Any = self
        return itself  # type: ignore[no-any-return]

    def wide(self) -> Tensor:
        """The parameter as it is, in the call's graph."""
        return self._harmony_use.wide()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is one of the parameter."""
        copy = memo[id(self)] = nn.Parameter(self.wide().detach().clone(), self._harmony_use.narrow.requires_grad)
        return copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function with what it needs in the place of weights."""
        # A compiler is not to trace through what brings parameters. To ask takes less than what keeps it out.
        run = _out_of_sight if torch.compiler.is_dynamo_compiling() else _run
        return run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    mode, name = take_mode(), _CASTING.get(func)
    if name is None:
        if func in ANSWERED and func not in _OF_LAYOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, NarrowWeight):
            use = first._harmony_use
            if func in _OF_LAYOUT:
                return func(use.narrow, *args[1:], **kwargs)
            if func in _VIEWS and _makes_view(func, args, kwargs):
                return _view_of(first, func, args[1:], kwargs)
            if _casts_by_hand(func, use.narrow.dtype, args, kwargs):
                # Not the weight itself: a cast makes memory of its own.
                return use.cast().to(use.narrow.dtype, copy=True)
        if (handing := handing_on(func)) is not None:
            with nullcontext() if mode is None else mode:
                return handing(*args, **kwargs)

    def real(shown: Any) -> Any:
        if not isinstance(shown, NarrowWeight):
            return tree_map_only(NarrowWeight, real, shown) if isinstance(shown, list | tuple | dict) else shown
        use = shown._harmony_use
        return use.wide() if name is None or not _would_cast(name, use.narrow) else use.cast()

    # Most others are the tensors that a layer computes with.
    args = [value if value is None or type(value) is Tensor else real(value) for value in args]
    if kwargs:
        kwargs = {key: real(value) for key, value in kwargs.items()}
    return func(*args, **kwargs) if mode is None else mode.run(func, args, kwargs)


_out_of_sight: Any = torch.compiler.disable(_run)


def _would_cast(name: str, narrow: Tensor) -> bool:
    """Whether autocast, as it is now, casts operands of an operation to the type of a narrow weight."""
    device = narrow.device
    return autocast_dtype(device) is narrow.dtype and _is_cast_on(name, device.type)


def can_show(parameter: nn.Parameter, leaf: Tensor) -> bool:
    """Whether a layer's code can be shown another tensor in the place of a weight."""
    kind: Any = type(parameter)
    return kind.__torch_function__ is _NO_FUNCTION and type(leaf).__torch_dispatch__ is NO_DISPATCH


def show(parameter: nn.Parameter, leaf: Tensor, refuse: Callable[[Tensor], None]) -> NarrowWeight:
    """What a layer's code finds in the place of a narrow weight, in one call after the other, once it is told of a use.

    Args:
        parameter: the user's own.
        leaf: the weight on the device.
        refuse: called with a gradient that comes to what is shown, where code got past it.
    """
    element = one_element(parameter.shape, parameter.dtype, leaf.device)
    shown: Any = Tensor._make_subclass(_shown(type(leaf)), element, leaf.requires_grad)
    shown.__dict__.update(vars(leaf))
    shown._harmony_like = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    if leaf.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            # The code of a layer may register none.
            Tensor.register_hook(shown, refuse)
    return shown  # type: ignore[no-any-return]


def really(value: Any) -> Any:
    """A tensor that a layer's code leaves, with the parameter in the place of what is shown of it."""
    return value.wide() if isinstance(value, NarrowWeight) else value


@cache
def _shown(kind: type[Tensor]) -> type[Tensor]:
    content = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return new_class(kind.__name__, (NarrowWeight, kind), exec_body=lambda namespace: namespace.update(content))


def _view_of(shown: Any, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        view: Any = func(shown, *args, **kwargs)
    view.__class__ = _shown(Tensor)
    view._harmony_use = _ViewUse(shown._harmony_use, lambda weight: func(weight, *args, **kwargs))
    return view


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_OF_LAYOUT = {Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset, _getter("_version")}
_VIEWS = {
    *(_getter(name) for name in ("T", "mT")),
    *(
        getattr(where, name)
        for where in (torch, Tensor)
        for name in (
            "t",
            "transpose",
            "permute",
            "unsqueeze",
            "squeeze",
            "flatten",
            "reshape",
            "narrow",
            "select",
            "view",
        )
        if hasattr(where, name)
    ),
    Tensor.__getitem__,
}
# What autocast casts all operands for, whatever else they are, by the name of the operation.
_CASTING: dict[Any, str] = {
    getattr(where, name): name
    for name in (
        "linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "addr",
        "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
        "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    )
    for where in (torch, Tensor, F)
    if hasattr(where, name)
} | {Tensor.__matmul__: "matmul", Tensor.__rmatmul__: "matmul"}  # fmt: skip
_OVERLOADS = {"conv_transpose2d": "conv_transpose2d.input", "conv_transpose3d": "conv_transpose3d.input"}
_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


@cache
def _is_cast_on(name: str, device: str) -> bool:
    key = _AUTOCAST_KEYS.get(device)
    if key is None:
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_OVERLOADS.get(name, name)}", key))


def _makes_view(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function, called so, gives nothing but a view of its first argument."""
    if func is Tensor.__getitem__:
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(index is None or type(index) in (int, slice, EllipsisType) for index in indices)
    return not any(isinstance(leaf, Tensor | torch.dtype) for leaf in tree_leaves((args[1:], kwargs)))


def _casts_by_hand(func: Any, dtype: torch.dtype, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function, called so, casts its first argument to a type, and does nothing else."""
    if func is Tensor.to:
        given = [*args[1:], *kwargs.values()]
        return len(given) == 1 and given[0] is dtype
    casts = {torch.bfloat16: Tensor.bfloat16, torch.float16: Tensor.half}
    return func is casts.get(dtype) and len(args) == 1 and not kwargs

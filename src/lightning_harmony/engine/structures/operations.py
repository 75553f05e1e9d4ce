"""Operations: which operand one changes, and how one runs that a dispatch mode is told of."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

Views = TypeVar("Views")
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_EMPTY = torch.empty(0)
# While one exists, its thread's dispatch modes see nothing.
_Guard: Any = torch._C._DisableTorchDispatch


def changes_first(name: str) -> bool:
    """Whether an operation changes its first operand, by its name."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
    return name.endswith("_")


def run_as_without_mode(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation in ``__torch_dispatch__`` as it would run without the mode, to the bit.

    In inference mode a composite operation comes whole. Torch then runs it where views of weights seem to need no gradients,
    and the matrix product, among others, goes another way for weights that need some: it sums in another order.
    """
    if torch.is_inference_mode_enabled() and _is_composite(func):
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return func(*args, **kwargs)
    return func(*args, **kwargs)


@cache
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


class Unseen:
    """The context of the engine's own work in the middle of user code: no graph records it, and no dispatch mode sees it.

    As `torch.no_grad` with `no_dispatch`, which take several times as long.
    """

    __slots__ = ("_grad_enabled", "_guard")

    def __enter__(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._guard = _Guard()

    def __exit__(self, *error: object) -> None:
        del self._guard
        torch._C._set_grad_enabled(self._grad_enabled)


def detached(tensor: Tensor) -> Tensor:
    """A tensor without its graph. It takes no memory, and no dispatch mode sees it."""
    if type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
        return Tensor.detach(tensor)
    guard = _Guard()
    try:
        return Tensor.detach(tensor)
    finally:
        del guard


def version_counter(tensor: Tensor) -> Tensor:
    """A tensor without memory whose version is that of another one, of a class without code of its own."""
    guard = _Guard()
    try:
        alias = Tensor.detach(tensor)
        alias.data = _EMPTY
        return alias
    finally:
        del guard


def viewed(tensor: Tensor, view: Callable[..., Views], *how: Any) -> Views:
    """A view of a tensor, or several. They take no memory, and no dispatch mode sees them.

    Args:
        tensor: what is viewed.
        view: makes the views of the tensor.
        how: further arguments of that.
    """
    if type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
        return view(tensor, *how)
    guard = _Guard()
    try:
        return view(tensor, *how)
    finally:
        del guard

"""Operations: which operand one changes, and how one runs that a dispatch mode is told of."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


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

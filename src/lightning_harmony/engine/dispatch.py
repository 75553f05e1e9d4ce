"""Operations that a dispatch mode is told of run as they would without the mode, to the bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def run_as_without_mode(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation in ``__torch_dispatch__``.

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

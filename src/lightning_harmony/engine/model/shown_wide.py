"""What stands in a layer's code for a weight that is narrower on the device than the parameter is."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor


class ShownWide:
    """A tensor that looks as the parameter is, and is not: code other than functions of torch gets `wide` instead."""

    def wide(self) -> Tensor:
        """The parameter as it is, on the device, differentiable where it needs gradients."""
        raise NotImplementedError


def hand_on(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that is given such tensors, in a mode of torch functions that is to see it again without them."""
    _thread.mode = mode
    try:
        return func(*args, **kwargs)
    finally:
        _thread.mode = None


def take_mode() -> Any:
    """The mode that is to see the function that runs; None if there is none. It is asked for once."""
    mode = _thread.mode
    if mode is not None:
        _thread.mode = None
    return mode


class _Thread(threading.local):
    mode: Any = None


_thread = _Thread()

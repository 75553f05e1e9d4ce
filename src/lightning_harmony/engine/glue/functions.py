"""Autograd functions of the user's own: between layers they are operations as torch's are, to stand-ins and on one device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode

from lightning_harmony.engine.glue.glue import StandIn, with_parameters
from lightning_harmony.engine.glue.one_device import OneDevice
from lightning_harmony.engine.model.shown_wide import ShownWide

# Below `Function.apply`, which the user's code may have got hold of before: `double = Double.apply`.
_BOTTOM: Any = torch.autograd.function._SingleLevelFunction
_TORCHS_APPLY = vars(torch._C._FunctionBase)["apply"]
_OURS = __name__.partition(".")[0]

# Several fits may be in their steps at once, each in a thread of its own: one entry for each.
_steps: list[None] = []
_lock = threading.Lock()


@contextmanager
def functions_as_operations() -> Iterator[None]:
    """The context in which the `apply` of an autograd function, of which torch tells nobody, is told of like other operations.

    A function finds parameters in the place of their stand-ins, and its backward returns each gradient to them.
    On several devices it runs on one, and so does its backward.

    The class attribute that this takes exists while any step is in this context, whatever its thread. To who has neither
    stand-ins nor several devices it does what torch's own does.
    """
    with _lock:
        _steps.append(None)
        _BOTTOM.apply = classmethod(_apply)
    try:
        yield
    finally:
        with _lock:
            _steps.pop()
            if not _steps:
                del _BOTTOM.apply


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    own = _TORCHS_APPLY.__get__(None, function)
    if function.__module__.partition(".")[0] == _OURS:
        return own(*args)
    args = tuple(arg.wide() if isinstance(arg, ShownWide) else arg for arg in args)
    given = [arg for arg in args if isinstance(arg, StandIn)]
    if given:
        for stand_in in given:
            stand_in._runtime.give(stand_in.parameter)
        # It may keep them, and call layers.
        return with_parameters(own, args, {}, copy=True)
    mode = _get_current_function_mode()
    return mode.run(own, args, {}) if isinstance(mode, OneDevice) else own(*args)

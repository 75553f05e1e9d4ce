"""Parameters that are being updated while other code runs: whoever reads one waits until it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code

from lightning_harmony.engine.glue import ANSWERED

# How each of them is waited for.
_waits: dict[int, Callable[[], None]] = {}
# A forked process has not the threads that update: there would be nothing to wait for.
os.register_at_fork(after_in_child=_waits.clear)
# What says nothing of the values that an update changes, nor takes from it the gradient, which it has already.
_NOT_READ = (
    ANSWERED
    | {getattr(Tensor, name).__get__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}
    | {getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")}
    | {Tensor.requires_grad_}
)


class AwaitedParameter(nn.Parameter):
    """What a parameter is as long as its update may be under way. The object stays the user's: its class alone changes."""

    # A dictionary finds it as it did before, and asks no further.
    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # It makes another of the same class.
        self.wait()
        copy: nn.Parameter = nn.Parameter.__deepcopy__(self, memo)
        return copy

    def wait(self) -> None:
        """Wait for the update; then it is an ordinary parameter again."""
        wait = _waits.get(id(self))
        if wait is not None:
            wait()
        # Another thread may have come to the next update meanwhile.
        if _waits.get(id(self)) is wait:
            settle([self])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for what is read, and go on with ordinary parameters."""
        kwargs = kwargs or {}
        read = [] if func in _NOT_READ else list(_awaited_in((args, kwargs)))
        for parameter in read:
            parameter.wait()
        if read:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _awaited_in(value: Any) -> Iterator[AwaitedParameter]:
    """Those among arguments, also in lists of any class, as torch takes them."""
    if type(value) is AwaitedParameter:
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _awaited_in(each)


def await_updates(waits: Mapping[nn.Parameter, Callable[[], None]]) -> None:
    """From now on, whoever reads one of these parameters waits, each by its own function, until it is settled."""
    for parameter, wait in waits.items():
        # What has a class of its own may not be taken for another.
        if type(parameter) in (nn.Parameter, AwaitedParameter):
            _waits[id(parameter)] = wait
            parameter.__class__ = AwaitedParameter


def settle(parameters: Iterable[nn.Parameter]) -> None:
    """These parameters are ordinary ones again."""
    for parameter in parameters:
        if type(parameter) is AwaitedParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
            _waits.pop(id(parameter), None)


# Nothing may be traced through what waits for other threads: a switch for this code, where a wrapper would cost each call.
skip_code(AwaitedParameter.__torch_function__.__code__)

"""Parameters that are being updated while other code runs: whoever reads one waits until it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.glue import ANSWERED
from lightning_harmony.engine.stream import Event

_events: dict[int, Event] = {}
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
        event = _events.get(id(self))
        if event is not None:
            event.synchronize()
        # Another thread may have come to the next update meanwhile.
        if _events.get(id(self)) is event:
            settle([self])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait for what is read, and go on with ordinary parameters."""
        kwargs = kwargs or {}
        if func in _NOT_READ:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) is cls:
                leaf.wait()
        return func(*args, **kwargs)


def await_updates(events: Mapping[nn.Parameter, Event]) -> None:
    """Whoever reads one of these parameters waits for its event from now on, until it is settled."""
    for parameter, event in events.items():
        # What has a class of its own may not be taken for another.
        if type(parameter) is nn.Parameter:
            _events[id(parameter)] = event
            parameter.__class__ = AwaitedParameter


def settle(parameters: Iterable[nn.Parameter]) -> None:
    """These parameters are ordinary ones again."""
    for parameter in parameters:
        if type(parameter) is AwaitedParameter:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
            _events.pop(id(parameter), None)


# Nothing may be traced through what waits for other threads: a switch for this code, where a wrapper would cost each call.
skip_code(AwaitedParameter.__torch_function__.__code__)

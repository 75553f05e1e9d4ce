"""Shallow copies of modules that are layers: they are none, and have forwards of their own."""

from __future__ import annotations

import copyreg
import threading
from collections import Counter
from typing import Any, Protocol

from torch import nn


class TakesPlace(Protocol):
    """What takes the place of an attribute of a module.

    Attributes:
        own: what the module had there itself; None for nothing.
    """

    own: Any


class ShallowCopies:
    """Lets `copy.copy` give copies what modules had themselves, where something else takes the place of it.

    Otherwise a copy would have that, too, which knows the original alone. A class has its entry in `copyreg.dispatch_table`
    while something takes such a place in one of its modules.

    Args:
        kind: of what takes places.
    """

    def __init__(self, kind: type[TakesPlace]) -> None:
        self._kind = kind
        self._modules = Counter[type]()
        # Several fits may run, each in a thread of its own.
        self._lock = threading.Lock()

    def begin(self, module: nn.Module) -> None:
        """Something takes the place of an attribute of a module."""
        with self._lock:
            self._modules[type(module)] += 1
            copyreg.dispatch_table.setdefault(type(module), self._reduced)

    def end(self, module: nn.Module) -> None:
        """It does so no longer."""
        kind = type(module)
        with self._lock:
            self._modules[kind] -= 1
            if self._modules[kind] <= 0 and copyreg.dispatch_table.get(kind) == self._reduced:
                del copyreg.dispatch_table[kind]

    def _reduced(self, module: nn.Module) -> Any:
        made, arguments, state, *rest = (*module.__reduce_ex__(4), None)[:5]
        if isinstance(state, dict):
            own = {name: value.own if isinstance(value, self._kind) else value for name, value in state.items()}
            state = {name: value for name, value in own.items() if value is not None or state[name] is None}
        return made, arguments, state, *rest

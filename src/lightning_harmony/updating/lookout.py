"""The lookout: ends an update that goes on between two batches when code that runs there looks at what it changes."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from lightning_harmony.engine.glue.glue import ANSWERED
from lightning_harmony.engine.structures.nested import is_ndarray
from lightning_harmony.engine.structures.parts import storages_of
from lightning_harmony.engine.structures.spans import Span, Spans, span_of
from lightning_harmony.engine.structures.tree import unwrapped
from lightning_harmony.updating.reach import names_in

# What tells nothing that an update changes.
_GRADIENT: Any = vars(torch._C.TensorBase)["grad"].__get__
_TELLS_NOTHING = ANSWERED - {_GRADIENT, *(getattr(Tensor, name).__get__ for name in ("_version", "_base"))}
# What is done with what they return, torch tells nobody either.
_GIVING_MEMORY = frozenset({Tensor.__dlpack__, Tensor.untyped_storage, Tensor.storage})
# Code that has looked behind so many steps in a row is taken to look behind the next one, too.
_MOST_IN_A_ROW = 2
_NOT_THE_USERS = ("torch", "lightning_harmony")
# Lookouts that are kept.
_KEPT: weakref.WeakSet[Lookout] = weakref.WeakSet()
_RUN_ELSEWHERE = ("threading", "_thread", "concurrent", "asyncio", "multiprocessing")


class Lookout(TorchFunctionMode):
    """While it is kept, torch tells it what this thread's code calls with which tensors.

    Args:
        finish: ends the update that goes on, if there is one.
        calls_hooks: whether a module of Python, given its name, is one of Lightning's that call hooks.

    Attributes:
        gives_memory: whether code was given memory of parameters in other ways than by arrays.
        misses_gradient: who has found no gradient at a parameter that needs some, in words; None if nobody has.
    """

    def __init__(self, finish: Callable[[], None], calls_hooks: Callable[[str], bool]) -> None:
        super().__init__()
        self.gives_memory = False
        self.misses_gradient: str | None = None
        self._finish, self._calls_hooks = finish, calls_hooks
        self._is_kept, self._process = False, os.getpid()
        self._thread = threading.get_ident()
        self._parameters: list[Tensor] = []
        self._identities: set[int] = set()
        # The memory of parameters and gradients, once somebody has used a tensor.
        self._memories: Spans | None = None
        # Who has looked behind this step, and behind how many in a row somebody did.
        self._looker: str | None = None
        self._num_in_a_row = 0
        self._arrays: list[weakref.ref[Any]] = []

    def keep(self, parameters: Iterable[Tensor]) -> None:
        """Look out in this thread, until `leave`.

        Args:
            parameters: what updates change.
        """
        self.leave()
        self._parameters = list(parameters)
        self._identities, self._memories = set(map(id, self._parameters)), None
        self._is_kept, self._looker, self._thread = True, None, threading.get_ident()
        _KEPT.add(self)
        # Beneath the user's modes: a mode that is left takes the topmost one away, and what modes do is seen. A default
        # device, but not a context of one, has to be lowest.
        others = [_pop_mode() for _ in _get_current_function_mode_stack()]
        if others and isinstance(others[-1], DeviceContext) and hasattr(others[-1], "old_device"):
            _push_mode(others.pop())
        for mode in (self, *reversed(others)):
            _push_mode(mode)

    def leave(self) -> None:
        """Nobody else may look: the next step begins, or there is none."""
        if not self._is_kept:
            return
        self._is_kept = False
        _KEPT.discard(self)
        self._num_in_a_row = 0 if self._looker is None else self._num_in_a_row + 1
        others: list[Any] = []
        if any(mode is self for mode in _get_current_function_mode_stack()):
            while (mode := _pop_mode()) is not self:
                others.append(mode)
        # The user's code has left them there.
        for mode in reversed(others):
            _push_mode(mode)

    def why_at_once(self) -> str | None:
        """What will look behind the next step, in words; None if nothing is known to."""
        self._arrays = [array for array in self._arrays if array() is not None]
        if self._arrays:
            return "an array has the memory of parameters"
        return self._looker if self._num_in_a_row >= _MOST_IN_A_ROW else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, behind the update if it may see what that changes."""
        kwargs = kwargs or {}
        # What is compiled has the lookout traced with it, and does not come here again: who has any is asked before.
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        # Processes that are forked have the lookout, too, but no updates.
        if func in _TELLS_NOTHING or self._process != os.getpid() or not self._has_some((*args, *kwargs.values())):
            return func(*args, **kwargs)
        self._end("looks at parameters")
        result = func(*args, **kwargs)
        if func == _GRADIENT and result is None and args[0].requires_grad and not _is_called_by_torch():
            self.misses_gradient = self.misses_gradient or self._caller()
        if is_ndarray(result):
            # What is done with it, torch tells nobody.
            self._arrays.append(weakref.ref(result))
        self.gives_memory |= func in _GIVING_MEMORY
        return result

    def end_before_fork(self) -> None:
        """A process is about to be forked, which will have the parameters as they are, and no update."""
        if self._is_kept and (self._process, self._thread) == (os.getpid(), threading.get_ident()):
            self._end("starts a process")

    def _end(self, what: str) -> None:
        if self._looker is None:
            self._looker = f"{self._caller()} {what}"
        self._finish()

    def _has_some(self, values: Iterable[Any]) -> bool:
        """Whether parameters are among these, at any depth of lists and dicts, or what shares memory with one of them."""
        for value in values:
            kind = type(value)
            if issubclass(kind, Tensor):
                if id(value) in self._identities or self._known_memories().meet(_memories_of((value,))):
                    return True
            elif issubclass(kind, list | tuple | set | frozenset):
                if self._has_some(value):
                    return True
            elif issubclass(kind, dict) and self._has_some(value.values()):
                return True
        return False

    def _known_memories(self) -> Spans:
        if self._memories is None:
            gradients = (parameter.grad for parameter in self._parameters)
            found = (*self._parameters, *(gradient for gradient in gradients if gradient is not None))
            self._memories = Spans(_memories_of(found))
        return self._memories

    def _caller(self) -> str:
        """The hook that looks, or what else Lightning's loops have called."""
        frame, outermost, found = sys._getframe(2), None, None
        while frame is not None:
            name = str(frame.f_globals.get("__name__"))
            if self._calls_hooks(name):
                # A hook may call the trainer, as to save a checkpoint, and that calls what looks.
                found, outermost = outermost or found, None
                if ".loops." in name:
                    break
            elif name.partition(".")[0] not in _NOT_THE_USERS:
                outermost = frame
            frame = frame.f_back  # type: ignore[assignment]
        if found is None:
            return "code between batches"
        owner = found.f_locals.get("self")
        if owner is None:
            return f"{found.f_code.co_name} ({PurePath(found.f_code.co_filename).name}:{found.f_lineno})"
        return f"{type(owner).__name__}.{found.f_code.co_name}"


def is_out_of_sight(value: Any) -> bool:
    """Whether code that has a value may use tensors without a lookout: in other threads and processes, or compiled."""
    if issubclass(type(value), torch.jit.ScriptFunction | torch.jit.ScriptModule):
        return True
    if issubclass(type(value), FunctionType) and any(map(_names_elsewhere, names_in(value.__code__))):
        return True
    place = value if issubclass(type(value), type | ModuleType) else type(value)
    name = place.__name__ if issubclass(type(place), ModuleType) else place.__module__
    return _names_elsewhere(name) or "_torchdynamo_orig_callable" in getattr(value, "__dict__", ())


def _names_elsewhere(name: str) -> bool:
    """Whether a dotted name that code has, such as that of what it imports, is of such a module."""
    root = name.removeprefix("torch.").partition(".")[0]
    return root in _RUN_ELSEWHERE and all(map(str.isidentifier, name.split(".")))


def _is_called_by_torch() -> bool:
    """Whether an operation is called by torch's own code, such as what zeroes gradients."""
    return str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0] == "torch"


def _memories_of(tensors: Iterable[Tensor]) -> Iterator[Span | None]:
    """Where the memory of those tensors is that are on the host."""
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            # What the transforms of torch.func work on has no memory of its own.
            for each in storages_of(unwrapped(tensor)):
                if each.device.type == "cpu":
                    yield span_of(each)


def _end_before_fork() -> None:
    for lookout in list(_KEPT):
        lookout.end_before_fork()


os.register_at_fork(before=_end_before_fork)

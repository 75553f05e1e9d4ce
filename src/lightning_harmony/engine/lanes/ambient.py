"""Ambient state: what PyTorch, Python and NumPy keep for a thread or for the process, and code sets for a while.

One registry serves lanes, which each find their own, and recomputes, which find what the forward found. To add a kind of
state is to add an entry to `OF_THREAD` or `OF_PROCESS`. Random number generators are captured apart, in `rng`: a microbatch
has streams of its own, one of them for all GPUs.
"""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from itertools import islice
from operator import is_
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn, overrides
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode


class OfThread(NamedTuple):
    """A kind of state that each thread has for itself.

    Attributes:
        name: for messages.
        get: reads it.
        applied: the context in which the calling thread has a value of it.
    """

    name: str
    get: Callable[[], Any]
    applied: Callable[[Any], AbstractContextManager[Any]]


class OfProcess(NamedTuple):
    """A kind of state that all threads share: whose turn it is finds its own.

    Attributes:
        name: for messages.
        get: reads it, in well under a microsecond: it is read several times a turn.
        set: writes it.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


class _Objects(tuple[Any, ...]):
    """Objects of which these and not their equals are meant, such as a list of filters that somebody will change."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Objects) and len(self) == len(other) and all(map(is_, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other


def _autocast(device_type: str) -> OfThread:
    def applied(value: tuple[bool, torch.dtype]) -> AbstractContextManager[Any]:
        enabled, dtype = value
        # Without the cache of casts: it would keep casts of weights that were swapped out.
        return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False)

    def get() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    return OfThread(f"autocast of {device_type}", get, applied)


def _default_device() -> torch.device | None:
    """As it was given: `torch.get_default_device` would make a tensor to find its index."""
    if torch._C._len_torch_function_stack():
        for mode in reversed(_get_current_function_mode_stack()):
            if isinstance(mode, DeviceContext):
                return torch.device(mode.device)
    # Who sets one enters its mode, too.
    return None


def _on_default_device(device: torch.device | None) -> AbstractContextManager[Any]:
    return torch.device("cpu") if device is None else device


def _users_modes(stack: Sequence[Any]) -> _Objects:
    """Those of a stack of modes that are neither ours nor the default device, which is a kind of its own."""
    return _Objects(
        [mode for mode in stack if not isinstance(mode, DeviceContext) and not _is_ours(type(mode).__module__)]
    )


_NO_MODES = _Objects()


@cache
def _is_ours(file: str) -> bool:
    return file.partition(".")[0] == __name__.partition(".")[0]


def _function_modes() -> _Objects:
    return _users_modes(_get_current_function_mode_stack()) if torch._C._len_torch_function_stack() else _NO_MODES


def _dispatch_modes() -> _Objects:
    return _users_modes(_get_current_dispatch_mode_stack()) if torch._C._len_torch_dispatch_stack() else _NO_MODES


@contextmanager
def _with_modes(
    get: Callable[[], _Objects], push: Callable[[Any], None], pop: Callable[[], Any], modes: _Objects
) -> Iterator[None]:
    """Without what their `__enter__` and `__exit__` do, such as to count anew or to print. Those that are on stay on."""
    num_on = next(
        (number for number, pair in enumerate(zip(get(), modes, strict=False)) if pair[0] is not pair[1]), None
    )
    missing = modes[len(get()) if num_on is None else num_on :]
    for mode in missing:
        push(mode)
    try:
        yield
    finally:
        for _ in missing:
            pop()


def _cuda_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


# Objects of `threading.local` that a model's code may use. Replaced as a whole: other threads may read it.
_thread_locals: tuple[weakref.ref[threading.local], ...] = ()
_OURS = __name__.partition(".")[0]


def share_thread_local(kept: threading.local) -> None:
    """From now on, lanes and recomputes find in it what their callers keep there; not so in ours, which tell lanes apart."""
    global _thread_locals  # noqa: PLW0603
    if type(kept).__module__.partition(".")[0] == _OURS:
        return
    known = [each for each in _thread_locals if each() is not None]
    if all(each() is not kept for each in known):
        _thread_locals = (*known, weakref.ref(kept))


def read_thread_locals() -> _Objects:
    """What the calling thread keeps in such objects: of each, itself, how much is in it, the names, and the values."""
    found: list[Any] = []
    for each in _thread_locals:
        kept = each()
        if kept is not None:
            attributes = vars(kept)
            found += [kept, len(attributes), *attributes, *attributes.values()]
    return _Objects(found)


def write_thread_locals(value: _Objects) -> None:
    """Let the calling thread keep there what was read."""
    left = iter(value)
    for kept in left:
        size = next(left)
        names, values = list(islice(left, size)), list(islice(left, size))
        vars(kept).clear()
        vars(kept).update(zip(names, values, strict=True))


def _settable(name: str, get: Callable[[], Any], set_: Callable[[Any], None]) -> OfThread:
    """A kind of state that is set, and set back."""

    @contextmanager
    def applied(value: Any) -> Iterator[None]:
        before = get()
        set_(value)
        try:
            yield
        finally:
            set_(before)

    return OfThread(name, get, applied)


AUTOCAST = _autocast("cpu"), _autocast("cuda")
OF_THREAD = (
    OfThread("inference mode", torch.is_inference_mode_enabled, torch.inference_mode),
    # Behind inference mode, which sets it.
    OfThread("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    *AUTOCAST,
    OfThread("the default device", _default_device, _on_default_device),
    OfThread("the current GPU", _cuda_device, torch.cuda.device),
    OfThread(
        "modes of functions",
        _function_modes,
        partial(_with_modes, _function_modes, overrides._push_mode, overrides._pop_mode),
    ),
    OfThread("modes of operators", _dispatch_modes, partial(_with_modes, _dispatch_modes, _push_mode, _pop_mode)),
    _settable("the number of threads", torch.get_num_threads, torch.set_num_threads),
    _settable("what is kept in threading.local", read_thread_locals, write_thread_locals),
)


def _attention() -> tuple[bool, ...]:
    # What the public functions call.
    torch_c = torch._C
    return (
        torch_c._get_flash_sdp_enabled(),
        torch_c._get_mem_efficient_sdp_enabled(),
        torch_c._get_math_sdp_enabled(),
        torch_c._get_cudnn_sdp_enabled(),
    )


def _set_attention(value: tuple[bool, ...]) -> None:
    kernels = torch.backends.cuda
    flash, memory_efficient, plain, of_cudnn = value
    kernels.enable_flash_sdp(flash)
    kernels.enable_mem_efficient_sdp(memory_efficient)
    kernels.enable_math_sdp(plain)
    kernels.enable_cudnn_sdp(of_cudnn)


def _cudnn() -> tuple[bool, ...]:
    torch_c = torch._C
    return torch_c._get_cudnn_enabled(), torch_c._get_cudnn_benchmark(), torch_c._get_cudnn_deterministic()


def _set_cudnn(value: tuple[bool, ...]) -> None:
    enabled, benchmark, deterministic = value
    torch.backends.cudnn.set_flags(_enabled=enabled, _benchmark=benchmark, _deterministic=deterministic)


def _deterministic() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    mode, warn_only = value
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)


# Since torch 2.9, each backend has a precision of its own beside the one for all.
_get_of_backend: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
_BACKENDS = (("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"))
_NAMES, _KINDS = zip(*_BACKENDS, strict=True) if _get_of_backend is not None else ((), ())


# For matrices, and for cuDNN.
_OF_ALL: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch._C._get_float32_matmul_precision, torch._C._set_float32_matmul_precision),
    (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
)


def _told(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:
        # The user sets those of backends, and has told torch nothing else.
        return None


def _precision() -> tuple[Any, ...]:
    return *[_told(get) for get, _ in _OF_ALL], *map(_get_of_backend, _NAMES, _KINDS)


def _set_precision(value: tuple[Any, ...]) -> None:
    of_all, of_backends = value[: len(_OF_ALL)], value[len(_OF_ALL) :]
    for (get, set_), each in zip(_OF_ALL, of_all, strict=True):
        if each is not None and _told(get) != each:
            set_(each)
    for backend, precision in zip(_BACKENDS, of_backends, strict=False):
        if _get_of_backend(*backend) != precision:
            torch._C._set_fp32_precision_setter(*backend, precision)


# Those for all modules, as `register_module_forward_hook` registers them.
_HOOKS: list[Any] = [
    each for name, each in vars(nn.modules.module).items() if name.startswith("_global_") and isinstance(each, dict)
]


def _global_hooks() -> tuple[Any, ...]:
    return tuple([tuple(each.items()) for each in _HOOKS]) if any(_HOOKS) else ()


def _set_global_hooks(value: tuple[Any, ...]) -> None:
    for number, each in enumerate(_HOOKS):
        each.clear()
        each.update(value[number] if value else ())


def _attributes(module: Any, *names: str) -> tuple[Callable[[], _Objects], Callable[[Any], None]]:
    """How attributes of a module of Python's are read and written."""
    content = vars(module)
    newest = _Objects()

    def read() -> _Objects:
        nonlocal newest
        values = list(map(content.get, names))
        if not newest or not all(map(is_, newest, values)):
            newest = _Objects(values)
        return newest

    def write(values: _Objects) -> None:
        content.update(zip(names, values, strict=True))

    return read, write


def _stream(name: str) -> OfProcess:
    read, write = _attributes(sys, name)

    def write_if_open(value: _Objects) -> None:
        # A recompute may come when who redirected it is done.
        if not getattr(value[0], "closed", False):
            write(value)

    return OfProcess(f"sys.{name}", read, write_if_open)


_read_warnings, _write_warnings = _attributes(warnings, "filters", "showwarning", "_showwarnmsg_impl")


class _Warnings:
    """The list of filters and what shows warnings; and what is in the list, which code may change in place."""

    def __init__(self) -> None:
        self._newest = _Objects(), _Objects()

    def read(self) -> tuple[_Objects, _Objects]:
        objects, filters = _read_warnings(), warnings.filters
        before, content = self._newest
        if objects is not before or len(content) != len(filters) or not all(map(is_, content, filters)):
            self._newest = objects, _Objects(filters)
        return self._newest


def _set_warnings(value: tuple[_Objects, _Objects]) -> None:
    objects, filters = value
    _write_warnings(objects)
    warnings.filters[:] = filters  # type: ignore[index]
    # What each module has been warned of is known for as long as filters don't change.
    getattr(warnings, "_filters_mutated_lock_held", getattr(warnings, "_filters_mutated", lambda: None))()


OF_PROCESS = (
    OfProcess("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    OfProcess("the kernels for attention", _attention, _set_attention),
    OfProcess("cuDNN's flags", _cudnn, _set_cudnn),
    OfProcess("deterministic algorithms", _deterministic, _set_deterministic),
    OfProcess("the precision of float32", _precision, _set_precision),
    OfProcess("mkldnn's flag", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    OfProcess("the hooks of all modules", _global_hooks, _set_global_hooks),
    OfProcess("the switch of the garbage collector", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    OfProcess("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    OfProcess("warnings.filters", _Warnings().read, _set_warnings),
    _stream("stdout"),
    _stream("stderr"),
)


_GETS = [kind.get for kind in OF_PROCESS]
_GETS_OF_THREAD = [kind.get for kind in OF_THREAD]


class ProcessState(tuple[Any, ...]):
    """The state of the process at one moment, in the order of `OF_PROCESS`."""

    __slots__ = ()
    # Most moments find the same, and then there is one object for them.
    _newest: ClassVar[ProcessState | None] = None

    @classmethod
    def capture(cls) -> ProcessState:
        """The state now."""
        state, newest = cls([get() for get in _GETS]), ProcessState._newest
        if newest is not None and state == newest:
            return newest
        ProcessState._newest = state
        return state

    def enter(self, found: ProcessState | None = None) -> ProcessState:
        """Make it so again.

        Args:
            found: the state now, if that is known.

        Returns:
            What was found, which leaves it when it is entered.
        """
        if found is None:
            found = ProcessState.capture()
        if found is not self:
            for kind, now, wanted in zip(OF_PROCESS, found, self, strict=True):
                # To set some takes longer than a change of lanes.
                if now != wanted:
                    kind.set(wanted)
        return found


class AmbientState:
    """What the calling code finds around it at one moment: the state of its thread, of the process, and context variables."""

    def __init__(self) -> None:
        self._process = ProcessState.capture()
        self._thread = [get() for get in _GETS_OF_THREAD]
        self._context = contextvars.copy_context()

    def is_as(self, other: AmbientState) -> bool:
        """Whether code finds the same in both, but for context variables."""
        return self._process == other._process and self._thread == other._thread

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The context in which code finds the same again, but for context variables. What it sets does not last."""
        with ExitStack() as stack:
            stack.callback(self._process.enter().enter)
            apply(stack, OF_THREAD, self._thread)
            yield

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function with the same context variables. What it sets does not last."""
        return self._context.copy().run(partial(function, *args, **kwargs))


def apply(stack: ExitStack, kinds: Sequence[OfThread], values: Sequence[Any]) -> None:
    """Let the calling thread find other values of some kinds of state, until the stack is closed."""
    for kind, value in zip(kinds, values, strict=True):
        if kind.get() != value:
            stack.enter_context(kind.applied(value))

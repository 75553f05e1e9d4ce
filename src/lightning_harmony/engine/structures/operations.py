"""Operations: which operand one changes, and how one runs that a dispatch mode is told of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.tree import is_watched

Views = TypeVar("Views")
# What classes have that leave operations to torch.
NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_EMPTY = torch.empty(0)
_VERSION = attrgetter("_version")
# While one exists, its thread's dispatch modes see nothing.
_Guard: Any = torch._C._DisableTorchDispatch
# While one exists, its thread's dispatch keys are those of the call that a mode is told of.
_AsCalled: Any = getattr(torch._C, "_RestorePythonTLSSnapshot")  # noqa: B009


def changes_uncounted(name: str) -> bool:
    """Whether an operation with a name may change operands, running statistics, of which no version tells."""
    return name.endswith(("batch_norm", "instance_norm"))


def state_for(name: str) -> Callable[[Tensor], Any]:
    """What tells whether an operation with a name has changed an operand: its version, or its bits where no version tells."""
    return _bits_of if changes_uncounted(name) else version_of


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None of one of inference mode, which does not count that."""
    try:
        if is_watched(type(tensor)):
            # That is no use of it. To be asked in Python whether it is takes a hundred times as long, in each turn.
            with DisableTorchFunction():
                return tensor._version
        return tensor._version
    except RuntimeError:
        # Asked behind: other threads have Python's lock while it answers.
        if not tensor.is_inference():
            raise
        return None


def versions_of(tensors: Collection[Tensor]) -> list[int | None]:
    """The same of some plain or watched ones: thousands are looked at in each turn."""
    try:
        with DisableTorchFunction():
            return list(map(_VERSION, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


class Versions:
    """How often each of some tensors was changed in place so far."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._known = [(tensor, version_of(tensor)) for tensor in tensors]

    def changed(self) -> list[Tensor]:
        """Those that have been changed since."""
        return [tensor for tensor, version in self._known if version_of(tensor) != version]


def _bits_of(tensor: Tensor) -> Any:
    with Unseen():
        return checksum(tensor.detach()).tolist()


def changes_first(name: str) -> bool:
    """Whether an operation changes its first operand, by its name."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
    return name.endswith("_")


def run_as_without_mode(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation in ``__torch_dispatch__`` as it would run without the mode, to the bit.

    Below the mode, autocast sees nothing of what an operation that is composed of others calls. What autocast has cast itself,
    it leaves as it is.

    In inference mode a composite operation comes whole. Torch then runs it where views of weights seem to need no gradients,
    and the matrix product, among others, goes another way for weights that need some: it sums in another order.

    On the host, operations on lists of tensors leave it to those on each of them to count that they change it.
    """
    # By its identity, as it lasts: to hash one takes torch code of Python's.
    is_composed, is_of_lists, _ = _known.get(id(func)) or _look_at(func)
    if is_of_lists:
        with _lifted(torch._C.DispatchKey.ADInplaceOrView):
            return func(*args, **kwargs)
    is_inference = torch.is_inference_mode_enabled()
    if (is_inference or is_composed) and _is_cast():
        with _lifted(torch._C.DispatchKey.AutocastCPU):
            return _run(func, args, kwargs) if is_inference else func(*args, **kwargs)
    return _run(func, args, kwargs) if is_inference else func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation in inference mode: one of others, unless torch keeps track of its own views, as of `chunk`'s."""
    if _has_kernel(func, "CompositeImplicitAutograd") and not _has_kernel(func, "ADInplaceOrView"):
        with _lifted(torch._C.DispatchKey.ADInplaceOrView):
            return func(*args, **kwargs)
    return func(*args, **kwargs)


# Of operations, by their identities: whether one is composed of others, or of lists, and itself.
_known: dict[int, tuple[bool, bool, Any]] = {}


def _look_at(func: Any) -> tuple[bool, bool, Any]:
    found = _known[id(func)] = _is_composed(func), func.name().startswith("aten::_foreach_"), func
    return found


def _is_composed(func: Any) -> bool:
    """Whether an operation is one of others, and none of those that autocast casts for."""
    # The fast path of a layer of torch, which has a kernel that calls others.
    if func is torch.ops.aten._transformer_encoder_layer_fwd.default:
        return True
    # Torch's own operations call such ones, within what autocast has cast for. A view computes nothing.
    if func.name().startswith("aten::_") or is_view(func):
        return False
    return not _has_kernel(func, "CPU") and not _has_kernel(func, "AutocastCPU")


def is_view(func: Any) -> bool:
    """Whether an operation returns a view and changes nothing."""
    return not func._schema.is_mutable and any(result.alias_info is not None for result in func._schema.returns)


@cache
def _has_kernel(func: Any, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def _lifted(key: Any) -> Any:
    """The context in which calls are told to what a dispatch key stands for, as they are not below a mode."""
    return torch._C._SetExcludeDispatchKeyGuard(key, False)


def _is_cast() -> bool:
    """Whether autocast was on for the host where the mode was called from."""
    with _AsCalled():
        return torch.is_autocast_enabled("cpu")


# All that runs where a mode has been called.
WITHOUT_MODE = (
    run_as_without_mode, _run, _look_at, _is_composed, is_view, _has_kernel.__wrapped__, _lifted, _is_cast,
)  # fmt: skip


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
    if type(tensor).__torch_dispatch__ is not NO_DISPATCH:
        return Tensor.detach(tensor)
    guard = _Guard()
    try:
        return Tensor.detach(tensor)
    finally:
        del guard


def is_counted(tensor: Tensor) -> bool:
    """Whether a tensor has a version that `version_counter` shares. Those of inference mode have none."""
    is_plain = (
        tensor.layout is torch.strided and not tensor.is_nested and type(tensor).__torch_dispatch__ is NO_DISPATCH
    )
    return is_plain and not tensor.is_inference()


def version_counter(tensor: Tensor) -> Tensor:
    """A tensor without memory whose version is that of another one, of a class without code of its own."""
    guard = _Guard()
    try:
        alias = Tensor.detach(tensor)
        alias.data = _EMPTY
        return alias
    finally:
        del guard


class Versioned:
    """A tensor that a graph has saved: nobody may change it in place until a backward asks for it.

    Args:
        tensor: what is saved.
        what: that saves it, in messages.
    """

    __slots__ = ("_counter", "_shape", "_version", "_what")

    def __init__(self, tensor: Tensor, what: str) -> None:
        is_plain, self._what = is_counted(tensor), what
        self._counter = version_counter(tensor) if is_plain else None
        self._version = tensor._version if is_plain else 0
        self._shape: Sequence[int] = tensor.shape if is_plain else ()

    def refuse_changed(self) -> None:
        """A backward asks for it.

        Raises:
            RuntimeError: if it was changed in place, as plain PyTorch raises.
        """
        if self._counter is not None and self._counter._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
                f"shape {list(self._shape)}, saved in {self._what}, is at version {self._counter._version}; expected version "
                f"{self._version} instead. Make the operation that changes it out of place"
            )


def viewed(tensor: Tensor, view: Callable[..., Views], *how: Any) -> Views:
    """A view of a tensor, or several. They take no memory, and no dispatch mode sees them.

    Args:
        tensor: what is viewed.
        view: makes the views of the tensor.
        how: further arguments of that.
    """
    if type(tensor).__torch_dispatch__ is not NO_DISPATCH:
        return view(tensor, *how)
    guard = _Guard()
    try:
        return view(tensor, *how)
    finally:
        del guard

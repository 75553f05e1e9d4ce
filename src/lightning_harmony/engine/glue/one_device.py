"""One device: what makes several, and a GPU beside the host, one to the model's own code, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_harmony.engine.glue.buffer_stand_in import BufferStandIn
from lightning_harmony.engine.glue.glue import SHARING, StandIn
from lightning_harmony.engine.memory.tensor_class import in_place_of
from lightning_harmony.engine.memory.transfer import LaneTransfers, Transfers
from lightning_harmony.engine.model.shown_wide import ShownWide, hand_on
from lightning_harmony.engine.structures.operations import changes_first, changes_uncounted, state_for
from lightning_harmony.engine.structures.tree import tensors_of, unwrapped


class OneDevice(TorchFunctionMode):
    """Runs each operation on one device: in glue, that of its largest operand, or of the one that it changes; else a layer's.

    Args:
        lane: the lane's transfers.
        transfers: all lanes'.
        at: the number of the device for all: a layer's. None to go by the operands.
        given: what the layer is called with.

    Attributes:
        has_found: whether any other operand was elsewhere.
    """

    def __init__(
        self, lane: LaneTransfers, transfers: Transfers, at: int | None = None, given: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        self._given = frozenset(map(id, given))
        self._at = at
        self._lane = lane
        self._transfers = transfers
        self._is_off = self.has_found = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within a layer all is on the layer's device, and the engine's own operations are no glue."""
        # A mode that is on costs some microseconds an operation even if it does nothing.
        on_top = _get_current_function_mode() is self
        before, self._is_off = self._is_off, True
        if on_top:
            _pop_mode()
        try:
            yield
        finally:
            self._is_off = before
            if on_top:
                _push_mode(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Bring the operands to one device."""
        kwargs = kwargs or {}
        if self._is_off:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":
            # What a tensor is, such as its shape, is asked often and needs no device. But for `mT` and the like it is no use.
            found = func(*args, **kwargs)
            if isinstance(found, Tensor) and found.requires_grad:
                self._note_uses(args[:1])
            elif func == _DATA:
                self._lane.note_data(found)
            return found
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation."""
        tensors = tensors_of(*args, *kwargs.values())
        if any(isinstance(tensor, StandIn | BufferStandIn) for tensor in tensors):
            # It comes again, with parameters and buffers in their stand-ins' places.
            return func(*args, **kwargs)
        if any(isinstance(tensor, ShownWide) for tensor in tensors):
            return hand_on(self, func, args, kwargs)
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if func in _DIFFERENTIATING and not is_transformed:
            return self._differentiate(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if changes_uncounted(name):
            for tensor in tensors:
                if not tensor.requires_grad:
                    self._lane.note_data(tensor)
        homes = [self._home(tensor) for tensor in tensors]
        target = self._target(_changed(func, args, kwargs), tensors, homes)
        # Python code may ask whether two tensors are one. Of an operation, each use brings its own gradient back.
        whole = isinstance(func, FunctionType)
        args, kwargs, originals = self._brought(
            args, kwargs, tensors, homes, target, state := state_for(name), whole=whole
        )
        if is_transformed:
            self._note_uses(map(unwrapped, tensors))
            return func(*args, **kwargs)
        self._lane.launched.begin(target)
        with self._transfers.devices[target].selected():
            result = func(*args, **kwargs)
        if func in SHARING or func == _SET_DATA:
            self._lane.note_data(args[0])
        made = tensors_of(result)
        if any(tensor.requires_grad for tensor in made):
            self._note_uses(tensors)
        self._lane.launched.note_made(made)
        for copied, tensor, before in originals.values():
            if state(copied) != before:
                self._write_back(tensor, copied)
        # What returns its operand as it is, such as `to`, is no use of it: each use brings its own gradient back.
        return originals[id(result)][1] if id(result) in originals else result

    def _note_uses(self, tensors: Iterable[Tensor]) -> None:
        """Gradients come back from an operation."""
        if torch.is_grad_enabled():
            self._lane.note_uses(tensor for tensor in tensors if id(tensor) not in self._given)

    def _write_back(self, tensor: Tensor, copied: Tensor) -> None:
        """An operation has changed the copy of an operand that is elsewhere: let that be changed, too."""
        home = self._transfers.home(tensor)
        assert home is not None
        back = self._lane.moved(copied, home)
        with self._transfers.devices[home].selected():
            tensor.copy_(back)

    def _target(self, changed: Sequence[Tensor], tensors: Sequence[Tensor], homes: Sequence[int | None]) -> int:
        """The number of the device that an operation runs on.

        Args:
            changed: the operands that it changes.
            tensors: all operands.
            homes: where these are.
        """
        # What a transform such as torch.vmap has wrapped stays where it is.
        wrapped = [unwrapped(tensor) for tensor in tensors if is_functorch_wrapped_tensor(tensor)]
        found = _largest(wrapped, map(self._transfers.home, wrapped))
        # A layer's operations are where its recompute will be, for the sake of what they save.
        if found is None and self._at is None:
            found = _largest(changed, map(self._home, changed))
            if found is None:
                found = _largest(tensors, homes)
        return (self._at or 0) if found is None else found

    def _home(self, tensor: Tensor) -> int | None:
        """The number of the device where an operand is; None for one on the host, or in the wrapper of a transform."""
        return None if is_functorch_wrapped_tensor(tensor) else self._transfers.home(tensor)

    def _brought(
        self,
        args: Any,
        kwargs: Any,
        tensors: Sequence[Tensor],
        homes: Sequence[int | None],
        target: int,
        state: Callable[[Tensor], Any],
        *,
        whole: bool,
    ) -> tuple[Any, Any, Mapping[int, tuple[Tensor, Tensor, Any]]]:
        """The operands on a device; by the identities of copies among them, each with what it is of, and its state.

        Args:
            args: the operands.
            kwargs: more of them.
            tensors: those that are tensors.
            homes: where these are.
            target: the number of the device.
            state: what tells whether one was changed.
            whole: whether one operand that is given twice stays one.
        """
        originals: dict[int, tuple[Tensor, Tensor, Any]] = {}
        once: dict[int, Tensor] = {}

        away = {id(tensor) for tensor, home in zip(tensors, homes, strict=True) if home is not None and home != target}

        def brought(tensor: Tensor) -> Tensor:
            if id(tensor) not in away:
                return tensor
            if id(tensor) in once:
                return once[id(tensor)]
            # Out of sight of transforms: it is a constant to them.
            with temporarily_clear_interpreter_stack():
                moved = in_place_of(self._lane.moved(tensor, target), tensor)
            originals[id(moved)] = moved, tensor, state(moved)
            if whole:
                once[id(tensor)] = moved
            return moved

        if away:
            self.has_found |= not away <= self._given
            args, kwargs = tree_map_only(Tensor, brought, (args, kwargs))
        return args, kwargs, originals

    def _differentiate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a backward of the user's: from gradients that are where its outputs are, and with this mode on for its glue."""
        name = _DIFFERENTIATING[func]
        outputs, gradients = _listed(args[0]), kwargs.pop(name, None)
        moved = [
            self._moved_gradient(output, gradient)
            for output, gradient in zip(
                outputs, [None] * len(outputs) if gradients is None else _listed(gradients), strict=True
            )
        ]
        # Torch leaves a mode while it handles a function of tensors, but not for one of edges.
        starts = [_edge(output) for output in outputs]
        if func is torch.autograd.grad:
            return self._gradients(starts, moved, _listed(args[1]), **kwargs)
        self._backward(starts, moved, **kwargs)
        return None

    def _backward(
        self,
        starts: Sequence[GradientEdge],
        gradients: Sequence[Tensor | None],
        *,
        inputs: Any = None,
        **kwargs: Any,
    ) -> None:
        ends = [] if inputs is None else _listed(inputs)
        for end in ends:
            if isinstance(end, Tensor) and not end.is_leaf:
                end.retain_grad()
        edges = None if inputs is None else [_edge(end) for end in ends]
        with self:
            torch.autograd.backward(starts, gradients, inputs=edges, **kwargs)

    def _gradients(
        self,
        starts: Sequence[GradientEdge],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Any],
        *,
        materialize_grads: bool = False,
        allow_unused: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        ends = [_edge(end) for end in inputs]
        with self:
            found = torch.autograd.grad(
                starts, ends, gradients, allow_unused=materialize_grads or allow_unused, **kwargs
            )
        if materialize_grads:
            # Torch knows no shapes of edges.
            return tuple(
                torch.zeros_like(end) if each is None else each for each, end in zip(found, inputs, strict=True)
            )
        return found

    def _moved_gradient(self, output: Any, gradient: Tensor | None) -> Tensor | None:
        if not isinstance(output, Tensor):
            return gradient
        if gradient is None:
            return torch.ones_like(output) if output.numel() == 1 else None
        home = self._transfers.home(output)
        return gradient if home is None else self._lane.moved(gradient, home)


_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]

# With the name of the gradients that they begin with, as torch passes them on to modes.
_DIFFERENTIATING = {
    torch.autograd.grad: "grad_outputs",
    torch.autograd.backward: "grad_tensors",
    Tensor.backward: "gradient",
}


def _largest(tensors: Iterable[Tensor], homes: Iterable[int | None]) -> int | None:
    """The number of the device of the largest tensor that is on one; None if none is."""
    found = [(tensor.numel(), home) for tensor, home in zip(tensors, homes, strict=True) if home is not None]
    return max(found, key=itemgetter(0))[1] if found else None


def _listed(value: Any) -> list[Any]:
    """One tensor or edge, or several."""
    return [value] if isinstance(value, Tensor | GradientEdge) else list(value)


def _edge(end: Any) -> GradientEdge:
    return get_gradient_edge(end) if isinstance(end, Tensor) else end


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The operands that an operation changes, by its name and theirs: normalizations count no version of their statistics."""
    operands = args[:1] if changes_first(getattr(func, "__name__", "")) else ()
    if func in _WITH_STATISTICS:
        operands = args[1:3]
    return tensors_of(*operands, *(kwargs.get(name) for name in ("out", "running_mean", "running_var")))


# Statistics are what they normalize a tensor with.
_WITH_STATISTICS = (F.batch_norm, F.instance_norm)


# They are given parameters to find their gradients, not to compute with them.
_FIND_GRADIENTS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class BringsHostOperands(TorchFunctionMode):
    """Runs operations between a GPU's tensors and the host's on the GPU; gradients find their way back.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Bring the operands that torch itself would refuse."""
        kwargs = kwargs or {}
        if self._are_mixed(func, args, kwargs):
            args, kwargs = tree_map_only(Tensor, self._brought, (args, kwargs))
        return func(*args, **kwargs)

    def _are_mixed(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = getattr(func, "__name__", "")
        if func in _FIND_GRADIENTS or name in ("__get__", "__set__") or name.endswith("copy_"):
            return False
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(tensor.device == self._device for tensor in tensors):
            return False
        # What is changed on the host stays there.
        is_changed = bool(args) and changes_first(name) and isinstance(args[0], Tensor) and _is_on_host(args[0])
        return not is_changed and any(map(_is_on_host, tensors))

    def _brought(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device) if _is_on_host(tensor) else tensor


def _is_on_host(tensor: Tensor) -> bool:
    # Torch takes numbers from the host.
    return tensor.device.type == "cpu" and tensor.dim() > 0

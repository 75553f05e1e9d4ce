"""Saved tensors: what autograd keeps in place of the tensors that a layer's graph saves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.autograd.graph import saved_tensors_hooks

from lightning_harmony.engine.structures.operations import Versioned, detached
from lightning_harmony.engine.structures.strides import has_strides
from lightning_harmony.errors import UnsupportedModelError

_OURS = __name__.partition(".")[0]
_OWN_HOOKS = ("torch", _OURS)


class SavedTensor(Versioned):
    """One saved tensor. Absent after the call unless the graph is kept; a recompute brings it.

    Args:
        tensor: what autograd saves.
        what: that its version is looked at for, in messages.
        open: called when a backward asks for it; it has to be there afterwards.
        keep: whether it stays.
    """

    __slots__ = ("__weakref__", "_layout", "_open", "content")

    def __init__(self, tensor: Tensor, what: str, open: Callable[[SavedTensor], None], *, keep: bool) -> None:
        # Without the node that made it, which would hold itself where it saves its result.
        self.content = detached(tensor) if keep else None
        self._layout = _layout_of(tensor)
        self._open = open
        super().__init__(tensor, what)

    def load(self) -> Tensor:
        """The tensor, for the backward.

        Raises:
            RuntimeError: if it was changed in place, as plain PyTorch raises.
        """
        self.refuse_changed()
        self._open(self)
        assert self.content is not None
        return self.content

    def fill(self, tensor: Tensor) -> bool:
        """Take a tensor of a recompute; whether it looks like this one."""
        self.content = tensor
        return bool(self._layout == _layout_of(tensor))


def _layout_of(tensor: Tensor) -> Any:
    """What tells tensors apart that a graph saves.

    Runs that make other graphs may save tensors of the same shapes in another order: a product of square matrices saves its
    factors in this order or that, by their strides.
    """
    if tensor.is_nested and tensor.layout is torch.strided:
        return tensor._nested_tensor_size().tolist(), tensor.dtype
    return tensor.shape, tensor.dtype, tensor.stride() if has_strides(tensor) else tensor.layout


class Filled(BaseException):
    """All saved tensors are there: the rest of a recompute would only make what the call has returned already."""


class Saves:
    """The places of a call's saved tensors, in the order in which its graph saved them. Its graph alone keeps them.

    Attributes:
        weights: the parameters in whose memory some lie, which no recompute has to bring.
    """

    def __init__(self) -> None:
        self._places: list[weakref.ref[SavedTensor] | None] = []
        self.weights = set[nn.Parameter]()

    def add(self, saved: SavedTensor | None, *, of: nn.Parameter | None = None) -> None:
        """The next one; None for one in the memory of a weight."""
        self._places.append(None if saved is None else weakref.ref(saved))
        if of is not None:
            self.weights.add(of)

    def alive(self) -> list[SavedTensor]:
        """Those that a backward may still ask for."""
        return [saved for place in self._places if place is not None and (saved := place()) is not None]

    def clear(self) -> None:
        """Let go of what they hold."""
        for saved in self.alive():
            saved.content = None

    def contents(self) -> list[Tensor | None]:
        """What is in all places; None for those of weights, or that no backward may ask for."""
        places = [None if place is None else place() for place in self._places]
        return [None if place is None else place.content for place in places]

    def fill(
        self, run: Callable[[], Any], *, is_compiled: bool = False, keeps: bool = False, to_end: bool = False
    ) -> bool:
        """Bring all by a recompute, which ends with the last one.

        Args:
            run: the call, once more.
            is_compiled: whether it is one of compiled code.
            keeps: whether its graph keeps what it saves: the code differentiates that itself.
            to_end: whether it goes on behind the last one, for what it makes besides.

        Returns:
            Whether it saved what the call had saved.
        """
        filling = _Filling([None if place is None else place() for place in self._places], to_end=to_end)
        # Code that a compiler leaves to Python would have it traced.
        take = torch.compiler.disable(filling.take) if is_compiled else filling.take
        hooks = (filling.take_and_keep, _as_it_is) if keeps else (take, _refuse)
        try:
            with saved_tensors_hooks(*hooks):
                run()
        # User code may have caught it, or wrapped it in an error of its own.
        except (Filled, Exception):
            if not filling.is_over or (to_end and filling.is_full):
                raise
        return filling.is_full


class _Filling:
    def __init__(self, places: list[SavedTensor | None], *, to_end: bool) -> None:
        while places and places[-1] is None:
            places.pop()
        self._remaining, self._to_end = places[::-1], to_end
        self.is_over, self.is_full = not places, not places

    def take(self, tensor: Tensor) -> None:
        """A tensor is saved.

        The graph of the recompute gets nothing: the layer's code may keep it, in an object or in a list that a hook fills, and
        would keep the layer's weights with it.
        """
        if self.is_over:
            self._end()
            return
        with DisableTorchFunction():
            tensor = detached(tensor)
        place = self._remaining.pop()
        is_right = place is None or place.fill(tensor)
        if not (is_right and self._remaining):
            self.is_over, self.is_full = True, is_right
            self._end()

    def _end(self) -> None:
        """Nothing more has to be taken."""
        if not (self._to_end and self.is_full):
            raise Filled

    def take_and_keep(self, tensor: Tensor) -> Tensor:
        """A tensor is saved, and its graph keeps it."""
        self.take(tensor)
        return detached(tensor)


def refuse_hooks_of_others(what: str) -> None:
    """Refuse hooks around layers, other than torch's own, which leave values as they are.

    They are called for what is saved between layers, and not for what a layer saves.

    Args:
        what: is called among them.

    Raises:
        UnsupportedModelError: if there are such.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) if torch.is_grad_enabled() else None
    if hooks is None:
        return
    module = str(getattr(hooks[0], "__module__", None) or type(hooks[0]).__module__)
    if module.partition(".")[0] not in _OWN_HOOKS:
        name = getattr(hooks[0], "__qualname__", type(hooks[0]).__qualname__)
        raise UnsupportedModelError(
            f"{what} is called within torch.autograd.graph.saved_tensors_hooks ({name}, of {module}), which would not be "
            "called for what layers save, since that is computed again: enter them in the forward of a layer's module, or "
            "leave them out where they only spare memory"
        )


def checkpoint_around() -> tuple[Any, bool]:
    """A checkpoint of the caller's that is not reentrant, and whether it runs again.

    Returns:
        The hook with which it saves tensors; None where there is none. It is not told of what layers save.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) if torch.is_grad_enabled() else None
    if hooks is None:
        return None, False
    name = str(getattr(hooks[0], "__qualname__", "")).partition(".")[0]
    return (hooks[0] if name in ("_checkpoint_hook", "_recomputation_hook") else None), name == "_recomputation_hook"


def drop(tensor: Tensor) -> None:
    """Keep nothing of a tensor that is saved, where no backward will come."""
    return


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


def _refuse(saved: None) -> Tensor:
    raise UnsupportedModelError(
        "a backward comes to what a layer has computed when it ran again for another backward, whose gradients it would count "
        "twice: differentiate what the layer has computed in its forward"
    )

"""What a layer is called with, so that it can be called again: with other tensors in the places of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.containers import Containers
from lightning_harmony.engine.glue import StandIn
from lightning_harmony.engine.guise import Guise, set_since
from lightning_harmony.engine.handed_out import HandedOut
from lightning_harmony.engine.opaque import is_opaque
from lightning_harmony.engine.tree import Arguments


class Made(NamedTuple):
    """Arguments to call a layer with.

    Attributes:
        args: the positional ones.
        kwargs: the others.
        tensors: those among them, each once.
        contents: to be called after the layer: what it left in lists and dicts among them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    contents: Callable[[], list[Any]]


class CallArguments:
    """How a call's arguments are made of tensors and all else. The caller's tensors are held until `write_back`.

    Attributes:
        structure: equal for calls that have it in common.
        numbers: of each leaf, which of the tensors it is; None for one that is no tensor.
        have_objects: whether there are some among them, or set on the tensors, in which others may be than are among them.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments, leaves: Sequence[Any]
    ) -> None:
        self._containers = Containers(args, kwargs)
        self._arguments = arguments
        self.structure = arguments.structure
        # The same tensor in two places stays one tensor: layers ask `query is key`, and sums keep their order.
        unique = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        numbers = {key: number for number, key in enumerate(unique)}
        self.numbers = [numbers.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in leaves]
        self._of_caller = list(unique.values())
        self._guises = [Guise.of(tensor) for tensor in self._of_caller]
        self.have_objects = any(map(is_opaque, leaves)) or any(map(_may_hide_tensors, filter(None, self._guises)))

    @classmethod
    def taken_apart(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None
    ) -> tuple[CallArguments, list[Any], list[Tensor]]:
        """How arguments are made, their leaves, and the tensors among these, each once.

        Args:
            args: the positional ones, as the caller has them.
            kwargs: the others.
            dtype: floating tensors are cast to it; None to leave them as they are.
        """
        leaves, arguments = Arguments.flatten(args, kwargs)
        leaves = [leaf.use() if isinstance(leaf, StandIn) else leaf for leaf in leaves]
        made = cls(args, kwargs, arguments, leaves)
        tensors = [_cast(tensor, dtype) for tensor in made._of_caller]
        return made, made._with_tensors(tensors, leaves), tensors

    def made_of(self, tensors: list[Tensor], leaves: Sequence[Any]) -> Made:
        """Arguments with these tensors, as the caller had them: of their classes, and with what was set on them.

        Args:
            tensors: as many as there were, each once.
            leaves: all else, in its places.
        """
        if any(self._guises):
            tensors = [t if guise is None else guise.on(t) for t, guise in zip(tensors, self._guises, strict=True)]
        args, kwargs = self._arguments.of(self._with_tensors(tensors, leaves))
        return Made(args, kwargs, tensors, self._containers.watched(args, kwargs, tensors))

    def _with_tensors(self, tensors: Sequence[Tensor], leaves: Sequence[Any]) -> list[Any]:
        return [leaf if n is None else tensors[n] for n, leaf in zip(self.numbers, leaves, strict=True)]

    def leave_attributes(self, tensors: Sequence[Tensor], handed_out: HandedOut) -> None:
        """What the layer has set on tensors that it took, the caller finds there."""
        for tensor, original in zip(tensors, self._of_caller, strict=True):
            attributes = set_since(tensor, original)
            if attributes is not None:
                vars(original).clear()
                vars(original).update(handed_out.guise(Guise(Tensor, attributes)).attributes)

    def write_back(self, contents: list[Any]) -> None:
        """What the layer has left in lists and dicts, the caller finds there. Then the caller's tensors go."""
        self._containers.write_back(contents, self._of_caller)
        self._of_caller = []

    def forget(self) -> None:
        """No call will be made again."""
        self._guises = []


def _may_hide_tensors(guise: Guise) -> bool:
    return any(isinstance(value, Tensor) or is_opaque(value) for value in tree_leaves(dict(guise.attributes)))


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

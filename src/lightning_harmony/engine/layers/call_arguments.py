"""What a layer is called with: tensors of the caller's, or others in their places, and the same again for a recompute."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_harmony.engine.glue.glue import StandIn
from lightning_harmony.engine.layers.saved_tensors import Saves
from lightning_harmony.engine.memory.opaque import is_opaque, tensors_in
from lightning_harmony.engine.memory.tensor_class import in_place_of
from lightning_harmony.engine.memory.unseen_changes import CallChanges, Save
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.structures.operations import Versions
from lightning_harmony.engine.structures.strides import places_in_memory
from lightning_harmony.engine.structures.tree import CONSTANTS, Arguments, WrittenTo, flatten, has_other_nodes
from lightning_harmony.errors import UnsupportedModelError

_NONE = Versions()


class CallArguments:
    """The arguments of one call.

    The layer gets the caller's own objects, so that what it does to them is done. Only tensors that have to be cast, or that
    are on another device, are exchanged, in the caller's lists and dicts too, until `give_back`.

    Args:
        args: the positional ones, as the caller has them.
        kwargs: the others.
        dtype: floating tensors are cast to it; None to leave them as they are.

    Attributes:
        structure: equal for calls that have it in common.
        leaves: what the arguments consist of.
        tensors: the tensors among the leaves, each once.
        numbers: of each leaf, which of the tensors it is; None for one that is no tensor.
        changes: looks for those that torch does not count, in a step that is watched.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None = None) -> None:
        self._given = args, kwargs
        self.leaves, self._arguments = Arguments.flatten(args, kwargs)
        self.structure = self._arguments.structure
        # The same tensor in two places stays one tensor: layers ask `query is key`, and sums keep their order.
        unique = {id(leaf): leaf for leaf in self.leaves if isinstance(leaf, Tensor)}
        numbers = {key: number for number, key in enumerate(unique)}
        self.numbers = [numbers.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in self.leaves]
        self._originals = list(unique.values())
        self.tensors = [_prepared(tensor, dtype) for tensor in self._originals]
        self.changes: CallChanges | None = None
        self._exchanged: _Exchanged | None = None
        # By the identities of those that were brought, what they were.
        self._before: dict[int, Tensor] = {}
        # Of those that share memory where they are, and not where the layer finds them.
        self._apart = _NONE

    def may_require_gradients(self) -> bool:
        """Whether gradients may come to them, also in objects, such as a cache that begins with a trained prefix.

        What such an object holds is to be known before the layer changes it.
        """
        if any(tensor.requires_grad for tensor in self.tensors):
            return True
        return any(tensor.requires_grad for leaf in self.leaves if is_opaque(leaf) for tensor in tensors_in(leaf))

    @property
    def have_objects(self) -> bool:
        """Whether the layer may change objects among the arguments, in which tensors are, or tensors that have attributes."""
        return (
            (not self._arguments.are_leaves and has_other_nodes(self._given))
            or any(map(is_opaque, self.leaves))
            or any(tensor.__dict__ for tensor in self.tensors)
        )

    @property
    def given(self) -> Sequence[Any]:
        """All of them in which there is more than tensors and numbers."""
        args, kwargs = self._given
        return () if self._arguments.are_leaves else [*args, *kwargs.values()]

    def brought(self, bring: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for the layer.

        Args:
            bring: returns the tensor that takes a tensor's place, or the tensor itself.
        """
        before, self.tensors = self.tensors, [in_place_of(bring(tensor), tensor) for tensor in self.tensors]
        self._before = {id(t): old for t, old in zip(self.tensors, before, strict=True) if t is not old}
        if self._before:
            self._apart = Versions(_come_apart(before, self.tensors))
        pairs = zip(self._originals, self.tensors, strict=True)
        others = {id(original): tensor for original, tensor in pairs if tensor is not original}
        if not others:
            return self._given
        self.leaves = [
            leaf if n is None else self.tensors[n] for n, leaf in zip(self.numbers, self.leaves, strict=True)
        ]
        self._exchanged = _Exchanged(others)
        args, kwargs = self._given
        return tuple(map(self._exchanged.of, args)), {name: self._exchanged.of(value) for name, value in kwargs.items()}

    def with_originals(self, result: Any) -> Any:
        """What the call returns; where that is what was brought from another device, what is there.

        Raises:
            UnsupportedModelError: if the layer has changed one of several that share memory there, and had copies of others.
        """
        for tensor in self._apart.changed():
            raise UnsupportedModelError(
                f"a layer changes an input in place, of shape {tuple(tensor.shape)}, that is on another device, and that "
                "others of its inputs share memory with: pass it one of them, and take views there, or use "
                "Trainer(devices=1)"
            )
        if self.changes is not None:
            self.changes.end([(self._before.get(id(each), each), each) for each in self.tensors], result)
        if not self._before:
            return result
        leaves, close = flatten(result)
        if not any(id(leaf) in self._before for leaf in leaves):
            return result
        return close(self._before.get(id(leaf), leaf) for leaf in leaves)

    def written_to(self) -> str | None:
        """The class of a node that the layer has written into, whose caller will not see that; None if there is none."""
        return None if self._exchanged is None else self._exchanged.written_to()

    def noting(self, save: Save) -> Save:
        """What saves a tensor for the graph of the call, and tells who looks at that."""
        return save if self.changes is None else self.changes.noting(save)

    def filled(self, layer: SwappedLayer, saves: Saves, fill: Callable[..., bool], *, to_end: bool) -> bool:
        """Bring what a graph has saved; whether all is there.

        Args:
            layer: the layer.
            saves: what its graph has saved.
            fill: brings it by a recompute.
            to_end: whether that goes on behind the last of it. So it does, from now on, if the code changes it there.
        """
        is_full = fill(to_end=to_end or layer.runs_to_end)
        changes, self.changes = self.changes, None
        if not is_full or changes is None or changes.are_left(saves.contents()):
            return is_full
        layer.runs_to_end = True
        return fill(to_end=True)

    def give_back(self) -> None:
        """The call is over: the caller's tensors are in its lists and dicts again. Nothing of the caller's is kept."""
        if self._exchanged is not None:
            self._exchanged.give_back({id(t): old for t, old in zip(self.tensors, self._originals, strict=True)})
        self._exchanged, self._originals, self._given, self.tensors, self._before = None, [], ((), {}), [], {}
        self._apart = _NONE
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]

    def again(self, tensors: Sequence[Tensor], leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as the call's were when it began.

        Args:
            tensors: as many as there were, each once.
            leaves: all else, in its places.
        """
        return self._arguments.of(
            [leaf if n is None else tensors[n] for n, leaf in zip(self.numbers, leaves, strict=True)]
        )


def _prepared(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor as layers compute with it."""
    if isinstance(tensor, StandIn):
        tensor = tensor.use()
    if dtype is None or not tensor.is_floating_point():
        return tensor
    return in_place_of(tensor.to(dtype), tensor)


def _come_apart(before: Sequence[Tensor], now: Sequence[Tensor]) -> list[Tensor]:
    """Those that share memory, and the copies that took the places of some of them, which do not."""
    memories = [memory for memory, _ in places_in_memory(before)]
    each_of = list(zip(before, now, memories, strict=True))
    numbers, copied = Counter(memories), {memory for old, new, memory in each_of if memory and old is not new}
    return [each for old, new, memory in each_of if memory in copied and numbers[memory] > 1 for each in (old, new)]


class _Exchanged:
    """Puts other tensors in the places of some: in lists and dicts themselves, in copies of tuples and of other nodes.

    Args:
        others: by the identities of those whose places they take.
    """

    def __init__(self, others: Mapping[int, Any]) -> None:
        self._others = others
        self._containers: list[Any] = []
        self._tuples: list[tuple[Any, Any]] = []
        self._copies: list[tuple[str, WrittenTo]] = []

    def of(self, value: Any) -> Any:
        """A value with the others in it."""
        if isinstance(value, Tensor):
            return self._others.get(id(value), value)
        if type(value) in CONSTANTS:
            return value
        if isinstance(value, list | deque | dict):
            self._containers.append(value)
            _exchange(value, self.of)
            return value
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if all(map(is_, items, value)):
                return value
            exchanged = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            self._tuples.append((exchanged, value))
            return exchanged
        copied = tree_map_only(Tensor, self.of, value)
        if copied is not value:
            self._copies.append((type(value).__name__, WrittenTo((copied,), {})))
        return copied

    def written_to(self) -> str | None:
        """The class of a copy that was written into; None if there is none."""
        return next((name for name, written_to in self._copies if written_to.now()), None)

    def give_back(self, originals: Mapping[int, Any]) -> None:
        """Put the first ones back."""
        first = {**originals, **{id(exchanged): value for exchanged, value in self._tuples}}
        for container in self._containers:
            _exchange(container, lambda item: first.get(id(item), item))


def _exchange(container: Any, other: Callable[[Any], Any]) -> None:
    for key, item in list(container.items() if isinstance(container, dict) else enumerate(container)):
        exchanged = other(item)
        if exchanged is not item:
            container[key] = exchanged

"""Contexts of users' autograd functions: what they keep beside what they save is absent between the passes, too."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_harmony.engine.memory.stash import SMALLEST_BYTES
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.engine.structures.tree import flatten

_OURS = __name__.partition(".")[0]
_CONTAINERS = (tuple, list, dict)
# What Python counts for a value that one name refers to, when it is asked.
_OF_ONE_NAME = 2


class Contexts:
    """What the functions of a call keep on their contexts, as those of bitsandbytes keep packed weights.

    Absent after the call unless the graph is kept; a recompute brings it.
    """

    def __init__(self) -> None:
        self._begin = _next_number()
        # In the order in which they are found from what the call returns.
        self._functions: list[_Function] = []
        self._again: list[Any] = []

    @property
    def are_absent(self) -> bool:
        """Whether a recompute has to bring something."""
        return any(function.absent for function in self._functions)

    def find(
        self,
        layer: SwappedLayer,
        returned: Any,
        made: Iterable[Tensor],
        ends: Collection[Any],
        open: Callable[[Any], None],
        *,
        is_compiled: bool,
    ) -> None:
        """Find the call's functions, and open the call before a backward comes to one that may ask for no saved tensor.

        A function of a layer's code may keep an object that has companions, or run modules again, and may save nothing.

        Args:
            layer: what is called. Functions of most keep nothing, and these layers are not looked at for long.
            returned: what the call returns.
            made: the tensors in that, and others that it leaves.
            ends: the nodes of those that it is called with.
            open: opens the call.
            is_compiled: whether the layer is compiled. What its functions keep is not looked at.
        """
        # An attribute may hold what was made before the call.
        found = {node for tensor in made if (node := tensor.grad_fn) is not None and node._sequence_nr() >= self._begin}
        nodes: set[Any] = found.difference(ends)
        functions: list[Any] = []
        if not (is_compiled or layer.differentiates) and (layer.keeps_on_contexts or layer.attributes.are_first_calls):
            functions = _functions_from(_nodes_of(returned), ends, self._begin)
        first = nodes if layer.companions else _functions_from(nodes, ends, self._begin, up_to_saves=True)
        for node in {*first, *functions}:
            node.register_prehook(open)
        layer.keeps_on_contexts |= any(_takes_memory(kept) for node in functions for kept in vars(node).values())
        self._functions = list(map(_Function, functions))

    def clear(self) -> None:
        """Let go of what takes memory."""
        for function in self._functions:
            function.clear()

    def noting(self, run: Callable[[], Any]) -> Callable[[], None]:
        """What runs the call once more, and notes the functions that it calls if something of theirs is absent."""

        def noted() -> None:
            begin, result = _next_number(), run()
            if self.are_absent:
                self._again = _functions_from(_nodes_of(result), (), begin)

        return noted

    def fill(self) -> bool:
        """Take what the functions of a recompute keep; whether they are the same functions."""
        again, self._again = self._again, []
        if not self.are_absent:
            return True
        is_same = len(again) == len(self._functions)
        return is_same and all(one.fill(other) for one, other in zip(self._functions, again, strict=True))


class _Function:
    """A node of a function, which its graph alone keeps.

    Attributes:
        absent: what was on its context, if others keep it, too.
    """

    def __init__(self, node: Any) -> None:
        self._node = weakref.ref(node)
        self.absent: dict[str, Callable[[], Any]] = {}

    def clear(self) -> None:
        """Let go of what takes memory. What is small stays, as numbers do, and lists and dicts to which others refer."""
        kept = vars(node) if (node := self._node()) is not None else {}
        for name in [name for name, value in kept.items() if _takes_memory(value)]:
            value = kept.pop(name)
            if not isinstance(value, _CONTAINERS):
                self.absent[name] = weakref.ref(value)
            elif isinstance(value, tuple) or sys.getrefcount(value) == _OF_ONE_NAME:
                self.absent[name] = _nothing
            else:
                kept[name] = value

    def fill(self, other: Any) -> bool:
        """Take what the same function keeps in a recompute; whether it is the same one."""
        absent, self.absent = self.absent, {}
        if (node := self._node()) is None:
            return True
        again = vars(other)
        if type(node) is not type(other) or not absent.keys() <= again.keys():
            return False
        for name, before in absent.items():
            value = before()
            setattr(node, name, again[name] if value is None else value)
        return True


def _nothing() -> None:
    return None


def _next_number() -> int:
    """What autograd numbers the next node with that this thread makes."""
    return int(torch._C._autograd._get_sequence_nr())


def _functions_from(nodes: Iterable[Any], ends: Collection[Any], begin: int, *, up_to_saves: bool = False) -> list[Any]:
    """The nodes of users' autograd functions to which some nodes of a graph lead, and among these.

    Args:
        nodes: the ones.
        ends: nodes that lead to others which are not looked at.
        begin: the number of the first node that is: those before are of an earlier call, whose state the layer may find in
            an attribute.
        up_to_saves: whether only those that a backward may come to before it asks for any saved tensor.
    """
    remaining, seen, found = list[Any](nodes), {None, *ends}, list[Any]()
    while remaining:
        node = remaining.pop()
        if node in seen or node._sequence_nr() < begin:
            continue
        seen.add(node)
        is_function = isinstance(node, torch._C._FunctionBase)
        if is_function and not _is_ours(node):
            found.append(node)
        elif up_to_saves and (is_function or _saves(node.__class__)):
            continue
        remaining += [behind for behind, _ in node.next_functions]
    return found


def _nodes_of(value: Any) -> list[Any]:
    """The nodes that have made the tensors in a value."""
    return [leaf.grad_fn for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def _is_ours(node: Any) -> bool:
    return bool(type(node)._forward_cls.__module__.partition(".")[0] == _OURS)


@cache
def _saves(kind: type) -> bool:
    """Whether nodes of a class save tensors in any case: those of products with numbers do not."""
    is_product = kind.__name__ in ("MulBackward0", "DivBackward0")
    return not is_product and any(name.startswith("_raw_saved") for name in dir(kind))


def _takes_memory(value: Any) -> bool:
    """Whether it is a tensor with memory that is not small, or a container or an object that has one."""
    if isinstance(value, _CONTAINERS):
        held = value.values() if isinstance(value, dict) else value
    elif type(value).__weakrefoffset__:
        held = value, *getattr(value, "__dict__", {}).values()
    else:
        # Nothing would tell whether others refer to it.
        return False
    return any(isinstance(each, Tensor) and _has_memory(each) for each in held)


def _has_memory(tensor: Tensor) -> bool:
    """Whether it keeps memory that is not small. A small weight lies in that of its pack."""
    if tensor.layout is not torch.strided or is_composed(tensor):
        return True
    return tensor.untyped_storage().nbytes() >= SMALLEST_BYTES

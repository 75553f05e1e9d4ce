"""What a layer's code may do where its work is recorded, and what tells that it has come to do something else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.devices.recording import RecordingError
from lightning_harmony.engine.lanes.rng import RandomState
from lightning_harmony.engine.layers.fixed_memory import FixedMemory
from lightning_harmony.engine.structures.operations import run_as_without_mode

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_ALL = [vars(torch_modules)[f"_global{hooks}"] for hooks in _HOOKS]


def hooks_within(module: nn.Module | None) -> list[Any]:
    """Where modules below one keep hooks around their forwards and backwards, and where torch keeps those of all modules."""
    below = [each for each in module.modules() if each is not module] if module is not None else []
    return [vars(each)[hooks] for each in below for hooks in _HOOKS if hooks in vars(each)] + _HOOKS_OF_ALL


def has_drawn(before: RandomState, after: RandomState) -> bool:
    """Whether random numbers were drawn on the GPU."""
    return before.cuda is not None and after.cuda is not None and not torch.equal(before.cuda, after.cuda)


def refuse_draws(before: RandomState, after: RandomState) -> None:
    """Refuse code that has drawn random numbers on the host.

    Raises:
        RecordingError: if it has.
    """
    if before.python != after.python or before.numpy != after.numpy or not torch.equal(before.cpu, after.cpu):
        raise RecordingError("its code draws random numbers on the host")


def graph_of(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Any]:
    """The graph of what code returns: its nodes, in an order that it alone decides, and where each leads to.

    Args:
        results: the tensors that it returns.
        inputs: those that it was called with.

    Raises:
        RecordingError: if inputs themselves are in it, and no leaves in their places: functions of its own see to that.
    """
    own = {id(each) for each in inputs}
    nodes: list[Any] = [each.grad_fn for each in reversed(results)]
    places: dict[Any, int] = {}
    while nodes:
        node = nodes.pop()
        if node is None or node in places:
            continue
        if id(getattr(node, "variable", None)) in own:
            raise RecordingError("a function of its own uses inputs out of sight of torch")
        places[node] = len(places)
        nodes += [each for each, _ in reversed(node.next_functions)]
    return [(each.name(), [(places.get(node), n) for node, n in each.next_functions]) for each in places]


class Foreign(TorchDispatchMode):
    """Refuses tensors that a layer's code has from elsewhere: they may be others, or gone, when it is replayed."""

    def __init__(self, memory: FixedMemory) -> None:
        super().__init__()
        self._memory = memory
        # Who is foreign was there before: none of these gets its identity.
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _strided(args, kwargs):
            if tensor.untyped_storage()._cdata not in self._made and not self._memory.has(tensor):
                # A number from the host is a constant.
                if tensor.device.type == "cpu" and func is torch.ops.aten.lift_fresh.default:
                    continue
                raise RecordingError("it computes with a tensor that is neither an argument nor a buffer")
        result = run_as_without_mode(func, args, kwargs)
        self._made.update(tensor.untyped_storage()._cdata for tensor in _strided(result))
        return result


def _strided(*values: Any) -> Collection[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.layout is torch.strided]

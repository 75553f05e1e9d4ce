"""Counts what operations compute and move, as they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.structures.operations import is_view
from lightning_harmony.engine.structures.parts import have_composed
from lightning_harmony.plan.outlook.work import Work

_aten = torch.ops.aten


class WorkCounter(TorchDispatchMode):
    """Counts what all operations allocate and compute."""

    def __init__(self, device: VirtualDevice) -> None:
        super().__init__()
        self._device = device
        self._flops: Counter[str] = Counter()
        self._moved_bytes = 0
        self._num_operations = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # There is nothing to compile in it.
        return False

    def take(self) -> Work:
        """The work since it was last taken."""
        work = Work(dict(self._flops), self._moved_bytes, self._num_operations)
        self._flops, self._moved_bytes, self._num_operations = Counter(), 0, 0
        return work

    def add(self, work: Work) -> None:
        """Count work that isn't done."""
        self._flops.update(work.flops)
        self._moved_bytes += work.moved_bytes
        self._num_operations += work.num_operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if have_composed(types):
            # Its own code does the work.
            return NotImplemented
        if func is _aten.equal.default:
            return True
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not _aten._local_scalar_dense.default:
                raise
            # A number that is logged, most likely.
            return {torch.bool: False}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        self._device.count_results(result)
        self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = func._overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if is_view(func) or packet.__name__ in _ALLOCATIONS:
            return
        self._num_operations += 1
        if packet in _FLOPS and tensors:
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            self._flops[dtype] += int(_FLOPS[packet](*args, **kwargs, out_val=result))
            return
        if packet is _aten.embedding:
            # It reads no more of the table than it returns.
            tensors = results
        moved = {id(tensor): tensor for tensor in tensors}
        self._moved_bytes += sum(t.numel() * t.element_size() for t in (*moved.values(), *results))


_ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh"}
)


def _sdpa_for_cpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _sdpa_for_cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(grad_out.shape, query.shape, key.shape, value.shape))


# The formulas of torch's own FlopCounterMode, and what they lack: attention on a CPU.
_FLOPS: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_for_cpu_backward,
    **flop_registry,
}

"""Host operands: outside of lanes the model's own code finds parameters on the host, and a GPU's tensors beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_harmony.engine.structures.operations import changes_first

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

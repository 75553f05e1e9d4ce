"""State that only `.to()` moves: what a module holds beside its parameters and buffers, as metrics do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.fit.move_to_host import companions_of


def move_unregistered(module: nn.Module, device: torch.device) -> None:
    """Do what `module.to(device)` does to everything but parameters and buffers, which are swapped.

    Whatever the module's own `to` does is done, and that of `_apply` in any submodule. Lightning modules then say that they
    are on the device. Companions of parameters stay where these are.
    """
    swapped = {id(tensor) for parameter in module.parameters() for tensor in (parameter, parameter.grad)}
    swapped |= {id(buffer) for buffer in module.buffers()}
    swapped |= {id(tensor) for companions in companions_of(module) for tensor in companions.tensors()}
    apply = module._apply

    def apply_to_others(fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        return apply(lambda tensor: tensor if id(tensor) in swapped else fn(tensor), *args, **kwargs)

    vars(module)["_apply"] = apply_to_others
    try:
        module.to(device)
    finally:
        del vars(module)["_apply"]

"""Optimizer state that waits in host memory while an evaluation needs its room on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.devices.free_memory import free_host_bytes
from lightning_harmony.engine.nodes.division import parameters_of
from lightning_harmony.engine.structures.parts import is_composed


class StateAside:
    """Takes the state of optimizers off a device for as long as none steps. Evaluation does not read it.

    Args:
        trainer: whose optimizers they are.

    Attributes:
        is_aside: whether it is off the device.
    """

    def __init__(self, trainer: Any) -> None:
        self.is_aside = False
        self._trainer = trainer
        self._hooks: list[Any] = []
        self._places: list[tuple[Tensor, torch.device]] = []

    def leave(self) -> bool:
        """Take it off the device. What has not come yet, as before the first step, does not count either.

        Returns:
            Whether it was there, and the host has the room for it.
        """
        owned = [tensor for tensor in _state_tensors(self._trainer.optimizers) if _owns_memory(tensor)]
        if self.is_aside or sum(tensor.nbytes for tensor in owned) > free_host_bytes():
            return False
        self.is_aside = True
        self._places = [(tensor, tensor.device) for tensor in owned]
        for tensor in owned:
            _move(tensor, torch.device("cpu"))
        # Hooks of an evaluation may step, too.
        self._hooks = [each.register_step_pre_hook(lambda *_: self.come_back()) for each in self._trainer.optimizers]
        return True

    def come_back(self) -> None:
        """Bring it to where it was."""
        for tensor, device in self._places:
            _move(tensor, device)
        self.end()

    def end(self) -> None:
        """Where it is now, it stays for whoever has the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._places, self.is_aside = [], [], False


def move_optimizer_state(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Bring what optimizers keep of their parameters to where these are."""
    for tensor in _state_tensors(optimizers):
        _move(tensor, device)


def _state_tensors(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    """What optimizers keep, each tensor once, without parameters: those are the model's, whoever else holds them."""
    seen = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
    for leaf in tree_leaves([list(optimizer.state.values()) for optimizer in optimizers]):
        if isinstance(leaf, Tensor) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield leaf


def _owns_memory(tensor: Tensor) -> bool:
    """Whether it is no part of other memory, which would stay, and be another's from then on."""
    is_strided = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_strided and tensor.untyped_storage().nbytes() == tensor.nbytes


@torch.inference_mode(False)
def _move(tensor: Tensor, device: torch.device) -> None:
    """It stays the same object: whoever holds it finds it there."""
    moved = tensor.detach().to(device)
    if is_composed(tensor):
        # Its data would be what it is around, and not what it is made of.
        torch.utils.swap_tensors(tensor, moved)
    else:
        tensor.data = moved

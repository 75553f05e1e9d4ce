"""Moves of a model: of parameters, which may do more then than to change their place, and of what only `.to()` moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.model.companions import Companions, join_copies
from lightning_harmony.engine.structures.parts import is_composed

_HOST = torch.device("cpu")


def move_to_host(module: nn.Module, device: torch.device) -> None:
    """Bring a model to the host, its parameters as a move to a device leaves them.

    Classes of quantized parameters quantize at the first move, and a GPU may round otherwise than the host. What Python code
    keeps of such parameters comes along, of which `module.to` knows nothing.

    Args:
        module: the model.
        device: where plain Lightning would move it.
    """
    for owner in module.modules():
        join_copies(owner)
    companions = companions_of(module)
    if device.type != _HOST.type:
        for each in companions:
            each.move(_HOST)
    # What code keeps of a parameter stays behind when that is moved. It is quantized already.
    quantized = {parameter for each in companions for parameter in each.parameters}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            # Those that code of their own class moves.
            if parameter is None or type(parameter).to is Tensor.to or is_composed(parameter):
                continue
            if parameter not in quantized:
                _move_own(owner, name, device)
            if device.type != _HOST.type:
                # It is another object where the move makes one.
                moved = owner._parameters[name]
                Companions([owner], [] if moved is None else [moved]).move(_HOST)
                # At once: a device may have no room for all of them.
                _move_own(owner, name, _HOST)
    if device.type != _HOST.type:
        module.to(_HOST)


def move_companions(module: nn.Module, device: torch.device) -> None:
    """Move frozen parameters to a device together with what Python code keeps of them, of which `module.to` knows nothing."""
    for each in companions_of(module):
        each.move(device)


def moved_to_device(module: nn.Module, model: nn.Module, device: torch.device) -> bool:
    """Move a model to a device, or back; whether there was room for all that its modules bring, such as copies of their own.

    Args:
        module: the user's.
        model: that, or what has it.
        device: where to.
    """
    try:
        move_companions(module, device)
        model.to(device)
    except torch.OutOfMemoryError:
        model.to(_HOST)
        return False
    return True


def companions_of(module: nn.Module) -> list[Companions]:
    """The companions of a model's parameters.

    What the model itself keeps of weights in its submodules is for the code between layers, and no companion.
    """
    inner = [each for each in module.modules() if each is not module]
    parameters = dict.fromkeys(parameter for each in inner for parameter in each.parameters(recurse=False))
    return [Companions(inner, parameters), Companions([module], module.parameters(recurse=False))]


def _move_own(owner: nn.Module, name: str, device: torch.device) -> None:
    """Do what `nn.Module.to` does to one parameter."""
    parameter = owner._parameters[name]

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, None, False) if tensor is parameter else tensor

    nn.Module._apply(owner, move, recurse=False)


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

"""The move of a model to the host, whose parameters may do more when they are moved than to change their place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_harmony.engine.model.companions import Companions
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
        for name in [name for name, parameter in owner._parameters.items() if _moves_itself(parameter)]:
            # What code keeps of a parameter stays behind when that is moved. It is quantized already.
            if not _companions_of(owner, name):
                _move_own(owner, name, device)
            if device.type != _HOST.type:
                _companions_of(owner, name).move(_HOST)
                # At once: a device may have no room for all of them.
                _move_own(owner, name, _HOST)
    if device.type != _HOST.type:
        module.to(_HOST)


def _moves_itself(parameter: nn.Parameter | None) -> bool:
    """Whether code of its own class moves a parameter."""
    return parameter is not None and type(parameter).to is not Tensor.to and not is_composed(parameter)


def _companions_of(owner: nn.Module, name: str) -> Companions:
    parameter = owner._parameters[name]
    return Companions([owner], [] if parameter is None else [parameter])


def _move_own(owner: nn.Module, name: str, device: torch.device) -> None:
    """Do what `nn.Module.to` does to one parameter."""
    parameter = owner._parameters[name]

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, None, False) if tensor is parameter else tensor

    nn.Module._apply(owner, move, recurse=False)

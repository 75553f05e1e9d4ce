"""Weights as a layer's code finds them on a device: what it does to them there would be lost with them."""

from __future__ import annotations

from functools import cache
from types import new_class
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_harmony.engine.model.companions import changes_data
from lightning_harmony.engine.model.layer import assign_in_caller, layer_of_caller
from lightning_harmony.engine.structures.parts import is_composed
from lightning_harmony.errors import UnsupportedModelError

_NEEDS_GRADIENTS: Any = Tensor.requires_grad


class DataAssignedError(UnsupportedModelError):
    """Code assigns to the data of a weight on a device.

    Args:
        weight: which one.
    """

    def __init__(self, weight: Tensor) -> None:
        layer = layer_of_caller()
        super().__init__(changes_data("" if layer is None else layer.name))
        self.weight = weight


def make_resident(weight: nn.Parameter) -> nn.Parameter:
    """Let what is done to the data of a weight on a device count as a change of it, which swapping would lose.

    Code finds a leaf, as a parameter is one: modules take no other tensor as a parameter. What of it is in a graph is not.

    Classes of composed ones may know no subclasses: where their parts are, `LayerCall` looks itself.
    """
    if is_composed(weight):
        return weight
    weight.__class__ = _resident(type(weight))
    return weight


@cache
def _resident(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    def assign(weight: Tensor, value: Tensor) -> None:
        if not (_is_same_view(weight, value) or assign_in_caller(weight, value)):
            raise DataAssignedError(weight)

    # A detached tensor counts its changes together with the weight.
    content = {
        "is_leaf": property(lambda weight: True),
        "grad_fn": property(lambda weight: None),
        "register_hook": _refuse_hook,
        "register_post_accumulate_grad_hook": _refuse_hook,
        "data": property(Tensor.detach, assign),
        "requires_grad": property(_NEEDS_GRADIENTS.__get__, _set_flag),  # type: ignore[arg-type]
        "requires_grad_": _set_flag,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return new_class(kind.__name__, (kind,), exec_body=lambda namespace: namespace.update(content))


def _set_flag(weight: Tensor, requires_grad: bool = True) -> Tensor:
    """Say whether a weight needs gradients. The code of a layer that trains says it of what is there for its call alone.

    Raises:
        UnsupportedModelError: if that would change it.
    """
    layer = layer_of_caller()
    if layer is not None and layer.is_training and requires_grad is not _NEEDS_GRADIENTS.__get__(weight):
        raise UnsupportedModelError(
            f"layer {layer.name!r} changes in its forward whether one of its parameters needs gradients, of shape "
            f"{tuple(weight.shape)}: say so before the step, as in on_train_batch_start"
        )
    return Tensor.requires_grad_(weight, requires_grad)


def _refuse_hook(weight: Tensor, hook: Any) -> NoReturn:
    """The weight of a call ends with it, and code that runs again would register the hook once more.

    Raises:
        UnsupportedModelError: in any case.
    """
    layer = layer_of_caller()
    name = "" if layer is None else f" {layer.name!r}"
    raise UnsupportedModelError(
        f"layer{name} registers a hook on one of its parameters in its forward, of shape {tuple(weight.shape)}: register it "
        "on the parameter before the fit, or use on_after_backward"
    )


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same elements of one memory, so that to assign one to the other changes nothing."""
    if other.layout is not torch.strided or one.untyped_storage()._cdata != other.untyped_storage()._cdata:
        return False
    places = [(each.dtype, each.size(), each.stride(), each.storage_offset()) for each in (one, other)]
    return places[0] == places[1]

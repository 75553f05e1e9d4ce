"""Subclass and Python attributes of a tensor, reapplied to copies of its elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import new_class
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_harmony.engine.memory.opaque import with_tensors
from lightning_harmony.engine.structures.containers import have_same_content
from lightning_harmony.engine.structures.operations import NO_DISPATCH
from lightning_harmony.engine.structures.parts import is_composed


class TensorClass(NamedTuple):
    """The class of a tensor and its Python attributes, which copies of its elements lack.

    Attributes:
        kind: its class.
        attributes: what was set on it.
    """

    kind: type[Tensor]
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorClass | None:
        """Those of a tensor as it is now; None for a plain tensor with no attributes."""
        attributes = _attributes_of(tensor)
        if attributes is None:
            return None
        # What a parameter is to its module, what is computed from it is not.
        kind = Tensor if isinstance(tensor, nn.Parameter) else type(tensor)
        return cls(kind, dict(attributes)) if kind is not Tensor or attributes else None

    def on(self, tensor: Tensor) -> Tensor:
        """A tensor of this class with these attributes. It shares the memory and the graph of the other."""
        if self.kind is not Tensor and type(tensor) is not self.kind:
            tensor = Tensor.as_subclass(tensor, self.kind)
        vars(tensor).update(self.attributes)
        return tensor


def in_place_of(tensor: Tensor, original: Tensor) -> Tensor:
    """A tensor that takes the place of another: of its class, and what is set on one is on both."""
    if tensor is not original and (own := TensorClass.of(original)) is not None:
        tensor = own.on(tensor)
        tensor.__dict__ = original.__dict__
    return tensor


def parameter_like(
    parameter: nn.Parameter, values: Tensor, exchange: Callable[[Tensor], Tensor] | None = None
) -> nn.Parameter:
    """A parameter with other values, which has the class of another parameter and what was set on that one.

    Args:
        parameter: the other one.
        values: what it holds.
        exchange: gives what takes the place of a tensor among the attributes, also of those within objects such as
            bitsandbytes' `quant_state`; None for one that is where the values are.
    """
    exchange = exchange or (lambda tensor: tensor.to(values.device))
    copy: Any
    if is_composed(parameter):
        # As the constructor makes one, which has the class's own code detach it, and that may be out of sight.
        copy = values
        copy._is_param = True
    elif type(parameter) is nn.Parameter:
        copy = nn.Parameter(values, parameter.requires_grad)
    elif type(values) is not Tensor:
        # Fake ones stay so.
        copy = nn.Parameter(values, parameter.requires_grad)
        copy.__class__ = _of_both(type(parameter), type(values))
    else:
        # Constructors of classes of their own may quantize, or take other arguments.
        copy = Tensor._make_subclass(type(parameter), values, parameter.requires_grad)
    # What composes it is there already.
    if vars(parameter):
        others = {name: value for name, value in vars(parameter).items() if name not in vars(copy)}
        vars(copy).update({name: _with_others(value, exchange) for name, value in others.items()})
    return copy  # type: ignore[no-any-return]


def share_attributes(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Let what is set on one of two parameters be on both, as far as both have the same now."""
    own = _attributes_of(parameter)
    if own is not None and have_same_content(own, vars(other)):
        other.__dict__ = own


@cache
def _of_both(kind: type[Tensor], other: type[Tensor]) -> type[Tensor]:
    return new_class(kind.__name__, (kind, other))


def _with_others(value: Any, exchange: Callable[[Tensor], Tensor]) -> Any:
    """A value that was set on a tensor, with others in the places of its tensors; the value itself if they are the same."""
    return exchange(value) if isinstance(value, Tensor) else with_tensors(value, exchange)


def _attributes_of(tensor: Tensor) -> dict[str, Any] | None:
    """What was set on a tensor; None where its values are elsewhere, which its class has put there."""
    return vars(tensor) if type(tensor).__torch_dispatch__ is NO_DISPATCH else None

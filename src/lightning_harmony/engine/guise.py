"""Subclass and Python attributes of a tensor, reapplied to copies of its elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


class Guise(NamedTuple):
    """What a tensor looks like.

    Attributes:
        kind: its class.
        attributes: what was set on it.
    """

    kind: type[Tensor]
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, tensor: Tensor) -> Guise | None:
        """The guise of a tensor as it is now; None for one that looks like any other."""
        attributes = _attributes_of(tensor)
        if attributes is None:
            return None
        # What a parameter is to its module, what is computed from it is not.
        kind = Tensor if isinstance(tensor, nn.Parameter) else type(tensor)
        return cls(kind, dict(attributes)) if kind is not Tensor or attributes else None

    def on(self, tensor: Tensor) -> Tensor:
        """A tensor in this guise, which shares its memory and its graph."""
        if self.kind is not Tensor and type(tensor) is not self.kind:
            tensor = Tensor.as_subclass(tensor, self.kind)
        vars(tensor).update(self.attributes)
        return tensor


def _attributes_of(tensor: Tensor) -> dict[str, Any] | None:
    """What was set on a tensor; None where its values are elsewhere, which its class has put there."""
    return vars(tensor) if type(tensor).__torch_dispatch__ is _NO_DISPATCH else None

"""Structure: what layers that do the same have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_harmony.engine.memory.opaque import PLAIN
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.structures.parts import is_composed, parts_of


@dataclass(frozen=True)
class Shape:
    """A tensor without its elements; of one that is composed of others, with their shapes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    parts: tuple[Shape, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        """That of a tensor."""
        parts = tuple(map(cls.of, parts_of(tensor))) if is_composed(tensor) else ()
        return cls(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad, parts)

    def empty(self) -> Tensor:
        """A tensor of this shape on the CPU."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu")


# Attributes that number layers tell no two of them apart.
_NUMBERING = ("idx", "index", "_id", "number")


def structure_of(layer: SwappedLayer) -> Any:
    """What layers that do the same have in common."""
    assert layer.whole is not None
    numbers = {parameter: number for number, parameter in enumerate(layer.parameters)}

    def of_module(module: nn.Module) -> Any:
        parameters = [(name, p) for name, p in module._parameters.items() if p is not None]
        buffers = [(name, b) for name, b in module._buffers.items() if b is not None]
        plain = [(n, v) for n, v in vars(module).items() if isinstance(v, PLAIN) and not n.endswith(_NUMBERING)]
        return (
            type(module),
            tuple((name, numbers[p], type(p), Shape.of(p), layer.narrow.get(p)) for name, p in parameters),
            tuple((name, Shape.of(b)) for name, b in buffers),
            tuple(plain),
        )

    return tuple((name, of_module(module)) for name, module in layer.whole.named_modules())

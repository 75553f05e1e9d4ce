"""What the packs that own a parameter contribute to its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lightning_harmony.engine.model.pack import SummedGradients


@dataclass
class Contribution:
    """One contribution to the gradient of a parameter."""

    order: tuple[int, int]
    gradient: Tensor
    source: SummedGradients
    norm: Tensor | None


def total(parameter: nn.Parameter, parts: list[Contribution], earlier: Tensor | None) -> tuple[Tensor, bool]:
    """The gradient of a parameter, added to what it has from earlier, and whether it has come from the device as it is."""
    parts.sort(key=lambda part: part.order)
    summed = parts[0].gradient
    for part in parts[1:]:
        summed.add_(part.gradient)
    includes_earlier = any(parameter in part.source.includes_earlier for part in parts)
    if earlier is not None and not includes_earlier:
        return earlier.add_(summed), False
    # A tensor of its own: a reference to it shows that the buffer is in use.
    return summed.detach(), len(parts) == 1

"""Norms of gradients, with the bits that they have on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


@dataclass(frozen=True)
class _Norm:
    gradient: Tensor
    version: int
    value: Tensor


class Norms:
    """Norms of gradients, computed on the device on which plain training has them; their norm is that of `get_total_norm`.

    Args:
        device: where those are computed that are not known when gradients leave their device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[nn.Parameter, _Norm] = {}

    def note(self, parameter: nn.Parameter, value: Tensor) -> None:
        """The norm of the gradient that a parameter has."""
        assert parameter.grad is not None
        self._known[parameter] = _Norm(parameter.grad, parameter.grad._version, value)

    def total(self, parameters: Sequence[nn.Parameter], merge: Callable[[Tensor], None] | None = None) -> Tensor:
        """The norm of all gradients together.

        Args:
            parameters: whose.
            merge: lets norms be the largest of all nodes', where some gradients are on other nodes; None where none is.
        """
        with torch.no_grad():
            found = {p: self._here(self._of(p, p.grad)) for p in parameters if p.grad is not None}
            if merge is not None:
                # Less than all norms, and exact for each type.
                known = torch.full((len(parameters),), -1.0, dtype=torch.float64)
                for number, parameter in enumerate(parameters):
                    if parameter in found:
                        known[number] = found[parameter]
                merge(known)
                found = {
                    p: self._here(norm.to(p.dtype)) for p, norm in zip(parameters, known, strict=True) if norm != -1.0
                }
            norms: list[Tensor | None] = list(found.values())
            if not norms:
                return torch.nn.utils.get_total_norm([])
            # Those of one type after those of another, as torch sums them.
            by_type = _group_tensors_by_device_and_dtype([norms])
            in_order = [norm for (same, *_), _ in by_type.values() for norm in same if norm is not None]
            total: Tensor = torch.linalg.vector_norm(torch.stack(in_order), 2.0)
        return total

    def _of(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        known = self._known.get(parameter)
        if known is not None and known.gradient is gradient and known.version == gradient._version:
            return known.value
        return norms_of([self._here(gradient)])[0]

    def _here(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=self._device).copy_(tensor)

    def clear(self) -> None:
        """Forget them, and let their gradients go."""
        self._known = {}


def norms_of(gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The norm of each gradient, whichever others it is computed with."""
    return torch._foreach_norm(list(gradients), 2.0) if gradients else ()

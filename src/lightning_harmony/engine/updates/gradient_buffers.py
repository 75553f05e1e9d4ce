"""What the packs that own a parameter contribute to its gradient, and the host buffers in which that is."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

from torch import Tensor, nn

from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import lies_in
from lightning_harmony.engine.model.pack import SummedGradients
from lightning_harmony.engine.structures.memory_users import num_users


class GradientBuffers:
    """Returns the buffers of gradients to their pool when nobody has a gradient in them any more.

    Args:
        pool: where the buffers return to.
    """

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        # Several queues may have parts of one.
        self._lock = Lock()
        # How many gradients of each are still to be used.
        self._unused: dict[int, int] = {}
        # Those whose gradients became parameters' `grad`, and how many tensors of ours have their memory.
        self._held: list[tuple[SummedGradients, int]] = []

    @property
    def kept_bytes(self) -> int:
        """What gradients take that parameters, or users, have from earlier steps."""
        return sum(source.buffer.numel() for source, _ in self._held)

    def add(self, source: SummedGradients) -> None:
        """Gradients have been delivered, each of which will be used once."""
        self._unused[id(source)] = len(source.sums)

    def use(self, source: SummedGradients, *, as_grad: bool, free: bool) -> None:
        """One of the gradients has been used.

        Args:
            source: the gradients in the same buffer.
            as_grad: whether they became the ``grad`` of their parameters: `reclaim` sees when these are gone.
            free: otherwise, whether the buffer is free when all of them have been used.
        """
        with self._lock:
            self._unused[id(source)] -= 1
            if self._unused[id(source)] > 0:
                return
            del self._unused[id(source)]
        if as_grad:
            grads = [parameter.grad for _, parameter in source.sums if parameter.grad is not None]
            num_grads = sum(lies_in(gradient, source.buffer) for gradient in grads)
            self._held.append((source, num_users(source.buffer) - num_grads))
        elif free and source.is_on_host:
            self._pool.give(source.buffer, None)

    def reclaim(self) -> None:
        """Take back the buffers of gradients that nobody has any more, neither a parameter nor the user."""
        held, self._held = self._held, []
        for source, our_uses in held:
            if num_users(source.buffer) > our_uses:
                self._held.append((source, our_uses))
            else:
                self._pool.give(source.buffer, None)


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

"""Buffers that hold gradients on the host, and when they are free for other gradients."""

from __future__ import annotations

from threading import Lock

from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import lies_in, num_users
from lightning_harmony.engine.model.pack import SummedGradients


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

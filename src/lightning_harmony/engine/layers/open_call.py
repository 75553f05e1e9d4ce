"""The call that a backward is in: its layer resides on the device until the backward goes on elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from lightning_harmony.engine.devices.device import NO_CONTEXT, Device
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import Residency
from lightning_harmony.plan.values.task import Phase


class OpenCall:
    """The call that a backward is in: its layer resides on the device, and is bound, until the backward goes on elsewhere.

    Args:
        visit: waits for a layer's turn, and makes it resident.

    Attributes:
        call: which one; None if the backward is in none.
    """

    def __init__(self, visit: Callable[[SwappedLayer, Phase], AbstractContextManager[Residency]]) -> None:
        self._visit = visit
        self.call: object = None
        # Where it runs.
        self._device: Device | None = None
        self._stay: AbstractContextManager[None] = NO_CONTEXT
        # The backward that leaves the call when it ends, as autograd numbers them.
        self._backward = -1

    def enter(
        self, call: object, layer: SwappedLayer, entered: Callable[[Residency], AbstractContextManager[None]]
    ) -> None:
        """A backward comes to a call.

        Args:
            call: which one.
            layer: what was called.
            entered: given where its pack resides, the call's own context for as long as the backward is in it.
        """
        if self.call is call:
            return
        self.leave()
        stay = self._staying(call, layer, entered)
        stay.__enter__()
        self._stay = stay
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.leave)

    @contextmanager
    def _staying(
        self, call: object, layer: SwappedLayer, entered: Callable[[Residency], AbstractContextManager[None]]
    ) -> Iterator[None]:
        with self._visit(layer, Phase.BACKWARD) as residency:
            self.call, self._device = call, residency.device
            try:
                with entered(residency):
                    yield
            finally:
                self.call = None

    def leave(self) -> None:
        """The backward leaves the call, if it is in one."""
        if self.call is not None:
            assert self._device is not None
            # What comes next waits for what computed here.
            with self._device.scheduling():
                self._stay.__exit__(None, None, None)

    @contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        """The context of backwards that the user's own code runs: an error that ends one leaves the call that it was in.

        Autograd runs what waits for the end of a backward only if there was no error.
        """
        try:
            yield
        except BaseException as error:
            if self.call is not None:
                assert self._device is not None
                with self._device.scheduling():
                    # The visit says which layer ran out of memory.
                    self._stay.__exit__(type(error), error, error.__traceback__)
            raise

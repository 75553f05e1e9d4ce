"""The call that a backward is in: its layer resides on the device until the backward goes on elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from lightning_harmony.engine.devices.device import Device
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
        self._leaving = ExitStack()
        # The backward that leaves the call when it ends, as autograd numbers them.
        self._backward = -1

    def enter(self, call: object, layer: SwappedLayer, enter: Callable[[Residency, ExitStack], None]) -> None:
        """A backward comes to a call.

        Args:
            call: which one.
            layer: what was called.
            enter: what the call does about it, given where its pack resides, and a stack that it leaves with.
        """
        if self.call is call:
            return
        self.leave()
        with ExitStack() as stack:
            residency = stack.enter_context(self._visit(layer, Phase.BACKWARD))
            stack.callback(setattr, self, "call", None)
            self.call, self._device = call, residency.device
            enter(residency, stack)
            self._leaving = stack.pop_all()
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.leave)

    def leave(self) -> None:
        """The backward leaves the call, if it is in one."""
        if self.call is not None:
            assert self._device is not None
            # What comes next waits for what computed here.
            with self._device.scheduling():
                self._leaving.close()

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
                    self._leaving.__exit__(type(error), error, error.__traceback__)
            raise

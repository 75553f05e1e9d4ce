"""Weights that their owners have updated go to the other nodes, those first that a forward needs first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any

import torch
from torch import nn

from lightning_harmony.engine.devices.stream import Event, HostEvent
from lightning_harmony.engine.nodes.division import Division, explained
from lightning_harmony.engine.replicas.flat_pieces import in_pieces

# What nodes wait for at once: how far each is with its updates, they tell each other before.
_BATCH_BYTES = 64 << 20


class DividedUpdate:
    """The update of one step whose parameters have owners.

    Args:
        division: between the nodes.
        parameters: all that are updated, the same in the same order on all nodes.
    """

    def __init__(self, division: Division, parameters: Sequence[nn.Parameter]) -> None:
        self._division = division
        self._batches: list[list[Any]] = list(in_pieces(parameters, _BATCH_BYTES))

    def is_own(self, parameter: nn.Parameter) -> bool:
        """Whether this node updates a parameter."""
        return self._division.is_own(parameter)

    def share(self, updated: Mapping[nn.Parameter, Event], settle: Callable[[], None]) -> dict[nn.Parameter, Event]:
        """Send the others what this node updates, and receive the rest, in a thread. All nodes come here.

        Args:
            updated: the end of each update that this node makes.
            settle: waits until what these have changed is where it lives.

        Returns:
            Of each parameter, when it has its new values.
        """
        futures: list[Future[None]] = [Future() for _ in self._batches]
        self._division.begin(futures)
        # Who ends with an error does not wait for it: it may wait for nodes that wait for this one's end.
        Thread(target=self._run, args=(dict(updated), settle, futures), name="harmony-weights", daemon=True).start()
        events: dict[nn.Parameter, Event] = dict(updated)
        for batch, future in zip(self._batches, futures, strict=True):
            events.update(dict.fromkeys(batch, HostEvent(future)))
        return events

    # ---- in the thread -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _run(
        self, updated: Mapping[nn.Parameter, Event], settle: Callable[[], None], futures: Sequence[Future[None]]
    ) -> None:
        failure: Exception | None = None
        for batch, future in zip(self._batches, futures, strict=True):
            try:
                if failure is not None:
                    raise failure
                with self._division.exchange.beside():
                    self._share(batch, [updated[p] for p in batch if p in updated], settle)
            except Exception as error:
                failure = error
                future.set_exception(error)
            else:
                future.set_result(None)

    def _share(self, batch: Sequence[nn.Parameter], updated: Sequence[Event], settle: Callable[[], None]) -> None:
        failure: Exception | None = None
        try:
            for event in updated:
                event.synchronize()
            settle()
        except Exception as error:
            failure = error
        # No node begins what another one may not come to: such an exchange could not be ended.
        has_failed = torch.tensor([failure is not None], dtype=torch.uint8)
        with explained("updated weights could not be sent between nodes"):
            self._division.exchange.merge(has_failed)
            if failure is not None:
                raise failure
            if has_failed:
                raise RuntimeError("the update of one of them has failed")
            owners = [self._division.owner_of(parameter) or 0 for parameter in batch]
            self._division.exchange.spread([parameter.detach() for parameter in batch], owners)

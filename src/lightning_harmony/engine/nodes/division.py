"""How nodes divide an update: each parameter has an owner, which updates it, and alone has its optimizer state."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_harmony.engine.nodes.exchange import Exchange
from lightning_harmony.plan.values.owners import assign


class Need(IntEnum):
    """What a node needs of a step's gradients. What one node needs, all have."""

    # Averaged gradients of the parameters that it owns, each as it is final: they are updated in the backward.
    OWN = 0
    # Those, and the norms of the others: parameters are updated behind the backward.
    OWN_AND_NORMS = 1
    # All averaged gradients, which somebody reads.
    ALL = 2
    # All, to update all parameters: the update is not divided.
    WHOLE = 3


class Division:
    """The division of one fit's updates.

    Args:
        exchange: between the nodes.

    Attributes:
        need: of the step that runs, or that was last.
        is_divided: whether optimizer state of a parameter is on its owner alone.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.need, self.is_divided = Need.WHOLE, False
        # What a thread still exchanges: messages of another one may not come between.
        self._under_way: Sequence[Future[None]] = ()
        self._owners: dict[nn.Parameter, int] = {}
        self._loads = [0] * exchange.size

    def agree(self, need: Need) -> Need:
        """The largest need of all nodes, each of which comes here at the same point of its step.

        Raises:
            RuntimeError: if one of them is gone.
        """
        self.settle()
        message = torch.tensor([need], dtype=torch.uint8)
        with explained("nodes could not agree on what they need"):
            self.exchange.merge(message)
        self.need = Need(int(message))
        return self.need

    def begin(self, exchanges: Sequence[Future[None]]) -> None:
        """A thread exchanges from now on, as long as not all of these have ended."""
        self._under_way = exchanges

    def settle(self) -> None:
        """Wait until no thread exchanges. What has failed is raised where it is waited for by itself."""
        wait(self._under_way)

    def divide(self, parameters: Iterable[nn.Parameter], optimizers: Iterable[Optimizer]) -> None:
        """Divide updates from now on, and drop the optimizer state that other nodes have.

        Args:
            parameters: what is updated, in an order that all nodes have. Each new one goes to the node that has the fewest
                bytes; others keep their owners.
            optimizers: theirs, which have nothing under way.
        """
        new = [parameter for parameter in dict.fromkeys(parameters) if parameter not in self._owners]
        self._owners.update(zip(new, assign((parameter.nbytes for parameter in new), self._loads), strict=True))
        self.is_divided = True
        for optimizer in optimizers:
            for parameter in [each for each in list[Any](optimizer.state) if not self.is_own(each)]:
                del optimizer.state[parameter]

    def owner_of(self, parameter: Any) -> int | None:
        """The number of the node that updates a parameter; None if all do."""
        return self._owners.get(parameter) if self.is_divided else None

    def is_own(self, parameter: Any) -> bool:
        """Whether this node updates a parameter, alone or as all do, and has its optimizer state."""
        return self.owner_of(parameter) in (None, self.exchange.rank)

    # ---- optimizer state -----------------------------------------------------------------------------------------------

    def gather(self, optimizers: Iterable[Optimizer]) -> None:
        """Let all nodes have all optimizer state, and divide updates no more. All nodes come here; nothing is under way."""
        for optimizer in optimizers:
            state = dict(self.states(optimizer, range(self.exchange.size)))
            optimizer.state.update((parameter, found) for parameter, found in state.items() if found)
        self.is_divided = False

    def states(
        self, optimizer: Optimizer, receivers: Iterable[int] = (0,), folder: str | Path | None = None
    ) -> Iterator[tuple[nn.Parameter, Any]]:
        """Send the state of an optimizer, one parameter after the other. All nodes come here; nothing is under way.

        Args:
            optimizer: whose.
            receivers: the nodes that are to have all of it.
            folder: on a disk, where what comes lives; None for memory. It takes room there for as long as it is in use.

        Yields:
            Each parameter with its state, as far as this node has it, or is to have it; else with an empty one.
        """
        rank = self.exchange.rank
        for parameter in parameters_of(optimizer):
            owner, state = self.owner_of(parameter), optimizer.state.get(parameter, {})
            with explained("optimizer state could not be gathered from nodes"):
                if owner == rank:
                    self.exchange.send_bytes(_saved(state), [node for node in receivers if node != rank])
                elif owner is not None and rank in receivers:
                    state = self._receive(owner, folder)
            yield parameter, state

    def _receive(self, owner: int, folder: str | Path | None) -> Any:
        if folder is None:
            in_memory = io.BytesIO()
            self.exchange.receive_bytes(owner, in_memory)
            in_memory.seek(0)
            return torch.load(in_memory, weights_only=False)
        with NamedTemporaryFile(dir=folder) as file:
            self.exchange.receive_bytes(owner, file)
            file.flush()
            # What is mapped stays when the file has no name any more.
            return torch.load(file.name, weights_only=False, map_location="cpu", mmap=True)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of an optimizer, by the numbers that they have in its state_dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _saved(state: Any) -> memoryview:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getbuffer()


@contextmanager
def explained(what: str) -> Iterator[None]:
    """A context whose errors of nodes that are gone say where to look.

    Args:
        what: has not come to its end, in words.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{what}: where one has failed, its own output says why ({error})") from error

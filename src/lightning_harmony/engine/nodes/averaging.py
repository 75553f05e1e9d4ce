"""The mean of all nodes' gradients: a backward's become means as they are final on all nodes, in one order on all of them.

The first node says in which order. Before each exchange it hears of all others that their gradients are final, so that no
node begins one that another may not come to: such an operation could not be ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from threading import Condition, Thread

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import Event
from lightning_harmony.engine.nodes.division import Division, Need, explained
from lightning_harmony.errors import UnsupportedModelError


class _State(IntEnum):
    """What a node says of its backward."""

    GOES_ON = 0
    ENDS = 1
    HAS_FAILED = 2


@dataclass
class _Final:
    """Parameters whose gradients are final, by their numbers; what has to happen before, and to be done then."""

    numbers: Collection[int]
    after: Sequence[Event]
    prepare: Callable[[], None]


class Averaging:
    """The averaging of one backward's gradients.

    It runs in a thread of its own if it is started, else when it is to be finished.

    Args:
        division: between the nodes, which have agreed on what they need when the first gradient is final.
        parameters: of the module, in an order that all nodes have.
        gradient_of: returns the gradient of a parameter, where it is not started.

    Attributes:
        is_over: whether all gradients are means.
        division: the same.
    """

    def __init__(
        self,
        division: Division,
        parameters: Sequence[nn.Parameter],
        gradient_of: Callable[[nn.Parameter], Tensor | None],
    ) -> None:
        self.is_over = False
        self.division = division
        self._exchange, self._parameters, self._gradient_of = division.exchange, parameters, gradient_of
        self._take: Callable[[Mapping[nn.Parameter, Tensor | None]], None] = _let_have
        self._averaged: set[int] = set()
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}
        self._end: Future[None] | None = None
        # Says that something of what follows has changed.
        self._changed = Condition()
        self._coming: deque[_Final] = deque()
        self._state = _State.GOES_ON
        self._failure: Exception | None = None
        # In the thread: what is final here, and what is not a mean yet.
        self._final: set[int] = set()
        self._left = set(range(len(parameters)))

    def start(
        self,
        gradient_of: Callable[[nn.Parameter], Tensor | None],
        take: Callable[[Mapping[nn.Parameter, Tensor | None]], None],
    ) -> None:
        """Begin, in a thread, before the first gradient is final.

        Args:
            gradient_of: returns what this node has, when that is final; None if it has no gradient.
            take: called with gradients that have become means, those in the place of None among them; None for one that
                its owner alone has. Both are called in the thread.
        """
        self._gradient_of, self._take = gradient_of, take
        self._end = Future()
        # Who ends with an error does not wait for it: it may wait for nodes that wait for this one's end.
        Thread(target=self._run_in_thread, args=(self._end,), name="harmony-nodes", daemon=True).start()

    def add(self, parameters: Collection[nn.Parameter], after: Sequence[Event], prepare: Callable[[], None]) -> None:
        """Say that gradients are final; of parameters that are not the module's, none is averaged.

        Args:
            parameters: whose.
            after: the events that have to happen before.
            prepare: called in the thread then, before it asks for them.
        """
        numbers = [self._numbers[parameter] for parameter in parameters if parameter in self._numbers]
        with self._changed:
            self._coming.append(_Final(numbers, after, prepare))
            self._changed.notify()

    def finish(self) -> None:
        """Say that all others are final, and wait until all are means.

        Raises:
            RuntimeError: if the nodes do not come to that, as one has failed.
        """
        self._say(_State.ENDS)
        try:
            with explained("gradients could not be averaged over nodes"):
                if self._end is not None:
                    self._end.result()
                else:
                    self._run()
        except RuntimeError as error:
            self.abandon()
            raise self._failure or error  # noqa: B904
        self.is_over = True

    @property
    def divided(self) -> list[nn.Parameter]:
        """The parameters that their owners update with gradients of this backward, in the order that all nodes have."""
        averaged = [self._parameters[number] for number in sorted(self._averaged)]
        return [parameter for parameter in averaged if self.division.owner_of(parameter) is not None]

    def abandon(self) -> None:
        """Say that the backward has failed. The other nodes are told when they ask for gradients, or at the process's end."""
        self._say(_State.HAS_FAILED)

    def _say(self, state: _State) -> None:
        with self._changed:
            # What has failed stays so.
            self._state = max(self._state, state)
            self._changed.notify()

    # ---- in the thread -------------------------------------------------------------------------------------------------

    def _run_in_thread(self, end: Future[None]) -> None:
        try:
            with self._exchange.beside():
                self._run()
        except BaseException as error:
            end.set_exception(error)
        else:
            end.set_result(None)

    @torch.no_grad()
    def _run(self) -> None:
        while self._average_some():
            pass

    def _average_some(self) -> bool:
        """Average what the first node says, as soon as it is final on all nodes; whether there will be more."""
        said = torch.zeros(len(self._parameters) + 1, dtype=torch.uint8)
        if self._exchange.is_first:
            said[-1] = self._prepare(lambda: bool(self._final & self._left))
            said[list(self._final & self._left if said[-1] == _State.GOES_ON else self._left)] = 1
        self._exchange.tell(said)
        self._refuse_failed(said)
        numbers = said[:-1].nonzero().flatten().tolist()
        goes_on = bool(said[-1] == _State.GOES_ON)
        self._prepare(lambda: goes_on and self._final.issuperset(numbers))
        # Where one node has no gradient, those of the others count as if it had zeros.
        has = self._has_gradients(numbers)
        self._exchange.merge(has)
        self._refuse_failed(has)
        numbers_averaged = [number for number in numbers if has[number]]
        self._averaged.update(numbers_averaged)
        self._average([self._parameters[number] for number in numbers_averaged])
        self._left.difference_update(numbers)
        return goes_on

    def _prepare(self, is_there: Callable[[], bool]) -> _State:
        """Prepare gradients as they become final until enough are there; whether all are, or the backward has failed."""
        while not is_there():
            with self._changed:
                self._changed.wait_for(lambda: self._coming or self._state is not _State.GOES_ON)
                if self._state is _State.HAS_FAILED or not self._coming:
                    return self._state
                final = self._coming.popleft()
            try:
                for event in final.after:
                    event.synchronize()
                final.prepare()
            except Exception as error:
                self._fail(error)
            self._final.update(final.numbers)
        return _State.GOES_ON

    def _has_gradients(self, numbers: Sequence[int]) -> Tensor:
        """Which of some parameters have a gradient on this node."""
        has = torch.zeros(len(self._parameters) + 1, dtype=torch.uint8)
        try:
            for number in numbers:
                gradient = self._gradient_of(self._parameters[number])
                if gradient is not None:
                    _refuse_sparse(gradient)
                    has[number] = 1
        except Exception as error:
            self._fail(error)
        has[-1] = _State.GOES_ON if self._state is _State.ENDS else self._state
        return has

    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put means into the places of gradients, which all nodes have or take for zeros, and have them taken."""
        means: dict[nn.Parameter, Tensor | None] = {}
        shared: list[Tensor] = []
        owned: list[tuple[Tensor, int]] = []
        for parameter in parameters:
            gradient = self._gradient_of(parameter)
            # Where another node has a new one, that of an earlier backward counts.
            gradient = parameter.grad if gradient is None else gradient
            if gradient is None:
                gradient = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            owner = self.division.owner_of(parameter) if self.division.need < Need.ALL else None
            if owner is None:
                shared.append(gradient)
            else:
                owned.append((gradient, owner))
            means[parameter] = gradient if owner in (None, self._exchange.rank) else None
        if not means:
            return
        self._exchange.average(shared)
        self._exchange.reduce([gradient for gradient, _ in owned], [owner for _, owner in owned])
        with self._changed:
            if self._state is not _State.HAS_FAILED:
                self._take(means)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._say(_State.HAS_FAILED)

    def _refuse_failed(self, message: Tensor) -> None:
        """End where this node has failed, or another one says that it has."""
        if message[-1] == _State.HAS_FAILED:
            raise self._failure or RuntimeError("the backward of one of them has failed")


def _let_have(means: Mapping[nn.Parameter, Tensor | None]) -> None:
    """Let parameters have means as their ``grad``."""
    for parameter, mean in means.items():
        parameter.grad = mean


def _refuse_sparse(gradient: Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise UnsupportedModelError(
            f"a parameter of shape {tuple(gradient.shape)} has a sparse gradient, which is not averaged over nodes: make "
            "dense ones, as with sparse=False"
        )

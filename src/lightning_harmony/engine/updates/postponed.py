"""The postponed update: asked for when a step ends, done pack by pack in the order in which the next forward needs them.

Optimizer state that stays on devices from one update to the next is back on the host when somebody may look.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_harmony.engine.devices.stream import Event, Urgency
from lightning_harmony.engine.lanes.ambient import AUTOCAST, apply
from lightning_harmony.engine.nodes.division import parameters_of
from lightning_harmony.engine.nodes.weights import DividedUpdate
from lightning_harmony.engine.updates.optimizer_twin import Clip, Share
from lightning_harmony.engine.updates.queue import Overlap, UpdateQueue, queue_for


class PostponedUpdate:
    """The update of parameters that goes on when a step has ended, in shares, which the queues take in turns.

    Args:
        queues: make it.
        overlap: where its seconds are counted.
    """

    def __init__(self, queues: Sequence[UpdateQueue], overlap: Overlap) -> None:
        self._queues = queues
        self._devices = [queue.device for queue in queues]
        self._overlap = overlap
        self._optimizer: Optimizer | None = None
        self._known: Collection[Tensor] = ()
        self._events: dict[nn.Parameter, Event] = {}
        self._watched: Optimizer | None = None
        self._handles: list[RemovableHandle] = []

    def let_state_stay(self, optimizer: Optimizer | None) -> None:
        """Say before an update whose state may stay on devices behind it; None if somebody may look at it.

        Then state that is there goes with its update, and the rest when that is finished.
        """
        if self._watched not in (None, optimizer) and optimizer is not None:
            self.finish()
        if optimizer is not None:
            self._watch(optimizer)
        for queue in self._queues:
            queue.streamed.home.is_open = optimizer is not None and queue.streamed.spares_the_bus

    def start(
        self,
        optimizer: Optimizer,
        order: Iterable[Sequence[nn.Parameter]],
        clip: Clip | None,
        *,
        waits: bool = False,
        state_may_stay: bool = False,
        divided: DividedUpdate | None = None,
    ) -> None:
        """Ask for it.

        Args:
            optimizer: one that `why_not_separable` finds nothing against. Its parameters' ``grad`` stays, clipped.
            order: parameters in shares, those first that are needed first. What isn't among them comes last.
            clip: changes the gradients of each share before they are used.
            waits: whether to return when all are updated.
            state_may_stay: whether nobody looks at optimizer state before the next update.
            divided: says what this node updates; None if it updates all.
        """
        waited, busy = self._overlap.waited_seconds, self._overlap.busy_seconds
        self.finish_parameters()
        self.let_state_stay(optimizer if state_may_stay else None)
        known = frozenset(optimizer.state)
        groups = enumerate(optimizer.param_groups)
        left = {p: number for number, group in groups for p in group["params"] if p.grad is not None}
        if divided is not None:
            others = [parameter for parameter in left if not divided.is_own(parameter)]
            if clip is not None and others:
                # Somebody may look at these gradients, too.
                clip(others)
            for parameter in others:
                del left[parameter]
        events: dict[nn.Parameter, Event] = {}
        surroundings = partial(_autocast_as, [kind.get() for kind in AUTOCAST])
        for number, parameters in enumerate([*order, list(left)]):
            members = {parameter: left.pop(parameter) for parameter in parameters if parameter in left}
            if members:
                share = Share(optimizer, members, surroundings)
                parameter = next(iter(members))
                queue = queue_for(self._queues, parameter, share.gradients[parameter], number)
                event = queue.submit(partial(_update, queue, share, clip), urgency=Urgency(number))
                events.update(dict.fromkeys(members, event))
        if divided is not None:
            events = divided.share(events, self._queues[0].streamed.disk.settle)
        self._follow(optimizer, events, known)
        if waits:
            self.finish_parameters()
            # Nothing else goes on meanwhile.
            self._overlap.waited_seconds = waited + self._overlap.busy_seconds - busy

    def follow(self, optimizer: Optimizer, events: dict[nn.Parameter, Event], known: Collection[Tensor]) -> None:
        """Take over what is under way.

        Args:
            optimizer: whose parameters are updated.
            events: when each of them is.
            known: the parameters that had a state before.
        """
        self.finish_parameters()
        self._follow(optimizer, events, known)

    def _follow(self, optimizer: Optimizer, events: dict[nn.Parameter, Event], known: Collection[Tensor]) -> None:
        if not events:
            return
        self._optimizer, self._known, self._events = optimizer, known, events
        self._watch(optimizer)

    def _watch(self, optimizer: Optimizer) -> None:
        """Complete its state before any code reads it, in any way."""
        if self._watched is not optimizer:
            self._forget()
            self._watched = optimizer
            self._handles = [
                optimizer.register_state_dict_pre_hook(lambda _: self.finish()),
                optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish()),
            ]

    @property
    def goes_on(self) -> bool:
        """Whether somebody may still wait for it."""
        return bool(self._events)

    def is_under_way(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether some of these parameters are not updated yet."""
        return bool(self._events) and not all(event.done() for event in self._of(parameters))

    def wait_for(self, parameters: Iterable[nn.Parameter], meanwhile: Callable[[], bool] = lambda: False) -> None:
        """Wait until these parameters are updated.

        Args:
            parameters: of the optimizer.
            meanwhile: called again and again, until it says that there is nothing left to do meanwhile.
        """
        if self._events and (events := self._of(parameters)):
            self._overlap.wait_for(events, self._devices, meanwhile)

    def _of(self, parameters: Iterable[nn.Parameter]) -> list[Event]:
        return list(dict.fromkeys(self._events[p] for p in parameters if p in self._events))

    def finish(self) -> None:
        """Wait until all parameters are updated, and bring optimizer state to the host; raise what failed."""
        for queue in self._queues:
            queue.streamed.home.is_open = False
        self.finish_parameters()

    def finish_parameters(self) -> None:
        """Wait until all parameters are updated; raise what failed. Optimizer state stays that may."""
        try:
            self._finish_parameters()
        finally:
            if not any(queue.streamed.home.is_open for queue in self._queues):
                for queue in self._queues:
                    queue.bring_back_state()
                self._forget()

    def _finish_parameters(self) -> None:
        events = list(dict.fromkeys(self._events.values()))
        optimizer, self._optimizer = self._optimizer, None
        known, self._known = self._known, ()
        self._events = {}
        if optimizer is None:
            return
        try:
            self._overlap.wait_for(events, self._devices, then=self._queues[0].streamed.disk.settle)
        finally:
            # Also what comes after a share that failed.
            for queue in self._queues:
                queue.drain()
            sort_state(optimizer, known)

    def drain(self) -> None:
        """Wait until all parameters are updated, on the way out of another error."""
        with suppress(Exception):
            self.finish()

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._watched = [], None


@contextmanager
def _autocast_as(values: Sequence[Any]) -> Iterator[None]:
    """The context in which autocast does in a queue's thread what it did in the one that asked."""
    with ExitStack() as stack:
        apply(stack, AUTOCAST, values)
        yield


def _update(queue: UpdateQueue, share: Share, clip: Clip | None) -> None:
    with queue.updating(share.parameters):
        queue.streamed.update(share, clip, keeps_gradients=True)


def sort_state(optimizer: Optimizer, known: Collection[Tensor]) -> None:
    """Bring what an update added to an optimizer's state into the order in which a step over all parameters adds it."""
    state = optimizer.state
    added = [p for p in parameters_of(optimizer) if p in state and p not in known]
    if any(ours is not theirs for ours, theirs in zip(list(state)[len(known) :], added, strict=True)):
        for parameter in added:
            state[parameter] = state.pop(parameter)

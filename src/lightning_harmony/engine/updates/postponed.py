"""The postponed update: asked for when a step ends, done pack by pack in the order in which the next forward needs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_harmony.engine.devices.stream import Event, HostStream, Urgency
from lightning_harmony.engine.updates.optimizer_twin import Clip, Share
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate

# Told the parameters of a piece of an update, and its beginning and end by `time.perf_counter`.
UpdateHeard = Callable[[Iterable[nn.Parameter], float, float], None]
# While it waits for an update, the host looks this often whether there is something else to do.
_GLANCE_SECONDS = 2e-4


class Recorder(Protocol):
    """What tells when a device has nothing left to do."""

    def record(self) -> Event:
        """The event of all that was launched so far."""


@dataclass
class Running:
    """An update that is made.

    Attributes:
        parameters: what it updates.
        since: when it began, or went on, by `time.perf_counter`.
        seconds: what it took before.
    """

    parameters: Iterable[nn.Parameter]
    since: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0


@dataclass
class Overlap:
    """How long updates took, and how long they held up all else.

    Attributes:
        busy_seconds: what updates took.
        waited_seconds: how much of that all devices, with nothing else to do, waited for.
        on_update: told each piece of an update.
        failure: what an update that was waited for has raised; None if none has.
    """

    busy_seconds: float = 0.0
    waited_seconds: float = 0.0
    on_update: UpdateHeard = lambda parameters, start, end: None
    failure: Exception | None = None

    _running: Running | None = None

    @contextmanager
    def updating(self, parameters: Iterable[nn.Parameter]) -> Iterator[Running]:
        """The context of an update, in the thread that does it. A more urgent one may come in the middle of it."""
        interrupted = self._running
        if interrupted is not None:
            self._pause(interrupted)
        self._running = running = Running(parameters)
        try:
            yield running
        finally:
            self._pause(running)
            self._running = interrupted
            if interrupted is not None:
                interrupted.since = time.perf_counter()

    def _pause(self, running: Running) -> None:
        end = time.perf_counter()
        running.seconds += end - running.since
        self.busy_seconds += end - running.since
        self.on_update(running.parameters, running.since, end)

    def take_hidden(self) -> float:
        """The share of the updates' seconds in which other work went on, since this was last asked; 0 without an update."""
        busy, waited = self.busy_seconds, self.waited_seconds
        self.busy_seconds = self.waited_seconds = 0.0
        return max(1.0 - waited / busy, 0.0) if busy > 0.0 else 0.0

    def wait_for(
        self,
        events: Sequence[Event],
        devices: Sequence[Recorder],
        meanwhile: Callable[[], bool] = lambda: False,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Block until updates are done; what they raised is raised here.

        Args:
            events: of the updates.
            devices: what may have something else to do.
            meanwhile: called again and again, until it says that there is nothing left to do meanwhile.
            then: waits for what belongs to them besides.
        """
        computed = [device.record() for device in devices]
        idle_since: float | None = None
        while not all(event.done() for event in events):
            if idle_since is None and all(event.done() for event in computed):
                idle_since = time.perf_counter()
            if not meanwhile() and idle_since is not None:
                break
            time.sleep(_GLANCE_SECONDS)
        try:
            for event in events:
                event.synchronize()
            then()
        except Exception as error:
            self.failure = error
            raise
        if idle_since is not None:
            self.waited_seconds += time.perf_counter() - idle_since


class PostponedUpdate:
    """The update of parameters that goes on when a step has ended, in shares, on a stream of its own.

    Args:
        stream: runs it.
        streamed: makes it.
        overlap: where its seconds are counted.
    """

    def __init__(self, stream: HostStream, streamed: StreamedUpdate, overlap: Overlap) -> None:
        self._stream = stream
        self._streamed = streamed
        self._overlap = overlap
        self._optimizer: Optimizer | None = None
        self._known: Collection[Tensor] = ()
        self._events: dict[nn.Parameter, Event] = {}
        self._handles: list[RemovableHandle] = []

    def start(self, optimizer: Optimizer, order: Iterable[Sequence[nn.Parameter]], clip: Clip | None) -> None:
        """Ask for it.

        Args:
            optimizer: one that `why_not_separable` finds nothing against. Its parameters' ``grad`` stays, clipped.
            order: parameters in shares, those first that are needed first. What isn't among them comes last.
            clip: changes the gradients of each share before they are used.
        """
        self._ask(optimizer, order, clip)

    def make_at_once(self, optimizer: Optimizer, order: Iterable[Sequence[nn.Parameter]], clip: Clip | None) -> None:
        """As `start`, and wait for it."""
        waited, busy = self._overlap.waited_seconds, self._overlap.busy_seconds
        self._ask(optimizer, order, clip)
        self.finish()
        # Nothing else goes on meanwhile.
        self._overlap.waited_seconds = waited + self._overlap.busy_seconds - busy

    def _ask(self, optimizer: Optimizer, order: Iterable[Sequence[nn.Parameter]], clip: Clip | None) -> None:
        self.finish()
        known = frozenset(optimizer.state)
        groups = enumerate(optimizer.param_groups)
        left = {p: number for number, group in groups for p in group["params"] if p.grad is not None}
        events: dict[nn.Parameter, Event] = {}
        for number, parameters in enumerate([*order, list(left)]):
            members = {parameter: left.pop(parameter) for parameter in parameters if parameter in left}
            if members:
                share = Share(optimizer, members)
                event = self._stream.submit(partial(self._update, share, clip), urgency=Urgency(number))
                events.update(dict.fromkeys(members, event))
        self._follow(optimizer, events, known)

    def _update(self, share: Share, clip: Clip | None) -> None:
        with self._overlap.updating(share.parameters):
            self._streamed.update(share, clip, keeps_gradients=True)

    def follow(self, optimizer: Optimizer, events: dict[nn.Parameter, Event], known: Collection[Tensor]) -> None:
        """Take over what is under way.

        Args:
            optimizer: whose parameters are updated.
            events: when each of them is.
            known: the parameters that had a state before.
        """
        self.finish()
        self._follow(optimizer, events, known)

    def _follow(self, optimizer: Optimizer, events: dict[nn.Parameter, Event], known: Collection[Tensor]) -> None:
        if not events:
            return
        self._optimizer, self._known, self._events = optimizer, known, events
        # Its state is complete for whoever asks for it, by whatever way.
        self._handles = [
            optimizer.register_state_dict_pre_hook(lambda _: self.finish()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish()),
        ]

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
            self._overlap.wait_for(events, self._streamed.devices, meanwhile)

    def _of(self, parameters: Iterable[nn.Parameter]) -> list[Event]:
        return list(dict.fromkeys(self._events[p] for p in parameters if p in self._events))

    def finish(self) -> None:
        """Wait until all parameters are updated; raise what failed."""
        events = list(dict.fromkeys(self._events.values()))
        optimizer, self._optimizer = self._optimizer, None
        known, self._known = self._known, ()
        self._forget()
        if optimizer is None:
            return
        try:
            self._overlap.wait_for(events, self._streamed.devices, then=self._streamed.settle)
        finally:
            # Also what comes after a share that failed.
            self._stream.submit(lambda: None).synchronize()
            sort_state(optimizer, known)

    def drain(self) -> None:
        """Wait until all parameters are updated, on the way out of another error."""
        with suppress(Exception):
            self.finish()

    def _forget(self) -> None:
        self._events = {}
        for handle in self._handles:
            handle.remove()
        self._handles = []


def sort_state(optimizer: Optimizer, known: Collection[Tensor]) -> None:
    """Bring what an update added to an optimizer's state into the order in which a step over all parameters adds it."""
    state = optimizer.state
    added = [p for group in optimizer.param_groups for p in group["params"] if p in state and p not in known]
    if any(ours is not theirs for ours, theirs in zip(list(state)[len(known) :], added, strict=True)):
        for parameter in added:
            state[parameter] = state.pop(parameter)

"""The postponed update: asked for when a step ends, done pack by pack in the order in which the next forward needs them."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_harmony.engine.devices.cores import run_anywhere
from lightning_harmony.engine.devices.stream import Event, HostEvent, HostStream
from lightning_harmony.engine.measure.profile import Speed

# Changes the gradients of some parameters in place, whichever they are.
Clip = Callable[[list[nn.Parameter]], None]
# The optimizer's state of some parameters.
States = Mapping[nn.Parameter, dict[str, Any]]
# Told the parameters of a piece of an update, and its beginning and end by `time.perf_counter`.
UpdateHeard = Callable[[Iterable[nn.Parameter], float, float], None]
# While it waits for an update, the host looks this often whether there is something else to do.
_GLANCE_SECONDS = 2e-4
# Threads that compute norms, each that of one gradient of at least so many bytes.
_MOST_NORM_THREADS, _LARGE_BYTES = 8, 1 << 20


class Recorder(Protocol):
    """What tells when a device has nothing left to do."""

    def record(self) -> Event:
        """The event of all that was launched so far."""


@dataclass
class Overlap:
    """How long updates took, and how long they held up all else.

    Attributes:
        busy_seconds: what updates took.
        waited_seconds: how much of that all devices, with nothing else to do, waited for.
        spared_threads: how many of torch's threads an update leaves to who launches the devices' work.
        on_update: told each piece of an update.
        has_failed: whether an update that was waited for has raised.
    """

    busy_seconds: float = 0.0
    waited_seconds: float = 0.0
    spared_threads: int = 0
    on_update: UpdateHeard = lambda parameters, start, end: None
    has_failed: bool = False

    @contextmanager
    def updating(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """The context of a piece of an update, in the thread that does it."""
        start = time.perf_counter()
        before = torch.get_num_threads()
        if self.spared_threads:
            # Of this thread alone: other threads keep theirs.
            torch.set_num_threads(max(before - self.spared_threads, 1))
        try:
            yield
        finally:
            if self.spared_threads:
                torch.set_num_threads(before)
            end = time.perf_counter()
            self.busy_seconds += end - start
            self.on_update(parameters, start, end)

    def take_hidden(self) -> float:
        """The share of the updates' seconds in which other work went on, since this was last asked; 0 without an update."""
        busy, waited = self.busy_seconds, self.waited_seconds
        self.busy_seconds = self.waited_seconds = 0.0
        return max(1.0 - waited / busy, 0.0) if busy > 0.0 else 0.0

    def wait_for(
        self, events: Sequence[Event], devices: Sequence[Recorder], meanwhile: Callable[[], bool] = lambda: False
    ) -> None:
        """Block until updates are done; what they raised is raised here.

        Args:
            events: of the updates.
            devices: what may have something else to do.
            meanwhile: called again and again, until it says that there is nothing left to do meanwhile.
        """
        computed = [device.record() for device in devices]
        idle_since: float | None = None
        # What a device has updated is but on its way here.
        updating = [event for event in events if isinstance(event, HostEvent)]
        while not all(event.done() for event in updating):
            if idle_since is None and all(event.done() for event in computed):
                idle_since = time.perf_counter()
            if not meanwhile() and idle_since is not None:
                break
            time.sleep(_GLANCE_SECONDS)
        try:
            for event in events:
                event.synchronize()
        except Exception:
            self.has_failed = True
            raise
        if idle_since is not None:
            self.waited_seconds += time.perf_counter() - idle_since


def by_norm(max_norm: float, total_norm: Tensor) -> Clip | None:
    """What `torch.nn.utils.clip_grad_norm_` does to gradients once it knows their norm; None where that changes nothing."""
    coefficient = max_norm / (total_norm + 1e-6)
    if coefficient >= 1.0:
        # Every gradient times one: not to read and write them all for that.
        return None
    return partial(_multiply, factor=coefficient)


def _multiply(parameters: list[nn.Parameter], factor: Tensor) -> None:
    # A number on the host may multiply what is on any device: to bring it there, torch's own function would wait for it.
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def by_value(limit: float) -> Clip:
    """What `torch.nn.utils.clip_grad_value_` does to gradients."""
    return partial(torch.nn.utils.clip_grad_value_, clip_value=limit)


@dataclass(frozen=True)
class _Norm:
    gradient: Tensor
    version: int
    num_threads: int
    value: Tensor


class Norms:
    """Norms of gradients, each computed when its gradient arrives; their norm is that of `torch.nn.utils.get_total_norm`.

    Torch computes the norm of a tensor in one thread, which takes long for gigabytes. Here several do, each that of a tensor.

    Args:
        spared_cores: of the processor, where none of them runs.
    """

    def __init__(self, spared_cores: Collection[int] = ()) -> None:
        self._known: dict[nn.Parameter, _Norm] = {}
        num_threads = min(_MOST_NORM_THREADS, os.cpu_count() or 1)
        # Threads begin when there is work for them.
        begin = partial(run_anywhere, spared_cores)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="harmony-norms", initializer=begin)

    def note(self, parameters: Sequence[nn.Parameter]) -> None:
        """Compute the norm of the gradient of each."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # The number of threads decides in which order a norm's squares are summed.
        num_threads = torch.get_num_threads()
        for parameter, gradient, value in zip(parameters, gradients, self._computed(gradients), strict=True):
            self._known[parameter] = _Norm(gradient, gradient._version, num_threads, value)

    def _computed(self, gradients: list[Tensor]) -> list[Tensor]:
        """Of each, whatever the thread: the bits are those that torch computes in its one."""
        large = [gradient for gradient in gradients if _is_large(gradient)]
        small = [gradient for gradient in gradients if not _is_large(gradient)]
        of_large = self._pool.map(lambda gradient: torch._foreach_norm([gradient], 2.0)[0], large)
        of_small = iter(torch._foreach_norm(small, 2.0) if small else ())
        return [next(of_large if _is_large(gradient) else of_small) for gradient in gradients]

    def total(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of all gradients together."""
        having = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in having if parameter.grad is not None]
        if len({gradient.dtype for gradient in gradients}) != 1:
            return torch.nn.utils.get_total_norm(gradients)
        with torch.no_grad():
            self.note([parameter for parameter in having if not self._is_known(parameter)])
            total: Tensor = torch.linalg.vector_norm(
                torch.stack([self._known[parameter].value for parameter in having]), 2.0
            )
        return total

    def _is_known(self, parameter: nn.Parameter) -> bool:
        known, gradient = self._known.get(parameter), parameter.grad
        if known is None or gradient is None or known.gradient is not gradient:
            return False
        return known.version == gradient._version and known.num_threads == torch.get_num_threads()

    def clear(self) -> None:
        """Forget them, and let their gradients go."""
        self._known = {}

    def close(self) -> None:
        """Join the threads."""
        self._pool.shutdown(wait=True)


def _is_large(gradient: Tensor) -> bool:
    return gradient.numel() * gradient.element_size() >= _LARGE_BYTES


class Share:
    """Some parameters of an optimizer, which are updated by themselves.

    It takes what it needs when it is made: the gradients, if they are there, and the hyperparameters that a scheduler may
    change at once. The optimizer itself stays untouched, all but the tensors of its state.

    Args:
        optimizer: one that `why_not_separable` finds nothing against.
        groups: the parameters, with the number of the group that each is in.

    Attributes:
        stand_ins: for each of the parameters, one with the same memory and gradient, whose ``grad`` nobody else takes away.
    """

    def __init__(self, optimizer: Optimizer, groups: Mapping[nn.Parameter, int]) -> None:
        self.stand_ins = {parameter: _stand_in(parameter) for parameter in groups}
        self._optimizer = optimizer
        self._twin = twin_of(optimizer, groups, self.stand_ins)

    @property
    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Of the parameters that have one."""
        return {p: stand_in.grad for p, stand_in in self.stand_ins.items() if stand_in.grad is not None}

    @property
    def states(self) -> States:
        """Of each parameter, the optimizer's state: what changes in it has changed for the optimizer."""
        return {parameter: self._twin.state[stand_in] for parameter, stand_in in self.stand_ins.items()}

    def elsewhere(
        self, tensors: Mapping[nn.Parameter, Tensor], gradients: Mapping[nn.Parameter, Tensor], states: States
    ) -> Optimizer:
        """An optimizer that makes the same step of the same parameters where these tensors are.

        Args:
            tensors: where each parameter is, and maybe others.
            gradients: those that there are.
            states: of each parameter, the optimizer's state. What is a tensor there is changed in place.
        """
        there = {stand_in: nn.Parameter(tensors[p], p.requires_grad) for p, stand_in in self.stand_ins.items()}
        numbers = {p: number for number, group in enumerate(self._twin.param_groups) for p in group["params"]}
        twin = twin_of(self._twin, numbers, there)
        for parameter, stand_in in self.stand_ins.items():
            there[stand_in].grad = gradients.get(parameter)
            twin.state[there[stand_in]] = states[parameter]
        return twin

    def update(self, clip: Clip | None) -> None:
        """Clip the gradients, and step."""
        if clip is not None:
            clip(list(self.stand_ins.values()))
        self._twin.step()
        for parameter, stand_in in self.stand_ins.items():
            if self._twin.state.get(stand_in):
                self._optimizer.state[parameter] = self._twin.state[stand_in]


class OpenUpdate:
    """The event of an update that a device may make, as long as nobody waits for it: then the host does.

    Args:
        share: what is updated.
        clip: changes the gradients before they are used; None if they are used as they are.
        on_host: has the host make it.
    """

    def __init__(self, share: Share, clip: Clip | None, on_host: Callable[[], Event]) -> None:
        self.share = share
        self.clip = clip
        self._on_host = on_host
        self._event: Event | None = None

    @property
    def is_open(self) -> bool:
        """Whether nobody makes it yet."""
        return self._event is None

    def made_by(self, event: Event) -> None:
        """A device makes it.

        Args:
            event: when the host has what it changes.
        """
        assert self.is_open
        self._event = event

    def made(self) -> Event:
        """The end of the update, which the host makes if nobody does."""
        if self._event is None:
            self._event = self._on_host()
        return self._event

    def wait(self) -> None:
        """Order what the caller computes next after it."""
        self.made().wait()

    def synchronize(self) -> None:
        """Block until it is done."""
        self.made().synchronize()

    def done(self) -> bool:
        """Whether it is done."""
        return self._event is not None and self._event.done()


class PostponedUpdate:
    """The update of parameters that goes on when a step has ended, in shares, on a stream of its own.

    Args:
        stream: runs it.
        devices: what runs meanwhile.
        overlap: where its seconds are counted.

    Attributes:
        fastest: of what the host has updated, in the step in which that was fastest.
    """

    def __init__(self, stream: HostStream, devices: Sequence[Recorder], overlap: Overlap) -> None:
        self.fastest, self._speed_of_step = Speed(), Speed()
        self._stream = stream
        self._devices = devices
        self._overlap = overlap
        self._optimizer: Optimizer | None = None
        self._known: Collection[Tensor] = ()
        self._events: dict[nn.Parameter, Event] = {}
        self._handles: list[RemovableHandle] = []

    def start(
        self,
        optimizer: Optimizer,
        order: Iterable[Sequence[nn.Parameter]],
        clip: Clip | None,
        left_to_devices: Collection[int] = (),
    ) -> None:
        """Ask for it.

        Args:
            optimizer: one that `why_not_separable` finds nothing against. Its parameters' ``grad`` stays, clipped.
            order: parameters in shares, those first that are needed first. What isn't among them comes last.
            clip: changes the gradients of each share before they are used.
            left_to_devices: the numbers of the shares that stay open for a device.
        """
        self.finish()
        known = frozenset(optimizer.state)
        groups = enumerate(optimizer.param_groups)
        left = {p: number for number, group in groups for p in group["params"] if p.grad is not None}
        events: dict[nn.Parameter, Event] = {}
        for number, parameters in enumerate([*order, list(left)]):
            members = {parameter: left.pop(parameter) for parameter in parameters if parameter in left}
            if not members:
                continue
            share = Share(optimizer, members)
            # What is asked for late may be needed early.
            on_host = partial(self._stream.submit, partial(self._update, share, clip), rank=number)
            event: Event = OpenUpdate(share, clip, on_host) if number in left_to_devices else on_host()
            events.update(dict.fromkeys(members, event))
        self._follow(optimizer, events, known)

    def _update(self, share: Share, clip: Clip | None) -> None:
        start = time.perf_counter()
        with self._overlap.updating(share.stand_ins):
            share.update(clip)
        self._speed_of_step.note(sum(parameter.nbytes for parameter in share.stand_ins), time.perf_counter() - start)

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

    def open_for(self, parameters: Iterable[nn.Parameter]) -> OpenUpdate | None:
        """The update of these parameters, if it is one that nobody makes yet."""
        events = self._of(parameters) if self._events else []
        only = events[0] if len(events) == 1 else None
        return only if isinstance(only, OpenUpdate) and only.is_open else None

    def is_of(self, parameters: Iterable[nn.Parameter], event: Event) -> bool:
        """Whether the update of all of these ends with an event, and nobody has waited for all updates since."""
        return all(self._events.get(parameter) is event for parameter in parameters)

    def wait_for(self, parameters: Iterable[nn.Parameter], meanwhile: Callable[[], bool] = lambda: False) -> None:
        """Wait until these parameters are updated.

        Args:
            parameters: of the optimizer.
            meanwhile: called again and again, until it says that there is nothing left to do meanwhile.
        """
        if self._events and (events := self._of(parameters)):
            self._overlap.wait_for(_made(events), self._devices, meanwhile)

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
            self._overlap.wait_for(_made(events), self._devices)
        finally:
            # Also what comes after a share that failed.
            self._stream.submit(lambda: None).synchronize()
            sort_state(optimizer, known)
            self.fastest.keep_faster(self._speed_of_step)
            self._speed_of_step = Speed()

    def drain(self) -> None:
        """Wait until all parameters are updated, on the way out of another error."""
        with suppress(Exception):
            self.finish()

    def _forget(self) -> None:
        self._events = {}
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _made(events: Iterable[Event]) -> list[Event]:
    """The ends of updates. From here on, the host makes those that nobody does, all of them."""
    return [event.made() if isinstance(event, OpenUpdate) else event for event in events]


def sort_state(optimizer: Optimizer, known: Collection[Tensor]) -> None:
    """Bring what an update added to an optimizer's state into the order in which a step over all parameters adds it."""
    state = optimizer.state
    added = [p for group in optimizer.param_groups for p in group["params"] if p in state and p not in known]
    if any(ours is not theirs for ours, theirs in zip(list(state)[len(known) :], added, strict=True)):
        for parameter in added:
            state[parameter] = state.pop(parameter)


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """The same memory and gradient, as a parameter whose `grad` nobody else takes away."""
    stand_in = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    stand_in.grad = parameter.grad
    return stand_in


def twin_of(
    optimizer: Optimizer, groups: Mapping[nn.Parameter, int], stand_ins: Mapping[nn.Parameter, nn.Parameter]
) -> Optimizer:
    """An optimizer for some parameters, by the groups that they are in, with hyperparameters of its own."""
    chosen: dict[int, list[nn.Parameter]] = defaultdict(list)
    for parameter, number in groups.items():
        chosen[number].append(stand_ins[parameter])
    twin: Optimizer = object.__new__(type(optimizer))
    # Without the `step` that a scheduler puts on the optimizer to see whether it is called.
    twin.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    twin.state = defaultdict(dict)
    twin.state.update({stand_in: optimizer.state[p] for p, stand_in in stand_ins.items() if p in optimizer.state})
    twin.param_groups = [
        {name: _kept(value) for name, value in optimizer.param_groups[number].items()} | {"params": members}
        for number, members in sorted(chosen.items())
    ]
    return twin


def _kept(value: Any) -> Any:
    """A hyperparameter as it is now: a scheduler writes into one that is a tensor."""
    return value.clone() if isinstance(value, Tensor) else value

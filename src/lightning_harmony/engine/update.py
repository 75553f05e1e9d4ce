"""The update: gradients become the parameters' ``grad``, and pack by pack, just in time, an optimizer step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_harmony.engine.host_store import HostPool, lies_in, num_users
from lightning_harmony.engine.postponed import Clip, Norms, Overlap, PostponedUpdate, Recorder, UpdateHeard, sort_state
from lightning_harmony.engine.profile import Speed
from lightning_harmony.engine.stream import Event, HostStream
from lightning_harmony.engine.swap import HostGradients

# Optimizers that update each parameter from its own gradient and state alone, so that a step pack by pack is the same
# step. (LBFGS is not one: it searches along all parameters together.)
SEPARABLE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
        "SGD",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip


def why_not_separable(optimizer: Optimizer) -> str | None:
    """The reason why an optimizer can't step pack by pack; None if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in SEPARABLE:
        return f"{name} is not known to update each parameter on its own"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has step hooks"
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "step hooks are registered for all optimizers"
    return None


@dataclass
class _Part:
    """One contribution to the gradient of a parameter."""

    order: tuple[int, int]
    gradient: Tensor
    source: HostGradients


# How many packs' gradients may be on their way into an update just in time. The fused packs, up to a quarter of them, become
# final together; what waits beyond those would only take host memory, as the device's work is launched far ahead.
RING = 8


class Updater:
    """Collects the gradients of a step on the host, and steps the optimizer where that may be done just in time.

    Args:
        pool: where the buffers of gradients return to.
        devices: what computes meanwhile.
        spared_threads: how many of torch's threads updates leave to who launches the devices' work.
        on_update: told the parameters of each piece of an update, and its beginning and end by `time.perf_counter`.

    Attributes:
        overlap: of all updates.
        speed: of the updates just in time in the step in which they were fastest. The first ones share the host with its
            making of buffers.
        norms: of the gradients of this step, where they were asked for.
        postponed: the update of the step before, where it runs under this one's forward.
    """

    def __init__(
        self,
        pool: HostPool,
        devices: Sequence[Recorder],
        spared_threads: int = 0,
        on_update: UpdateHeard = lambda parameters, start, end: None,
    ) -> None:
        self.speed, self._speed_of_step = Speed(), Speed()
        self._pool = pool
        self._devices = devices
        # A thread of its own: the update of a pack runs under the backward of the next.
        self._stream = HostStream("update")
        self.overlap = Overlap(spared_threads=spared_threads, on_update=on_update)
        self.norms = Norms()
        self.postponed = PostponedUpdate(self._stream, devices, self.overlap)
        self._optimizer: Optimizer | None = None
        self._clip: Clip | None = None
        self._with_norms = False
        self._known: frozenset[Tensor] = frozenset()
        self._held_back: list[tuple[Callable[[], None], list[Event]]] | None = None
        self._reuses = True
        self._places: dict[nn.Parameter, tuple[int, int]] = {}
        self._num_owners: dict[nn.Parameter, int] = {}
        self._parts: dict[nn.Parameter, list[_Part]] = {}
        self._unused: dict[int, int] = {}
        self._held: list[tuple[HostGradients, int]] = []
        self._submitted: list[Event] = []

    def begin(
        self,
        optimizer: Optimizer | None,
        packs: Iterable[Sequence[nn.Parameter]],
        *,
        clip: Clip | None = None,
        with_norms: bool = False,
        hold_back: bool = False,
    ) -> None:
        """Begin a step.

        Args:
            optimizer: the one to step just in time; None if gradients are only to be collected.
            packs: the parameters of each pack that `deliver` will be called for.
            clip: changes gradients before they are used just in time.
            with_norms: whether to compute the norm of each gradient as it is collected.
            hold_back: whether nothing may change before `finish`. Then each buffer goes as it is used: nobody needs them all
                once more.
        """
        # A step that failed never came to its end: what it left must not run into this one.
        self.drain()
        self._submitted = []
        self._held_back, self._reuses = [] if hold_back else None, not hold_back
        self._optimizer, self._clip, self._with_norms = optimizer, clip, with_norms
        self._known = frozenset[Tensor]() if optimizer is None else frozenset(optimizer.state)
        self.norms.clear()
        self._parts = defaultdict(list)
        self._num_owners = defaultdict(int)
        for parameters in packs:
            for parameter in parameters:
                self._num_owners[parameter] += 1
        self._places = {} if optimizer is None else _places(optimizer)

    def deliver(self, parameters: Sequence[nn.Parameter], gradients: Sequence[HostGradients]) -> None:
        """Take the final gradients of a pack; those parameters that no other pack owns are ready."""
        for source in gradients:
            self._unused[id(source)] = len(source.sums)
            for (layer, parameter), gradient in source.sums.items():
                self._parts[parameter].append(_Part((layer.index, -source.use), gradient, source))
        ready = []
        for parameter in parameters:
            self._num_owners[parameter] -= 1
            if self._num_owners[parameter] == 0 and parameter in self._parts:
                ready.append(parameter)
        parts = [self._parts.pop(parameter) for parameter in ready]
        if ready:
            events = {id(part.source): part.source.event for several in parts for part in several}
            self._submit(lambda: self._take(ready, parts), list(events.values()))

    def _submit(self, work: Callable[[], None], after: list[Event]) -> None:
        if self._held_back is not None:
            self._held_back.append((work, after))
        else:
            self._submitted.append(self._stream.submit(work, after))

    def await_room(self) -> None:
        """Wait until the gradients of few packs alone wait for an update just in time."""
        if self._optimizer is not None and self._held_back is None and len(self._submitted) >= RING:
            self._submitted[-RING].synchronize()

    def finish(self) -> None:
        """Wait until every gradient is in place and every update is done; raise what the first of them raised."""
        held_back, self._held_back = self._held_back or [], None
        self._submitted += [self._stream.submit(work, after) for work, after in held_back]
        held_back.clear()
        submitted, self._submitted = self._submitted, []
        try:
            self.overlap.wait_for(submitted, self._devices)
        finally:
            self.drain()
            self.speed.keep_faster(self._speed_of_step)
            self._speed_of_step = Speed()
            optimizer, self._optimizer = self._optimizer, None
            if optimizer is not None:
                sort_state(optimizer, self._known)

    def drain(self) -> None:
        """Wait until nothing is under way, on the way out of an error or before the next step."""
        self._stream.submit(lambda: None).synchronize()

    def _take(self, parameters: Sequence[nn.Parameter], parts: Sequence[list[_Part]]) -> None:
        for parameter, contributions in zip(parameters, parts, strict=True):
            _set_gradient(parameter, contributions)
        if self._optimizer is not None:
            self._step(self._optimizer, parameters)
        elif self._with_norms:
            self.norms.note(parameters)
        for contributions in parts:
            for part in contributions:
                self._use_up(part.source)
        # Where sums include those of earlier batches, the buffers of these are free.
        self.reclaim()

    def _step(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        start = time.perf_counter()
        with self.overlap.updating(parameters), _only(optimizer, self._places, parameters):
            if self._clip is not None:
                self._clip(list(parameters))
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        # The first step of all, the one that is held back, also makes the state.
        if self._reuses:
            self._speed_of_step.note(sum(p.numel() * p.element_size() for p in parameters), time.perf_counter() - start)

    def _use_up(self, source: HostGradients) -> None:
        self._unused[id(source)] -= 1
        if self._unused[id(source)] > 0:
            return
        del self._unused[id(source)]
        if self._optimizer is None:
            grads = [parameter.grad for _, parameter in source.sums if parameter.grad is not None]
            num_grads = sum(lies_in(gradient, source.buffer) for gradient in grads)
            self._held.append((source, num_users(source.buffer) - num_grads))
        elif self._reuses:
            self._pool.give(source.buffer, None)

    def reclaim(self) -> None:
        """Take back the buffers of gradients that nobody has any more, neither a parameter nor the user."""
        held, self._held = self._held, []
        for source, our_uses in held:
            if num_users(source.buffer) > our_uses:
                self._held.append((source, our_uses))
            else:
                self._pool.give(source.buffer, None)

    def close(self) -> None:
        """Finish what was asked for and join the thread."""
        self.postponed.drain()
        self._stream.close()


def _set_gradient(parameter: nn.Parameter, parts: list[_Part]) -> None:
    parts.sort(key=lambda part: part.order)
    total = parts[0].gradient
    for part in parts[1:]:
        total.add_(part.gradient)
    includes_earlier = any(parameter in part.source.includes_earlier for part in parts)
    if parameter.grad is not None and not includes_earlier:
        parameter.grad.add_(total)
    else:
        # A tensor of its own: whoever keeps it is seen to use the buffer.
        parameter.grad = total.detach()


def _places(optimizer: Optimizer) -> dict[nn.Parameter, tuple[int, int]]:
    """Group and position of each parameter."""
    return {
        parameter: (number, position)
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }


@contextmanager
def _only(
    optimizer: Optimizer, places: dict[nn.Parameter, tuple[int, int]], parameters: Iterable[nn.Parameter]
) -> Iterator[None]:
    """Let an optimizer have only these parameters for a moment."""
    groups = optimizer.param_groups
    full = [group["params"] for group in groups]
    chosen = _by_group(places, parameters)
    try:
        for number, members in chosen.items():
            groups[number]["params"] = members
        optimizer.param_groups = [groups[number] for number in sorted(chosen)]
        yield
    finally:
        optimizer.param_groups = groups
        for group, members in zip(groups, full, strict=True):
            group["params"] = members


def _by_group(
    places: dict[nn.Parameter, tuple[int, int]], parameters: Iterable[nn.Parameter]
) -> dict[int, list[nn.Parameter]]:
    chosen: dict[int, list[nn.Parameter]] = defaultdict(list)
    for parameter in sorted((p for p in parameters if p in places), key=lambda p: places[p]):
        chosen[places[parameter][0]].append(parameter)
    return chosen

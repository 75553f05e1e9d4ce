"""The update: gradients become the parameters' ``grad``, and pack by pack, just in time, an optimizer step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_harmony.engine.devices.stream import Event, HostEvent, Urgency, wait_for_one
from lightning_harmony.engine.measure.profile import Speed, UpdateSpeeds
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.pack import SummedGradients
from lightning_harmony.engine.nodes.averaging import Averaging
from lightning_harmony.engine.nodes.weights import DividedUpdate
from lightning_harmony.engine.updates.averaged import AveragedGradients
from lightning_harmony.engine.updates.gradient_buffers import Contribution, GradientBuffers, total
from lightning_harmony.engine.updates.norms import Norms
from lightning_harmony.engine.updates.optimizer_twin import Clip, Share
from lightning_harmony.engine.updates.postponed import PostponedUpdate, sort_state
from lightning_harmony.engine.updates.queue import Overlap, UpdateHeard, UpdateQueue, queue_for
from lightning_harmony.engine.updates.separable_optimizers import only, why_not_separable
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from lightning_harmony.plan.values.host_need import RING


@dataclass(frozen=True)
class StepUpdate:
    """What is asked of the update of a step.

    Attributes:
        optimizer: the one to step just in time; None if gradients are only to be collected.
        clip: changes gradients before they are used just in time.
        with_norms: whether to compute the norm of each gradient as it is collected, for who will ask for it.
        may_outlast: whether updates just in time may go on when the step has ended, until the next forward, as one does that
            is postponed: code that needs parameters then asks `postponed` first. The optimizer is one that
            `why_not_separable` finds nothing against.
        state_may_stay: whether nobody looks at optimizer state before the next update just in time.
        reuses: whether the buffers of gradients that are used up are for those to come; the updater says so.
        separable: whether each parameter can be updated by itself, so that nobody sees the optimizer do it; the updater says
            so. Of others, who insists on an update just in time has the optimizer itself step.
    """

    optimizer: Optimizer | None = None
    clip: Clip | None = None
    with_norms: bool = False
    may_outlast: bool = False
    state_may_stay: bool = False
    reuses: bool = True
    separable: bool = False


class Updater:
    """Collects the gradients of a step on the host, and has the optimizer step where that may be done just in time.

    Args:
        pool: where the buffers of gradients return to.
        streamed: of each device, updates parameters that can be updated by themselves.
        spared_cores: the cores of the processor that updates leave to who launches the devices' work.
        on_update: told the parameters of each piece of an update, and its beginning and end by `perf_counter`.

    Attributes:
        overlap: of all updates.
        speeds: of the updates just in time.
        norms: of the gradients of this step, where they were asked for.
        postponed: the update of the step before, where it runs under this one's forward.
        streamed: makes the updates of the first device; the disk, if there is one, is that of all.
        buffers: of gradients that parameters, or users, have.
    """

    def __init__(
        self,
        pool: HostPool,
        streamed: Sequence[StreamedUpdate],
        spared_cores: Collection[int] = (),
        on_update: UpdateHeard = lambda parameters, start, end: None,
    ) -> None:
        self.speeds = UpdateSpeeds()
        self._pool = pool
        self.buffers = GradientBuffers(pool)
        self.streamed = streamed[0]
        self.overlap = Overlap(on_update=on_update)
        # Threads of their own: the update of a pack runs under the backward of the next.
        self._queues = [UpdateQueue(each, self.overlap, spared_cores) for each in streamed]
        self.norms = Norms(self._queues[0].device.torch_device)
        self.postponed = PostponedUpdate(self._queues, self.overlap)
        self._step = StepUpdate()
        self._optimizer: Optimizer | None = None
        self._known: frozenset[Tensor] = frozenset()
        self._held_back: list[Callable[[], Any]] | None = None
        self._averaged: AveragedGradients | None = None
        self._divided: DividedUpdate | None = None
        # The number of the optimizer's group that each parameter is in.
        self._groups: dict[nn.Parameter, int] = {}
        self._ranks: dict[nn.Parameter, int] = {}
        self._num_owners: dict[nn.Parameter, int] = defaultdict(int)
        self._parts: dict[nn.Parameter, list[Contribution]] = {}
        self._submitted: list[HostEvent] = []
        self._from_host: list[HostEvent] = []
        self._updated: dict[nn.Parameter, Event] = {}

    def begin(
        self,
        packs: Iterable[Sequence[nn.Parameter]],
        update: StepUpdate,
        *,
        hold_back: bool = False,
        is_tight: bool = False,
        averaging: Averaging | None = None,
    ) -> None:
        """Begin a step.

        Args:
            packs: the parameters of each pack that `deliver` will be called for, those first that a forward needs first.
            update: what is asked of it.
            hold_back: whether nothing may change before `finish`. Then each buffer goes as it is used: nobody needs them all
                once more.
            is_tight: whether this step leaves no room for state that stays.
            averaging: makes gradients means over nodes before they are used; None where there is one node.
        """
        # A step that failed never came to its end: what it left must not run into this one.
        self.drain()
        self.streamed.disk.settle()
        # What waits on a device keeps its memory: the oldest goes first. When all is there, the next forward says what does.
        for queue in self._queues:
            queue.goes_by_rank = False
            queue.streamed.open()
        self._submitted, self._from_host, self._updated, self._divided = [], [], {}, None
        self._held_back = [] if hold_back else None
        optimizer = update.optimizer
        separable = optimizer is not None and why_not_separable(optimizer) is None
        outlasts = update.may_outlast and not hold_back
        self._step = replace(update, may_outlast=outlasts, reuses=not hold_back, separable=separable)
        self.speeds.in_place = separable and self.streamed.spares_the_bus and averaging is None
        if optimizer is not None:
            self._optimizer = optimizer
            self.speeds.state_may_stay = update.state_may_stay and self.speeds.in_place
            stays = update.state_may_stay and separable and not hold_back and not is_tight
            self.postponed.let_state_stay(optimizer if stays else None)
        self._known = frozenset[Tensor]() if optimizer is None else frozenset(optimizer.state)
        self.norms.clear()
        self._parts = defaultdict(list)
        self._num_owners = defaultdict(int)
        self._ranks = {}
        for rank, parameters in enumerate(packs):
            for parameter in parameters:
                self._num_owners[parameter] += 1
                self._ranks.setdefault(parameter, rank)
        groups = [] if optimizer is None else optimizer.param_groups
        self._groups = {parameter: number for number, group in enumerate(groups) for parameter in group["params"]}
        if averaging is not None:
            take = partial(self._take, self._queues[0], self._step, None)
            self._averaged = AveragedGradients(
                averaging, take if optimizer is None else None, self._submit, partial(self._use, self._step)
            )

    @property
    def wants_norms(self) -> bool:
        """Whether the norm of each gradient is to be computed as it leaves its device."""
        return self._step.with_norms

    @property
    def is_just_in_time(self) -> bool:
        """Whether gradients that are delivered are used up at once."""
        return self._step.optimizer is not None

    @property
    def uses_gradients_at_once(self) -> bool:
        """Whether gradients that are delivered are updated with, or averaged over nodes, before the backward is over."""
        return self._averaged is not None or self.is_just_in_time

    @property
    def torn(self) -> str | None:
        """Why the state of parameters and optimizers is of no one step; None if it is of one.

        Parameters count as updated whose gradients have been used in a backward that failed. Where all have been, that step is
        whole.
        """
        if self.overlap.failure is not None:
            return f"the update of parameters has failed ({self.overlap.failure})"
        left = sum(number > 0 for number in self._num_owners.values())
        if not (self.is_just_in_time and self._updated and left):
            return None
        number = len(self._updated)
        return f"the last step failed when {number} of {number + left} parameters had been updated"

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """A pack of these parameters has come up since the step began, for which `deliver` will be called, too."""
        for parameter in parameters:
            self._num_owners[parameter] += 1
            self._ranks.setdefault(parameter, len(self._ranks))

    @property
    def updates_in_place(self) -> bool:
        """Whether gradients that are delivered may still be on the device, where their update is made."""
        is_direct = self._held_back is None and self._averaged is None
        return self._step.separable and is_direct and self.streamed.is_on_device

    def deliver(self, parameters: Sequence[nn.Parameter], gradients: Sequence[SummedGradients]) -> HostEvent | None:
        """Take the final gradients of a pack; those parameters that no other pack owns are ready.

        Args:
            parameters: of the pack.
            gradients: of these. Where they are still on the device, no other pack owns the parameters.

        Returns:
            The end of the update of those that are ready; None if none is, or that comes later.
        """
        for source in gradients:
            self.buffers.add(source)
            for (layer, parameter), gradient in source.sums.items():
                self._parts[parameter].append(
                    Contribution((layer.index, -source.use), gradient, source, source.norms.get((layer, parameter)))
                )
        ready: list[nn.Parameter] = []
        without: list[nn.Parameter] = []
        for parameter in parameters:
            self._num_owners[parameter] -= 1
            if self._num_owners[parameter] == 0:
                (ready if parameter in self._parts else without).append(parameter)
        parts = [self._parts.pop(parameter) for parameter in ready]
        after = list({id(part.source): part.source.event for several in parts for part in several}.values())
        submit: Callable[[], HostEvent | None] = partial(self._submit, ready, parts, after)
        if self._averaged is not None:
            submit = partial(self._averaged.add, ready, parts, without, after)
        elif not ready:
            return None
        if self._held_back is None:
            return submit()
        self._held_back.append(submit)
        return None

    def _submit(
        self, ready: Sequence[nn.Parameter], parts: Sequence[list[Contribution]], after: Sequence[Event] = ()
    ) -> HostEvent:
        """Have gradients used when they are there. Those that no pack contributed to are in their parameters' ``grad``."""
        rank = min(self._ranks.get(p, len(self._ranks)) for p in ready)
        # An optimizer that takes part as a whole is stepped by one at a time.
        queues = self._queues if self._step.optimizer is not None and self._step.separable else self._queues[:1]
        queue = queue_for(queues, ready[0], parts[0][0].gradient if parts[0] else ready[0].grad, rank)
        is_on_host = any(part.source.is_on_host for several in parts for part in several)
        urgency = Urgency(rank, gives_way=is_on_host)
        event = queue.submit(self._work(queue, ready, parts, urgency), after, urgency)
        self._submitted.append(event)
        if is_on_host:
            self._from_host.append(event)
        self._updated.update(dict.fromkeys(ready, event))
        return event

    def _work(
        self,
        queue: UpdateQueue,
        parameters: Sequence[nn.Parameter],
        parts: Sequence[list[Contribution]],
        urgency: Urgency | None = None,
    ) -> Callable[[], None]:
        """What there is to do for some parameters, with the gradients that are there, as the optimizer is now."""
        between = None if urgency is None else partial(queue.run_more_urgent, urgency)
        return partial(self._take, queue, self._step, self._share(parameters), parameters, parts, between)

    def _share(self, parameters: Sequence[nn.Parameter]) -> Share | None:
        """What is updated by itself, and not by the optimizer, which somebody may look at meanwhile."""
        if self._step.optimizer is None or not self._step.separable:
            return None
        share = Share(self._step.optimizer, {p: self._groups[p] for p in parameters if p in self._groups})
        for parameter in parameters:
            # Lightning's own step must not find it. The share has it.
            parameter.grad = None
        return share

    def await_room(self, num_bytes: int) -> None:
        """Wait until the gradients of few packs alone wait for an update on the host, and there is room for others.

        Args:
            num_bytes: what those take.
        """
        if self._step.optimizer is None or self._held_back is not None:
            return
        while waiting := [event for event in self._from_host if not event.done()]:
            if len(waiting) < RING and self._pool.has_room(num_bytes):
                return
            wait_for_one(waiting)

    def finish(self) -> None:
        """Wait until every gradient is in place and every update is done, or leave the updates to `postponed`.

        What the first of those that it waits for raised is raised here.
        """
        for queue in self._queues:
            queue.goes_by_rank = True
        held_back, self._held_back = self._held_back or [], None
        while held_back:
            held_back.pop(0)()
        if self._averaged is not None:
            self._divided = self._averaged.finish()
        self._averaged = None
        submitted, self._submitted, self._from_host = list[Event](self._submitted), [], []
        updated, self._updated = self._updated, {}
        optimizer = self._step.optimizer
        if optimizer is not None and self._divided is not None:
            updated, self._divided = self._divided.share(updated, self.streamed.disk.settle), None
            submitted += dict.fromkeys(updated.values())
        # Before anybody plans with what updates take, some have to be timed.
        if optimizer is not None and self._step.may_outlast and self.speeds.fastest.bytes_per_second is not None:
            self.postponed.follow(optimizer, updated, self._known)
        else:
            self._wait_for(submitted)

    def _wait_for(self, submitted: Sequence[Event]) -> None:
        try:
            self.overlap.wait_for(submitted, [queue.device for queue in self._queues], then=self.streamed.disk.settle)
        finally:
            self.drain()
            if self._step.optimizer is not None:
                sort_state(self._step.optimizer, self._known)
            # Of parameters that this step does not update, state may have stayed until now.
            self.postponed.finish_parameters()

    def drain(self) -> None:
        """Wait until nothing is under way, on the way out of an error or before the next step."""
        averaged, self._averaged = self._averaged, None
        if averaged is not None:
            averaged.abandon()
            if self._updated:
                self.overlap.failure = RuntimeError("gradients of others were not averaged over nodes")
        of_step = Speed()
        for queue in self._queues:
            queue.drain()
            speed = queue.take_speed()
            of_step.note(speed.num_bytes, speed.seconds)
        self.speeds.note(of_step)

    def _take(
        self,
        queue: UpdateQueue,
        step: StepUpdate,
        share: Share | None,
        parameters: Sequence[nn.Parameter],
        parts: Sequence[list[Contribution]],
        between: Callable[[], None] | None = None,
    ) -> None:
        for parameter, contributions in zip(parameters, parts, strict=True):
            if not contributions:
                # Other nodes have made its gradient, which it has.
                continue
            if share is None:
                parameter.grad, is_whole = total(parameter, contributions, parameter.grad)
                if is_whole and step.with_norms and contributions[0].norm is not None:
                    self.norms.note(parameter, contributions[0].norm)
            elif parameter in share.parameters:
                share.gradients[parameter], _ = total(parameter, contributions, share.gradients.get(parameter))
                for masters in (part.source.masters for part in contributions):
                    if masters is not None and (master := masters.find(parameter)) is not None:
                        share.masters[parameter] = master
        if step.optimizer is not None:
            self._update(queue, step, share, parameters, between)
        for contributions in parts:
            for part in contributions:
                self._use(step, part)
        if step.optimizer is None:
            # Where sums include those of earlier batches, the buffers of these are free.
            self.buffers.reclaim()

    def _use(self, step: StepUpdate, part: Contribution) -> None:
        """A contribution has become a gradient, or a part of one, or has been used for an update."""
        self.buffers.use(part.source, as_grad=step.optimizer is None, free=step.reuses)

    def _update(
        self,
        queue: UpdateQueue,
        step: StepUpdate,
        share: Share | None,
        parameters: Sequence[nn.Parameter],
        between: Callable[[], None] | None,
    ) -> None:
        # The first step of all, the one that is held back, also makes the state.
        timed_bytes = sum(p.numel() * p.element_size() for p in parameters) if step.reuses else 0
        # What need not go spares its time.
        timed_bytes = int(timed_bytes * queue.streamed.home.moved_share(parameters))
        with queue.updating(parameters, timed_bytes):
            if share is not None:
                queue.streamed.update(share, step.clip, between=between)
            elif step.optimizer is not None:
                with only(step.optimizer, self._groups, parameters):
                    if step.clip is not None:
                        step.clip(list(parameters))
                    step.optimizer.step()
                for parameter in parameters:
                    parameter.grad = None

    def update_all(
        self,
        optimizer: Optimizer,
        order: Iterable[Sequence[nn.Parameter]],
        clip: Clip | None,
        *,
        waits: bool,
        state_may_stay: bool,
    ) -> None:
        """Update all parameters that have gradients.

        Args:
            optimizer: the one to step.
            order: parameters in shares, those first that the next forward needs first.
            clip: changes gradients before they are used.
            waits: whether to return when all are updated.
            state_may_stay: whether nobody looks at optimizer state before the next update.
        """
        self._optimizer = optimizer
        self.speeds.state_may_stay = state_may_stay and self.streamed.spares_the_bus
        divided, self._divided = self._divided, None
        self.postponed.start(optimizer, order, clip, waits=waits, state_may_stay=state_may_stay, divided=divided)

    def keep_on_devices(self, parameters: Sequence[frozenset[nn.Parameter]]) -> None:
        """Let optimizer state stay on devices between updates, as far as nobody looks.

        Args:
            parameters: of each device, those whose state stays there.
        """
        pairs = [(queue.streamed.home, chosen) for queue, chosen in zip(self._queues, parameters, strict=True)]
        if any(home.keeps_others_than(chosen) for home, chosen in pairs):
            self.postponed.finish()
        for home, chosen in pairs:
            home.parameters = chosen

    def state_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """What the optimizer state of some parameters takes that may stay on a device, as the last update has left it."""
        state = {} if self._optimizer is None else self._optimizer.state
        values = [value for parameter in parameters for value in list(state.get(parameter, {}).values())]
        return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim() > 0)

    def kept_bytes(self) -> list[int]:
        """What optimizer state takes of each device between updates."""
        return [queue.streamed.home.num_bytes for queue in self._queues]

    def close(self) -> None:
        """Finish what was asked for and join the threads."""
        self.postponed.drain()
        for queue in self._queues:
            queue.close()

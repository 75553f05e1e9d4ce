"""Queues of updates: each device makes its own, so that all of their buses are used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.stream import Event, HostStream
from lightning_harmony.engine.measure.profile import Speed
from lightning_harmony.engine.structures.parts import num_bytes_of
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.values.memory_size import format_bytes

# Told the parameters of a piece of an update, and its beginning and end by `perf_counter`.
UpdateHeard = Callable[[Iterable[nn.Parameter], float, float], None]
# While it waits for an update, the host looks this often whether there is something else to do.
_GLANCE_SECONDS = 2e-4


@dataclass
class Running:
    """An update that is made.

    Attributes:
        parameters: what it updates.
        since: when it began, or went on, by `perf_counter`.
        seconds: what it took before.
    """

    parameters: Iterable[nn.Parameter]
    since: float = field(default_factory=perf_counter)
    seconds: float = 0.0


@dataclass
class Overlap:
    """How long updates went on, and how long they held up all else.

    Attributes:
        busy_seconds: how long at least one was made.
        waited_seconds: how much of that all devices, with nothing else to do, waited for.
        on_update: told each piece of an update.
        failure: what an update that was waited for has raised; None if none has.
    """

    busy_seconds: float = 0.0
    waited_seconds: float = 0.0
    on_update: UpdateHeard = lambda parameters, start, end: None
    failure: Exception | None = None

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _num_running: int = 0
    _since: float = 0.0

    def begin(self) -> None:
        """An update begins, in the thread of any queue."""
        with self._lock:
            if self._num_running == 0:
                self._since = perf_counter()
            self._num_running += 1

    def end(self) -> None:
        """An update ends."""
        with self._lock:
            self._num_running -= 1
            if self._num_running == 0:
                self.busy_seconds += perf_counter() - self._since

    def take_hidden(self) -> float:
        """The share of the updates' seconds in which other work went on, since the last call; 0 without an update."""
        busy, waited = self.busy_seconds, self.waited_seconds
        self.busy_seconds = self.waited_seconds = 0.0
        return max(1.0 - waited / busy, 0.0) if busy > 0.0 else 0.0

    def wait_for(
        self,
        events: Sequence[Event],
        devices: Sequence[Device],
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
                idle_since = perf_counter()
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
            self.waited_seconds += perf_counter() - idle_since


class UpdateQueue(HostStream):
    """The updates that one device makes, one at a time, in a thread of its own.

    Args:
        streamed: makes them.
        overlap: where their seconds are counted.
        spared_cores: the cores of the processor that updates leave to who launches the devices' work.

    Attributes:
        device: which one.
        streamed: makes them.
    """

    def __init__(self, streamed: StreamedUpdate, overlap: Overlap, spared_cores: Collection[int] = ()) -> None:
        super().__init__(f"update-{streamed.device.torch_device}", spared_cores)
        self.device: Device = streamed.device
        self.streamed = streamed
        self._overlap = overlap
        self._running: Running | None = None
        self._speed = Speed()

    @contextmanager
    def updating(self, parameters: Iterable[nn.Parameter], num_bytes: int = 0) -> Iterator[None]:
        """The context of an update, in the thread of this queue. A more urgent one may come in the middle of it.

        Args:
            parameters: what it updates.
            num_bytes: what it counts for in the speed of updates.

        Raises:
            CapacityError: if the device has no room for it.
        """
        parameters = list(parameters)
        self._overlap.begin()
        interrupted = self._running
        if interrupted is not None:
            self._pause(interrupted)
        self._running = running = Running(parameters)
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._exceeded(parameters, error) from error
        finally:
            self._pause(running)
            self._overlap.end()
            self._running = interrupted
            if interrupted is not None:
                interrupted.since = perf_counter()
        disk_seconds = self.streamed.disk.take_waited_seconds()
        if num_bytes:
            self._speed.note(num_bytes, running.seconds - disk_seconds)

    def _exceeded(self, parameters: Sequence[nn.Parameter], error: BaseException) -> CapacityError:
        """What to raise where the device has no room for an update."""
        num_bytes, capacity = sum(map(num_bytes_of, parameters)), self.device.capacity_bytes
        limit = "the device" if capacity is None else f"the capacity of {format_bytes(capacity)}"
        return CapacityError(
            f"the update of {len(parameters)} parameters, {format_bytes(num_bytes)}, with their gradients and optimizer state "
            f"exceeds {limit}: have optimizers step on the host with HarmonyStrategy(update_on='host'), or allow more memory "
            f"with HarmonyStrategy(device_memory=...). ({error})"
        )

    def _pause(self, running: Running) -> None:
        end = perf_counter()
        running.seconds += end - running.since
        self._overlap.on_update(running.parameters, running.since, end)

    def drain(self) -> None:
        """Wait until all that was submitted is done."""
        self.submit(lambda: None).synchronize()

    def bring_back_state(self) -> None:
        """Have optimizer state that stays on the device brought to the host, behind all that was submitted."""
        if self.streamed.home.num_bytes:
            self.submit(self.streamed.bring_back).synchronize()

    def take_speed(self) -> Speed:
        """Of the updates that counted for it since the last call; nothing is under way."""
        speed, self._speed = self._speed, Speed()
        return speed

    @override
    def close(self) -> None:
        """Finish what was asked for, join the thread, and let the memory on the device go."""
        super().close()
        self.streamed.close()


def queue_for(
    queues: Sequence[UpdateQueue], parameter: nn.Parameter, gradient: Tensor | None, rank: int
) -> UpdateQueue:
    """Who updates a pack: the device where its optimizer state stays, or that has its gradients; else each device in turn.

    Args:
        queues: to choose from.
        parameter: one of the pack's.
        gradient: of it.
        rank: of the pack among all.
    """
    has_gradient = (queue for queue in queues if gradient is not None and queue.device.owns(gradient))
    has_state = (queue for queue in queues if parameter in queue.streamed.home.parameters)
    return next(chain(has_state, has_gradient), queues[rank % len(queues)])

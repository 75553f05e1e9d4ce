"""The state of a replay: what each lane and device has at a moment of it, and when the next task can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.simulate.device_memory import DeviceMemory
from lightning_harmony.plan.simulate.footprint import Footprint, footprints
from lightning_harmony.plan.simulate.order import owner
from lightning_harmony.plan.simulate.schedule import Schedule
from lightning_harmony.plan.simulate.update_stream import UpdateStream
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.prediction import Span
from lightning_harmony.plan.values.profile import DeviceLimits
from lightning_harmony.plan.values.task import COMPUTE, STREAM_OF, STREAMS, Errand, Phase, Task


@dataclass
class Lane:
    """Where a microbatch is.

    Attributes:
        position: the visit that comes next; in the backward, counted down.
        phase: the phase of that.
        device: where its tensors are; None before it began.
        ready: when they are there.
    """

    position: int = 0
    phase: Phase = Phase.FORWARD
    device: int | None = None
    ready: float = 0.0


@dataclass
class Stashed:
    """What a forward left for its backward.

    Attributes:
        footprint: of the visit.
        where: on the device, on the host, or back from there.
        ready: when it is there.
    """

    footprint: Footprint
    where: str
    ready: float


@dataclass
class Device:
    """A device in the middle of its tasks."""

    number: int
    tasks: Sequence[Task]
    memory: DeviceMemory
    lasting: DeviceMemory
    updates: UpdateStream
    place: int = 0
    waits_for: str = ""
    streams: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0.0))
    issued: float = 0.0
    spans: list[Span] = field(default_factory=list)
    weights: dict[int, float] = field(default_factory=dict)
    masters: dict[int, int] = field(default_factory=dict)
    first_use: dict[int, float] = field(default_factory=dict)
    last_use: dict[int, float] = field(default_factory=dict)
    num_graphs: Counter[int] = field(default_factory=Counter)
    stash: dict[tuple[int, int], list[Stashed]] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    summed_at: dict[int, float] = field(default_factory=dict)
    parked: dict[int, float] = field(default_factory=dict)
    reduced: dict[int, list[int]] = field(default_factory=dict)
    next_sum: dict[int, int] = field(default_factory=dict)
    swapped_in: Counter[str] = field(default_factory=Counter)
    swapped_out: Counter[str] = field(default_factory=Counter)
    transferred_bytes: int = 0

    def give(self, num_bytes: int, end: float, *, lingers: bool = False) -> None:
        """Weights or sums are gone from ``end`` on; what lingers is copied until then."""
        self.memory.give(num_bytes, end, lingers=lingers)
        self.lasting.give(num_bytes, end, lingers=lingers)

    def hold(self, seconds: float) -> None:
        """Nothing that comes behind is asked for before."""
        self.streams[COMPUTE] = max(self.streams[COMPUTE], seconds)
        self.issued = max(self.issued, seconds)


class BrokenRuleError(Exception):
    """A task breaks a rule, whatever other devices do."""


class NotYetError(Exception):
    """A task waits for what another device does."""


# Runs a task of a device, for a pack and a microbatch.
# Raises BrokenRuleError or NotYetError where it does not run, and has then changed nothing.
Handler = Callable[[Device, int, int], None]


def seconds_of(num_bytes: float, bytes_per_second: float | None) -> float:
    """How long a copy or an update takes."""
    return num_bytes / bytes_per_second if bytes_per_second else 0.0


def _update_seconds(cost: Cost, machine: DeviceLimits, *, stays: bool) -> float:
    """How long the update of a pack takes.

    State from disk is read and written piece by piece, under the copies of others. What stays on the device spares its time.
    """
    share = cost.gradient_bytes / (cost.gradient_bytes + cost.optimizer_bytes) if stays and cost.gradient_bytes else 1.0
    return max(
        share * seconds_of(cost.gradient_bytes, machine.update_bytes_per_second),
        seconds_of(cost.disk_bytes, machine.disk_bytes_per_second),
    )


class ReplayState:
    """The lanes and the devices of a step in the middle of it.

    Args:
        plan: what the tasks are for.
        schedule: the tasks of each device.
        packs: what each pack costs.
        machine: what they run on.

    Attributes:
        footprints: of each visit.
        lanes: of each microbatch.
        devices: with their tasks and updates.
    """

    def __init__(self, plan: Plan, schedule: Schedule, packs: Sequence[Cost], machine: DeviceLimits) -> None:
        if plan.num_microbatches is None or len(schedule.devices) != plan.num_devices:
            raise PlanError(
                f"the plan is for {plan.num_devices} devices and {plan.num_microbatches} microbatches, the schedule for "
                f"{len(schedule.devices)} devices"
            )
        self.plan, self.schedule, self.packs, self.machine = plan, schedule, packs, machine
        self.footprints = footprints(plan, packs)
        self.lanes = [Lane() for _ in range(plan.num_microbatches)]
        limits = schedule.lasting_bytes if machine.pools_apart and schedule.lasting_bytes else [None] * plan.num_devices
        ranks = {pack: rank for rank, pack in enumerate(dict.fromkeys(plan.visits))}
        updating = [
            _update_seconds(cost, machine, stays=pack in plan.state_on_device) for pack, cost in enumerate(packs)
        ]
        self.devices = []
        for number, (own, limit) in enumerate(zip(schedule.devices, limits, strict=True)):
            memories = DeviceMemory(machine.capacity_bytes, machine.occupied_bytes), DeviceMemory(limit)
            self.devices.append(Device(number, own, *memories, UpdateStream(ranks, updating, memories)))

    # ---- when the next task runs ---------------------------------------------------------------------------------------

    def run(self, device: Device, num_bytes: int, after: float, seconds: float, *, lasting_bytes: int = 0) -> float:
        """Run the next task of a device as soon as it can.

        Args:
            device: the device.
            num_bytes: what the task takes there.
            after: when what it needs is there.
            seconds: how long it takes.
            lasting_bytes: what of the bytes is for weights or sums.

        Returns:
            Its end.
        """
        task = device.tasks[device.place]
        stream = STREAM_OF[task.kind]
        room = self._room_at(device, num_bytes, lasting_bytes) if num_bytes else 0.0
        start = max(after, room, device.streams[stream], 0.0 if stream is COMPUTE else device.issued)
        end = start + seconds
        device.streams[stream] = end
        if stream is COMPUTE:
            device.issued = start
        device.memory.take(num_bytes, start)
        device.lasting.take(lasting_bytes, start)
        if stream is COMPUTE:
            device.memory.note_turn()
        device.spans.append(Span(task, stream, start, end))
        return end

    def _room_at(self, device: Device, num_bytes: int, lasting_bytes: int) -> float:
        """When a device has room."""
        device.updates.run_until(device.issued)
        while (room := device.memory.room_at(num_bytes)) is None:
            if not device.updates.run_next():
                short = format_bytes(device.memory.short_bytes(num_bytes))
                problem = f"it takes {format_bytes(num_bytes)}, for which the capacity is {short} short"
                # With several devices, another one may still fetch what is in the way.
                raise BrokenRuleError(problem) if len(self.devices) == 1 else NotYetError(problem)
        if not lasting_bytes:
            return room
        while (apart := device.lasting.room_at(lasting_bytes)) is None:
            if not device.updates.run_next():
                # Nothing else makes way: it has the memory of what passes, too.
                return room
        return max(room, apart)

    # ---- whether it may ------------------------------------------------------------------------------------------------

    def refuse_misplaced(self, device: Device, task: Task) -> None:
        """Refuse a task that is for nothing of the plan, or not for this device."""
        if not 0 <= task.pack < len(self.packs):
            raise BrokenRuleError(f"there is no pack {task.pack}")
        if task.microbatch is None or task.kind is Errand.REDUCE:
            return
        if not 0 <= task.microbatch < len(self.lanes):
            raise BrokenRuleError(f"there is no microbatch {task.microbatch}")
        if task.kind is Errand.GATHER:
            self.refuse_other_owner(device, task.pack)
            return
        where = self.plan.device_of(task.pack, task.microbatch)
        if where != device.number:
            raise BrokenRuleError(
                f"the plan places pack {task.pack} for microbatch {task.microbatch} on device {where}"
            )

    def refuse_other_owner(self, device: Device, pack: int) -> None:
        """Refuse what only the device that updates a pack does."""
        if owner(self.plan, pack) != device.number:
            raise BrokenRuleError(f"the gradients of pack {pack} leave from device {owner(self.plan, pack)}")

    def await_turn(self, lane: Lane, phase: Phase, pack: int, microbatch: int) -> None:
        """Wait until a lane comes to a pack."""
        visits = self.plan.visits
        if lane.position < 0:
            raise NotYetError(f"microbatch {microbatch} has come to its end")
        if lane.phase is not phase or visits[lane.position] != pack:
            raise NotYetError(
                f"microbatch {microbatch} has to run {Task(visits[lane.position], lane.phase, microbatch)} before"
            )

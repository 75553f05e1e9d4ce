"""Replay: the rules of a step, all of them and only here. It refuses what breaks one, and tells times and bytes of the rest.

The rules:

1. A task is for a pack and a microbatch of the plan, on the device where the plan places it.
2. Each microbatch goes through the visits in their order, and back through them in reverse, each once.
3. A forward or a backward runs where the pack's weights are: swapped in, and not evicted since. What is there already is
   not swapped in again, and nothing is left at the end. Weights stay while graphs that were made with them are kept.
4. A lane's tensors are on the device: what comes from another one was transferred, once.
5. A visit that keeps no graph stashes what its backward needs. It goes to the host at most once, and comes back before the
   backward. Where the graph is kept, there is no stash.
6. Gradients are summed in the order of the microbatches: then the sums do not depend on the plan. Those of a pack that is
   spread are gathered one by one at its home, from whichever device has made them; that makes no more of them before.
7. The gradients of a pack go to the host once, after its last backward, and after those of other devices were added, in
   the order of the devices. The update follows, once. Where nothing is done just in time, each device sends its own, and no
   update begins before the whole backward has ended. Sums that are not final may make way: they are parked on the host, and
   come back before the next backward that adds to them.
8. Or they stay on the device until the pack has been updated with them there.
9. What is on a device never exceeds the capacity.

Times: each device has a stream of each kind, and the host one for updates, which may go on from step to step. A task begins
when its stream is free, what it needs is there, and there is room: it waits for what earlier tasks send away, as far as it
has to. A copy is issued behind the computing that is listed before it, so it begins no sooner than that does; weights, where
none are fetched ahead, no sooner than that has ended. Gradients leave, and all behind them is issued, when those of few packs
alone wait for an update just in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.simulate.device_memory import DeviceMemory
from lightning_harmony.plan.simulate.footprint import footprints
from lightning_harmony.plan.simulate.lowering import lower
from lightning_harmony.plan.simulate.order import owner, summing_devices
from lightning_harmony.plan.simulate.replay_state import Device, Lane, Made, Stashed
from lightning_harmony.plan.simulate.schedule import Schedule
from lightning_harmony.plan.simulate.update_stream import UpdateStream
from lightning_harmony.plan.simulate.validity import refuse_invalid
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.host_need import RING
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.plan import Plan, Predicted
from lightning_harmony.plan.values.prediction import DevicePrediction, Prediction, Span
from lightning_harmony.plan.values.profile import MachineLimits
from lightning_harmony.plan.values.streams import COMPUTE, STREAM_OF, UPDATE
from lightning_harmony.plan.values.task import Errand, Phase, Task


def predict(plan: Plan, machine: MachineLimits | None = None, *, is_deferred: bool = False) -> Prediction:
    """What a step by this plan does, as far as the plan knows what its layers cost.

    Args:
        plan: the plan, with its profile.
        machine: what it runs on; None for what its profile was measured on.
        is_deferred: whether parameters are updated after the backward.

    Raises:
        PlanError: if it has no profile, or breaks a rule.
    """
    if plan.profile is None:
        raise PlanError("the plan does not say what its layers cost: save trainer.strategy.plan after the first step")
    refuse_invalid(plan)
    machine = machine or plan.profile.machine
    packs = plan.profile.pack_costs(plan.packs)
    return replay(plan, lower(plan, packs, machine.free_bytes, is_deferred=is_deferred), packs, machine)


def with_prediction(plan: Plan) -> Plan:
    """A plan with what a step by it is predicted to take; with no prediction where its order leaves no room."""
    try:
        prediction = predict(plan)
    except PlanError:
        # The executor may still find some: it drops graphs, and parks sums.
        return replace(plan, predicted=None)
    return replace(plan, predicted=Predicted(prediction.seconds, prediction.peak_bytes))


def replay(plan: Plan, schedule: Schedule, packs: Sequence[Cost], machine: MachineLimits) -> Prediction:
    """Go through the tasks of all devices by the rules.

    Args:
        plan: what the tasks are for.
        schedule: the tasks of each device.
        packs: what each pack costs.
        machine: what they run on.

    Raises:
        PlanError: if a rule is broken; the message shows where.
    """
    refuse_invalid(plan)
    step = _Replay(plan, schedule, packs, machine)
    prediction = step.run()
    left = step.left_behind(prediction.seconds)
    # A step begins with what the one before it leaves.
    return _Replay(plan, schedule, packs, machine, left).run() if left else prediction


class _BrokenError(Exception):
    """A task breaks a rule, whatever other devices do."""


class _Replay:
    """One go through the tasks. Handlers return what a task waits for, or "" when it is done.

    Args:
        plan: what the tasks are for.
        schedule: the tasks of each device.
        packs: what each pack costs.
        machine: what they run on.
        left: the gradients that updates of the step before use up on devices: by device, their bytes, and until when.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        packs: Sequence[Cost],
        machine: MachineLimits,
        left: Sequence[tuple[int, int, float]] = (),
    ) -> None:
        if plan.num_microbatches is None or len(schedule.devices) != plan.num_devices:
            raise PlanError(
                f"the plan is for {plan.num_devices} devices and {plan.num_microbatches} microbatches, the schedule for "
                f"{len(schedule.devices)} devices"
            )
        self._plan, self._schedule, self._packs, self._machine = plan, schedule, packs, machine
        self._num_microbatches = plan.num_microbatches
        self._footprints = footprints(plan, packs)
        self._devices = [Device(number, tasks, DeviceMemory(machine)) for number, tasks in enumerate(schedule.devices)]
        self._lanes = [Lane() for _ in range(self._num_microbatches)]
        self._num_visits = Counter(plan.visits)
        # Those that sum gradients on each device, in order.
        self._of_device = [
            [m for m in range(self._num_microbatches) if plan.parallel == "pipeline" or plan.device_of(0, m) == number]
            for number in range(plan.num_devices)
        ]
        self._left = {
            (pack, device): number * len(self._of_device[device])
            for pack, number in self._num_visits.items()
            for device in summing_devices(plan, pack)
        }
        # By pack and microbatch.
        self._made: dict[tuple[int, int], Made] = {}
        self._sent: dict[int, dict[int, float]] = {}
        for number, num_bytes, end in left:
            self._devices[number].memory.take(num_bytes, 0.0)
            self._devices[number].memory.give(num_bytes, end, lingers=True)
        # Gradients that are updated where they are, by pack.
        self._staying: dict[int, tuple[Device, int]] = {}
        ranks = {pack: rank for rank, pack in enumerate(dict.fromkeys(plan.visits))}
        self._updates = UpdateStream(ranks, [self._update_seconds(cost) for cost in packs], self._use_up)
        self._handlers: dict[Phase | Errand, Callable[[Device, int, int], str]] = {
            Phase.FORWARD: self._forward,
            Phase.BACKWARD: self._backward,
            Errand.SWAP_IN: self._swap_in,
            Errand.EVICT: self._evict,
            Errand.SWAP_OUT: self._swap_out,
            Errand.PARK: self._park,
            Errand.UNPARK: self._unpark,
            Errand.UPDATE: self._update,
            Errand.STASH_OUT: self._stash_out,
            Errand.STASH_IN: self._stash_in,
            Errand.TRANSFER_FORWARD: self._transfer_forward,
            Errand.TRANSFER_BACKWARD: self._transfer_backward,
            Errand.GATHER: self._gather,
            Errand.REDUCE: self._reduce,
        }

    def _use_up(self, pack: int, end: float) -> None:
        """A pack has been updated: gradients that stayed for it go."""
        if pack in self._staying:
            device, num_bytes = self._staying[pack]
            device.memory.give(num_bytes, end, lingers=True)

    def left_behind(self, seconds: float) -> list[tuple[int, int, float]]:
        """The gradients that updates still use up when the next step begins, after so many seconds; as `left`."""
        ends = {pack: end for pack, _, end in self._updates.done}
        return [
            (device.number, num_bytes, ends[pack] - seconds)
            for pack, (device, num_bytes) in self._staying.items()
            if ends[pack] > seconds
        ]

    def run(self) -> Prediction:
        while self._advance():
            pass
        if waiting := [device for device in self._devices if device.place < len(device.tasks)]:
            raise self._refusal([(device, device.waits_for) for device in waiting])
        if unfinished := [(device, problem) for device in self._devices if (problem := self._unfinished(device))]:
            raise self._refusal(unfinished)
        seconds = self._end_updates()
        return Prediction(seconds, tuple(self._prediction(device) for device in self._devices))

    def _end_updates(self) -> float:
        """Run the updates that are left. How long each step takes."""
        period = max((span.end_seconds for device in self._devices for span in device.spans), default=0.0)
        self._updates.run_all()
        for pack, start, end in self._updates.done:
            span = Span(Task(pack, Errand.UPDATE), UPDATE, start, end)
            self._devices[owner(self._plan, pack)].spans.append(span)
            period = max(period, end - (self._needed_at(pack) if self._machine.updates_outlast else 0.0))
        return max(period, sum(end - start for _, start, end in self._updates.done))

    def _update_seconds(self, cost: Cost) -> float:
        return self._seconds(cost.gradient_bytes, self._machine.update_bytes_per_second)

    def _needed_at(self, pack: int) -> float:
        """When a forward has to begin to fetch a pack for its first use."""
        first = min(device.first_use[pack] for device in self._devices if pack in device.first_use)
        return max(first - self._seconds(self._packs[pack].copied_bytes, self._machine.swap_in_bytes_per_second), 0.0)

    def _advance(self) -> bool:
        """Let each device go on as far as it comes; whether any came further."""
        advanced = False
        for device in self._devices:
            tasks, handlers = device.tasks, self._handlers
            while device.place < len(tasks):
                task = tasks[device.place]
                try:
                    self._refuse_misplaced(device, task)
                    device.waits_for = handlers[task.kind](device, task.pack, task.microbatch or 0)
                except _BrokenError as error:
                    raise self._refusal([(device, str(error))]) from None
                if device.waits_for:
                    break
                device.place += 1
                advanced = True
        return advanced

    def _refuse_misplaced(self, device: Device, task: Task) -> None:
        if not 0 <= task.pack < len(self._packs):
            raise _BrokenError(f"there is no pack {task.pack}")
        if task.microbatch is None or task.kind is Errand.REDUCE:
            return
        if not 0 <= task.microbatch < self._num_microbatches:
            raise _BrokenError(f"there is no microbatch {task.microbatch}")
        if task.kind is Errand.GATHER:
            self._refuse_other_owner(device, task.pack)
            return
        where = self._plan.device_of(task.pack, task.microbatch)
        if where != device.number:
            raise _BrokenError(f"the plan places pack {task.pack} for microbatch {task.microbatch} on device {where}")

    def _refusal(self, problems: Sequence[tuple[Device, str]]) -> PlanError:
        marked = [(device.number, device.place) for device, _ in problems]
        reasons = [
            f"{device.tasks[device.place] if device.place < len(device.tasks) else 'the end'} on device {device.number}: "
            f"{problem}"
            for device, problem in problems
        ]
        return PlanError("\n".join([*reasons, self._schedule.grid(marked)]))

    def _unfinished(self, device: Device) -> str:
        """What is missing when all tasks of a device are done."""
        plan = self._plan
        for number, lane in enumerate(self._lanes):
            if plan.visits and lane.position >= 0:
                pack = plan.visits[lane.position]
                if plan.device_of(pack, number) == device.number:
                    return f"microbatch {number} never runs {Task(pack, lane.phase, number)}"
        for pack, number in self._made:
            if owner(plan, pack) == device.number:
                return f"the gradients of pack {pack} for microbatch {number} are never added"
        if device.weights:
            return f"the weights of pack {min(device.weights)} are still there"
        if device.sums:
            return f"the gradients of pack {min(device.sums)} are never swapped out"
        if device.parked:
            return f"the gradients of pack {plan.visits[min(device.parked)]} are parked for ever"
        waiting = [pack for pack in self._sent if pack not in self._updates and owner(plan, pack) == device.number]
        return f"pack {waiting[0]} is never updated" if waiting else ""

    def _prediction(self, device: Device) -> DevicePrediction:
        memory = device.memory.curve()
        computing = [span for span in device.spans if span.stream == COMPUTE]
        peak = max([device.memory.most_bytes, *(num_bytes for _, num_bytes in memory)])
        return DevicePrediction(
            spans=tuple(device.spans),
            peak_bytes=peak,
            bound_bytes=max(peak, device.memory.bound_bytes),
            memory=memory,
            compute_seconds=sum(span.end_seconds - span.start_seconds for span in computing),
            swapped_in_bytes=dict(device.swapped_in),
            swapped_out_bytes=dict(device.swapped_out),
            transferred_bytes=device.transferred_bytes,
        )

    # ---- time and room -------------------------------------------------------------------------------------------------

    def _begin(self, device: Device, num_bytes: int, after: float, seconds: float) -> tuple[float, float] | None:
        """Run the task at hand as soon as it can; None if there is no room."""
        task = device.tasks[device.place]
        stream = STREAM_OF[task.kind]
        room = self._room_at(device, num_bytes) if num_bytes else 0.0
        if room is None:
            return None
        start = max(after, room, device.streams[stream], 0.0 if stream is COMPUTE else device.issued)
        end = start + seconds
        device.streams[stream] = end
        if stream is COMPUTE:
            device.issued = start
        device.memory.take(num_bytes, start)
        if stream is COMPUTE:
            device.memory.note_turn()
        device.spans.append(Span(task, stream, start, end))
        return start, end

    def _room_at(self, device: Device, num_bytes: int) -> float | None:
        """When a device has room; None if there is none, whatever has been updated."""
        self._updates.run_until(device.issued)
        while (room := device.memory.room_at(num_bytes)) is None and self._updates.run_next():
            pass
        return room

    def _no_room(self, device: Device, num_bytes: int) -> str:
        """With several devices, another one may still fetch what is in the way."""
        short = format_bytes(device.memory.short_bytes(num_bytes))
        problem = f"it takes {format_bytes(num_bytes)}, for which the capacity is {short} short"
        if len(self._devices) == 1:
            raise _BrokenError(problem)
        return problem

    def _seconds(self, num_bytes: int, bytes_per_second: float | None) -> float:
        return num_bytes / bytes_per_second if bytes_per_second else 0.0

    # ---- weights -------------------------------------------------------------------------------------------------------

    def _swap_in(self, device: Device, pack: int, _: int) -> str:
        if pack in device.weights:
            raise _BrokenError(f"pack {pack} is there already")
        cost = self._packs[pack]
        seconds = self._seconds(cost.copied_bytes, self._machine.swap_in_bytes_per_second)
        after = 0.0 if self._plan.lookahead else device.streams[COMPUTE]
        num_bytes = cost.weight_bytes + cost.staging_bytes
        run = self._begin(device, num_bytes, after, seconds)
        if run is None:
            return self._no_room(device, num_bytes)
        device.memory.give(cost.staging_bytes, run[1], lingers=True)
        device.weights[pack] = device.last_use[pack] = run[1]
        device.swapped_in["weights"] += cost.copied_bytes
        return ""

    def _evict(self, device: Device, pack: int, _: int) -> str:
        self._refuse_absent(device, pack)
        if device.num_graphs[pack]:
            raise _BrokenError(f"graphs that need the weights of pack {pack} are kept")
        del device.weights[pack]
        device.memory.give(self._packs[pack].weight_bytes, device.last_use[pack])
        return ""

    def _refuse_absent(self, device: Device, pack: int) -> None:
        if pack not in device.weights:
            raise _BrokenError(f"the weights of pack {pack} are not there")

    # ---- phases --------------------------------------------------------------------------------------------------------

    def _forward(self, device: Device, pack: int, microbatch: int) -> str:
        self._refuse_absent(device, pack)
        lane = self._lanes[microbatch]
        if problem := self._not_next(lane, Phase.FORWARD, pack, microbatch):
            return problem
        if lane.device not in (None, device.number):
            return f"its input is on device {lane.device}"
        position = lane.position
        footprint = self._footprints[position]
        after = max(lane.ready, device.weights[pack])
        run = self._begin(device, footprint.forward_bytes, after, footprint.forward_seconds)
        if run is None:
            return self._no_room(device, footprint.forward_bytes)
        device.first_use.setdefault(pack, run[0])
        end = device.last_use[pack] = lane.ready = run[1]
        device.memory.give(footprint.there_bytes + footprint.forward_bytes - footprint.forward_left_bytes, end)
        if self._plan.keeps_graph(position):
            device.num_graphs[pack] += 1
        else:
            device.stash.setdefault((pack, microbatch), []).append(Stashed(footprint, "on the device", end))
        lane.device = device.number
        lane.position += 1
        if lane.position == len(self._plan.visits):
            lane.phase, lane.position = Phase.BACKWARD, lane.position - 1
        return ""

    def _backward(self, device: Device, pack: int, microbatch: int) -> str:
        self._refuse_absent(device, pack)
        lane = self._lanes[microbatch]
        if problem := self._not_next(lane, Phase.BACKWARD, pack, microbatch):
            return problem
        if lane.device != device.number:
            return f"the gradient that it begins with is on device {lane.device}"
        position = lane.position
        footprint, keeps = self._footprints[position], self._plan.keeps_graph(position)
        # A pack that was visited twice comes back to what it left last.
        stashed = None if keeps else device.stash[pack, microbatch][-1]
        if stashed is not None and stashed.where == "on the host":
            raise _BrokenError("its stash is on the host")
        if position in device.parked:
            raise _BrokenError("its gradients are parked on the host")
        if any(each.device is device for (other, _), each in self._made.items() if other == pack):
            return f"gradients of pack {pack} that it has made before are still to be added"
        adds = footprint.gradient_bytes > 0 and not footprint.is_gathered
        if adds:
            self._refuse_other_order(device, position, microbatch)
        sum_bytes = footprint.gradient_bytes if adds and position not in device.next_sum else 0
        num_bytes = footprint.backward_bytes + sum_bytes
        after = max(lane.ready, device.weights[pack], 0.0 if stashed is None else stashed.ready)
        run = self._begin(device, num_bytes, after, footprint.backward_seconds)
        if run is None:
            return self._no_room(device, num_bytes)
        end = device.last_use[pack] = lane.ready = run[1]
        gone = footprint.returning_bytes + footprint.graph_bytes
        if stashed is not None:
            gone += footprint.stash_bytes if stashed.where == "on the device" else footprint.loaded_bytes
        left = footprint.backward_left_bytes + footprint.gathered_bytes
        device.memory.give(footprint.backward_bytes - left + gone, end)
        if keeps:
            device.num_graphs[pack] -= 1
        else:
            device.stash[pack, microbatch].pop()
        if adds:
            self._add(device, position, sum_bytes, end)
        elif footprint.is_gathered:
            self._made[pack, microbatch] = Made(position, device, end)
        lane.position -= 1
        return ""

    def _refuse_other_order(self, device: Device, position: int, microbatch: int) -> None:
        of_device, summed = self._of_device[device.number], device.next_sum.get(position, 0)
        if of_device[summed] != microbatch:
            raise _BrokenError(f"gradients of microbatch {of_device[summed]} are to be summed first")

    def _add(self, device: Device, position: int, sum_bytes: int, end: float) -> None:
        """Gradients of one microbatch have been added, to sums that took some bytes if these are the first."""
        pack = self._plan.visits[position]
        device.next_sum[position] = device.next_sum.get(position, 0) + 1
        device.sums[pack] = device.sums.get(pack, 0) + sum_bytes
        device.summed_at[pack] = end
        self._left[pack, device.number] -= 1

    def _not_next(self, lane: Lane, phase: Phase, pack: int, microbatch: int) -> str:
        """Why a lane does not run this now; "" if it does."""
        visits = self._plan.visits
        if lane.position < 0:
            return f"microbatch {microbatch} has come to its end"
        if lane.phase is not phase or visits[lane.position] != pack:
            return f"microbatch {microbatch} has to run {Task(visits[lane.position], lane.phase, microbatch)} before"
        return ""

    # ---- stash ---------------------------------------------------------------------------------------------------------

    def _stash_out(self, device: Device, pack: int, microbatch: int) -> str:
        stashed = self._stashed(device, pack, microbatch, "on the device")
        num_bytes = stashed.footprint.stash_bytes
        seconds = self._seconds(num_bytes, self._machine.swap_out_bytes_per_second)
        run = self._begin(device, 0, stashed.ready, seconds)
        assert run is not None
        stashed.where, stashed.ready = "on the host", run[1]
        device.memory.give(num_bytes, run[1], lingers=True)
        device.swapped_out["stash"] += num_bytes
        return ""

    def _stash_in(self, device: Device, pack: int, microbatch: int) -> str:
        stashed = self._stashed(device, pack, microbatch, "on the host")
        num_bytes, loaded = stashed.footprint.stash_bytes, stashed.footprint.loaded_bytes
        seconds = self._seconds(num_bytes, self._machine.swap_in_bytes_per_second)
        run = self._begin(device, loaded, stashed.ready, seconds)
        if run is None:
            return self._no_room(device, loaded)
        stashed.where, stashed.ready = "back on the device", run[1]
        device.swapped_in["stash"] += num_bytes
        return ""

    def _stashed(self, device: Device, pack: int, microbatch: int, where: str) -> Stashed:
        """What a pack left last for a microbatch, and has to be somewhere."""
        left = device.stash.get((pack, microbatch))
        if not left:
            raise _BrokenError(f"pack {pack} has no stash of microbatch {microbatch}")
        if left[-1].where != where:
            raise _BrokenError(f"the stash of pack {pack} for microbatch {microbatch} is {left[-1].where}")
        return left[-1]

    # ---- between devices -----------------------------------------------------------------------------------------------

    def _transfer_forward(self, device: Device, pack: int, microbatch: int) -> str:
        return self._transfer(device, pack, microbatch, Phase.FORWARD)

    def _transfer_backward(self, device: Device, pack: int, microbatch: int) -> str:
        return self._transfer(device, pack, microbatch, Phase.BACKWARD)

    def _transfer(self, device: Device, pack: int, microbatch: int, phase: Phase) -> str:
        lane = self._lanes[microbatch]
        if problem := self._not_next(lane, phase, pack, microbatch):
            return problem
        if lane.device in (None, device.number):
            raise _BrokenError(f"the tensors of microbatch {microbatch} are there already")
        footprint = self._footprints[lane.position]
        if phase is Phase.FORWARD:
            num_bytes, there = footprint.input_bytes, footprint.there_bytes
            gone = self._footprints[lane.position - 1].passed_bytes
        else:
            num_bytes, there = footprint.output_bytes, footprint.returning_bytes
            gone = there
        seconds = self._seconds(num_bytes, self._machine.transfer_bytes_per_second)
        run = self._begin(device, there, lane.ready, seconds)
        if run is None:
            return self._no_room(device, there)
        self._devices[lane.device or 0].memory.give(gone, run[1])
        lane.device, lane.ready = device.number, run[1]
        device.transferred_bytes += num_bytes
        return ""

    def _gather(self, device: Device, pack: int, microbatch: int) -> str:
        made = self._made.get((pack, microbatch))
        if made is None:
            return f"there are no gradients of pack {pack} for microbatch {microbatch} to be added"
        position, source = made.position, made.device
        if position in device.parked:
            raise _BrokenError("its gradients are parked on the host")
        self._refuse_other_order(device, position, microbatch)
        footprint = self._footprints[position]
        sum_bytes = 0 if position in device.next_sum else footprint.gradient_bytes
        come_bytes = 0 if source is device else footprint.gathered_bytes
        seconds = self._seconds(come_bytes, self._machine.transfer_bytes_per_second)
        run = self._begin(device, sum_bytes + come_bytes, max(made.ready, device.summed_at.get(pack, 0.0)), seconds)
        if run is None:
            return self._no_room(device, sum_bytes + come_bytes)
        del self._made[pack, microbatch]
        # What came is added, and then gone on both devices.
        device.memory.give(come_bytes, run[1], lingers=True)
        source.memory.give(footprint.gathered_bytes, run[1], lingers=True)
        self._add(device, position, sum_bytes, run[1])
        device.transferred_bytes += come_bytes
        return ""

    def _reduce(self, device: Device, pack: int, other: int) -> str:
        self._refuse_other_owner(device, pack)
        others = [number for number in summing_devices(self._plan, pack) if number != device.number]
        reduced = device.reduced.setdefault(pack, [])
        if others[len(reduced) : len(reduced) + 1] != [other]:
            raise _BrokenError(f"the gradients of pack {pack} on device {other} are not what is to be added next")
        if self._left[pack, device.number] or self._left[pack, other]:
            return f"not all backwards of pack {pack} on devices {device.number} and {other} have run"
        source = self._devices[other]
        if pack not in source.sums or pack not in device.sums:
            raise _BrokenError(
                f"gradients of pack {pack} on devices {device.number} and {other} are parked on the host"
            )
        num_bytes = source.sums[pack]
        seconds = self._seconds(num_bytes, self._machine.transfer_bytes_per_second)
        after = max(source.summed_at[pack], device.summed_at[pack])
        run = self._begin(device, num_bytes, after, seconds)
        if run is None:
            return self._no_room(device, num_bytes)
        # What came is added, and then gone on both devices.
        device.memory.give(num_bytes, run[1])
        source.memory.give(source.sums.pop(pack), run[1])
        device.summed_at[pack] = run[1]
        device.transferred_bytes += num_bytes
        reduced.append(other)
        return ""

    def _refuse_other_owner(self, device: Device, pack: int) -> None:
        if owner(self._plan, pack) != device.number:
            raise _BrokenError(f"the gradients of pack {pack} leave from device {owner(self._plan, pack)}")

    # ---- gradients -----------------------------------------------------------------------------------------------------

    def _swap_out(self, device: Device, pack: int, _: int) -> str:
        if self._plan.just_in_time:
            self._refuse_other_owner(device, pack)
        if pack in self._plan.device_updated:
            raise _BrokenError(f"the plan has pack {pack} updated where its gradients are")
        sent = self._sent.setdefault(pack, {})
        if device.number in sent:
            raise _BrokenError(f"the gradients of pack {pack} are on the host already")
        self._refuse_unfinished_sums(device, pack)
        others = len(summing_devices(self._plan, pack)) - 1 if self._plan.just_in_time else 0
        if len(device.reduced.get(pack, [])) < others:
            raise _BrokenError(f"the gradients of pack {pack} on other devices are not added")
        # Whoever asks for the copy waits for room on the host: what comes behind is asked for later.
        device.hold(self._updates.room_at(RING))
        sent[device.number] = self._send(device, pack)
        # What was parked of other visits is on the host, where it is added.
        for position in [position for position in device.parked if self._plan.visits[position] == pack]:
            sent[device.number] = max(sent[device.number], device.parked.pop(position))
        return ""

    def _refuse_unfinished_sums(self, device: Device, pack: int) -> None:
        if self._left.get((pack, device.number)):
            raise _BrokenError(f"{self._left[pack, device.number]} backwards of pack {pack} have not run or been added")
        if pack not in device.sums:
            raise _BrokenError(f"pack {pack} has no gradients")

    def _send(self, device: Device, pack: int) -> float:
        """Bring the sums of a pack to the host; when they are there."""
        num_bytes = device.sums.pop(pack)
        seconds = self._seconds(num_bytes, self._machine.swap_out_bytes_per_second)
        run = self._begin(device, 0, device.summed_at[pack], seconds)
        assert run is not None
        device.memory.give(num_bytes, run[1], lingers=True)
        device.swapped_out["gradients"] += num_bytes
        return run[1]

    def _park(self, device: Device, pack: int, _: int) -> str:
        if pack not in device.sums:
            raise _BrokenError(f"pack {pack} has no gradients")
        there = [p for p, number in device.next_sum.items() if number and self._plan.visits[p] == pack]
        there = [position for position in there if position not in device.parked]
        device.parked.update(dict.fromkeys(there, self._send(device, pack)))
        return ""

    def _unpark(self, device: Device, pack: int, microbatch: int) -> str:
        lane = self._lanes[microbatch]
        if problem := self._not_next(lane, Phase.BACKWARD, pack, microbatch):
            return problem
        if lane.position not in device.parked:
            raise _BrokenError(f"no gradients of pack {pack} are parked that microbatch {microbatch} adds to")
        num_bytes = self._footprints[lane.position].gradient_bytes
        seconds = self._seconds(num_bytes, self._machine.swap_in_bytes_per_second)
        run = self._begin(device, num_bytes, device.parked[lane.position], seconds)
        if run is None:
            return self._no_room(device, num_bytes)
        del device.parked[lane.position]
        device.sums[pack] = device.sums.get(pack, 0) + num_bytes
        device.summed_at[pack] = max(device.summed_at[pack], run[1])
        device.swapped_in["gradients"] += num_bytes
        return ""

    def _update(self, device: Device, pack: int, _: int) -> str:
        self._refuse_other_owner(device, pack)
        if pack in self._updates:
            raise _BrokenError(f"pack {pack} has been updated")
        if pack in self._plan.device_updated:
            self._refuse_unfinished_sums(device, pack)
            self._staying[pack] = device, device.sums.pop(pack)
            self._updates.add(pack, device.summed_at[pack], is_on_host=False)
            return ""
        sent, after = self._sent.get(pack, {}), 0.0
        if self._plan.just_in_time and not sent:
            raise _BrokenError(f"the gradients of pack {pack} are not on the host")
        if not self._plan.just_in_time:
            if missing := [number for number in summing_devices(self._plan, pack) if number not in sent]:
                return f"the gradients of pack {pack} on device {missing[0]} are not on the host"
            if waiting := [number for number, lane in enumerate(self._lanes) if lane.position >= 0]:
                return f"the backward of microbatch {waiting[0]} has not ended"
            after = max(lane.ready for lane in self._lanes)
        # A deferred one is listed behind all computing.
        self._updates.add(pack, max(*sent.values(), after, device.streams[COMPUTE]))
        return ""

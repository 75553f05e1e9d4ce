"""Replay: goes through the tasks of a step, refuses what breaks a rule, and tells times and bytes of the rest.

The rules, of which `lane_rules` keeps 2 to 5, `gradient_rules` 6 to 8, and `replay_state` the others:

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
8. Or they stay on the device until the pack has been updated with them there, and with them the weights that came for the
   backward, as they are on the host.
9. What is on a device never exceeds the capacity.

Times: each device has a stream of each kind. Updates may go on from step to step. A task begins
when its stream is free, what it needs is there, and there is room: it waits for what earlier tasks send away, as far as it
has to. A copy is issued behind the computing that is listed before it, so it begins no sooner than that does; weights, where
none are fetched ahead, no sooner than that has ended. Gradients leave, and all behind them is issued, when those of few packs
alone wait for an update just in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.simulate.gradient_rules import GradientRules
from lightning_harmony.plan.simulate.lane_rules import LaneRules
from lightning_harmony.plan.simulate.lowering import lower
from lightning_harmony.plan.simulate.replay_state import BrokenRuleError, Device, NotYetError, ReplayState, seconds_of
from lightning_harmony.plan.simulate.schedule import Schedule
from lightning_harmony.plan.simulate.validity import refuse_invalid
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan, Predicted
from lightning_harmony.plan.values.prediction import DevicePrediction, Prediction, Span
from lightning_harmony.plan.values.profile import DeviceLimits
from lightning_harmony.plan.values.task import COMPUTE, UPDATE, Errand, Task


def predict(plan: Plan, machine: DeviceLimits | None = None, *, is_deferred: bool = False) -> Prediction:
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
    return replay(
        plan,
        lower(plan, packs, machine, is_deferred=is_deferred),
        packs,
        machine,
    )


def prediction_of(plan: Plan) -> Prediction | None:
    """What a step by a plan does; None where it has no profile, or its order leaves no room."""
    try:
        return predict(plan)
    except PlanError:
        # The executor may still find some: it drops graphs, and parks sums. But nobody knows what that takes.
        return None


def with_prediction(plan: Plan) -> Plan:
    """A plan with what a step by it is predicted to take; with no prediction where its order leaves no room."""
    found = prediction_of(plan)
    return replace(plan, predicted=None if found is None else Predicted(found.seconds, found.peak_bytes))


def replay(plan: Plan, schedule: Schedule, packs: Sequence[Cost], machine: DeviceLimits) -> Prediction:
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
    step = _Replay(ReplayState(plan, schedule, packs, machine))
    prediction = step.run()
    left = step.left_behind(prediction.seconds)
    # A step begins with what the one before it leaves.
    return _Replay(ReplayState(plan, schedule, packs, machine), left).run() if any(left) else prediction


class _Replay:
    """One go through the tasks.

    Args:
        state: of its beginning.
        left: what updates of the step before use up: of each device, their bytes, and until when.
    """

    def __init__(self, state: ReplayState, left: Sequence[Sequence[tuple[int, float]]] = ()) -> None:
        self._state = state
        for device, of_device in zip(state.devices, left, strict=False):
            for num_bytes, end in of_device:
                device.memory.take(num_bytes, 0.0)
                device.lasting.take(num_bytes, 0.0)
                device.give(num_bytes, end, lingers=True)
        self._gradients = GradientRules(state)
        self._lanes = LaneRules(state, self._gradients)
        self._handlers = {**self._lanes.handlers, **self._gradients.handlers}

    def left_behind(self, seconds: float) -> list[list[tuple[int, float]]]:
        """What updates still use up when the next step begins, after so many seconds; as `left`."""
        return [device.updates.left_behind(seconds) for device in self._state.devices]

    def run(self) -> Prediction:
        devices = self._state.devices
        while self._advance():
            pass
        if waiting := [device for device in devices if device.place < len(device.tasks)]:
            raise self._refusal([(device, device.waits_for) for device in waiting])
        problems = [
            (device, self._lanes.unfinished(device) or self._gradients.unfinished(device)) for device in devices
        ]
        if unfinished := [(device, problem) for device, problem in problems if problem]:
            raise self._refusal(unfinished)
        seconds = self._end_updates()
        return Prediction(seconds, tuple(self._prediction(device) for device in devices))

    def _end_updates(self) -> float:
        """Run the updates that are left. How long each step takes."""
        period = max((span.end_seconds for device in self._state.devices for span in device.spans), default=0.0)
        for device in self._state.devices:
            device.updates.run_all()
            for pack, start, end in device.updates.done:
                device.spans.append(Span(Task(pack, Errand.UPDATE), UPDATE, start, end))
                period = max(period, end - (self._needed_at(pack) if self._state.machine.updates_outlast else 0.0))
            period = max(period, sum(end - start for _, start, end in device.updates.done))
        return period

    def _needed_at(self, pack: int) -> float:
        """When a forward has to begin to fetch a pack for its first use."""
        first = min(device.first_use[pack] for device in self._state.devices if pack in device.first_use)
        return max(
            first - seconds_of(self._state.packs[pack].copied_bytes, self._state.machine.swap_in_bytes_per_second), 0.0
        )

    def _advance(self) -> bool:
        """Let each device go on as far as it comes; whether any came further."""
        advanced = False
        for device in self._state.devices:
            tasks, handlers = device.tasks, self._handlers
            while device.place < len(tasks):
                task = tasks[device.place]
                try:
                    self._state.refuse_misplaced(device, task)
                    handlers[task.kind](device, task.pack, task.microbatch or 0)
                except NotYetError as reason:
                    device.waits_for = str(reason)
                    break
                except BrokenRuleError as error:
                    raise self._refusal([(device, str(error))]) from None
                device.place += 1
                advanced = True
        return advanced

    def _refusal(self, problems: Sequence[tuple[Device, str]]) -> PlanError:
        marked = [(device.number, device.place) for device, _ in problems]
        reasons = [
            f"{device.tasks[device.place] if device.place < len(device.tasks) else 'the end'} on device {device.number}: "
            f"{problem}"
            for device, problem in problems
        ]
        return PlanError("\n".join([*reasons, self._state.schedule.grid(marked)]))

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

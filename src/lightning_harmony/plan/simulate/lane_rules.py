"""The rules of a lane's way through the packs: weights, forwards and backwards, stashes, and transfers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from lightning_harmony.plan.simulate.gradient_rules import GradientRules
from lightning_harmony.plan.simulate.replay_state import (
    BrokenRuleError,
    Device,
    Handler,
    NotYetError,
    ReplayState,
    Stashed,
    seconds_of,
)
from lightning_harmony.plan.values.task import COMPUTE, Errand, Kind, Phase, Task


class LaneRules:
    """Runs what lanes compute and what they take for it; rules 2 to 5 of a replay.

    Args:
        state: of the replay.
        gradients: of backwards.

    Attributes:
        handlers: by the kind of a task.
    """

    def __init__(self, state: ReplayState, gradients: GradientRules) -> None:
        self._state, self._gradients = state, gradients
        self.handlers: Mapping[Kind, Handler] = {
            Phase.FORWARD: self._forward,
            Phase.BACKWARD: self._backward,
            Errand.SWAP_IN: self._swap_in,
            Errand.EVICT: self._evict,
            Errand.STASH_OUT: self._stash_out,
            Errand.STASH_IN: self._stash_in,
            Errand.TRANSFER_FORWARD: partial(self._transfer, Phase.FORWARD),
            Errand.TRANSFER_BACKWARD: partial(self._transfer, Phase.BACKWARD),
        }

    def unfinished(self, device: Device) -> str:
        """What is missing when all tasks of a device are done; "" if nothing is."""
        plan = self._state.plan
        for number, lane in enumerate(self._state.lanes):
            if plan.visits and lane.position >= 0:
                pack = plan.visits[lane.position]
                if plan.device_of(pack, number) == device.number:
                    return f"microbatch {number} never runs {Task(pack, lane.phase, number)}"
        return f"the weights of pack {min(device.weights)} are still there" if device.weights else ""

    # ---- weights -------------------------------------------------------------------------------------------------------

    def _swap_in(self, device: Device, pack: int, _: int) -> None:
        if pack in device.weights:
            raise BrokenRuleError(f"pack {pack} is there already")
        cost = self._state.packs[pack]
        seconds = seconds_of(cost.copied_bytes, self._state.machine.swap_in_bytes_per_second)
        after = 0.0 if self._state.plan.lookahead else device.streams[COMPUTE]
        num_bytes = cost.weight_bytes + cost.staging_bytes
        if pack in self._state.plan.device_updated and pack in device.first_use and cost.master_bytes:
            # It comes for its backward, and stays as it is on the host.
            num_bytes = cost.weight_bytes + cost.master_bytes
            device.masters[pack] = cost.master_bytes
        end = self._state.run(device, num_bytes, after, seconds, lasting_bytes=num_bytes)
        if pack not in device.masters:
            device.give(cost.staging_bytes, end, lingers=True)
        device.weights[pack] = device.last_use[pack] = end
        device.swapped_in["weights"] += cost.copied_bytes

    def _evict(self, device: Device, pack: int, _: int) -> None:
        _refuse_absent(device, pack)
        if device.num_graphs[pack]:
            raise BrokenRuleError(f"graphs that need the weights of pack {pack} are kept")
        del device.weights[pack]
        num_bytes = self._state.packs[pack].weight_bytes - self._gradients.handed_over_bytes(device, pack)
        device.give(num_bytes, device.last_use[pack])

    # ---- phases ------------------------------------------------------------------------------------------------------

    def _forward(self, device: Device, pack: int, microbatch: int) -> None:
        _refuse_absent(device, pack)
        lane = self._state.lanes[microbatch]
        self._state.await_turn(lane, Phase.FORWARD, pack, microbatch)
        if lane.device not in (None, device.number):
            raise NotYetError(f"its input is on device {lane.device}")
        position = lane.position
        footprint = self._state.footprints[position]
        after = max(lane.ready, device.weights[pack])
        end = self._state.run(device, footprint.forward_bytes, after, footprint.forward_seconds)
        device.first_use.setdefault(pack, device.spans[-1].start_seconds)
        device.last_use[pack] = lane.ready = end
        device.memory.give(footprint.there_bytes + footprint.forward_bytes - footprint.forward_left_bytes, end)
        if self._state.plan.keeps_graph(position):
            device.num_graphs[pack] += 1
        else:
            device.stash.setdefault((pack, microbatch), []).append(Stashed(footprint, "on the device", end))
        lane.device = device.number
        lane.position += 1
        if lane.position == len(self._state.plan.visits):
            lane.phase, lane.position = Phase.BACKWARD, lane.position - 1

    def _backward(self, device: Device, pack: int, microbatch: int) -> None:
        _refuse_absent(device, pack)
        lane = self._state.lanes[microbatch]
        self._state.await_turn(lane, Phase.BACKWARD, pack, microbatch)
        if lane.device != device.number:
            raise NotYetError(f"the gradient that it begins with is on device {lane.device}")
        position = lane.position
        footprint, keeps = self._state.footprints[position], self._state.plan.keeps_graph(position)
        # A pack that was visited twice comes back to what it left last.
        stashed = None if keeps else device.stash[pack, microbatch][-1]
        if stashed is not None and stashed.where == "on the host":
            raise BrokenRuleError("its stash is on the host")
        if position in device.parked:
            raise BrokenRuleError("its gradients are parked on the host")
        sum_bytes = self._gradients.bytes_to_sum(device, position, microbatch)
        num_bytes, seconds = footprint.backward_bytes + sum_bytes, footprint.backward_seconds
        after = max(lane.ready, device.weights[pack], 0.0 if stashed is None else stashed.ready)
        end = self._state.run(device, num_bytes, after, seconds, lasting_bytes=sum_bytes)
        device.last_use[pack] = lane.ready = end
        gone = footprint.returning_bytes + footprint.graph_bytes
        if stashed is not None:
            gone += footprint.stash_bytes if stashed.where == "on the device" else footprint.loaded_bytes
        left = footprint.backward_left_bytes + footprint.gathered_bytes
        device.memory.give(footprint.backward_bytes - left + gone, end)
        if keeps:
            device.num_graphs[pack] -= 1
        else:
            device.stash[pack, microbatch].pop()
        self._gradients.make(device, position, microbatch, end)
        lane.position -= 1

    # ---- stash -------------------------------------------------------------------------------------------------------

    def _stash_out(self, device: Device, pack: int, microbatch: int) -> None:
        stashed = self._stashed(device, pack, microbatch, "on the device")
        num_bytes = stashed.footprint.stash_bytes
        seconds = seconds_of(num_bytes, self._state.machine.swap_out_bytes_per_second)
        end = self._state.run(device, 0, stashed.ready, seconds)
        stashed.where, stashed.ready = "on the host", end
        device.memory.give(num_bytes, end, lingers=True)
        device.swapped_out["stash"] += num_bytes

    def _stash_in(self, device: Device, pack: int, microbatch: int) -> None:
        stashed = self._stashed(device, pack, microbatch, "on the host")
        num_bytes, loaded = stashed.footprint.stash_bytes, stashed.footprint.loaded_bytes
        seconds = seconds_of(num_bytes, self._state.machine.swap_in_bytes_per_second)
        end = self._state.run(device, loaded, stashed.ready, seconds)
        stashed.where, stashed.ready = "back on the device", end
        device.swapped_in["stash"] += num_bytes

    def _stashed(self, device: Device, pack: int, microbatch: int, where: str) -> Stashed:
        """What a pack left last for a microbatch, and has to be somewhere."""
        left = device.stash.get((pack, microbatch))
        if not left:
            raise BrokenRuleError(f"pack {pack} has no stash of microbatch {microbatch}")
        if left[-1].where != where:
            raise BrokenRuleError(f"the stash of pack {pack} for microbatch {microbatch} is {left[-1].where}")
        return left[-1]

    # ---- between devices ---------------------------------------------------------------------------------------------

    def _transfer(self, phase: Phase, device: Device, pack: int, microbatch: int) -> None:
        lane = self._state.lanes[microbatch]
        self._state.await_turn(lane, phase, pack, microbatch)
        if lane.device in (None, device.number):
            raise BrokenRuleError(f"the tensors of microbatch {microbatch} are there already")
        footprint = self._state.footprints[lane.position]
        if phase is Phase.FORWARD:
            num_bytes, there = footprint.input_bytes, footprint.there_bytes
            gone = self._state.footprints[lane.position - 1].passed_bytes
        else:
            num_bytes, there = footprint.output_bytes, footprint.returning_bytes
            gone = there
        seconds = seconds_of(num_bytes, self._state.machine.transfer_bytes_per_second)
        end = self._state.run(device, there, lane.ready, seconds)
        self._state.devices[lane.device or 0].memory.give(gone, end)
        lane.device, lane.ready = device.number, end
        device.transferred_bytes += num_bytes


def _refuse_absent(device: Device, pack: int) -> None:
    if pack not in device.weights:
        raise BrokenRuleError(f"the weights of pack {pack} are not there")

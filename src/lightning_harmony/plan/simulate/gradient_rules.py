"""The rules of gradients: how they are summed, where the sums go, and when packs are updated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_harmony.plan.simulate.order import owner, summing_devices
from lightning_harmony.plan.simulate.replay_state import (
    BrokenRuleError,
    Device,
    Handler,
    NotYetError,
    ReplayState,
    seconds_of,
)
from lightning_harmony.plan.simulate.update_stream import room_on_host_at
from lightning_harmony.plan.values.host_need import RING
from lightning_harmony.plan.values.task import COMPUTE, Errand, Kind, Phase


@dataclass
class Made:
    """Gradients of a microbatch that are to be gathered.

    Attributes:
        position: the visit that they are of.
        device: where they are.
        ready: when they are there.
    """

    position: int
    device: Device
    ready: float


class GradientRules:
    """Sums the gradients of backwards, brings the sums to their updates, and lets these run; rules 6 to 8 of a replay.

    Args:
        state: of the replay.

    Attributes:
        handlers: by the kind of a task.
    """

    def __init__(self, state: ReplayState) -> None:
        self._state = state
        plan, numbers = state.plan, range(len(state.lanes))
        # Those that sum gradients on each device, in order.
        self._of_device = [
            [m for m in numbers if plan.parallel == "pipeline" or plan.device_of(0, m) == number]
            for number in range(plan.num_devices)
        ]
        # How many backwards are still to be added, by pack and device.
        self._left = {
            (pack, device): number * len(self._of_device[device])
            for pack, number in Counter(plan.visits).items()
            for device in summing_devices(plan, pack)
        }
        # By pack and microbatch.
        self._made: dict[tuple[int, int], Made] = {}
        # By pack and device, when they are on the host.
        self._sent: dict[int, dict[int, float]] = {}
        self.handlers: Mapping[Kind, Handler] = {
            Errand.SWAP_OUT: self._swap_out,
            Errand.PARK: self._park,
            Errand.UNPARK: self._unpark,
            Errand.UPDATE: self._update,
            Errand.GATHER: self._gather,
            Errand.REDUCE: self._reduce,
        }

    def unfinished(self, device: Device) -> str:
        """What is missing when all tasks of a device are done; "" if nothing is."""
        plan = self._state.plan
        for pack, number in self._made:
            if owner(plan, pack) == device.number:
                return f"the gradients of pack {pack} for microbatch {number} are never added"
        if device.sums:
            return f"the gradients of pack {min(device.sums)} are never swapped out"
        if device.parked:
            return f"the gradients of pack {plan.visits[min(device.parked)]} are parked for ever"
        waiting = [pack for pack in self._sent if pack not in device.updates and owner(plan, pack) == device.number]
        return f"pack {waiting[0]} is never updated" if waiting else ""

    # ---- sums ----------------------------------------------------------------------------------------------------------

    def bytes_to_sum(self, device: Device, position: int, microbatch: int) -> int:
        """What the sums of a visit take when a backward adds to them that may come now: nothing if they are there."""
        state = self._state
        footprint, pack = state.footprints[position], state.plan.visits[position]
        if position in device.parked:
            raise BrokenRuleError("its gradients are parked on the host")
        if any(each.device is device for (other, _), each in self._made.items() if other == pack):
            raise NotYetError(f"gradients of pack {pack} that it has made before are still to be added")
        if not footprint.gradient_bytes or footprint.is_gathered:
            return 0
        self._refuse_other_order(device, position, microbatch)
        return 0 if position in device.next_sum else footprint.gradient_bytes

    def handed_over_bytes(self, device: Device, pack: int) -> int:
        """What an update where the gradients are takes over of a pack's weights, once its last backward has run."""
        cost = self._state.packs[pack]
        if pack not in self._state.plan.device_updated or cost.master_bytes or not cost.gradient_bytes:
            return 0
        return 0 if self._left.get((pack, device.number)) else cost.weight_bytes

    def make(self, device: Device, position: int, microbatch: int, end: float) -> None:
        """A backward has made the gradients of a visit."""
        footprint = self._state.footprints[position]
        if footprint.is_gathered:
            self._made[self._state.plan.visits[position], microbatch] = Made(position, device, end)
        elif footprint.gradient_bytes > 0:
            self._add(device, position, end)

    def _refuse_other_order(self, device: Device, position: int, microbatch: int) -> None:
        of_device, summed = self._of_device[device.number], device.next_sum.get(position, 0)
        if of_device[summed] != microbatch:
            raise BrokenRuleError(f"gradients of microbatch {of_device[summed]} are to be summed first")

    def _add(self, device: Device, position: int, end: float) -> None:
        """Gradients of one microbatch have been added."""
        pack = self._state.plan.visits[position]
        first_bytes = 0 if position in device.next_sum else self._state.footprints[position].gradient_bytes
        device.next_sum[position] = device.next_sum.get(position, 0) + 1
        device.sums[pack] = device.sums.get(pack, 0) + first_bytes
        device.summed_at[pack] = end
        self._left[pack, device.number] -= 1

    def _gather(self, device: Device, pack: int, microbatch: int) -> None:
        made = self._made.get((pack, microbatch))
        if made is None:
            raise NotYetError(f"there are no gradients of pack {pack} for microbatch {microbatch} to be added")
        position, source = made.position, made.device
        if position in device.parked:
            raise BrokenRuleError("its gradients are parked on the host")
        self._refuse_other_order(device, position, microbatch)
        footprint = self._state.footprints[position]
        sum_bytes = 0 if position in device.next_sum else footprint.gradient_bytes
        come_bytes = 0 if source is device else footprint.gathered_bytes
        seconds = seconds_of(come_bytes, self._state.machine.transfer_bytes_per_second)
        after = max(made.ready, device.summed_at.get(pack, 0.0))
        end = self._state.run(device, sum_bytes + come_bytes, after, seconds, lasting_bytes=sum_bytes)
        del self._made[pack, microbatch]
        # What came is added, and then gone on both devices.
        device.memory.give(come_bytes, end, lingers=True)
        source.memory.give(footprint.gathered_bytes, end, lingers=True)
        self._add(device, position, end)
        device.transferred_bytes += come_bytes

    def _reduce(self, device: Device, pack: int, other: int) -> None:
        self._state.refuse_other_owner(device, pack)
        others = [number for number in summing_devices(self._state.plan, pack) if number != device.number]
        reduced = device.reduced.setdefault(pack, [])
        if others[len(reduced) : len(reduced) + 1] != [other]:
            raise BrokenRuleError(f"the gradients of pack {pack} on device {other} are not what is to be added next")
        if self._left[pack, device.number] or self._left[pack, other]:
            raise NotYetError(f"not all backwards of pack {pack} on devices {device.number} and {other} have run")
        source = self._state.devices[other]
        if pack not in source.sums or pack not in device.sums:
            raise BrokenRuleError(
                f"gradients of pack {pack} on devices {device.number} and {other} are parked on the host"
            )
        num_bytes = source.sums[pack]
        seconds = seconds_of(num_bytes, self._state.machine.transfer_bytes_per_second)
        after = max(source.summed_at[pack], device.summed_at[pack])
        end = self._state.run(device, num_bytes, after, seconds)
        # What came is added, and then gone on both devices.
        device.memory.give(num_bytes, end)
        source.give(source.sums.pop(pack), end)
        device.summed_at[pack] = end
        device.transferred_bytes += num_bytes
        reduced.append(other)

    # ---- from the sums to the updates --------------------------------------------------------------------------------

    def _swap_out(self, device: Device, pack: int, _: int) -> None:
        if self._state.plan.just_in_time:
            self._state.refuse_other_owner(device, pack)
        if pack in self._state.plan.device_updated:
            raise BrokenRuleError(f"the plan has pack {pack} updated where its gradients are")
        sent = self._sent.setdefault(pack, {})
        if device.number in sent:
            raise BrokenRuleError(f"the gradients of pack {pack} are on the host already")
        self._refuse_unfinished_sums(device, pack)
        others = len(summing_devices(self._state.plan, pack)) - 1 if self._state.plan.just_in_time else 0
        if len(device.reduced.get(pack, [])) < others:
            raise BrokenRuleError(f"the gradients of pack {pack} on other devices are not added")
        # The copy waits for room on the host: what comes behind is launched later.
        streams = [each.updates for each in self._state.devices]
        device.hold(room_on_host_at(device.updates, streams, RING))
        sent[device.number] = self._send(device, pack)
        # What was parked of other visits is on the host, where it is added.
        for position in [position for position in device.parked if self._state.plan.visits[position] == pack]:
            sent[device.number] = max(sent[device.number], device.parked.pop(position))

    def _refuse_unfinished_sums(self, device: Device, pack: int) -> None:
        if self._left.get((pack, device.number)):
            raise BrokenRuleError(
                f"{self._left[pack, device.number]} backwards of pack {pack} have not run or been added"
            )
        if pack not in device.sums:
            raise BrokenRuleError(f"pack {pack} has no gradients")

    def _send(self, device: Device, pack: int) -> float:
        """Bring the sums of a pack to the host; when they are there."""
        num_bytes = device.sums.pop(pack)
        seconds = seconds_of(num_bytes, self._state.machine.swap_out_bytes_per_second)
        end = self._state.run(device, 0, device.summed_at[pack], seconds)
        device.give(num_bytes, end, lingers=True)
        device.swapped_out["gradients"] += num_bytes
        return end

    def _park(self, device: Device, pack: int, _: int) -> None:
        if pack not in device.sums:
            raise BrokenRuleError(f"pack {pack} has no gradients")
        there = [p for p, number in device.next_sum.items() if number and self._state.plan.visits[p] == pack]
        there = [position for position in there if position not in device.parked]
        device.parked.update(dict.fromkeys(there, self._send(device, pack)))

    def _unpark(self, device: Device, pack: int, microbatch: int) -> None:
        lane = self._state.lanes[microbatch]
        self._state.await_turn(lane, Phase.BACKWARD, pack, microbatch)
        if lane.position not in device.parked:
            raise BrokenRuleError(f"no gradients of pack {pack} are parked that microbatch {microbatch} adds to")
        num_bytes = self._state.footprints[lane.position].gradient_bytes
        seconds = seconds_of(num_bytes, self._state.machine.swap_in_bytes_per_second)
        end = self._state.run(device, num_bytes, device.parked[lane.position], seconds, lasting_bytes=num_bytes)
        del device.parked[lane.position]
        device.sums[pack] = device.sums.get(pack, 0) + num_bytes
        device.summed_at[pack] = max(device.summed_at[pack], end)
        device.swapped_in["gradients"] += num_bytes

    def _update(self, device: Device, pack: int, _: int) -> None:
        self._state.refuse_other_owner(device, pack)
        if pack in device.updates:
            raise BrokenRuleError(f"pack {pack} has been updated")
        if pack in self._state.plan.device_updated:
            self._refuse_unfinished_sums(device, pack)
            num_bytes = device.sums.pop(pack) + device.masters.pop(pack, 0) + self.handed_over_bytes(device, pack)
            device.updates.add(pack, device.summed_at[pack], num_bytes)
            return
        sent, after = self._sent.get(pack, {}), 0.0
        if self._state.plan.just_in_time and not sent:
            raise BrokenRuleError(f"the gradients of pack {pack} are not on the host")
        if not self._state.plan.just_in_time:
            if missing := [number for number in summing_devices(self._state.plan, pack) if number not in sent]:
                raise NotYetError(f"the gradients of pack {pack} on device {missing[0]} are not on the host")
            if waiting := [number for number, lane in enumerate(self._state.lanes) if lane.position >= 0]:
                raise NotYetError(f"the backward of microbatch {waiting[0]} has not ended")
            after = max(lane.ready for lane in self._state.lanes)
        # A deferred one is listed behind all computing.
        device.updates.add(pack, max(*sent.values(), after, device.streams[COMPUTE]))

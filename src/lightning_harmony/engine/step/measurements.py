"""Measurements: what steps were seen to take of a machine, from which plans are made and which later fits recall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.measure.profile import Profiler
from lightning_harmony.engine.measure.workspace import WorkSpace
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.updates.update import Updater
from lightning_harmony.plan.search.packing import smallest
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.profile import DeviceLimits
from lightning_harmony.plan.values.record import Record


@dataclass(frozen=True)
class Measurements:
    """What is measured of training steps.

    Attributes:
        devices: where they run.
        store: the host store, from which layers come.
        profiler: what was timed.
        work: what was allocated.
        updater: times updates, and has the state that is on the host, on disk and on devices.
    """

    devices: Sequence[Device]
    store: HostStore
    profiler: Profiler
    work: WorkSpace
    updater: Updater

    def cost(self, layer: SwappedLayer) -> Cost:
        """What a layer was seen to cost."""
        cost = self.profiler.complete(self.work.cost(layer, self.store), layer)
        state, disk = self.updater.state_bytes(layer.parameters), self.updater.streamed.disk
        # That which lives there stays on no device.
        state = 0 if any(map(disk.is_home_of, layer.parameters)) else state
        return replace(cost, disk_bytes=disk.bytes_of(layer.parameters), optimizer_bytes=state)

    def machine(self) -> DeviceLimits:
        """The capacity, and the speeds that were seen."""
        # The plan says how much of that stays.
        kept = self.updater.kept_bytes()
        return DeviceLimits(
            smallest(device.capacity_bytes for device in self.devices),
            swap_in_bytes_per_second=self.profiler.swap_in.bytes_per_second,
            swap_out_bytes_per_second=self.profiler.swap_out.bytes_per_second,
            transfer_bytes_per_second=self.profiler.transfer.bytes_per_second,
            update_bytes_per_second=self.updater.speeds.fastest.bytes_per_second,
            disk_bytes_per_second=self.updater.streamed.disk.bytes_per_second,
            # Between steps, when nothing of a step is there.
            occupied_bytes=max(
                device.occupied_bytes() + device.unplanned_bytes() - there
                for device, there in zip(self.devices, kept, strict=True)
            ),
            updates_outlast=self.updater.speeds.outlast is not False,
            updates_in_place=self.updater.speeds.in_place,
            state_may_stay=self.updater.speeds.state_may_stay,
            pools_apart=any(device.pools_apart for device in self.devices),
        )

    def recall(self, record: Record, num_elements: int, layers: Mapping[str, SwappedLayer]) -> None:
        """Take over what was seen before.

        Args:
            record: tells it.
            num_elements: of the largest microbatch.
            layers: those that it knows, by their names.
        """
        num_calls = Counter(record.calls)
        self.profiler.begin(num_elements)
        for cost in record.costs_at(num_elements):
            self.profiler.recall(layers[cost.name], cost)
            self.work.recall(layers[cost.name], cost, num_calls[cost.name])
        self.profiler.swap_in.recall(record.machine.swap_in_bytes_per_second)
        self.profiler.swap_out.recall(record.machine.swap_out_bytes_per_second)
        self.profiler.transfer.recall(record.machine.transfer_bytes_per_second)
        self.updater.speeds.fastest.recall(record.machine.update_bytes_per_second)

    def forget_layers(self, *, keeps_work: bool = False) -> None:
        """Forget what layers cost: from now on they run otherwise.

        Args:
            keeps_work: whether they may run again as they did, and what they allocate at most is to be known then.
        """
        if not keeps_work:
            self.work.clear()
        self.profiler.clear()

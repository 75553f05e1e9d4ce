"""What a step is planned for: what its devices can do, and what the layers cost on them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from lightning_harmony.plan.values.cost import SECONDS, Cost, pack_cost
from lightning_harmony.plan.values.document import Count, Speed
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.printed import Printed, table_lines


@dataclass(frozen=True)
class DeviceLimits:
    """Capacity and speeds of each device that a plan is for. A speed of None is not known: what it takes counts as no time.

    Attributes:
        capacity_bytes: what a device may hold; None for no limit.
        swap_in_bytes_per_second: host to device.
        swap_out_bytes_per_second: device to host.
        transfer_bytes_per_second: device to device.
        update_bytes_per_second: gradients that updates of one device use up, the disk aside.
        disk_bytes_per_second: what updates read from disk, and write there again at the same time.
        occupied_bytes: what of the capacity a step finds taken: by the batch, by buffers of no layer, by what user code keeps.
        updates_outlast: whether updates just in time may go on under the next step's forward. Where something may look at
            weights between steps, each step waits for its own.
        updates_in_place: whether packs may be updated with their gradients where these were summed.
        state_may_stay: whether optimizer state may stay on devices between updates: nobody looks at it then.
        pools_apart: whether what lasts on a device (weights, sums of gradients) and what passes (activations, work) have
            memory of their own, of which what one has left is of no use to the other at once.
    """

    capacity_bytes: Count | None = None
    swap_in_bytes_per_second: Speed | None = None
    swap_out_bytes_per_second: Speed | None = None
    transfer_bytes_per_second: Speed | None = None
    update_bytes_per_second: Speed | None = None
    disk_bytes_per_second: Speed | None = None
    occupied_bytes: Count = 0
    updates_outlast: bool = True
    updates_in_place: bool = False
    state_may_stay: bool = False
    pools_apart: bool = False

    @property
    def free_bytes(self) -> int | None:
        """What a step may take of a device; None for no limit."""
        return None if self.capacity_bytes is None else max(self.capacity_bytes - self.occupied_bytes, 0)


@dataclass(frozen=True)
class Profile(Printed):
    """What was measured. Prints as a table of the layers.

    Attributes:
        layers: the cost of each, in the order of their first calls.
        machine: what they ran on.
    """

    layers: tuple[Cost, ...]
    machine: DeviceLimits = DeviceLimits()

    def pack_costs(self, packs: Sequence[Sequence[str]]) -> tuple[Cost, ...]:
        """The costs of packs of these layers, given by their names; a layer that was not seen costs nothing."""
        return tuple(pack_cost([self._by_name.get(name) or Cost(name, 0, 0) for name in pack]) for pack in packs)

    def __str__(self) -> str:
        rows = [
            (
                cost.name,
                format_bytes(cost.weight_bytes),
                *(f"{1000 * each:.3g} ms" for each in (cost.forward_seconds, cost.backward_seconds)),
            )
            for cost in self.layers
        ]
        return "\n".join(table_lines([("Layer", "Weights", "Forward", "Backward"), *rows]))

    @cached_property
    def _by_name(self) -> dict[str, Cost]:
        return {cost.name: cost for cost in self.layers}


# The bytes of a cost that are not the layer's doing alone.
_AROUND = ("forward_work_bytes", "backward_work_bytes", "arriving_bytes", "returning_bytes")


def share_seconds(layers: Sequence[Cost], kinds: Sequence[str]) -> list[Cost]:
    """Let layers that do the same share what was timed of each: the median, which one slow turn does not move.

    Those do the same that are of one kind and cost the same bytes: their inputs have the same shapes, then. But what they
    allocate meanwhile may differ, and what they find: the first of its kind on a device also makes what libraries work with,
    which takes long, and what it is called with may be small. Bytes are counted, not timed, so each layer keeps its own.

    Args:
        layers: what each costs.
        kinds: of each, the same for those whose code and parameters are alike.
    """
    alike: defaultdict[object, list[Cost]] = defaultdict(list)
    for cost, kind in zip(layers, kinds, strict=True):
        alike[_key(cost, kind)].append(cost)
    shared: dict[object, dict[str, Any]] = {
        key: {name: median(getattr(cost, name) for cost in costs) for name in SECONDS} for key, costs in alike.items()
    }
    return [replace(cost, **shared[_key(cost, kind)]) for cost, kind in zip(layers, kinds, strict=True)]


def _key(cost: Cost, kind: str) -> object:
    untimed: dict[str, Any] = dict.fromkeys(SECONDS, 0.0)
    around: dict[str, Any] = dict.fromkeys(_AROUND, 0)
    return kind, replace(cost, name="", **around, **untimed)

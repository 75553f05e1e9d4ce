"""Placement: the packs of the plan in use, as they are on each device, and where each of them runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from torch import nn

from lightning_harmony.engine.lanes.lane import this_thread
from lightning_harmony.engine.measure.workspace import WorkSpace
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import BufferKey, SwappedLayer
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.plan.simulate.lowering import moves_of
from lightning_harmony.plan.simulate.order import owner
from lightning_harmony.plan.values.plan import Plan


class Placement:
    """Knows in which pack each layer is, and on which device that runs.

    Args:
        store: the host store.
        residents: of each device, the root's first.

    Attributes:
        residents: the same.
        plan: the one in use.
        pack_of: the pack of each layer, both by their indices.
    """

    def __init__(self, store: HostStore, residents: Sequence[Residents]) -> None:
        self.residents = residents
        self.plan = Plan((), (), 0)
        self.pack_of: dict[int, int] = {}
        self._store = store
        # Of each pack that has buffers: the packs that have some of them, on each device, itself included.
        self._sharing: dict[int, list[tuple[Residents, SwappedPack]]] = {}

    @property
    def packs(self) -> list[SwappedPack]:
        """The packs as they are on the root device; other devices have the same ones."""
        return self.residents[0].packs

    def packs_with(self, parameter: nn.Parameter) -> list[tuple[Residents, SwappedPack]]:
        """The packs that have a parameter, on each device."""
        packs = [(residents, pack) for residents in self.residents for pack in residents.packs]
        return [(residents, pack) for residents, pack in packs if any(each is parameter for each in pack.parameters)]

    def refuse_changed_weights(self) -> None:
        """Refuse a step in whose forward layers have changed weights.

        Raises:
            UnsupportedModelError: naming the pack.
        """
        for residents in self.residents:
            residents.weight_checks.refuse_changed()

    def widen_read(self) -> bool:
        """Let parameters that layers needed as they are come so from the next step on; whether there were any."""
        has_widened = False
        for pack in self.packs:
            read = {parameter for layer in pack.layers for parameter in layer.read_wide}
            if read:
                has_widened = True
                for copy in self.copies(pack.index):
                    copy.widen(read)
                for layer in pack.layers:
                    layer.read_wide.clear()
        return has_widened

    def begin_step(self, work: WorkSpace | None) -> None:
        """Bound what lasts on devices, so that it leaves its memory to what passes, where that has a pool of its own.

        Args:
            work: what microbatches were seen to take that go forward alone; None for a step by the plan, which knows.
        """
        for number, (residents, limit) in enumerate(zip(self.residents, self._limits, strict=True)):
            device, bound = residents.device, limit
            if work is not None:
                passing, capacity = work.passing_bytes(number), device.capacity_bytes
                bound = capacity - passing if passing and capacity is not None and device.pools_apart else None
            device.lasting_limit_bytes = bound

    def use(self, plan: Plan, layers: Sequence[SwappedLayer]) -> None:
        """Place these layers by a plan from now on."""
        self.plan, of_devices = plan, moves_of(plan)
        self._limits = [each.lasting_bytes for each in of_devices]
        by_name = {layer.name: layer for layer in layers}
        packs = [[by_name[name] for name in pack] for pack in plan.packs]
        # Anew even where they are the same: their weights may be narrow by now.
        for residents, each in zip(self.residents, of_devices, strict=True):
            residents.packs = [SwappedPack(index, layers, self._store) for index, layers in enumerate(packs)]
            residents.agenda.use(plan, each.moves)
        self.pack_of = {layer.index: index for index, layers in enumerate(packs) for layer in layers}
        having: dict[BufferKey, list[int]] = defaultdict(list)
        for pack in self.packs:
            for key in pack.buffers:
                having[key].append(pack.index)
        self._sharing = {
            pack.index: [
                (residents, residents.packs[index])
                for residents in self.residents
                for index in dict.fromkeys(chain.from_iterable(having[key] for key in pack.buffers))
            ]
            for pack in self.packs
            if pack.buffers
        }

    def add(self, layer: SwappedLayer) -> None:
        """Make a pack of a layer that the plan does not know."""
        self.pack_of[layer.index] = len(self.packs)
        for residents in self.residents:
            residents.packs.append(SwappedPack(len(residents.packs), [layer], self._store))

    def in_order(self) -> list[SwappedPack]:
        """The packs as a forward comes to them, and then those that the plan does not know."""
        return [self.packs[index] for index in dict.fromkeys((*self.plan.visits, *range(len(self.packs))))]

    def copies(self, pack: int) -> list[SwappedPack]:
        """A pack as it is on each device."""
        return [residents.packs[pack] for residents in self.residents]

    def others_with_buffers_of(self, pack: SwappedPack) -> list[tuple[Residents, SwappedPack]]:
        """Where some of a pack's buffers may be, too: the same pack on other devices, and packs whose layers share modules."""
        sharing = self._sharing.get(pack.index)
        return [] if sharing is None else [(residents, other) for residents, other in sharing if other is not pack]

    def parameters_with_state_there(self) -> list[frozenset[nn.Parameter]]:
        """Of each device, the parameters whose optimizer state stays there."""
        chosen: list[list[nn.Parameter]] = [[] for _ in self.residents]
        for pack in self.plan.state_on_device:
            chosen[self.plan.device_of(pack, 0)] += self.packs[pack].parameters
        return list(map(frozenset, chosen))

    def device_of(self, pack: int) -> int:
        """The number of the device where a pack runs for the current lane; outside of lanes, the root."""
        if self.plan.num_devices == 1 or (lane := this_thread.lane) is None:
            return 0
        return self.plan.device_of(pack, lane.microbatch)

    def residents_of(self, pack: int) -> Residents:
        """Those of the device where a pack runs for the current lane."""
        return self.residents[self.device_of(pack)]

    def home_of(self, pack: int) -> Residents:
        """Those of the home of a pack that is spread, where the gradients of all lanes are gathered."""
        return self.residents[owner(self.plan, pack)]

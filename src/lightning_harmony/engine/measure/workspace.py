"""Work space: what layers were seen to allocate on the device beside their weights and gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.task import Phase


class WorkSpace:
    """The most that each layer was seen to allocate for one microbatch, in each phase, and for its graph.

    Attributes:
        loss_bytes: what the backward of a loss was seen to leave for that of the last layer.
        occupied_bytes: what was on each device before and after the step, by the device's number.
    """

    def __init__(self) -> None:
        self._work: dict[Phase, Counter[int]] = {phase: Counter() for phase in Phase}
        self._graphs: Counter[int] = Counter()
        self._uses: Counter[int] = Counter()
        self._found: dict[Phase, dict[int, tuple[int, int, int]]] = {phase: {} for phase in Phase}
        self.loss_bytes = 0
        self.occupied_bytes: Sequence[int] = ()

    def note(self, layers: Iterable[SwappedLayer], phase: Phase, num_bytes: int) -> None:
        """A phase of some layers, one after the other, was seen to allocate so much."""
        work = self._work[phase]
        for layer in layers:
            work[layer.index] = max(work[layer.index], num_bytes)

    def note_graph(self, layer: SwappedLayer, num_bytes: int) -> None:
        """A layer's graph, with its inputs, was seen to take so much."""
        self._graphs[layer.index] = max(self._graphs[layer.index], num_bytes)

    def note_found(
        self, layers: Iterable[SwappedLayer], phase: Phase, num_bytes: int, num_lanes: int, device: int = 0
    ) -> None:
        """So much was on a device, beside their state, when lanes came to some layers there."""
        for layer in layers:
            known = self._found[phase].get(layer.index, (0, 1, device))
            self._found[phase][layer.index] = max(known, (num_bytes, num_lanes, device))

    def note_calls(self, calls: Iterable[int]) -> None:
        """One microbatch called these layers, given by their indices."""
        self._uses |= Counter(calls)

    def recall(self, layer: SwappedLayer, cost: Cost, num_calls: int) -> None:
        """What an earlier fit has seen of a layer that each microbatch calls so often."""
        self.note([layer], Phase.FORWARD, cost.forward_work_bytes)
        self.note([layer], Phase.BACKWARD, cost.backward_work_bytes)
        self.note_graph(layer, cost.graph_bytes // max(num_calls, 1))
        self._uses[layer.index] = num_calls
        self.note_found([layer], Phase.FORWARD, cost.arriving_bytes, 1)
        self.note_found([layer], Phase.BACKWARD, cost.returning_bytes, 1)

    def bytes(self, layers: Iterable[SwappedLayer], phase: Phase) -> int:
        """What some layers allocate at most, of which one works at a time."""
        work = self._work[phase]
        return max(work[layer.index] for layer in layers)

    def passing_bytes(self, device: int) -> int:
        """The most that one microbatch was seen to have on a device in its forward, beside the state of layers."""
        work = self._work[Phase.FORWARD]
        return max(
            (found + work[index] for index, (found, _, there) in self._found[Phase.FORWARD].items() if there == device),
            default=0,
        )

    def graph_bytes(self, layers: Iterable[SwappedLayer]) -> int:
        """What the graphs of all calls of some layers take together, for one microbatch."""
        return sum(self._graphs[layer.index] * max(self._uses[layer.index], 1) for layer in layers)

    def cost(self, layer: SwappedLayer, store: HostStore) -> Cost:
        """What a layer costs in a pack of its own."""
        pack = SwappedPack(-1, [layer], store)
        pack.is_narrow = True
        forward, backward = (self.bytes([layer], phase) for phase in Phase)
        return Cost(
            layer.name,
            pack.layout.num_bytes + pack.buffer_bytes,
            pack.gradient_layout()[1],
            forward,
            backward,
            self.graph_bytes([layer]),
            staging_bytes=pack.layout.staging_bytes,
            master_bytes=pack.layout.master_bytes,
            arriving_bytes=self._found_bytes(layer, Phase.FORWARD),
            returning_bytes=self._found_bytes(layer, Phase.BACKWARD),
        )

    def _found_bytes(self, layer: SwappedLayer, phase: Phase) -> int:
        """What each microbatch had on the device when it came to a layer."""
        num_bytes, num_lanes, device = self._found[phase].get(layer.index, (0, 1, 0))
        occupied = self.occupied_bytes[device] if self.occupied_bytes else 0
        return max(num_bytes - occupied, 0) // num_lanes

    def clear(self) -> None:
        """Forget all."""
        for work in self._work.values():
            work.clear()
        self._graphs.clear()
        self._uses.clear()
        for found in self._found.values():
            found.clear()
        self.loss_bytes, self.occupied_bytes = 0, ()

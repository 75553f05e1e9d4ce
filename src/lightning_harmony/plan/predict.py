"""What a step will take of a machine: its packs, the bytes that it cannot do without, its seconds, and what bounds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_harmony.plan.cost import Cost, pack_cost
from lightning_harmony.plan.graphs import graphs_to_keep
from lightning_harmony.plan.machine import Machine
from lightning_harmony.plan.packing import fill_capacity
from lightning_harmony.plan.plan import Plan, visits_of
from lightning_harmony.plan.work import StepProfile


@dataclass(frozen=True)
class Need:
    """What one layer or pack needs on the device while it runs.

    Attributes:
        name: of the layer or pack; empty for the code before the first layer.
        state_bytes: its weights, and in the backward its gradients.
        work_bytes: what it allocates.
        live_bytes: what all microbatches have on the device meanwhile.
        other_bytes: buffers of no layer, the batch, and what libraries take.
    """

    name: str
    state_bytes: int
    work_bytes: int
    live_bytes: int
    other_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.state_bytes + self.work_bytes + self.live_bytes + self.other_bytes


@dataclass(frozen=True)
class HostNeed:
    """What a training takes of the host's memory.

    Attributes:
        weight_bytes: parameters.
        gradient_bytes: their gradients.
        optimizer_bytes: the optimizer's state.
        stash_bytes: the stash of all microbatches.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    stash_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.stash_bytes


@dataclass(frozen=True)
class PhaseSeconds:
    """How long each part of the machine is busy in one phase of a step. The longest bounds it.

    Attributes:
        seconds: by part: "compute", "launch" (the host, having the device compute), "swap in", "swap out", "update".
    """

    seconds: Mapping[str, float]

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.seconds, key=lambda part: self.seconds[part])

    @property
    def total(self) -> float:
        """As long as the longest."""
        return self.seconds[self.bound]


@dataclass(frozen=True)
class Prediction:
    """One way to run a step, on one machine.

    Attributes:
        num_microbatches: lanes.
        plan: packs, and whose graphs are kept.
        need: the one that needs most on the device.
        host: what is held on the host.
        peak_bytes: the most that will be allocated on the device.
        forward: the phase.
        backward: the phase, with the updates under it.
        turn_seconds: what nothing can run beside: the way of the last pack's gradients out, its update and the first
            pack's way in; with a deferred update, all of that.
        swapped_in_bytes: host to device, by kind.
        swapped_out_bytes: device to host, by kind.
    """

    num_microbatches: int
    plan: Plan
    need: Need
    host: HostNeed
    peak_bytes: int
    forward: PhaseSeconds
    backward: PhaseSeconds
    turn_seconds: float
    swapped_in_bytes: Mapping[str, int]
    swapped_out_bytes: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """Of the step, each part as busy as it can be."""
        return self.forward.total + self.backward.total + self.turn_seconds

    @property
    def bound(self) -> str:
        """What takes the largest part of it."""
        parts = {"the turn of the step": self.turn_seconds}
        for phase in (self.forward, self.backward):
            parts[phase.bound] = parts.get(phase.bound, 0.0) + phase.total
        return max(parts, key=lambda part: parts[part])


def predict(
    profile: StepProfile,
    machine: Machine,
    *,
    capacity_bytes: int | None,
    num_microbatches: int,
    is_deferred: bool = False,
    state_copies: int = 2,
) -> Prediction:
    """Predict a step.

    Args:
        profile: of one microbatch.
        machine: where it runs.
        capacity_bytes: what the device may hold; None for no limit.
        num_microbatches: how many there are.
        is_deferred: whether parameters are updated after the backward.
        state_copies: bytes of optimizer state for each byte of a trained parameter.
    """
    return _Step(profile, machine, capacity_bytes, num_microbatches, is_deferred, state_copies).predict()


class _Step:
    def __init__(
        self,
        profile: StepProfile,
        machine: Machine,
        capacity_bytes: int | None,
        num_microbatches: int,
        is_deferred: bool,
        state_copies: int,
    ) -> None:
        self._profile = profile
        self._machine = machine
        self._capacity = capacity_bytes
        self._lanes = num_microbatches
        self._is_deferred = is_deferred
        self._state_copies = state_copies
        order = list(dict.fromkeys(profile.calls))
        packs = fill_capacity([profile.layers[index].cost for index in order], capacity_bytes)
        called = set(order)
        uncalled = [(index,) for index in range(len(profile.layers)) if index not in called]
        self._packs = [*(tuple(order[place] for place in pack) for pack in packs), *uncalled]
        self._costs = [pack_cost([profile.layers[index].cost for index in pack]) for pack in self._packs]
        self._plan = self._make_plan()

    def _make_plan(self) -> Plan:
        layers = self._profile.layers
        pack_of = {index: number for number, pack in enumerate(self._packs) for index in pack}
        visits = visits_of([pack_of[call] for call in self._profile.calls])
        first_fused, keeping = graphs_to_keep(visits, self._costs, self._lanes, [self._capacity], "pipeline")
        names = tuple(tuple(layers[index].cost.name for index in pack) for pack in self._packs)
        return Plan(names, visits, first_fused, keeping)

    def predict(self) -> Prediction:
        need = self._need()
        staying = self._staying()
        keeping = self._plan.fused | self._plan.kept
        weights = [self._sum(pack, "swapped_bytes") for pack in range(len(self._packs))]
        gradients = sum(self._costs[pack].gradient_bytes for pack in set(self._plan.visits))
        stash = self._lanes * sum(
            self._sum(pack, "stash_bytes") for pack in dict.fromkeys(self._plan.visits) if pack not in keeping
        )
        first = sum(weights[pack] for pack in set(self._plan.visits))
        again = sum(weights[pack] for pack in set(self._plan.visits) - staying)
        forward = self._phase("forward", first, stash, gradients=0, keeping=keeping)
        backward = self._phase("backward", again + stash, 0, gradients=gradients, keeping=keeping)
        return Prediction(
            num_microbatches=self._lanes,
            plan=self._plan,
            need=need,
            host=self._host(),
            peak_bytes=self._peak(need),
            forward=forward,
            backward=backward,
            turn_seconds=self._turn(weights),
            swapped_in_bytes={"weights": first + again, "stash": stash},
            swapped_out_bytes={"gradients": gradients, "stash": stash},
        )

    def _sum(self, pack: int, attribute: str) -> int:
        return sum(getattr(self._profile.layers[index], attribute) for index in self._packs[pack])

    # ---- bytes ---------------------------------------------------------------------------------------------------------

    @property
    def _other_bytes(self) -> int:
        profile = self._profile
        return profile.buffer_bytes + self._lanes * profile.microbatch_bytes + self._machine.library_bytes

    def _need(self) -> Need:
        """What the neediest takes: of the layers one by one, as in the first step, and of the packs."""
        layers = self._profile.layers
        live = self._live()
        start = Need("", 0, self._profile.start_bytes, self._lanes * max(live.values(), default=0), self._other_bytes)
        needs = [start]
        for index in dict.fromkeys(self._profile.calls):
            needs += self._needs(layers[index].first_cost, layers[index].num_calls, live[index])
        for cost, pack in zip(self._costs, self._packs, strict=True):
            called = [index for index in pack if index in live]
            if called:
                calls = max(layers[index].num_calls for index in called)
                needs += self._needs(cost, calls, max(live[index] for index in called))
        return max(needs, key=lambda need: need.num_bytes)

    def _needs(self, cost: Cost, num_calls: int, live_bytes: int) -> list[Need]:
        """Forward, and backward with a sum of gradients for each call."""
        live, other = self._lanes * live_bytes, self._other_bytes
        gradients = max(num_calls, 1) * cost.gradient_bytes
        return [
            Need(cost.name, cost.weight_bytes, cost.forward_work_bytes, live, other),
            Need(cost.name, cost.weight_bytes + gradients, cost.backward_work_bytes, live, other),
        ]

    def _live(self) -> dict[int, int]:
        """What a microbatch has on the device around each layer: some lanes wait for it, others for one beside it."""
        calls, layers = self._profile.calls, self._profile.layers
        live = dict.fromkeys(calls, 0)
        for place, index in enumerate(calls):
            around = calls[max(place - 1, 0) : place + 2]
            live[index] = max(live[index], *(layers[other].live_bytes for other in around))
        return live

    def _peak(self, need: Need) -> int:
        """All that there is room for is used."""
        live = self._lanes * max(self._live().values(), default=0)
        visited = set(self._plan.visits)
        states = sum(self._costs[pack].state_bytes for pack in visited)
        graphs = sum(self._costs[pack].graph_bytes for pack in self._plan.fused)
        graphs += self._lanes * sum(self._costs[pack].graph_bytes for pack in self._plan.kept)
        work = max((self._costs[pack].work_bytes for pack in visited), default=0)
        everything = max(states + graphs + work + live + self._other_bytes, need.num_bytes)
        return everything if self._capacity is None else min(everything, self._capacity)

    def _host(self) -> HostNeed:
        layers = self._profile.layers
        trained = sum(layer.trained_bytes for layer in layers)
        return HostNeed(
            weight_bytes=self._profile.weight_bytes,
            gradient_bytes=trained,
            optimizer_bytes=trained * self._state_copies,
            stash_bytes=self._lanes * sum(layer.stash_bytes for layer in layers),
        )

    def _staying(self) -> set[int]:
        """The packs that the backward still finds on the device."""
        plan = self._plan
        before = list(dict.fromkeys(reversed(plan.visits[: plan.first_fused])))
        if self._capacity is None:
            return set(plan.visits)
        costs = self._costs
        # The two moments that leave least room: in the fused packs, and when the backward of the others begins.
        fused = sum(costs[pack].state_bytes + costs[pack].graph_bytes for pack in plan.fused)
        fused += max((costs[pack].backward_work_bytes for pack in plan.fused), default=0)
        behind = max((costs[pack].gradient_bytes + costs[pack].backward_work_bytes for pack in before), default=0)
        live = self._lanes * max(self._live().values(), default=0)
        room = self._capacity - max(fused, behind) - live - self._other_bytes
        staying = set(plan.fused)
        for pack in before:
            room -= costs[pack].weight_bytes
            room -= self._lanes * costs[pack].graph_bytes if pack in plan.kept else 0
            if room < 0:
                break
            staying.add(pack)
        return staying

    # ---- seconds -------------------------------------------------------------------------------------------------------

    def _phase(
        self, phase: str, in_bytes: int, out_bytes: int, *, gradients: int, keeping: frozenset[int]
    ) -> PhaseSeconds:
        machine = self._machine
        compute = launch = 0.0
        for number, pack in enumerate(self._packs):
            for index in pack:
                layer = self._profile.layers[index]
                work = layer.forward if phase == "forward" else layer.backward
                compute += work.device_seconds(machine)
                launch += work.host_seconds(machine) + layer.num_calls * machine.call_seconds
                if phase == "backward" and number in keeping:
                    compute -= layer.recompute.device_seconds(machine)
                    launch -= layer.recompute.host_seconds(machine)
        seconds = {
            "compute": self._lanes * compute,
            "launch": self._lanes * launch,
            "swap in": in_bytes / machine.swap_in_bytes_per_second,
            "swap out": (out_bytes + gradients) / machine.swap_out_bytes_per_second,
        }
        if phase == "backward" and not self._is_deferred:
            seconds["update"] = self._updated(range(len(self._packs)))
        return PhaseSeconds(seconds)

    def _updated(self, packs: Sequence[int]) -> float:
        return sum(self._sum(pack, "num_trained") for pack in packs) / self._machine.updated_parameters_per_second

    def _turn(self, weights: Sequence[int]) -> float:
        machine, visits = self._machine, self._plan.visits
        if not visits:
            return 0.0
        first = visits[0]
        seconds = weights[first] / machine.swap_in_bytes_per_second
        seconds += self._costs[first].gradient_bytes / machine.swap_out_bytes_per_second
        return seconds + self._updated(range(len(self._packs)) if self._is_deferred else [first])

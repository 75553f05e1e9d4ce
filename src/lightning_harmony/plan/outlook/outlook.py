"""The outlook: what a step will take of a machine, told from what its layers compute, before anything ran.

A plan is made as training makes it after its first step, and `replay` tells its seconds and bytes. Besides, this says what
a step cannot do without: the first one goes layer by layer, with weights as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.outlook.nodes import Nodes, Pack, packs_of, seconds_on
from lightning_harmony.plan.outlook.work import Held, LayerProfile, StepProfile
from lightning_harmony.plan.search.deciding import decide
from lightning_harmony.plan.search.rules import with_graphs
from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.values.cost import Cost, pack_cost
from lightning_harmony.plan.values.host_need import HostNeed, bytes_beside_state
from lightning_harmony.plan.values.line import on_line
from lightning_harmony.plan.values.machine import Machine, shared_stash_bytes, with_shared_stash
from lightning_harmony.plan.values.plan import Plan, Predicted, visits_of
from lightning_harmony.plan.values.prediction import Prediction
from lightning_harmony.plan.values.profile import DeviceLimits
from lightning_harmony.plan.values.task import COMPUTE

# More microbatches are not replayed, and have the packs of so many: each of them adds as much as the one before.
MOST_REPLAYED = 32
_PARTS = {"swap-in": "swap in", "stash-in": "swap in", "swap-out": "swap out", "update": "update"}


@dataclass(frozen=True)
class Need:
    """What one layer or pack needs on the device while it runs.

    Attributes:
        name: of the layer or pack; empty for the code before the first layer.
        state_bytes: its weights, and in the backward its gradients.
        work_bytes: what the microbatch that runs has on the device.
        live_bytes: what the other microbatches have there meanwhile.
        other_bytes: buffers of no layer, the batch, what libraries take, and what is left to tensors that several layers take.
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
class Outlook:
    """One way to run a step, on one machine.

    Attributes:
        num_microbatches: lanes.
        plan: what the step will run by, with what its layers cost.
        need: the layer or pack that needs most on the device.
        host: what is held on the host.
        peak_bytes: the most that will be allocated on the device, however slow copies are: what is on its way to the host
            stays until its room is needed.
        seconds: of the step.
        busy_seconds: how long each part of the machine is busy in it: "compute", "launch" (the host, having the device
            compute), "swap in", "swap out", "update", and "network" where its speed is known.
        swapped_in_bytes: host to device, by kind.
        swapped_out_bytes: device to host, by kind.
        sent_bytes: what a node sends to the others.
    """

    num_microbatches: int
    plan: Plan
    need: Need
    host: HostNeed
    peak_bytes: int
    seconds: float
    busy_seconds: Mapping[str, float]
    swapped_in_bytes: Mapping[str, int]
    swapped_out_bytes: Mapping[str, int]
    sent_bytes: int = 0

    @property
    def bound(self) -> str:
        """The part that is busy for longest."""
        return max(self.busy_seconds, key=lambda part: self.busy_seconds[part])


@dataclass(frozen=True)
class _Course:
    """What replays of a plan come to.

    Attributes:
        seconds: of the step.
        peak_bytes: the most on the device.
        bound_bytes: the most on the device, however long copies take.
        busy_seconds: by part.
        swapped_in_bytes: by kind.
        swapped_out_bytes: by kind.
    """

    seconds: float
    peak_bytes: int
    bound_bytes: int
    busy_seconds: Mapping[str, float]
    swapped_in_bytes: Mapping[str, int]
    swapped_out_bytes: Mapping[str, int]


@dataclass
class StepAhead:
    """A step that nobody has run.

    Attributes:
        profile: of one microbatch.
        machine: where it runs.
        capacity_bytes: what the device may hold; None for no limit.
        num_microbatches: how many there are.
        is_deferred: whether parameters are updated after the backward.
        state_copies: bytes of optimizer state for each byte of a trained parameter.
        most_tasks: how many tasks are replayed in the search for a plan.
        nodes: that train, each on such a machine.
    """

    profile: StepProfile
    machine: Machine
    capacity_bytes: int | None
    num_microbatches: int
    is_deferred: bool
    state_copies: int
    most_tasks: float
    nodes: Nodes

    def __post_init__(self) -> None:
        costs = {cost.name: cost for cost in self._costs()}
        calls = [self.profile.layers[call].cost.name for call in self.profile.calls]
        limits, replayed = self._limits(), min(self.num_microbatches, MOST_REPLAYED)
        self._plan = decide(costs, calls, replayed, limits, most_tasks=self.most_tasks)
        if self.num_microbatches > replayed:
            self._plan = with_graphs(self._plan, costs, self.num_microbatches, [limits.free_bytes])
        index_of = {name: index for index, name in enumerate(costs)}
        self._packs = [[index_of[name] for name in pack] for pack in self._plan.packs]

    def outlook(self) -> Outlook:
        """What it will take."""
        plan, need = self._plan, self._need()
        course = self._course(plan)
        peak = max(course.bound_bytes, need.num_bytes)
        seconds, busy, sent_bytes = course.seconds, course.busy_seconds, 0
        if self.nodes.number > 1:
            packs = self._sent_packs(course.seconds)
            num_bytes = sum(pack.num_bytes for pack in packs)
            seconds, sent_bytes = seconds_on(self.nodes, seconds, packs), self.nodes.sent_bytes(num_bytes)
            if self.nodes.bytes_per_second is not None:
                busy = {**busy, "network": self.nodes.seconds(num_bytes)}
        return Outlook(
            num_microbatches=self.num_microbatches,
            plan=replace(plan, predicted=Predicted(course.seconds, (course.peak_bytes,))),
            need=need,
            host=self._host(),
            peak_bytes=peak if self.capacity_bytes is None else min(peak, self.capacity_bytes),
            seconds=seconds,
            busy_seconds=busy,
            swapped_in_bytes=course.swapped_in_bytes,
            swapped_out_bytes=course.swapped_out_bytes,
            sent_bytes=sent_bytes,
        )

    def _sent_packs(self, seconds: float) -> list[Pack]:
        """The packs whose gradients are sent, in a step that takes so long without that."""
        plan = replace(self._plan, num_microbatches=min(self.num_microbatches, MOST_REPLAYED))
        assert plan.profile is not None
        prediction = _replay(plan, is_deferred=self.is_deferred)
        # Of more microbatches, each part of the step takes longer.
        longer = seconds / prediction.seconds
        return [
            Pack(longer * pack.begins, longer * pack.final, pack.num_bytes)
            for pack in packs_of(prediction, plan.profile.pack_costs(plan.packs))
        ]

    # ---- costs ---------------------------------------------------------------------------------------------------------

    def _costs(self) -> list[Cost]:
        num_visits = Counter(visits_of(self.profile.calls))
        return [self._cost(layer, num_visits[index]) for index, layer in enumerate(self.profile.layers)]

    def _cost(self, layer: LayerProfile, num_visits: int) -> Cost:
        """What a layer costs in each of the visits that a microbatch pays it, where it is a pack of its own."""
        parts = ("forward", "backward", "recompute")
        forward, backward, recompute = (max(self._compute_seconds(layer, part)) / max(num_visits, 1) for part in parts)
        return replace(
            layer.cost,
            copied_bytes=layer.swapped_bytes,
            input_bytes=layer.input_bytes,
            stash_bytes=layer.stash_bytes // max(num_visits, 1),
            forward_seconds=forward,
            backward_seconds=backward,
            recompute_seconds=recompute,
            optimizer_bytes=self.state_copies * layer.cost.gradient_bytes,
        )

    def _compute_seconds(self, layer: LayerProfile, part: str) -> tuple[float, float]:
        """How long the device computes a part of a layer, and how long the host is busy with that."""
        work, machine = getattr(layer, part), self.machine
        calls = layer.num_calls * machine.call_seconds if part != "recompute" else 0.0
        return work.device_seconds(machine), work.host_seconds(machine) + calls

    def _limits(self) -> DeviceLimits:
        machine = self.machine
        shared = shared_stash_bytes(self.capacity_bytes, computes_apart=machine.computes_apart)
        return DeviceLimits(
            self.capacity_bytes,
            swap_in_bytes_per_second=machine.swap_in_bytes_per_second,
            swap_out_bytes_per_second=machine.swap_out_bytes_per_second,
            # The bus bounds it: half as many bytes a parameter take half as long.
            update_bytes_per_second=4 * machine.updated_parameters_per_second / self.nodes.own_share,
            updates_in_place=machine.computes_apart and not self.is_deferred,
            state_may_stay=machine.computes_apart and not self.is_deferred,
            pools_apart=machine.computes_apart,
            occupied_bytes=self._other_bytes + shared,
        )

    # ---- its course ----------------------------------------------------------------------------------------------------

    def _course(self, plan: Plan) -> _Course:
        if self.num_microbatches <= MOST_REPLAYED:
            return self._replayed(plan, self.num_microbatches)
        half = MOST_REPLAYED // 2
        one, other = self._replayed(plan, half), self._replayed(plan, MOST_REPLAYED)
        return on_line(one, other, (self.num_microbatches - half) / half)

    def _replayed(self, plan: Plan, num_microbatches: int) -> _Course:
        prediction = _replay(replace(plan, num_microbatches=num_microbatches), is_deferred=self.is_deferred)
        (device,) = prediction.devices
        busy = {"compute": 0.0, "launch": 0.0, "swap in": 0.0, "swap out": 0.0, "update": 0.0}
        for span in device.spans:
            if span.stream != COMPUTE:
                busy[_PARTS[span.stream]] += span.end_seconds - span.start_seconds
        for number, pack in enumerate(self._packs):
            keeps = number in plan.fused | plan.kept
            for index in pack if number in plan.visits else ():
                layer = self.profile.layers[index]
                parts = [self._compute_seconds(layer, part) for part in ("forward", "backward", "recompute")]
                for place, part in enumerate(("compute", "launch")):
                    forward, backward, again = (seconds[place] for seconds in parts)
                    busy[part] += num_microbatches * (forward + backward - (again if keeps else 0.0))
        swapped_in = {"weights": 0, "stash": 0, **device.swapped_in_bytes}
        swapped_out = {"gradients": 0, "stash": 0, **device.swapped_out_bytes}
        return _Course(prediction.seconds, device.peak_bytes, device.bound_bytes, busy, swapped_in, swapped_out)

    # ---- bytes ---------------------------------------------------------------------------------------------------------

    @property
    def _other_bytes(self) -> int:
        profile = self.profile
        return profile.buffer_bytes + self.num_microbatches * (profile.microbatch_bytes + self.machine.library_bytes)

    def _need(self) -> Need:
        """What the neediest takes: of the layers one by one, as in the first step, and of the packs."""
        layers, calls = self.profile.layers, self.profile.calls
        first = [layer.first_held for layer in layers]
        waiting = self._waiting(first)
        needs = [
            Need(
                "",
                0,
                self.profile.start_bytes,
                (self.num_microbatches - 1) * max(waiting.values(), default=0),
                self._other_bytes,
            )
        ]
        for index in dict.fromkeys(calls):
            needs += self._needs(layers[index].first_cost, layers[index].num_calls, first[index], waiting[index])
        if calls:
            # The backward of a loss runs beside the layer called last, and beside the gradients of earlier microbatches.
            last = layers[calls[-1]].first_cost
            state = last.weight_bytes + last.gradient_bytes
            live = (self.num_microbatches - 1) * waiting[calls[-1]]
            needs.append(Need(last.name, state, self.profile.loss_bytes, live, self._other_bytes))
        held = [layer.held for layer in layers]
        waiting = self._waiting(held)
        for pack in self._packs:
            called = [index for index in pack if index in waiting]
            if called:
                most = Held(
                    max(held[index].forward_bytes for index in called),
                    max(held[index].backward_bytes for index in called),
                )
                num_calls = max(layers[index].num_calls for index in called)
                cost = pack_cost([layers[index].cost for index in pack])
                needs += self._needs(cost, num_calls, most, max(waiting[index] for index in called))
        need = max(needs, key=lambda need: need.num_bytes)
        whole = with_shared_stash(need.num_bytes, computes_apart=self.machine.computes_apart)
        return replace(need, other_bytes=need.other_bytes + whole - need.num_bytes)

    def _needs(self, cost: Cost, num_calls: int, held: Held, waiting_bytes: int) -> list[Need]:
        """Forward, and backward with a sum of gradients for each call."""
        live, other = (self.num_microbatches - 1) * waiting_bytes, self._other_bytes
        # Room for its work is made before it comes.
        weights, gradients = cost.weight_bytes + cost.staging_bytes, max(num_calls, 1) * cost.gradient_bytes
        return [
            Need(cost.name, weights, held.forward_bytes, live, other),
            Need(cost.name, weights + gradients, held.backward_bytes, live, other),
        ]

    def _waiting(self, held: Sequence[Held]) -> dict[int, int]:
        """What a microbatch that waits holds while another is in each layer: it waits for this layer, or for one beside it.

        Args:
            held: by each layer.
        """
        calls = self.profile.calls
        at = {index: held[index].waiting_bytes for index in calls}
        waiting = dict.fromkeys(calls, 0)
        for place, index in enumerate(calls):
            around = calls[max(place - 1, 0) : place + 2]
            waiting[index] = max(waiting[index], *(at[other] for other in around))
        return waiting

    def _host(self) -> HostNeed:
        layers: Sequence[LayerProfile] = self.profile.layers
        own_trained = int(self.nodes.own_share * sum(layer.trained_bytes for layer in layers))
        state = self.state_copies * own_trained
        # On nodes, a pack's gradients may wait for those of a slower one.
        all_wait = self.is_deferred or self.nodes.number > 1
        packs = [sum(layers[index].trained_bytes for index in pack) for pack in self._packs]
        stash = sum(layer.stash_bytes for layer in layers)
        return HostNeed(
            weight_bytes=self.profile.weight_bytes,
            gradient_bytes=bytes_beside_state(packs, state, is_deferred=all_wait),
            least_gradient_bytes=bytes_beside_state(packs, state, is_deferred=all_wait, ring=1),
            optimizer_bytes=state,
            stash_bytes=self.num_microbatches * stash,
            least_stash_bytes=stash,
        )


def _replay(plan: Plan, *, is_deferred: bool) -> Prediction:
    try:
        return predict(plan, is_deferred=is_deferred)
    except PlanError:
        # Too little for the plan's order: the executor drops graphs and parks sums. With more room it could not be slower.
        assert plan.profile is not None
        return predict(plan, replace(plan.profile.machine, capacity_bytes=None), is_deferred=is_deferred)

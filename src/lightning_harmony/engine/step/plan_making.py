"""Making plans: from what layers were measured to cost, or from a plan that the user gives."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.measure.origin import kind_of
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.step.measurements import Measurements
from lightning_harmony.engine.structures.parts import num_bytes_of
from lightning_harmony.plan.search.deciding import decide, improved, with_costs, with_homes
from lightning_harmony.plan.search.given import refuse_unfit
from lightning_harmony.plan.search.rules import Packs, fitting_packs, packed, with_graphs
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Parallel, Plan, fingerprint
from lightning_harmony.plan.values.profile import share_seconds

# How many times as fast as before updates or layers have to be for a plan to be looked at again.
CLEARLY_FASTER = 1.25


@dataclass(eq=False, repr=False)
class PlanMaker:
    """Makes the plans of a model. Layers and their calls are given by the layers' indices.

    Args:
        layers: of the model. Parameters that glue uses come to it as they are found.
        devices: where they run.
        parallel: how packs are placed on several devices.
        fingerprint: of the model.
        measured: what training steps were seen to take.
        given: whose packs to use instead of deciding on them.
    """

    _layers: Sequence[SwappedLayer]
    _devices: Sequence[Device]
    _parallel: Parallel
    _fingerprint: str
    _measured: Measurements
    _given: Plan | None

    def __post_init__(self) -> None:
        self._kinds: dict[int, str] = {}

    def layer_by_layer(self, calls: Sequence[int]) -> Plan:
        """Each layer a pack of its own, called in an order."""
        return self._packed([], calls)

    def with_fitting_packs(self, calls: Sequence[int]) -> Plan:
        """Packs that fit on the devices; nothing is decided on graphs."""
        capacities = [device.capacity_bytes for device in self._devices]
        return self._packed(fitting_packs(self._costs(), self._names(calls), capacities, self._parallel), calls)

    def decided(self, calls: Sequence[int], num_microbatches: int) -> Plan:
        """The plan for steps from what is known of the layers, or what becomes of the given one."""
        if self._given is not None:
            # Parameters that glue used when it was made may not have been used yet.
            known = {layer.name for layer in self._layers}
            packs = [[name for name in pack if name in known] for pack in self._given.packs]
            return self.of_packs([pack for pack in packs if pack], calls, num_microbatches)
        plan = self._searched(calls, num_microbatches)
        if plan.predicted is None and any(device.set_aside_bytes for device in self._devices):
            # It is too tight to predict what is done: recordings take none of the room then.
            for device in self._devices:
                device.set_aside_bytes = 0
            plan = self._searched(calls, num_microbatches)
        return plan

    def _searched(self, calls: Sequence[int], num_microbatches: int) -> Plan:
        plan = decide(
            self._costs(),
            self._names(calls),
            num_microbatches,
            self._measured.machine(),
            num_devices=len(self._devices),
            parallel=self._parallel,
        )
        return replace(plan, fingerprint=self._fingerprint)

    def of_packs(self, packs: Packs, calls: Sequence[int], num_microbatches: int) -> Plan:
        """A plan of packs for a number of microbatches, with whose graphs are kept, and what is predicted."""
        plan = self._packed(packs, calls)
        given, costs, machine = self._given, self._costs(), self._measured.machine()
        if given is not None:
            is_placed = (plan.packs, plan.visits) == (given.packs, given.visits)
            spread: frozenset[int] = given.spread if is_placed else frozenset()
            plan = replace(plan, reuse=given.reuse, lookahead=given.lookahead, spread=spread)
        plan = with_graphs(plan, costs, num_microbatches, [machine.free_bytes] * len(self._devices))
        if given is None:
            return improved(with_costs(plan, costs, machine), self._names(calls), with_its_packs=True)
        # A step that differs from what a given plan predicts goes by its packs, but decides on graphs anew.
        if all(getattr(given, name) == getattr(plan, name) for name in ("packs", "visits", "num_microbatches")):
            fields = ("first_fused", "kept", "joined", "device_updated", "state_on_device")
            plan = replace(plan, **{name: getattr(given, name) for name in fields})
        elif not plan.just_in_time:
            plan = replace(plan, first_fused=len(plan.visits), kept=frozenset())
        return with_costs(plan, costs, machine)

    def revised(self, plan: Plan, calls: Sequence[int], *, searches: bool) -> Plan:
        """A plan with what is predicted of it by what is known now.

        Args:
            plan: the plan in use.
            calls: the order in which layers are called.
            searches: whether to search for a better one even if the plan itself has not become clearly faster.
        """
        costs, machine = self._costs(), self._measured.machine()
        if self._given is not None:
            return with_costs(plan, costs, machine)
        # Who updates which packs is decided last, for whatever packs these are.
        revised = with_costs(replace(plan, device_updated=frozenset(), state_on_device=frozenset()), costs, machine)
        if searches or _is_clearly_faster(revised, plan):
            revised = improved(revised, self._names(calls))
        return with_homes(revised)

    def _packed(self, packs: Packs, calls: Sequence[int]) -> Plan:
        """A plan of packs, and of one for each layer that is in none; nothing is decided on graphs."""
        layers = [layer.name for layer in self._layers]
        plan = packed(packs, layers, self._names(calls), len(self._devices), self._parallel)
        return replace(plan, fingerprint=self._fingerprint)

    def _names(self, calls: Sequence[int]) -> list[str]:
        return [self._layers[call].name for call in calls]

    def _costs(self) -> dict[str, Cost]:
        """The cost of each layer by its name, layers that are alike sharing what was timed."""
        kinds = [self._kind(layer) for layer in self._layers]
        return {cost.name: cost for cost in share_seconds(list(map(self._measured.cost, self._layers)), kinds)}

    def _kind(self, layer: SwappedLayer) -> str:
        if layer.index not in self._kinds:
            self._kinds[layer.index] = "a parameter" if layer.whole is None else kind_of(layer.whole)
        return self._kinds[layer.index]


def _is_clearly_faster(plan: Plan, other: Plan) -> bool:
    """Whether a plan is predicted to be."""
    ours, theirs = plan.predicted, other.predicted
    return ours is not None and theirs is not None and theirs.seconds > CLEARLY_FASTER * ours.seconds


def check_given(
    given: Plan | None,
    layers: Sequence[SwappedLayer],
    parameters: Collection[str],
    devices: Sequence[Device],
    parallel: Parallel,
) -> str:
    """The fingerprint of a model, which a given plan has to be for.

    Args:
        given: the plan, if any.
        layers: of the model.
        parameters: the names of its parameters.
        devices: where it runs.
        parallel: how packs are placed there.

    Raises:
        PlanError: if the plan is for another model, for other devices or for a larger capacity.
    """
    # What layers borrow of others shows in a step alone.
    own = [(layer.name, layer.parameters if layer.module is None else layer.module.parameters()) for layer in layers]
    found = fingerprint((name, [p.shape for p in parameters]) for name, parameters in own)
    if given is not None:
        capacities = [device.capacity_bytes for device in devices]
        refuse_unfit(given, list(map(_known_cost, layers)), parameters, found, capacities, parallel)
    return found


def _known_cost(layer: SwappedLayer) -> Cost:
    """What is known of a layer before it runs: its state."""
    weights, gradients = (
        sum(map(num_bytes_of, parameters))
        for parameters in (layer.parameters, [p for p in layer.parameters if p.requires_grad])
    )
    return Cost(layer.name, weights, gradients)

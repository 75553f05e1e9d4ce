"""A plan that the user gives instead of having one made: whether it is for this model and these devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.structures.parts import num_bytes_of
from lightning_harmony.errors import PlanError
from lightning_harmony.plan.search.given import refuse_unfit
from lightning_harmony.plan.search.packing import smallest
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Parallel, Plan, fingerprint


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
    found = fingerprint((layer.name, [p.shape for p in layer.parameters]) for layer in layers)
    if given is not None:
        _refuse_other_devices(given, len(devices), parallel)
        refuse_unfit(
            given,
            [_known_cost(layer) for layer in layers],
            parameters,
            found,
            smallest(device.capacity_bytes for device in devices),
        )
    return found


def _refuse_other_devices(plan: Plan, number: int, parallel: Parallel) -> None:
    if plan.num_devices != number or (number > 1 and plan.parallel != parallel):
        raise PlanError(
            f"HarmonyStrategy(plan=...): the plan is for {plan.num_devices} devices ({plan.parallel}), not for {number} "
            f"({parallel}): use Trainer(devices=...) and HarmonyStrategy(parallel=...) as it was made with, or "
            "leave plan= out to plan anew"
        )


def _known_cost(layer: SwappedLayer) -> Cost:
    """What is known of a layer before it runs: its state."""
    weights, gradients = (
        sum(map(num_bytes_of, parameters))
        for parameters in (layer.parameters, [p for p in layer.parameters if p.requires_grad])
    )
    return Cost(layer.name, weights, gradients)

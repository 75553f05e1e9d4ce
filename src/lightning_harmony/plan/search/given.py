"""A plan that a user gives: whether it is for this model, and whether it fits this machine."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.search.packing import smallest
from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.simulate.validity import refuse_invalid
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.plan import Parallel, Plan


def read_plan(given: Plan | str | Path) -> Plan:
    """A plan, or what a JSON file holds of one.

    Raises:
        PlanError: if there is no such file, or it holds something else, or the plan contradicts itself.
    """
    if isinstance(given, Plan):
        # Its values are checked as those of a file are.
        refuse_invalid(Plan.from_json(given.to_json()))
        return given
    try:
        plan = Plan.from_json(Path(given).read_text(encoding="utf-8"))
        refuse_invalid(plan)
    except (OSError, UnicodeDecodeError, PlanError) as error:
        raise PlanError(f"plan={str(given)!r}: {error}") from error
    return plan


def refuse_unfit(
    plan: Plan,
    layers: Sequence[Cost],
    parameters: Collection[str],
    fingerprint: str,
    capacities: Sequence[int | None],
    parallel: Parallel,
) -> None:
    """Refuse a plan that this model cannot be run by on these devices.

    Args:
        plan: the plan.
        layers: the layers of the model, with what is known of their costs.
        parameters: the names of its parameters: those that the code between layers uses are packed, too.
        fingerprint: of the model.
        capacities: of each device; None for no limit.
        parallel: how packs are placed on the devices.

    Raises:
        PlanError: with the first difference, or what does not fit.
    """
    number, capacity_bytes = len(capacities), smallest(capacities)
    if plan.num_devices != number or (number > 1 and plan.parallel != parallel):
        raise PlanError(
            f"HarmonyStrategy(plan=...): the plan is for {plan.num_devices} devices ({plan.parallel}), not for {number} "
            f"({parallel}): use Trainer(devices=...) and HarmonyStrategy(parallel=...) as it was made with, or "
            "leave plan= out to plan anew"
        )
    _refuse_other_model(plan, [cost.name for cost in layers], parameters, fingerprint)
    if capacity_bytes is None:
        return
    known = {cost.name: cost for cost in layers}
    for index, pack in enumerate(plan.packs):
        needed = sum(known[name].state_bytes for name in pack if name in known)
        if needed > capacity_bytes:
            raise PlanError(
                f"HarmonyStrategy(plan=...): pack {index} ({pack[0]} … {pack[-1]}) takes {format_bytes(needed)} for weights "
                f"and gradients, {format_bytes(needed - capacity_bytes)} more than the capacity of "
                f"{format_bytes(capacity_bytes)}. {_WAY_OUT}"
            )
    if plan.predicted is not None and plan.profile is not None:
        try:
            predict(plan, replace(plan.profile.machine, capacity_bytes=capacity_bytes))
        except PlanError as error:
            peak = format_bytes(max(plan.predicted.peak_bytes, default=0))
            raise PlanError(
                f"HarmonyStrategy(plan=...): the plan does not fit the capacity of {format_bytes(capacity_bytes)}; where it "
                f"was made it took {peak}. {_WAY_OUT}\n{error}"
            ) from error


_WAY_OUT = "Raise HarmonyStrategy(device_memory=...), or leave plan= out to plan anew"


def _refuse_other_model(plan: Plan, layers: Sequence[str], parameters: Collection[str], fingerprint: str) -> None:
    planned = list(chain.from_iterable(plan.packs))
    known = {*layers, *parameters}
    strangers = [f"the plan has {name!r}, which the model has not" for name in planned if name not in known]
    strangers += [f"the model has {name!r}, which the plan has not" for name in layers if name not in set(planned)]
    if not strangers and plan.fingerprint and plan.fingerprint != fingerprint:
        strangers = ["the names of the layers are the same, but not the shapes of their parameters"]
    if strangers:
        more = f" (and {len(strangers) - 1} more differences)" if len(strangers) > 1 else ""
        raise PlanError(
            f"HarmonyStrategy(plan=...): the plan is for another model, or its layers were chosen otherwise: {strangers[0]}"
            f"{more}. Layers follow from HarmonyStrategy(layers=..., device_memory=...): give what the plan was made with, or "
            "leave plan= out to plan anew"
        )

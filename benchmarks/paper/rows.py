"""The rows that are compared, as plans, and the formulas that tell their bytes.

Each row of `ROWS` adds something to the one before. The first is what the paper compares with: each microbatch swaps each
layer anew, as memory that is merely virtual does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf

from models import LAYERS, Model, Shape, batch_on_meta

from lightning_harmony.engine.model.decompose import find_layers
from lightning_harmony.engine.rehearsal.rehearse import rehearse
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.outlook.work import LayerProfile
from lightning_harmony.plan.search.packing import fill_capacity
from lightning_harmony.plan.search.search import MOST_TASKS, Space
from lightning_harmony.plan.simulate.lowering import lower
from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.machine import Machine
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.plan import Parallel, Plan, visits_of
from lightning_harmony.plan.values.prediction import Prediction
from lightning_harmony.plan.values.profile import DeviceLimits, Profile
from lightning_harmony.plan.values.task import Errand

# Plain Lightning, whose steps those of the rows are beside.
IN_MEMORY = "in memory"
ROWS = ("per microbatch", "grouping", "just in time", "packing", "prefetch", "search")


@dataclass(frozen=True)
class Costs:
    """What a model's layers cost, told without its memory.

    Attributes:
        profile: the layers and the machine.
        calls: the order in which they are called.
        parameter_bytes: of each, by its name.
    """

    profile: Profile
    calls: tuple[int, ...]
    parameter_bytes: dict[str, int]

    @property
    def weight_bytes(self) -> int:
        """W: all parameters."""
        return sum(self.parameter_bytes.values())


def costs_of(shape: Shape, microbatch_size: int, machine: Machine, capacity_bytes: int) -> Costs:
    """Rehearse a step on fake tensors."""
    import torch

    with torch.device("meta"):
        model = Model(shape)
    layers = find_layers(model, max_layer_bytes=None, layers=LAYERS)
    step = rehearse(model, layers, lambda batch: model.training_step(batch, 0), batch_on_meta(shape, microbatch_size))
    limits = DeviceLimits(
        capacity_bytes,
        machine.swap_in_bytes_per_second,
        machine.swap_out_bytes_per_second,
        # Between GPUs there is a faster way than through the host.
        None,
        4 * machine.updated_parameters_per_second,
    )
    profile = Profile(tuple(_cost(layer, machine) for layer in step.layers), limits)
    sizes = {
        layer.name: sum(p.numel() * p.element_size() for p in layer.module.parameters() if p.requires_grad)
        for layer in layers
    }
    return Costs(profile, step.calls, sizes)


def _cost(layer: LayerProfile, machine: Machine) -> Cost:
    """What the planner knows of a layer, with seconds on a machine."""
    forward, backward, recompute = (
        max(work.device_seconds(machine), work.host_seconds(machine) + call_seconds)
        for work, call_seconds in (
            (layer.forward, machine.call_seconds),
            (layer.backward, machine.call_seconds),
            (layer.recompute, 0.0),
        )
    )
    return replace(
        layer.cost,
        copied_bytes=layer.swapped_bytes,
        input_bytes=layer.input_bytes,
        stash_bytes=layer.stash_bytes,
        forward_seconds=forward,
        backward_seconds=backward,
        recompute_seconds=recompute,
    )


def plan_of(row: str, costs: Costs, num_microbatches: int, num_devices: int, parallel: Parallel) -> Plan:
    """The plan of a row.

    Args:
        row: one of `ROWS`.
        costs: of the model.
        num_microbatches: of all devices together.
        num_devices: how many there are.
        parallel: how they share the work.

    Raises:
        CapacityError: if no plan that is searched fits the capacity.
    """
    if row == "search":
        space = Space(costs.profile, costs.calls, num_microbatches, num_devices, parallel)
        found = space.best(MOST_TASKS, inf, 0.0)
        if found is None:
            capacity = format_bytes(costs.profile.machine.capacity_bytes or 0)
            raise CapacityError(
                f"no plan for {num_microbatches} microbatches on {num_devices} devices fits {capacity}: raise --capacity"
            )
        return found
    level = ROWS.index(row)
    layers = [costs.profile.layers[call] for call in dict.fromkeys(costs.calls)]
    cut: tuple[tuple[int, ...], ...] = tuple((number,) for number in range(len(layers)))
    if level >= ROWS.index("packing"):
        around = num_devices if parallel == "pipeline" else 1
        cut = fill_capacity(layers, costs.profile.machine.capacity_bytes, around)
    packs = tuple(tuple(layers[number].name for number in pack) for pack in cut)
    pack_of = {name: index for index, pack in enumerate(packs) for name in pack}
    visits = visits_of([pack_of[costs.profile.layers[call].name] for call in costs.calls])
    is_just_in_time = level >= ROWS.index("just in time")
    return Plan(
        packs,
        visits,
        len(visits) - 1 if is_just_in_time else len(visits),
        num_devices=num_devices,
        parallel=parallel,
        num_microbatches=num_microbatches,
        reuse="just-in-time" if is_just_in_time else "visit" if level else "none",
        lookahead=2 if level >= ROWS.index("prefetch") else 0,
        profile=costs.profile,
    )


# ---- bytes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """Bytes of weights and gradients that a step swaps, and how the formula comes to them.

    Attributes:
        num_bytes: counted.
        between_devices: of those, what goes from device to device: gradients that are summed there before one copy leaves.
        formula: in words of the paper.
        formula_bytes: what it comes to.
        paper: what the paper's formula says of the row, where the two differ.
        paper_bytes: what that comes to.
        stash_bytes: what is stashed and comes back, beside.
        seconds: of the step, as predicted.
    """

    num_bytes: int
    between_devices: int
    formula: str
    formula_bytes: int
    paper: str
    paper_bytes: int
    stash_bytes: int
    seconds: float


def count(plan: Plan, costs: Costs) -> Counted:
    """Replay a plan, and count its bytes."""
    prediction = predict(plan)
    reduced = sum(device.transferred_bytes for device in prediction.devices) if plan.parallel == "data" else 0
    formula, formula_bytes = formula_of(plan, costs)
    paper, paper_bytes = paper_formula_of(plan, costs)
    return Counted(
        num_bytes=swapped_bytes(prediction) + reduced,
        between_devices=reduced,
        formula=formula,
        formula_bytes=formula_bytes,
        paper=paper,
        paper_bytes=paper_bytes,
        stash_bytes=sum(
            d.swapped_in_bytes.get("stash", 0) + d.swapped_out_bytes.get("stash", 0) for d in prediction.devices
        ),
        seconds=prediction.seconds,
    )


def swapped_bytes(prediction: Prediction) -> int:
    """Weights and gradients, in and out."""
    return sum(
        each.get("weights", 0) + each.get("gradients", 0)
        for device in prediction.devices
        for each in (device.swapped_in_bytes, device.swapped_out_bytes)
    )


def formula_of(plan: Plan, costs: Costs) -> tuple[str, int]:
    """What this runtime has to copy, and how many bytes that is.

    The host's copy of the weights is always the current one, and the optimizer runs there. So weights never leave a device,
    and no state comes to one.
    """
    weights, lanes = costs.weight_bytes, plan.num_microbatches or 0
    times, of = (plan.num_devices, "N·") if plan.parallel == "data" else (1, "")
    if not plan.groups:
        # Each microbatch: in for its forward and its backward; gradients out behind it, and in before all but the first.
        each, name = (-(-lanes // plan.num_devices), "m") if plan.parallel == "data" else (lanes, "M")
        return f"(4{name} - 1)·{of}W", (4 * each - 1) * times * weights
    if not plan.just_in_time:
        return f"3·{of}W", 3 * times * weights
    staying = _staying_bytes(plan, costs)
    return f"3·{of}W - last - kept", 3 * times * weights - staying


def paper_formula_of(plan: Plan, costs: Costs) -> tuple[str, int]:
    """What the paper counts for the row: where memory is virtual, whatever leaves is written, and updates are made on devices.

    Adam's state is twice as large as the weights.
    """
    weights, lanes = costs.weight_bytes, plan.num_microbatches or 0
    if plan.groups:
        return formula_of(plan, costs)
    if plan.parallel == "data":
        each, times = -(-lanes // plan.num_devices), plan.num_devices
        return "(4m+2)·N·W + (2m+1)·N·W + 2·N·K", ((6 * each + 3) * weights + 2 * 2 * weights) * times
    return "(4M+2)·W + (2M+1)·W + 2·K", (6 * lanes + 3) * weights + 2 * 2 * weights


def _staying_bytes(plan: Plan, costs: Costs) -> int:
    """The packs that the backward finds on a device, the last one among them."""
    assert plan.profile is not None
    schedule = lower(plan, plan.profile.pack_costs(plan.packs), plan.profile.machine)
    staying = 0
    for tasks in schedule.devices:
        times = Counter(task.pack for task in tasks if task.kind is Errand.SWAP_IN)
        once = (pack for pack, number in times.items() if number == 1)
        staying += sum(costs.parameter_bytes[name] for pack in once for name in plan.packs[pack])
    return staying

"""What training a model will take and how fast it will be, told before any memory is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from lightning_harmony.engine.batches.split import microbatch_sizes, split_batch
from lightning_harmony.engine.measure.this_machine import measure_machine
from lightning_harmony.engine.model.decompose import LayerChoice, find_layers
from lightning_harmony.engine.rehearsal.rehearse import rehearse
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.estimating.advice import with_advice
from lightning_harmony.estimating.result import Estimate, Row
from lightning_harmony.estimating.subject import Subject, casting, make_subject, naming_failures, precision_name
from lightning_harmony.plan.outlook.nodes import Nodes
from lightning_harmony.plan.outlook.outlook import Outlook, StepAhead
from lightning_harmony.plan.outlook.work import StepProfile, between
from lightning_harmony.plan.search.search import MOST_TASKS
from lightning_harmony.plan.values.card_memory import usable_bytes
from lightning_harmony.plan.values.host_need import HostNeed
from lightning_harmony.plan.values.machine import BY_DATA_SHEET, Machine, read_machine
from lightning_harmony.plan.values.memory_size import format_bytes, parse_bytes
from lightning_harmony.plan.values.owners import largest_share
from lightning_harmony.setup.argument_names import suggests_names


@suggests_names("estimate")
def estimate(
    model: Any,
    batch: Any = None,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    layers: LayerChoice | None = None,
    precision: Any = "32-true",
    optimizer: str | None = None,
    update: Literal["just-in-time", "deferred"] = "just-in-time",
    machine: Machine | str | None = None,
    num_nodes: int = 1,
    network_gigabits: float | None = None,
) -> Estimate:
    """Estimate what training a model takes, without its memory: on the meta device and with fake tensors.

    Args:
        model: a LightningModule, a function that returns one, which is called on the meta device, or the configuration of
            a Hugging Face model.
        batch: an example batch of all samples of a step; its tensors may be on the meta device. For a Hugging Face model
            a mapping of its arguments, or None for ``batch_size`` and ``sequence_length``.
        batch_size: samples of a step; 8 if not given.
        sequence_length: tokens of a sample.
        device_memory: as for `HarmonyStrategy`; None for what the machine has.
        host_memory: what the host has, such as "128GiB"; None for what is known of the machine.
        num_microbatches: as for `HarmonyStrategy`.
        microbatch_size: as for `HarmonyStrategy`.
        layers: as for `HarmonyStrategy`.
        precision: as for Lightning's Trainer.
        optimizer: the name of the optimizer's class; None to ask the module.
        update: when parameters are updated. Clipping, a gradient scaler and accumulation defer it.
        machine: a description, its name, a JSON file; None to measure this machine.
        num_nodes: as for Lightning's Trainer. Each node is such a machine, with a batch of its own.
        network_gigabits: what each node can send in a second while it receives as much; None for a network that takes no time.

    Raises:
        UnsupportedModelError: if the model cannot be built or run without data.
        ValueError: if an argument makes no sense.
    """
    if num_microbatches is not None and microbatch_size is not None:
        raise ValueError("give num_microbatches or microbatch_size, not both")
    numbers = {
        "batch_size": batch_size,
        "sequence_length": sequence_length,
        "num_microbatches": num_microbatches,
        "microbatch_size": microbatch_size,
        "num_nodes": num_nodes,
    }
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} must be at least 1, not {number!r}")
    if network_gigabits is not None and not network_gigabits > 0:
        raise ValueError(f"network_gigabits must be above 0, not {network_gigabits!r}")
    precision = precision_name(precision)
    where = measure_machine() if machine is None else read_machine(machine) if isinstance(machine, str) else machine
    if host_memory is not None:
        where = replace(where, host_bytes=parse_bytes(host_memory))
    limit = None if device_memory is None else parse_bytes(device_memory)
    capacity = _capacity(where, limit)
    subject = make_subject(
        model,
        batch,
        batch_size=batch_size,
        sequence_length=sequence_length,
        precision=precision,
        optimizer=optimizer,
    )
    if num_microbatches is not None and num_microbatches > subject.batch_size:
        raise ValueError(
            f"num_microbatches={num_microbatches}, but a batch has {subject.batch_size} samples: give at most "
            f"{subject.batch_size}"
        )
    found = find_layers(subject.module, max_layer_bytes=capacity, layers=layers)
    if not found:
        raise UnsupportedModelError(f"{subject.name} has no submodule with parameters that could be swapped as a layer")
    nodes = _nodes(subject, num_nodes, network_gigabits)
    is_deferred = update == "deferred" or precision == "16-mixed"

    @cache
    def profile_of(of_size: int) -> StepProfile:
        with naming_failures(subject.name, subject.batch):
            return rehearse(subject.module, found, subject.step, _microbatch(subject, of_size), casting(precision))

    def outlook_of(profile: StepProfile, of_size: int, most_tasks: float) -> Outlook:
        ahead = StepAhead(
            profile,
            where,
            capacity_bytes=capacity,
            num_microbatches=len(microbatch_sizes(subject.batch_size, microbatch_size=of_size)),
            is_deferred=is_deferred,
            state_copies=subject.state_copies,
            most_tasks=most_tasks,
            nodes=nodes,
        )
        return ahead.outlook()

    if num_microbatches is not None or microbatch_size is not None:
        size = microbatch_sizes(
            subject.batch_size, num_microbatches=num_microbatches or 1, microbatch_size=microbatch_size
        )[0]
    else:
        # As training finds it: the fewest that fit, beside the whole model or else beside the layer that runs.
        whole, most = None, subject.batch_size
        # What lasts is the same for all sizes: no others are rehearsed for it.
        if capacity is None or _lasting_bytes(profile_of(most), subject) <= capacity:
            whole = _largest(most, lambda size: _in_memory_bytes(profile_of(size), subject), capacity)
        size = whole or _largest(most, lambda size: outlook_of(profile_of(size), size, 0).need.num_bytes, capacity) or 1

    # Two sizes are rehearsed; what others take lies on the line through them. A single sample only where there is no other:
    # its tensors may be views where those of several have to be copied.
    other = subject.batch_size if size < subject.batch_size else 2 if size > 2 else 1
    profile = profile_of(size)
    second = profile if other == size else profile_of(other)

    # The plans of all other sizes together are searched for as long as that of the size that is asked for.
    others = [each for each in _sizes_to_show(subject.batch_size, size) if each != size]

    def row(of_size: int) -> Row:
        factor = 0.0 if of_size == size else (of_size - size) / (other - size)
        most_tasks = MOST_TASKS if of_size == size else MOST_TASKS // len(others)
        return Row(of_size, outlook_of(between(profile, second, factor), of_size, most_tasks))

    chosen = row(size)
    result = Estimate(
        name=subject.name,
        precision=precision,
        num_parameters=profile.num_parameters,
        num_trained=sum(layer.num_trained for layer in profile.layers),
        num_layers=len(found),
        optimizer=subject.optimizer or "AdamW",
        batch_size=subject.batch_size,
        items=subject.items,
        items_per_step=subject.batch_size * subject.items_per_sample,
        machine=where,
        nodes=nodes,
        limit_bytes=limit,
        capacity_bytes=capacity,
        in_memory_bytes=_in_memory_bytes(profile, subject),
        chosen=chosen,
        rows=tuple(sorted([chosen, *map(row, others)], key=lambda each: each.microbatch_size)),
        advice=(),
        notes=(*subject.notes, *_notes(profile, where, capacity, subject, chosen.outlook.host, nodes)),
    )
    return with_advice(result, subject.module)


def _nodes(subject: Subject, number: int, gigabits: float | None) -> Nodes:
    trained = [each.numel() * each.element_size() for each in subject.module.parameters() if each.requires_grad]
    # It steps all parameters together, on each node.
    is_whole = subject.optimizer == "LBFGS"
    share = 1.0 if is_whole else largest_share(trained, number)
    return Nodes(number, share, None if gigabits is None else gigabits * 1e9 / 8)


def _microbatch(subject: Subject, size: int) -> Any:
    sizes = microbatch_sizes(subject.batch_size, microbatch_size=size)
    return split_batch(subject.batch, subject.batch_size, sizes)[0]


def _sizes_to_show(batch_size: int, chosen: int) -> list[int]:
    """Powers of two up to the whole batch, and what was asked for."""
    powers = [1 << power for power in range(batch_size.bit_length()) if 1 << power <= batch_size]
    return sorted({*powers, chosen, batch_size})


def _capacity(machine: Machine, limit_bytes: int | None) -> int | None:
    """What may be allocated on a device; None for no limit."""
    if machine.device_bytes is None:
        return limit_bytes
    return machine.device_bytes if limit_bytes is None else min(machine.device_bytes, usable_bytes(limit_bytes))


def _largest(batch_size: int, num_bytes: Callable[[int], int], capacity: int | None) -> int | None:
    """The largest of a whole batch, a half of it, and so on, that takes no more than the capacity; None if none does.

    Args:
        batch_size: samples of the batch.
        num_bytes: what a microbatch of some samples takes.
        capacity: None for no limit.
    """
    size = batch_size
    while capacity is not None and num_bytes(size) > capacity:
        if size == 1:
            return None
        size = -(-size // 2)
    return size


def _lasting_bytes(profile: StepProfile, subject: Subject) -> int:
    """What is on the device from step to step if nothing is swapped."""
    trained = sum(layer.trained_bytes for layer in profile.layers)
    return profile.weight_bytes + profile.buffer_bytes + (1 + subject.state_copies) * trained


def _in_memory_bytes(profile: StepProfile, subject: Subject) -> int:
    """That, and the graph of a microbatch."""
    return _lasting_bytes(profile, subject) + profile.saved_bytes


def _notes(
    profile: StepProfile, machine: Machine, capacity: int | None, subject: Subject, host: HostNeed, nodes: Nodes
) -> Iterator[str]:
    """What the figures do not say."""
    if machine.host_bytes is not None and host.least_bytes <= machine.host_bytes < host.in_turns_bytes:
        yield (
            "the stash of all microbatches may not fit on the host, beside weights and optimizer state: they run one after "
            "the other then, each layer is swapped in for each of them, and a step takes longer than is said here"
        )
    if nodes.number > 1:
        if nodes.own_share < 1:
            yield (
                f"to save a checkpoint, the host of the first machine takes up to "
                f"{format_bytes(int(host.optimizer_bytes / nodes.own_share) - host.optimizer_bytes)} more, for the optimizer "
                "state of the others; with offload_dir, files take it"
            )
        if nodes.bytes_per_second is None:
            yield "the network between machines is taken to be fast enough: say how fast it is with --network-gigabits"
    in_memory = _in_memory_bytes(profile, subject)
    if capacity is None or in_memory <= capacity:
        yield (
            f"weights, gradients, optimizer state and the graph of a microbatch take {format_bytes(in_memory)} of the device "
            "together: training should run there as in plain Lightning, nothing be swapped, and the host hold none of this"
        )
    if machine.name.endswith(BY_DATA_SHEET):
        yield (
            "the times of this card follow from its data sheet, and nobody measured them: on the card itself, "
            "`lightning-harmony machine --measure` does"
        )

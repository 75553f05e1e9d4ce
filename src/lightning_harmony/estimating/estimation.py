"""What training a model will take and how fast it will be, told before any memory is taken."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from torch import nn

from lightning_harmony.engine.batches.split import microbatch_sizes, split_batch
from lightning_harmony.engine.measure.this_machine import measure_machine
from lightning_harmony.engine.model.decompose import LayerChoice, find_layers
from lightning_harmony.engine.rehearsal.rehearse import rehearse
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.estimating.result import Estimate, Row
from lightning_harmony.estimating.subject import Subject, casting, make_subject, precision_name
from lightning_harmony.plan.outlook.outlook import Outlook, look_ahead
from lightning_harmony.plan.outlook.work import StepProfile, between
from lightning_harmony.plan.search.search import MOST_TASKS
from lightning_harmony.plan.values.machine import Machine, read_machine
from lightning_harmony.plan.values.memory_size import format_bytes, parse_bytes
from lightning_harmony.setup.argument_names import suggests_names


@suggests_names("estimate")
def estimate(
    model: Any,
    batch: Any = None,
    *,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    device_memory: int | str | None = None,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
    layers: LayerChoice | None = None,
    precision: Any = "32-true",
    optimizer: str | None = None,
    update: Literal["just-in-time", "deferred"] = "just-in-time",
    machine: Machine | str | None = None,
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
        num_microbatches: as for `HarmonyStrategy`.
        microbatch_size: as for `HarmonyStrategy`.
        layers: as for `HarmonyStrategy`.
        precision: as for Lightning's Trainer.
        optimizer: the name of the optimizer's class; None to ask the module.
        update: when parameters are updated. Clipping, a gradient scaler and accumulation defer it.
        machine: a description, its name, a JSON file; None to measure this machine.

    Raises:
        UnsupportedModelError: if the model cannot be built or run without data.
        ValueError: if an argument makes no sense.
    """
    if num_microbatches is not None and microbatch_size is not None:
        raise ValueError("give num_microbatches or microbatch_size, not both")
    precision = precision_name(precision)
    where = measure_machine() if machine is None else read_machine(machine) if isinstance(machine, str) else machine
    capacity = where.device_bytes if device_memory is None else parse_bytes(device_memory)
    subject = make_subject(
        model,
        batch,
        batch_size=batch_size,
        sequence_length=sequence_length,
        precision=precision,
        optimizer=optimizer,
    )
    found = find_layers(subject.module, max_layer_bytes=capacity, layers=layers)
    if not found:
        raise UnsupportedModelError(f"{subject.name} has no submodule with parameters that could be swapped as a layer")
    is_deferred = update == "deferred" or precision == "16-mixed"

    @cache
    def profile_of(of_size: int) -> StepProfile:
        return rehearse(subject.module, found, subject.step, _microbatch(subject, of_size), casting(precision))

    def outlook_of(profile: StepProfile, of_size: int, most_tasks: float) -> Outlook:
        return look_ahead(
            profile,
            where,
            capacity_bytes=capacity,
            num_microbatches=len(microbatch_sizes(subject.batch_size, microbatch_size=of_size)),
            is_deferred=is_deferred,
            state_copies=subject.state_copies,
            most_tasks=most_tasks,
        )

    if num_microbatches is not None or microbatch_size is not None:
        size = microbatch_sizes(
            subject.batch_size, num_microbatches=num_microbatches or 1, microbatch_size=microbatch_size
        )[0]
    else:
        # As training finds it: the fewest that fit.
        size = subject.batch_size
        while size > 1 and capacity is not None and outlook_of(profile_of(size), size, 0).need.num_bytes > capacity:
            size = -(-size // 2)

    # Two sizes are rehearsed; what others take lies on the line through them. Not a single sample, if that isn't asked for:
    # its tensors may be views where those of several have to be copied.
    other = subject.batch_size if size < subject.batch_size else min(2, size)
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
        capacity_bytes=capacity,
        chosen=chosen,
        rows=tuple(sorted([chosen, *map(row, others)], key=lambda each: each.microbatch_size)),
        advice=(),
        notes=tuple(subject.notes),
    )
    return _with_advice(result, subject.module)


def _microbatch(subject: Subject, size: int) -> Any:
    sizes = microbatch_sizes(subject.batch_size, microbatch_size=size)
    return split_batch(subject.batch, subject.batch_size, sizes)[0]


def _sizes_to_show(batch_size: int, chosen: int) -> list[int]:
    """Powers of two up to the whole batch, and what was asked for."""
    powers = [1 << power for power in range(batch_size.bit_length()) if 1 << power <= batch_size]
    return sorted({*powers, chosen, batch_size})


# ---- what to change ----------------------------------------------------------------------------------------------------


def _with_advice(result: Estimate, module: nn.Module) -> Estimate:
    advice = [*_device_advice(result, module), *_host_advice(result)]
    return Estimate(**{**vars(result), "advice": tuple(advice)})


def _device_advice(result: Estimate, module: nn.Module) -> list[str]:
    if result.fits_device(result.chosen):
        return []
    advice = []
    fitting = [row for row in result.rows if result.fits_device(row)]
    if fitting:
        best = min(fitting, key=lambda row: row.outlook.seconds)
        advice.append(
            f"HarmonyStrategy(num_microbatches={best.outlook.num_microbatches}): microbatches of "
            f"{best.microbatch_size} need {format_bytes(best.outlook.need.num_bytes)}"
        )
    need = result.outlook.need
    advice.append(
        f'HarmonyStrategy(device_memory="{_rounded_up(need.num_bytes)}") or more, for microbatches of '
        f"{result.chosen.microbatch_size}"
    )
    smallest = result.rows[0].outlook.need
    if not fitting and result.rows[0].microbatch_size != result.chosen.microbatch_size:
        advice.append(
            f'device_memory="{_rounded_up(smallest.num_bytes)}" for microbatches of {result.rows[0].microbatch_size}'
        )
    if not fitting and smallest.state_bytes > smallest.work_bytes and smallest.name:
        advice.append(_state_advice(smallest.name, smallest.state_bytes, module))
    elif not fitting:
        advice.append("shorter sequences or smaller samples: the work space of one sample is what does not fit")
    return advice


def _state_advice(name: str, state_bytes: int, module: nn.Module) -> str:
    try:
        layer = module.get_submodule(name)
    except AttributeError:
        layer = None
    if layer is not None and len(list(layer.children())) > 1:
        kinds = sorted({type(child).__name__ for child in layer.children() if any(True for _ in child.parameters())})
        return f"HarmonyStrategy(layers={{{', '.join(kinds)}}}) schedules the parts of {name} one by one"
    return (
        f"a narrower {name}, whose weights and gradients alone take {format_bytes(state_bytes)}: it has no parts that could "
        "be swapped one by one. Trainer(precision='bf16-true') halves them"
    )


def _host_advice(result: Estimate) -> list[str]:
    if result.fits_host(result.chosen):
        return []
    host = result.outlook.host
    short = host.num_bytes - (result.machine.host_bytes or 0)
    advice = [f"{format_bytes(short)} more host memory"]
    if host.optimizer_bytes >= host.gradient_bytes > 0:
        state = format_bytes(host.optimizer_bytes)
        advice.append(f"an optimizer with less state, such as Adafactor or SGD: {result.optimizer} keeps {state}")
    if result.precision in ("32-true", "bf16-mixed", "16-mixed"):
        half = format_bytes((host.weight_bytes + host.gradient_bytes + host.optimizer_bytes) // 2)
        advice.append(f"Trainer(precision='bf16-true'), which saves {half} and trains less exactly")
    if result.num_trained == result.num_parameters:
        advice.append("fewer trained parameters: those that are frozen take their weights alone")
    return advice


def _rounded_up(num_bytes: int) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 10 * 2**30 else (2**20, "MiB")
    return f"{-(-num_bytes // unit)}{name}"


# ---- words -------------------------------------------------------------------------------------------------------------

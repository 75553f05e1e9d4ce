"""What training a model will take and how fast it will be, told before any memory is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from torch import nn

from lightning_harmony.engine.measure.this_machine import measure_machine
from lightning_harmony.engine.model.decompose import LayerChoice, find_layers
from lightning_harmony.engine.rehearsal.rehearse import rehearse
from lightning_harmony.engine.step.batch import microbatch_sizes, split_batch
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.estimating.subject import Subject, casting, make_subject, precision_name
from lightning_harmony.plan.outlook.outlook import Outlook, look_ahead
from lightning_harmony.plan.outlook.work import StepProfile, between
from lightning_harmony.plan.search.search import MOST_TASKS
from lightning_harmony.plan.values.machine import Machine, read_machine
from lightning_harmony.plan.values.memory_size import format_bytes, parse_bytes


@dataclass(frozen=True)
class Row:
    """One size of the microbatches.

    Attributes:
        microbatch_size: samples of each.
        outlook: on the step.
    """

    microbatch_size: int
    outlook: Outlook


@dataclass(frozen=True)
class Estimate:
    """What training a model takes of a machine. Prints as a page; `to_dict` gives the figures.

    Attributes:
        name: of the model.
        precision: in which it trains.
        num_parameters: its parameters.
        num_trained: those that an optimizer updates.
        num_layers: the layers that are scheduled.
        optimizer: the name of its class.
        batch_size: samples of a step.
        items: "tokens" or "samples".
        items_per_step: how many of these a step takes.
        machine: where it trains.
        capacity_bytes: what the device may hold; None for no limit.
        chosen: the size of microbatches that was asked for.
        rows: this and other sizes, the smallest first.
        advice: what to change if it does not fit, best first.
        notes: what was assumed.
    """

    name: str
    precision: str
    num_parameters: int
    num_trained: int
    num_layers: int
    optimizer: str
    batch_size: int
    items: str
    items_per_step: int
    machine: Machine
    capacity_bytes: int | None
    chosen: Row
    rows: tuple[Row, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def outlook(self) -> Outlook:
        """On a step with the size that was asked for."""
        return self.chosen.outlook

    @property
    def fits(self) -> bool:
        """Whether device and host have what it needs."""
        return self.fits_device(self.chosen) and self.fits_host(self.chosen)

    def fits_device(self, row: Row) -> bool:
        """Whether the device has what one size of microbatches needs."""
        return self.capacity_bytes is None or row.outlook.need.num_bytes <= self.capacity_bytes

    def fits_host(self, row: Row) -> bool:
        """Whether the host has."""
        return self.machine.host_bytes is None or row.outlook.host.num_bytes <= self.machine.host_bytes

    @property
    def items_per_second(self) -> float:
        """Tokens or samples, as `items` says."""
        return self.items_per_step / self.outlook.seconds

    def to_dict(self) -> dict[str, Any]:
        """The figures, ready for JSON."""
        return {
            "name": self.name,
            "precision": self.precision,
            "num_parameters": self.num_parameters,
            "num_trained": self.num_trained,
            "num_layers": self.num_layers,
            "optimizer": self.optimizer,
            "batch_size": self.batch_size,
            "machine": self.machine.name,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "chosen": self._figures(self.chosen),
            "packs": [list(pack) for pack in self.outlook.plan.packs],
            "rows": [self._figures(row) for row in self.rows],
            "advice": list(self.advice),
            "notes": list(self.notes),
        }

    def _figures(self, row: Row) -> dict[str, Any]:
        outlook = row.outlook
        return {
            "microbatch_size": row.microbatch_size,
            "num_microbatches": outlook.num_microbatches,
            "fits_device": self.fits_device(row),
            "fits_host": self.fits_host(row),
            "needed_device_bytes": outlook.need.num_bytes,
            "needed_by": outlook.need.name,
            "peak_device_bytes": outlook.peak_bytes,
            "host_bytes": outlook.host.num_bytes,
            "num_packs": len(outlook.plan.packs),
            "seconds": outlook.seconds,
            f"{self.items}_per_second": self.items_per_step / outlook.seconds,
            "bound_by": outlook.bound,
            "busy_seconds": dict(outlook.busy_seconds),
            "swapped_in_bytes": dict(outlook.swapped_in_bytes),
            "swapped_out_bytes": dict(outlook.swapped_out_bytes),
        }

    # ---- the page ------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        parts = [self._head(), self._bytes(), self._step(), self._table(), self._end()]
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _head(self) -> list[str]:
        trained = "" if self.num_trained == self.num_parameters else f", {_count(self.num_trained)} of them trained"
        capacity = "no limit" if self.capacity_bytes is None else format_bytes(self.capacity_bytes)
        host = "unknown" if self.machine.host_bytes is None else format_bytes(self.machine.host_bytes)
        return [
            f"{self.name}: {_count(self.num_parameters)} parameters{trained}, {self.num_layers} layers, {self.precision}, "
            f"{self.optimizer}",
            f"a step: {self.batch_size} samples"
            + (f", {self.items_per_step:,} tokens" if self.items == "tokens" else "")
            + f", in {self.outlook.num_microbatches} microbatches of {self.chosen.microbatch_size}",
            f"on {self.machine.name}: device {capacity}, host {host}",
        ]

    def _bytes(self) -> list[str]:
        outlook = self.outlook
        need, host = outlook.need, outlook.host
        where = f"for {need.name}" if need.name else "before the first layer"
        device_verdict = "fits" if self.fits_device(self.chosen) else "DOES NOT FIT"
        host_verdict = "fits" if self.fits_host(self.chosen) else "DOES NOT FIT"
        return [
            f"device  {device_verdict}: needs {format_bytes(need.num_bytes)}, and uses up to "
            f"{format_bytes(outlook.peak_bytes)} where it has it",
            f"        most {where}: {format_bytes(need.state_bytes)} weights and gradients, "
            f"{format_bytes(need.work_bytes)} work space, {format_bytes(need.live_bytes)} of other microbatches, "
            f"{format_bytes(need.other_bytes)} besides",
            f"host    {host_verdict}: {format_bytes(host.num_bytes)} = {format_bytes(host.weight_bytes)} weights + "
            f"{format_bytes(host.gradient_bytes)} gradients + {format_bytes(host.optimizer_bytes)} optimizer + "
            f"{format_bytes(host.stash_bytes)} stash",
            f"packs   {_describe_packs(outlook)}",
        ]

    def _step(self) -> list[str]:
        outlook = self.outlook
        return [
            f"step    about {_seconds(outlook.seconds)}: {_rate(self.items_per_second)} {self.items}/s; "
            f"bounded by {outlook.bound}",
            f"        {_describe_parts(outlook)}",
            f"swaps   in {_describe_bytes(outlook.swapped_in_bytes)}; out {_describe_bytes(outlook.swapped_out_bytes)}",
        ]

    def _table(self) -> list[str]:
        head = ("microbatches", "of size", "device needs", "", "host", "packs", "step", f"{self.items}/s", "bounded by")
        rows = [head, *(self._cells(row) for row in self.rows)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        left = {3, 8}
        return [
            "  ".join(
                cell.ljust(width) if column in left else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]

    def _cells(self, row: Row) -> tuple[str, ...]:
        outlook = row.outlook
        return (
            str(outlook.num_microbatches),
            str(row.microbatch_size),
            format_bytes(outlook.need.num_bytes),
            "fits" if self.fits_device(row) and self.fits_host(row) else "too much",
            format_bytes(outlook.host.num_bytes),
            str(len(outlook.plan.packs)),
            _seconds(outlook.seconds),
            _rate(self.items_per_step / outlook.seconds),
            outlook.bound,
        )

    def _end(self) -> list[str]:
        advice = ["To make it fit:", *(f"- {line}" for line in self.advice)] if self.advice else []
        return [*advice, *(f"Note: {note}." for note in self.notes)]


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


def _describe_packs(outlook: Outlook) -> str:
    plan = outlook.plan
    packs = [pack for pack in plan.packs if pack]
    largest = max((len(pack) for pack in packs), default=0)
    of_layers = "each a layer" if largest == 1 else f"of up to {largest} layers"
    fused = f"; the last {_plural(len(plan.fused), 'runs', 'run')} forward and backward at once" if plan.fused else ""
    keeping = f"; {len(plan.kept)} more keep their graphs" if plan.kept else ""
    joining = f"; the forward takes up to {max(map(len, plan.forward_turns))} in a turn" if plan.joined else ""
    return f"{len(packs)} {of_layers}{fused}{keeping}{joining}"


def _plural(number: int, one: str, several: str) -> str:
    return one if number == 1 else f"{number} {several}"


def _describe_parts(outlook: Outlook) -> str:
    parts = sorted(outlook.busy_seconds.items(), key=lambda part: -part[1])
    return "busy    " + ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in parts)


def _describe_bytes(num_bytes: Mapping[str, int]) -> str:
    return " + ".join(f"{format_bytes(number)} {kind}" for kind, number in num_bytes.items())


def _count(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return str(number)


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2f}"

"""The estimate: what a training will take and how fast it will be, as figures and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_harmony.plan.outlook.nodes import Nodes
from lightning_harmony.plan.outlook.outlook import Outlook
from lightning_harmony.plan.values.machine import Machine
from lightning_harmony.plan.values.memory_size import format_bytes
from lightning_harmony.plan.values.printed import Printed


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
class Estimate(Printed):
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
        nodes: how many such machines train, each with a batch of its own.
        limit_bytes: what the process may take of the device, as it was given; None for all.
        capacity_bytes: what may be allocated of that, beside the context and what the allocator keeps unused; None for no
            limit.
        in_memory_bytes: what training takes on the device if nothing is swapped and nothing recomputed, beside what the
            optimizer's step allocates.
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
    nodes: Nodes
    limit_bytes: int | None
    capacity_bytes: int | None
    in_memory_bytes: int
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
        return self.machine.host_bytes is None or row.outlook.host.least_bytes <= self.machine.host_bytes

    @property
    def items_per_second(self) -> float:
        """Tokens or samples of a machine, as `items` says."""
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
            "num_nodes": self.nodes.number,
            "capacity_bytes": self.capacity_bytes,
            "in_memory_bytes": self.in_memory_bytes,
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
            "least_host_bytes": outlook.host.least_bytes,
            "num_packs": len(outlook.plan.packs),
            "seconds": outlook.seconds,
            f"{self.items}_per_second": self.items_per_step / outlook.seconds,
            "bound_by": outlook.bound,
            "busy_seconds": dict(outlook.busy_seconds),
            "swapped_in_bytes": dict(outlook.swapped_in_bytes),
            "swapped_out_bytes": dict(outlook.swapped_out_bytes),
            "node_sent_bytes": outlook.sent_bytes,
        }

    # ---- the page ------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        parts = [self._head(), self._bytes(), self._step(), self._table(), self._end()]
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _head(self) -> list[str]:
        trained = "" if self.num_trained == self.num_parameters else f", {_count(self.num_trained)} of them trained"
        capacity = "no limit" if self.capacity_bytes is None else format_bytes(self.capacity_bytes)
        if self.limit_bytes is not None and self.limit_bytes != self.capacity_bytes:
            capacity += f" to allocate under a limit of {format_bytes(self.limit_bytes)}"
        host = (
            "unknown (say it with --host-memory)"
            if self.machine.host_bytes is None
            else format_bytes(self.machine.host_bytes)
        )
        microbatches = _plural(self.outlook.num_microbatches, "1 microbatch", "microbatches")
        each = "" if self.nodes.number == 1 else f", on each of {self.nodes.number} machines"
        layers = _plural(self.num_layers, "1 layer", "layers")
        return [
            f"{self.name}: {_count(self.num_parameters)} parameters{trained}, {layers}, {self.precision}, "
            f"{self.optimizer}",
            f"a step: {self.batch_size} samples"
            + (f", {self.items_per_step:,} tokens" if self.items == "tokens" else "")
            + f", in {microbatches} of {self.chosen.microbatch_size}{each}",
            f"on {self.machine.name}: device {capacity}, host {host}",
        ]

    def _bytes(self) -> list[str]:
        outlook = self.outlook
        need, host = outlook.need, outlook.host
        share = self.nodes.own_share
        part = f" ({share:.0%} of that of all {self.nodes.number} machines)" if share < 1 else ""
        where = f"for {need.name}" if need.name else "before the first layer"
        device_verdict = "fits: " if self.fits_device(self.chosen) else "DOES NOT FIT: "
        host_verdict = "fits: " if self.fits_host(self.chosen) else "DOES NOT FIT: "
        if self.machine.host_bytes is None:
            host_verdict = ""
        return [
            f"device  {device_verdict}{_needed(need.num_bytes, outlook.peak_bytes)}",
            f"        most {where}: {format_bytes(need.state_bytes)} weights and gradients, "
            f"{format_bytes(need.work_bytes)} work space, {format_bytes(need.live_bytes)} of other microbatches, "
            f"{format_bytes(need.other_bytes)} besides",
            f"host    {host_verdict}{_needed(host.least_bytes, host.num_bytes)}",
            f"        at the most {format_bytes(host.weight_bytes)} weights + "
            f"{format_bytes(host.gradient_bytes)} gradients + {format_bytes(host.optimizer_bytes)} optimizer{part} + "
            f"{format_bytes(host.stash_bytes)} stash",
            f"packs   {_describe_packs(outlook)}",
        ]

    def _step(self) -> list[str]:
        outlook, several = self.outlook, self.nodes.number > 1
        sent = [f"sends   {format_bytes(outlook.sent_bytes)} to other machines"] if several else []
        a_machine = " a machine" if several else ""
        return [
            f"step    about {_seconds(outlook.seconds)}: {_rate(self.items_per_second)} {self.items}/s{a_machine}; "
            f"bounded by {outlook.bound}",
            f"        {_describe_parts(outlook)}",
            f"swaps   in {_describe_bytes(outlook.swapped_in_bytes)}; out {_describe_bytes(outlook.swapped_out_bytes)}",
            *sent,
        ]

    def _table(self) -> list[str]:
        head = (
            "microbatches",
            "of size",
            "device needs",
            "",
            "host up to",
            "packs",
            "step",
            f"{self.items}/s",
            "bounded by",
        )
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


def _needed(least: int, most: int) -> str:
    more = f", and uses up to {format_bytes(most)} where it has it" if most > least else ""
    return f"needs {format_bytes(least)}{more}"


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

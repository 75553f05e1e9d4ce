"""A machine in figures: how fast it computes, copies and updates, and how much it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.values.card_memory import usable_bytes
from lightning_harmony.plan.values.document import Count, Seconds, Speed, decode


@dataclass(frozen=True)
class Machine:
    """What a step's time and place depend on, for one device and its host.

    Attributes:
        name: what it is called in an estimate.
        flops_per_second: what its matrix products reach, by the type of their operands: "float32", "bfloat16", ...
        memory_bytes_per_second: what other operations read and write of the device's memory.
        swap_in_bytes_per_second: copies from host to device.
        swap_out_bytes_per_second: copies from device to host.
        updated_parameters_per_second: how many FP32 parameters Adam updates whose home is the host.
        operation_seconds: what it takes the host to have one operation run.
        call_seconds: what it takes the host to bring a layer's call to a lane.
        host_bytes: what a training may take of the host's memory; None if it isn't known.
        device_bytes: what it may take of the device's; None for no limit.
        library_bytes: what libraries take of the device for each thread that computes there, of which each lane is one.
        computes_apart: whether the device is a GPU, which updates parameters itself, and not a part of the host's memory.
    """

    name: str
    flops_per_second: Mapping[str, Speed]
    memory_bytes_per_second: Speed
    swap_in_bytes_per_second: Speed
    swap_out_bytes_per_second: Speed
    updated_parameters_per_second: Speed
    operation_seconds: Seconds
    call_seconds: Seconds
    host_bytes: Count | None = None
    device_bytes: Count | None = None
    library_bytes: Count = 0
    computes_apart: bool = True

    def flops_per_second_of(self, dtype: str) -> float:
        """The rate for a type; that of the slowest one for a type that isn't listed."""
        return self.flops_per_second.get(dtype, min(self.flops_per_second.values()))

    def to_json(self) -> str:
        """The description as text that `read_machine` reads."""
        return json.dumps(asdict(self), indent=2)


# Of a GPU, one part is left to tensors of the stash that several layers take.
_SHARED_STASH_PART = 256
# Of an H200, cuBLAS takes 64 MiB for a thread, and torch 32 MiB.
THREAD_BYTES = 96 * 2**20

# What each part reaches within a step, the others busy beside it. Alone, bf16 products reach 799 TFLOP/s. Of each parameter
# that is updated, 16 bytes come over the bus.
H200 = Machine(
    name="NVIDIA H200, 16 cores",
    flops_per_second={"bfloat16": 640e12, "float16": 640e12, "float32": 50e12, "float64": 50e12},
    memory_bytes_per_second=4.0e12,
    swap_in_bytes_per_second=55e9,
    swap_out_bytes_per_second=55e9,
    updated_parameters_per_second=3.2e9,
    operation_seconds=8e-6,
    call_seconds=3.5e-4,
    host_bytes=128 * 2**30,
    device_bytes=125 * 2**30,
    library_bytes=THREAD_BYTES,
)


# How the names of cards end whose rates nobody measured.
BY_DATA_SHEET = " (by its data sheet)"


@dataclass(frozen=True)
class _DataSheet:
    """What the maker's data sheet of a card says, and for the memory what the driver shows.

    Attributes:
        name: of the card.
        tflops_16: products of 16-bit matrices without sparsity, summed in FP32.
        tflops_32: FP32, without TF32.
        tflops_64: FP64.
        memory_gb_per_second: of the card's memory.
        bus_gb_per_second: of the PCI Express bus, each way.
        memory_gib: what the driver lets programs have.
    """

    name: str
    tflops_16: float
    tflops_32: float
    tflops_64: float
    memory_gb_per_second: float
    bus_gb_per_second: float
    memory_gib: float


_H200_SHEET = _DataSheet("NVIDIA H200", 989.5, 67.0, 67.0, 4800.0, 64.0, 139.8)
_SHEETS = {
    "rtx3090": _DataSheet("NVIDIA GeForce RTX 3090", 71.0, 35.6, 0.556, 936.0, 32.0, 23.69),
    "rtx4090": _DataSheet("NVIDIA GeForce RTX 4090", 165.2, 82.6, 1.29, 1008.0, 32.0, 23.64),
    "rtx5090": _DataSheet("NVIDIA GeForce RTX 5090", 209.5, 104.8, 1.64, 1792.0, 64.0, 31.36),
    "l40s": _DataSheet("NVIDIA L40S", 362.0, 91.6, 1.43, 864.0, 32.0, 44.4),
    "a100": _DataSheet("NVIDIA A100 80GB", 312.0, 19.5, 19.5, 2039.0, 32.0, 79.25),
    "h100": _DataSheet("NVIDIA H100 80GB", 989.5, 67.0, 67.0, 3350.0, 64.0, 79.1),
}


def _of_sheet(sheet: _DataSheet) -> Machine:
    """A card that reaches the shares of its data sheet that an H200 reaches within a step."""

    def rate(reached: float, of_h200: float, of_card: float) -> float:
        return reached * of_card / of_h200

    at_16 = rate(H200.flops_per_second["bfloat16"], _H200_SHEET.tflops_16, sheet.tflops_16)
    bus = rate(H200.swap_in_bytes_per_second, _H200_SHEET.bus_gb_per_second, sheet.bus_gb_per_second)
    return replace(
        H200,
        name=f"{sheet.name}{BY_DATA_SHEET}",
        flops_per_second={
            "bfloat16": at_16,
            "float16": at_16,
            "float32": rate(H200.flops_per_second["float32"], _H200_SHEET.tflops_32, sheet.tflops_32),
            "float64": rate(H200.flops_per_second["float64"], _H200_SHEET.tflops_64, sheet.tflops_64),
        },
        memory_bytes_per_second=rate(
            H200.memory_bytes_per_second, _H200_SHEET.memory_gb_per_second, sheet.memory_gb_per_second
        ),
        swap_in_bytes_per_second=bus,
        swap_out_bytes_per_second=bus,
        updated_parameters_per_second=rate(
            H200.updated_parameters_per_second, _H200_SHEET.bus_gb_per_second, sheet.bus_gb_per_second
        ),
        host_bytes=None,
        device_bytes=usable_bytes(int(sheet.memory_gib * 2**30)),
    )


MACHINES: Mapping[str, Machine] = {name: _of_sheet(sheet) for name, sheet in _SHEETS.items()} | {"h200": H200}
# What a file may leave out.
_DEFAULTS = {field.name: field.default for field in fields(Machine) if field.default is not MISSING}


def read_machine(text: str) -> Machine:
    """A machine by the name of one that is known, or from a JSON file.

    Raises:
        ValueError: if it is neither, or the file describes no machine.
    """
    known = text.lower().replace("-", "").replace(" ", "")
    if known in MACHINES:
        return MACHINES[known]
    path = Path(text)
    if not path.is_file():
        raise ValueError(
            f"{text!r} is neither a machine that is known ({', '.join(MACHINES)}) nor a file. `lightning-harmony machine "
            "--measure` prints the description of this machine; write that to a file"
        )
    try:
        machine = decode(Machine, {**_DEFAULTS, **json.loads(path.read_text())}, "machine")
    except (OSError, ValueError, TypeError, RecursionError, PlanError) as error:
        raise ValueError(f"{text} does not describe a machine: {error}") from error
    if not machine.flops_per_second:
        raise ValueError(f'{text} does not describe a machine: flops_per_second is empty; give {{"float32": 1e12}}')
    return machine


def shared_stash_bytes(capacity_bytes: int | None, *, computes_apart: bool) -> int:
    """What is left of a device to tensors of the stash that several layers take: on a GPU alone.

    Args:
        capacity_bytes: of the device; None for no limit.
        computes_apart: whether it is a GPU.
    """
    return (capacity_bytes or 0) // _SHARED_STASH_PART if computes_apart else 0


def with_shared_stash(num_bytes: int, *, computes_apart: bool) -> int:
    """The least capacity of which so many bytes are there beside that."""
    return num_bytes + num_bytes // (_SHARED_STASH_PART - 1) if computes_apart else num_bytes

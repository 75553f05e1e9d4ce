"""A machine in figures: how fast it computes, copies and updates, and how much it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.values.values import decode


@dataclass(frozen=True)
class Machine:
    """What a step's time and place depend on, for one device and its host.

    Attributes:
        name: what it is called in an estimate.
        flops_per_second: what its matrix products reach, by the type of their operands: "float32", "bfloat16", ...
        memory_bytes_per_second: what other operations read and write of the device's memory.
        swap_in_bytes_per_second: copies from host to device.
        swap_out_bytes_per_second: copies from device to host.
        updated_parameters_per_second: how many parameters Adam updates whose home is the host.
        operation_seconds: what it takes the host to have one operation run.
        call_seconds: what it takes the host to bring a layer's call to a lane.
        host_bytes: what a training may take of the host's memory; None if it isn't known.
        device_bytes: what it may take of the device's; None for no limit.
        library_bytes: what libraries allocate on the device beside.
    """

    name: str
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    swap_in_bytes_per_second: float
    swap_out_bytes_per_second: float
    updated_parameters_per_second: float
    operation_seconds: float
    call_seconds: float
    host_bytes: int | None = None
    device_bytes: int | None = None
    library_bytes: int = 0

    def flops_per_second_of(self, dtype: str) -> float:
        """The rate for a type; that of the slowest one for a type that isn't listed."""
        return self.flops_per_second.get(dtype, min(self.flops_per_second.values()))

    def to_json(self) -> str:
        """The description as text that `read_machine` reads."""
        return json.dumps(asdict(self), indent=2)


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
    library_bytes=32 * 2**20,
)
MACHINES: Mapping[str, Machine] = {"h200": H200}
# What a file may leave out.
_DEFAULTS = {field.name: field.default for field in fields(Machine) if field.default is not MISSING}


def read_machine(text: str) -> Machine:
    """A machine by the name of one that is known, or from a JSON file.

    Raises:
        ValueError: if it is neither, or the file describes no machine.
    """
    if text.lower() in MACHINES:
        return MACHINES[text.lower()]
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

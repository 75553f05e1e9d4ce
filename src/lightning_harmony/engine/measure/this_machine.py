"""Measuring this machine: a few seconds of products, copies and updates."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from time import perf_counter

import torch
from torch import nn

from lightning_harmony.engine.devices.cuda_device import CudaDevice
from lightning_harmony.engine.devices.cuda_memory import CudaBudget
from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.free_memory import free_host_bytes
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.origin import own_version
from lightning_harmony.plan.values.machine import THREAD_BYTES, Machine
from lightning_harmony.plan.values.memory_size import format_bytes

_COPIED_BYTES = 64 * 2**20
_UPDATED_PARAMETERS = 8 * 2**20
# What a call of a layer costs the host besides its operations, as measured: it depends little on the machine.
_CALL_SECONDS = 3.5e-4


def describe_versions() -> str:
    """The versions of Python, of this package and of those that it needs."""
    needed = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning"))
    return f"python {platform.python_version()}, lightning-harmony {own_version()}, {needed}"


def describe_machine() -> list[str]:
    """Versions, and the memory that a training could take, a line each."""
    lines = [describe_versions(), f"host: {format_bytes(free_host_bytes())} free"]
    for index in range(torch.cuda.device_count()):
        usable = format_bytes(CudaBudget.of(torch.device("cuda", index), None).capacity_bytes)
        lines.append(
            f"cuda:{index}: {torch.cuda.get_device_name(index)}, {usable} for HarmonyStrategy(device_memory=None)"
        )
    if torch.cuda.device_count() == 0:
        lines.append('no CUDA device: accelerator="cpu" trains on a virtual device in host memory')
    return lines


def measure_machine() -> Machine:
    """Describe this machine: its first GPU, or, where there is none, the virtual device in host memory."""
    if torch.cuda.is_available():
        torch_device = torch.device("cuda", 0)
        capacity = CudaBudget.of(torch_device, None).capacity_bytes
        device: Device = CudaDevice(torch_device, capacity)
        name = torch.cuda.get_device_name(torch_device)
        dtypes, size = [torch.bfloat16, torch.float16, torch.float32], 4096
    else:
        capacity = None
        device = VirtualDevice(None)
        name = "a virtual device in host memory"
        dtypes, size = [torch.float32, torch.bfloat16], 768
    try:
        copied = device.host_buffer(_COPIED_BYTES)
        on_device = device.empty(_COPIED_BYTES)
        swap_in = _COPIED_BYTES / _seconds(device, lambda: on_device.copy_(copied, non_blocking=True))
        swap_out = _COPIED_BYTES / _seconds(device, lambda: copied.copy_(on_device, non_blocking=True))
        return Machine(
            name=f"{name}, {os.cpu_count()} cores ({platform.node() or 'this machine'})",
            flops_per_second={str(d).removeprefix("torch."): _flops_per_second(device, d, size) for d in dtypes},
            memory_bytes_per_second=2 * _COPIED_BYTES / _seconds(device, on_device.clone),
            swap_in_bytes_per_second=swap_in,
            swap_out_bytes_per_second=swap_out,
            updated_parameters_per_second=_updated_per_second(device, swap_in, swap_out),
            operation_seconds=_operation_seconds(device),
            call_seconds=_CALL_SECONDS,
            host_bytes=free_host_bytes(),
            device_bytes=capacity,
            library_bytes=0 if capacity is None else THREAD_BYTES,
            computes_apart=device.computes_apart,
        )
    finally:
        device.close()


def _seconds(device: Device, work: Callable[[], object]) -> float:
    """The shortest of a few runs, after one that warms up."""
    shortest = float("inf")
    for number in range(4):
        _synchronize(device)
        start = perf_counter()
        work()
        _synchronize(device)
        if number:
            shortest = min(shortest, perf_counter() - start)
    return shortest


def _synchronize(device: Device) -> None:
    if device.torch_device.type == "cuda":
        torch.cuda.synchronize(device.torch_device)


def _flops_per_second(device: Device, dtype: torch.dtype, size: int) -> float:
    matrix = torch.ones(size, size, dtype=dtype, device=device.torch_device)
    return 2 * size**3 / _seconds(device, lambda: matrix @ matrix)


def _operation_seconds(device: Device) -> float:
    """What it takes to launch an operation, the next one not waiting for it."""
    scalar, number = torch.zeros((), device=device.torch_device), 200
    return _seconds(device, lambda: [scalar.add_(1) for _ in range(number)]) / number


def _updated_per_second(device: Device, swap_in: float, swap_out: float) -> float:
    """How many parameters AdamW updates that come to the device with their gradients and state, and go back without those.

    Args:
        device: where it steps.
        swap_in: bytes a second that come there.
        swap_out: bytes a second that go back.
    """
    parameter = nn.Parameter(torch.zeros(_UPDATED_PARAMETERS, device=device.torch_device))
    parameter.grad = torch.zeros_like(parameter)
    seconds = _seconds(device, torch.optim.AdamW([parameter]).step) / _UPDATED_PARAMETERS
    return 1 / max(seconds, 4 * parameter.element_size() / swap_in, 3 * parameter.element_size() / swap_out)

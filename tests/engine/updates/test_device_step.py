"""Which optimizers a device steps as the host does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_harmony.engine.devices.cuda_device import CudaDevice
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.updates.device_step import _fills_vectors, _is_fused_adam, step_on


def optimizer_of(kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.randn(4, 16, dtype=dtype))], **options)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop])
def test_a_virtual_device_runs_the_optimizers_own_code(kind: Any) -> None:
    device, optimizer = VirtualDevice(None), optimizer_of(kind, lr=0.1)
    step = step_on(device, optimizer)
    assert step is not None
    parameter = optimizer.param_groups[0]["params"][0]
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    with device.computing():
        step.run(optimizer)
    assert not torch.equal(parameter, before)
    # What it makes meanwhile is not counted.
    assert device.peak_bytes() == 0


@pytest.mark.parametrize(
    ("kind", "options", "is_known"),
    [
        (torch.optim.AdamW, {"fused": True}, True),
        (torch.optim.Adam, {"fused": True}, True),
        (torch.optim.AdamW, {}, False),
        (torch.optim.Adam, {"fused": True, "weight_decay": 0.1}, False),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}, False),
        (torch.optim.AdamW, {"fused": True, "maximize": True}, False),
        (torch.optim.AdamW, {"fused": True, "betas": (0.4, 0.9)}, False),
        (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(0.1)}, False),
        (torch.optim.AdamW, {"fused": True, "dtype": torch.float64}, False),
        (torch.optim.SGD, {"fused": True, "lr": 0.1}, False),
    ],
)
def test_the_kernel_is_for_plain_fused_adam_in_single_precision(
    kind: Any, options: dict[str, Any], is_known: bool
) -> None:
    assert _is_fused_adam(optimizer_of(kind, **options)) == is_known


def test_where_there_is_no_gpu_the_kernel_cannot_be_compared_and_the_host_updates() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    device = object.__new__(CudaDevice)
    device.torch_device = torch.device("cuda", 0)
    assert step_on(device, optimizer_of(torch.optim.AdamW, fused=True)) is None


def test_the_kernel_takes_what_lies_in_memory_as_the_parameter_does_and_fills_vectors() -> None:
    """It goes through parameters and moments as they lie: one that lies otherwise would be taken for another element's."""

    def moments(like: torch.Tensor) -> dict[str, Any]:
        return {"step": torch.ones(()), "exp_avg": torch.zeros_like(like), "exp_avg_sq": torch.zeros_like(like)}

    parameter = nn.Parameter(torch.randn(4, 8))
    assert _fills_vectors(parameter, moments(parameter))
    assert not _fills_vectors(parameter, moments(parameter) | {"exp_avg": torch.zeros(8, 4).t()})
    assert not _fills_vectors(parameter, moments(parameter) | {"exp_avg_sq": torch.zeros(4, 8, dtype=torch.float64)})
    assert not _fills_vectors(parameter, {})
    odd = nn.Parameter(torch.randn(3, 5))
    assert not _fills_vectors(odd, moments(odd))

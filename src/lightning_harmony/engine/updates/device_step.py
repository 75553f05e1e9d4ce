"""An optimizer's step on a device, where that has the bits of the host's: which device updates what must not show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_harmony.engine.devices.device import Device
from lightning_harmony.engine.devices.virtual_device import VirtualDevice

# The longest vector of a processor, in elements. What is left over by vectors, the host rounds in another way.
_VECTOR = 16
# What the kernel is compared on: enough for each rounding to differ somewhere.
_NUM_COMPARED, _COMPARED_STEPS = (1 << 16) + 3 * _VECTOR, 4


@dataclass(frozen=True)
class Step:
    """An optimizer's step on a device.

    Attributes:
        run: steps an optimizer whose parameters, gradients and state are there, all but the state's numbers.
        takes: whether it has the host's bits for a parameter with this state.
    """

    run: Callable[[Optimizer], None]
    takes: Callable[[nn.Parameter, Mapping[str, Any]], bool] = lambda parameter, state: True


def step_on(device: Device, optimizer: Optimizer) -> Step | None:
    """How to step an optimizer on a device; None where that would round otherwise than on the host.

    On a virtual device it is the same code on the same processor. On a GPU, torch's own kernels round otherwise, so there it
    is a kernel with the operations that the host's fused Adam makes, in their order. Whether it really has the same bits is
    seen once for each device.

    Args:
        device: where.
        optimizer: one that updates each parameter on its own.
    """
    if isinstance(device, VirtualDevice):
        return Step(partial(_step_uncounted, device))
    if not _is_fused_adam(optimizer) or not _kernel_has_hosts_bits(device.torch_device):
        return None
    return Step(_step_with_kernel, _fills_vectors)


def _fills_vectors(parameter: nn.Parameter, state: Mapping[str, Any]) -> bool:
    """Whether vectors leave nothing over, and moments lie in memory as the parameter does: the kernel goes through both."""
    moments = [state.get(name) for name in ("exp_avg", "exp_avg_sq")]
    return parameter.numel() % _VECTOR == 0 and all(
        isinstance(moment, Tensor) and moment.dtype is parameter.dtype and moment.stride() == parameter.stride()
        for moment in moments
    )


def _step_uncounted(device: VirtualDevice, twin: Optimizer) -> None:
    # As a kernel does it, in place: nothing of what it makes meanwhile is there afterwards.
    with device.on_host():
        twin.step()


def _is_fused_adam(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind in (torch.optim.Adam, torch.optim.AdamW) and all(
        _is_plain(group, decays_weights=kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay")))
        for group in optimizer.param_groups
    )


def _is_plain(group: dict[str, Any], *, decays_weights: bool) -> bool:
    """Whether a group is updated as the kernel does it, which lets weights decay, but no gradients."""
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    return (
        bool(group.get("fused"))
        and not (group["amsgrad"] or group["maximize"] or group["differentiable"] or group["capturable"])
        and all(isinstance(number, float | int) for number in numbers)
        # Torch interpolates from the other end otherwise.
        and 1 - group["betas"][0] < 0.5
        and (decays_weights or group["weight_decay"] == 0)
        and all(parameter.dtype is torch.float32 for parameter in group["params"])
    )


def _step_with_kernel(twin: Optimizer) -> None:
    from lightning_harmony.engine.updates.adam_kernel import adam_step

    for group in twin.param_groups:
        for parameter in group["params"]:
            state = twin.state[parameter]
            state["step"] += 1
            adam_step(
                parameter.detach(),
                parameter.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                int(state["step"]),
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )


@cache
def _kernel_has_hosts_bits(device: torch.device) -> bool:
    """Whether the kernel can be made here, and has the bits of the host's fused implementation."""
    try:
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
            return _compare(device)
    except Exception:
        # No compiler for it, or a version of it that this code does not know: the host updates, as it can anyway.
        return False


def _compare(device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(scale: float) -> Tensor:
        values = torch.randn(_NUM_COMPARED, generator=generator) * scale
        # Gradients differ by orders of magnitude: some make moments that are no normal numbers.
        return values * 10.0 ** torch.randint(-22, 2, (_NUM_COMPARED,), generator=generator)

    parameter = nn.Parameter(random(1.0))
    host = torch.optim.AdamW([parameter], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    stand_in = nn.Parameter(parameter.detach().to(device))
    twin = torch.optim.AdamW([stand_in], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    names = ("exp_avg", "exp_avg_sq")
    twin.state[stand_in] = {"step": torch.zeros(()), **{name: torch.zeros_like(stand_in) for name in names}}
    for _ in range(_COMPARED_STEPS):
        parameter.grad = random(0.1)
        stand_in.grad = parameter.grad.to(device)
        host.step()
        _step_with_kernel(twin)
    ours = [stand_in.detach(), *(twin.state[stand_in][name] for name in names)]
    theirs = [parameter.detach(), *(host.state[parameter][name] for name in names)]
    return all(torch.equal(our.cpu(), their) for our, their in zip(ours, theirs, strict=True))

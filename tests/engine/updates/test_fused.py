"""Optimizers that run fused on the host."""

import pytest
import torch
from torch import nn

from lightning_harmony.engine.updates.fused import FusedGroups


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_it_is_chosen_where_the_user_left_it_open_and_updates_alike(
    optimizer_class: type[torch.optim.Optimizer],
) -> None:
    parameters = [nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(1))) for _ in range(2)]
    optimizers = [optimizer_class([parameter], lr=0.1) for parameter in parameters]
    with torch.no_grad():
        parameters[1].copy_(parameters[0])
    fused = FusedGroups()
    for step in range(3):
        for optimizer, parameter in zip(optimizers, parameters, strict=True):
            parameter.grad = torch.full((5,), 0.5 + step)
            # After a step of another implementation, too.
            if optimizer is optimizers[1] and step > 0:
                fused.fuse(optimizer)
            optimizer.step()
    assert len(fused) == 1
    # The fused kernel rounds at other places.
    torch.testing.assert_close(parameters[0], parameters[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("chosen", [{"fused": False}, {"foreach": True}, {"capturable": True}])
def test_what_the_user_chose_stays(chosen: dict[str, bool]) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], **chosen)
    before, fused = dict(optimizer.param_groups[0]), FusedGroups()
    fused.fuse(optimizer)
    assert not fused
    assert optimizer.param_groups[0] == before


def test_optimizers_without_a_fused_implementation_stay_as_they_are() -> None:
    fused = FusedGroups()
    fused.fuse(torch.optim.Adamax([nn.Parameter(torch.ones(2))]))
    assert not fused


def test_it_does_not_announce_that_the_optimizer_unscales_gradients() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    FusedGroups().fuse(optimizer)
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


def test_saved_state_does_not_tell_of_it() -> None:
    chosen, open_one = ({"params": [nn.Parameter(torch.ones(2))]} for _ in range(2))
    optimizer = torch.optim.AdamW([{**chosen, "fused": True}, open_one])
    fused = FusedGroups()
    fused.fuse(optimizer)
    saved = optimizer.state_dict()
    fused.unmark(optimizer, saved)
    assert [group["fused"] for group in saved["param_groups"]] == [True, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("written", [None, True])
def test_in_16_bits_nothing_is_fused_for_the_hosts_kernel_is_wrong(dtype: torch.dtype, written: bool | None) -> None:
    """The fused SGD of torch on the CPU is off by a tenth of a step from the 32nd element on (2.11, 2.13)."""
    parameters = [nn.Parameter(torch.linspace(-1, 1, 100).to(dtype)) for _ in range(2)]
    reference = torch.optim.SGD([parameters[0]], lr=0.1)
    optimizer = torch.optim.SGD([parameters[1]], lr=0.1, fused=written)
    fused = FusedGroups()
    fused.fuse(optimizer)
    for parameter, its in zip(parameters, (reference, optimizer), strict=True):
        parameter.grad = torch.linspace(1, 2, 100).to(dtype)
        its.step()
    assert torch.equal(*parameters)
    assert not fused
    saved = optimizer.state_dict()
    fused.unmark(optimizer, saved)
    assert saved["param_groups"][0]["fused"] is written


def test_an_adam_that_the_user_fused_in_16_bits_stays_fused() -> None:
    """It computes in float32 inside, without which its epsilon is 0 in float16."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(40, dtype=torch.float16))], fused=True)
    FusedGroups().fuse(optimizer)
    assert optimizer.param_groups[0]["fused"] is True


def test_what_begins_to_be_trained_later_has_its_first_momentum_from_another_implementation() -> None:
    """Of fused SGD, which fails where some parameters have no momentum yet."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer, fused, chosen = torch.optim.SGD(parameters, lr=0.5, momentum=0.5), FusedGroups(), []
    parameters[1].requires_grad_(False)
    for step in range(4):
        if step == 1:
            parameters[1].requires_grad_(True)
        for parameter in parameters:
            parameter.grad = torch.ones(2) if parameter.requires_grad else None
        fused.fuse(optimizer)
        optimizer.step()
        chosen.append(optimizer.param_groups[0]["fused"])
    assert chosen == [True, None, True, True]
    assert [parameter[0].item() for parameter in parameters] == [1 - 0.5 * (1 + 1.5 + 1.75 + 1.875), 1 - 0.5 * 4.25]

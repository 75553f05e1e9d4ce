"""What operations between a device's tensors and the host's become. The meta device stands for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.glue.one_device import BringsHostOperands

GPU = torch.device("meta")


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 4))


def test_operands_of_the_host_are_brought_to_the_device(weight: nn.Parameter) -> None:
    x = torch.ones(2, 4, device=GPU)
    with BringsHostOperands(GPU):
        for result in (nn.functional.linear(x, weight), torch.cat([x, weight * 2]), x + weight[0]):
            assert result.device == GPU
            assert result.requires_grad
        assert x.add_(weight[0].detach()) is x


def test_what_is_on_the_host_alone_stays_there(weight: nn.Parameter) -> None:
    with BringsHostOperands(GPU):
        assert (weight + 1).device.type == "cpu"
        assert (torch.ones((), device=GPU) * weight.sum()).device == GPU


def test_what_is_changed_on_the_host_stays_there(weight: nn.Parameter, monkeypatch: pytest.MonkeyPatch) -> None:
    """To be refused by torch as ever, not to change a copy; and torch itself copies between devices."""
    seen: list[Tensor] = []
    for name in ("add_", "copy_"):
        monkeypatch.setattr(Tensor, name, _named(name, lambda *tensors: seen.extend(tensors)))
    changes = torch.ones(3, 4, device=GPU)
    with BringsHostOperands(GPU):
        for func in (Tensor.add_, Tensor.copy_):
            torch.overrides.handle_torch_function(func, (weight,), weight, changes)
        torch.overrides.handle_torch_function(Tensor.copy_, (changes,), changes, weight)
    assert [tensor.device.type for tensor in seen] == ["cpu", "meta", "cpu", "meta", "meta", "cpu"]


def _named(name: str, function: Callable[..., None]) -> Callable[..., None]:
    function.__name__ = name
    return function


def test_a_backward_finds_the_parameters_themselves(weight: nn.Parameter) -> None:
    """A copy of a parameter would have no part in the graph."""
    loss = nn.functional.linear(
        torch.ones(2, 4, device=GPU), on_device := weight.detach().to(GPU).requires_grad_()
    ).sum()
    unused = nn.Parameter(torch.ones(2))
    with BringsHostOperands(GPU):
        assert torch.autograd.grad(loss, [on_device, unused], allow_unused=True, retain_graph=True)[1] is None
        loss.backward(inputs=[on_device])
    gradient = on_device.grad
    assert isinstance(gradient, Tensor)
    assert gradient.device == GPU

"""When an optimizer that steps as a whole comes to the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.updates.whole_step import WholeStep, _asks_first


class Late(SGD):
    """Looks at its groups first."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.9
        loss = None if closure is None else closure()
        super().step()
        return loss


class Nested(SGD):
    def step(self, closure: Any = None) -> Any:
        def run() -> Any:
            self.is_running = True
            return closure()

        return run()


class Asking(SGD):
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(group["lr"] * parameter.grad)
                    self.state[parameter]["last"] = parameter.grad
        return loss


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(4.0)), nn.Parameter(torch.ones(2, 3))]


@pytest.mark.parametrize(("kind", "asks"), [(Late, False), (Nested, False), (LBFGS, False), (Asking, True)])
def test_what_code_looks_at_first_is_seen(kind: type[Optimizer], asks: bool) -> None:
    optimizer = kind(parameters(), lr=0.1)  # type: ignore[call-arg]
    assert _asks_first(optimizer.step) is asks
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert _asks_first(optimizer.step) is asks


@pytest.mark.parametrize("kind", [Late, Asking, AdamW, LBFGS])
@pytest.mark.parametrize("capacity", [None, 64])
def test_a_step_is_what_it_is_elsewhere_and_its_closure_runs_at_home(
    kind: type[Optimizer], capacity: int | None
) -> None:
    device = VirtualDevice(capacity)
    whole = WholeStep(
        device, lambda parameter: True, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8), Traffic()
    )
    found: list[list[Tensor]] = []
    for makes in (None, whole):
        trained = parameters()
        optimizer, homes = kind(trained, lr=0.1), [each.data_ptr() for each in trained]  # type: ignore[call-arg]

        def closure(trained: list[nn.Parameter] = trained, homes: list[int] = homes) -> Tensor:
            assert [each.data_ptr() for each in trained] == homes
            for each in trained:
                each.grad = None
            loss = sum(((each - 3) ** 2).sum() for each in trained)
            assert isinstance(loss, Tensor)
            loss.backward()
            return loss.detach()

        for _ in range(3):
            loss = optimizer.step(closure) if makes is None else makes.make(optimizer, optimizer.step, closure)
        assert [each.data_ptr() for each in trained] == homes
        gradients = [each.grad for each in trained if each.grad is not None]
        state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
        found.append([torch.as_tensor(loss), *trained, *gradients, *state])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert device.allocated_bytes() == 0


def test_state_that_is_a_gradient_stays_one() -> None:
    whole = WholeStep(
        VirtualDevice(None),
        lambda parameter: True,
        lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8),
        Traffic(),
    )
    optimizer = Asking(trained := parameters(), lr=0.1)
    for each in trained:
        each.grad = torch.ones_like(each)
    whole.make(optimizer, optimizer.step, None)
    for each in trained:
        each.grad.fill_(7.0)
        assert torch.equal(optimizer.state[each]["last"], each.grad)

"""When an optimizer that steps as a whole comes to the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.structures.memory_users import ALONE, num_users
from lightning_harmony.engine.updates import whole_step
from lightning_harmony.engine.updates.whole_step import WholeStep, _asks_first, _held_by


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


class Climbs(Asking):
    """Gives parameters other memory, has its closure run there, and gives them what they had."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        trained = [parameter for group in self.param_groups for parameter in group["params"]]
        before = [parameter.data for parameter in trained]
        for parameter in trained:
            self.state[parameter]["before"] = parameter.data
            parameter.data = parameter.data + 0.1 * parameter.grad
        loss = super().step(closure)
        for parameter, data in zip(trained, before, strict=True):
            assert torch.equal(self.state[parameter]["before"], data)
            moved = parameter.data
            parameter.data, self.state[parameter]["before"].data = data - 0.1 * parameter.grad, moved
        return loss


def made(kind: type[Optimizer], whole: WholeStep | None) -> list[Tensor]:
    """What three steps come to."""
    trained = parameters()
    optimizer, homes = kind(trained, lr=0.1), [each.data for each in trained]  # type: ignore[call-arg]

    def bring_home() -> None:
        # As the host store does before a forward, unless somebody keeps what was there.
        for each, home in zip(trained, homes, strict=True):
            if each.data_ptr() != home.data_ptr() and num_users(home) <= ALONE:
                home.copy_(each.detach())
                each.data = home

    def closure() -> Tensor:
        if whole is not None:
            bring_home()
        for each in trained:
            each.grad = None
        loss = sum(((each - 3) ** 2).sum() for each in trained)
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss.detach()

    for _ in range(3):
        loss = optimizer.step(closure) if whole is None else whole.make(optimizer, optimizer.step, closure)
    if whole is not None:
        bring_home()
    gradients = [each.grad for each in trained if each.grad is not None]
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    return [torch.as_tensor(loss), *trained, *gradients, *state]


@pytest.mark.parametrize(("module", "is_looked_into"), [("lightning_models.parts", True), ("lightning.pytorch", False)])
def test_what_optimizers_hold_is_looked_into_unless_it_is_lightnings(module: str, is_looked_into: bool) -> None:
    optimizer, held = SGD(parameters(), lr=0.1), torch.zeros(2)
    vars(optimizer)["helper"] = type("Helper", (), {"__module__": module})()
    vars(optimizer.helper)["mean"] = held  # type: ignore[attr-defined]
    assert any(each is held for each in _held_by(optimizer)) is is_looked_into


@pytest.mark.parametrize("kind", [Late, Asking, AdamW, LBFGS])
@pytest.mark.parametrize("capacity", [None, 64])
def test_a_step_is_what_it_is_elsewhere(kind: type[Optimizer], capacity: int | None) -> None:
    device = VirtualDevice(capacity)
    found = made(kind, of(device))
    torch.testing.assert_close(found, made(kind, None), rtol=0, atol=0)
    assert device.allocated_bytes() == 0


@pytest.mark.parametrize("kind", [Late, Asking, AdamW, LBFGS, Climbs])
def test_what_a_step_makes_comes_to_the_host_and_to_the_device_again(
    kind: type[Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual device that stands for a GPU: what is made there is not on the host."""
    device, came = VirtualDevice(None), list[int]()
    monkeypatch.setattr(whole_step, "_is_on_host", lambda tensor: not device.owns(tensor))
    whole = of(device)
    step = WholeStep.make

    def make(self: WholeStep, optimizer: Optimizer, code: Any, closure: Any) -> Any:
        def on_device(*args: Any) -> Any:
            with device.computing():
                return code(*args)

        # Its closure is asked for first, or not, as the code of the step itself has it.
        on_device.__wrapped__ = code  # type: ignore[attr-defined]
        return step(self, optimizer, on_device, None if closure is None else apart(device, closure))

    monkeypatch.setattr(WholeStep, "make", make)
    begin, end = WholeStep._begin, WholeStep._end

    def counted(self: WholeStep, optimizer: Optimizer) -> bool:
        with device.on_host():
            has_come = begin(self, optimizer)
        came.append(len(self._come))
        return has_come

    def ended(self: WholeStep, optimizer: Optimizer) -> None:
        with device.on_host():
            end(self, optimizer)

    monkeypatch.setattr(WholeStep, "_begin", counted)
    monkeypatch.setattr(WholeStep, "_end", ended)
    found = made(kind, whole)
    torch.testing.assert_close(found, made(kind, None), rtol=0, atol=0)
    assert [number for number, each in enumerate(found) if device.owns(each)] == []
    # Parameters and gradients in the first step, and state as well in the last one.
    assert came[-1] > 2 * len(parameters()) or kind in (Late, LBFGS)


def apart(device: VirtualDevice, closure: Any) -> Any:
    """A closure that computes on the host."""

    def run() -> Any:
        with device.on_host():
            return closure()

    return run


def of(device: VirtualDevice) -> WholeStep:
    return WholeStep(device, lambda parameter: True, lambda likes: list(map(torch.empty_like, likes)), Traffic())


def test_state_that_is_a_gradient_stays_one() -> None:
    whole = of(VirtualDevice(None))
    optimizer = Asking(trained := parameters(), lr=0.1)
    for each in trained:
        each.grad = torch.ones_like(each)
    whole.make(optimizer, optimizer.step, None)
    for each in trained:
        each.grad.fill_(7.0)
        assert torch.equal(optimizer.state[each]["last"], each.grad)

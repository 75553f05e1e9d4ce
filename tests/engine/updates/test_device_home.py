"""Optimizer state that stays on a device: the bits are those of a step, and what stays does not cross the bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.updates.optimizer_twin import Share
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": AdamW,
    "fused": lambda p: AdamW(p, fused=True),
    "foreach": lambda p: Adam(p, foreach=True, amsgrad=True),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": Adafactor,
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator) for size in ((40, 60), (3, 5), (30, 100), (7,), ())]
    made[2] = made[2].t()
    return [nn.Parameter(tensor) for tensor in made]


def step(members: list[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number + 1)
    for parameter in members:
        parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(torch.randn(parameter.numel(), generator=generator).view_as(parameter))


def update(streamed: StreamedUpdate, optimizer: Optimizer) -> None:
    streamed.update(Share(optimizer, dict.fromkeys(optimizer.param_groups[0]["params"], 0)))


def update_both(streamed: StreamedUpdate, optimizer: Optimizer, plain: Optimizer, number: int) -> None:
    for each in (optimizer, plain):
        step(each.param_groups[0]["params"], number)
    plain.step()
    update(streamed, optimizer)


def keeping(members: list[nn.Parameter], capacity: int | None = None, **options: Any) -> StreamedUpdate:
    streamed = StreamedUpdate(VirtualDevice(capacity), **options)
    streamed.home.parameters = frozenset(members)
    streamed.home.is_open = True
    return streamed


def assert_same(one: Optimizer, other: Optimizer) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    pairs = zip(*(each.param_groups[0]["params"] for each in (one, other)), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_stays_is_stepped_as_it_would_be_elsewhere(
    name: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_cut:
        monkeypatch.setattr("lightning_harmony.engine.updates.update_stage._MOST_BYTES", 4096)
    members, expected, traffic = parameters(), parameters(), Traffic()
    optimizer, plain = OPTIMIZERS[name](members), OPTIMIZERS[name](expected)
    streamed = keeping(members, traffic=traffic)
    for number in range(6):
        traffic.reset()
        update_both(streamed, optimizer, plain, number)
        if number in (3, 5):
            streamed.bring_back()
            assert_same(plain, optimizer)
            assert streamed.home.num_bytes == 0
    # The first update after that brings it again.
    weights, large = (
        sum(p.nbytes for p in members),
        [v for s in plain.state.values() for v in s.values() if v.dim() > 0],
    )
    assert traffic.swapped_out["optimizer"] == pytest.approx(weights + sum(value.nbytes for value in large), abs=64)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_may_stay_no_longer_goes_with_its_update(name: str, is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It went before it, and came once more for it."""
    if is_cut:
        monkeypatch.setattr("lightning_harmony.engine.updates.update_stage._MOST_BYTES", 4096)
    members, expected, traffic = parameters(), parameters(), Traffic()
    optimizer, plain = OPTIMIZERS[name](members), OPTIMIZERS[name](expected)
    streamed = keeping(members, traffic=traffic)
    for number in range(5):
        streamed.home.is_open = number not in (2, 4)
        traffic.reset()
        update_both(streamed, optimizer, plain, number)
        if not streamed.home.is_open:
            assert_same(plain, optimizer)
            assert streamed.home.num_bytes == 0
            assert streamed.home.moved_share(members) == 1
    gradients = sum(p.nbytes for p in members)
    large = sum(v.nbytes for s in plain.state.values() for v in s.values() if v.dim() > 0)
    # Weights and gradients come, and weights and state go.
    assert traffic.swapped_in["optimizer"] == pytest.approx(2 * gradients, abs=64)
    assert traffic.swapped_out["optimizer"] == pytest.approx(gradients + large, abs=64)


def test_what_stays_neither_comes_nor_goes() -> None:
    members, traffic = parameters(), Traffic()
    optimizer, streamed = AdamW(members), keeping(members, traffic=traffic)
    weights, moved = sum(p.nbytes for p in members), []
    for number in range(4):
        step(members, number)
        traffic.reset()
        update(streamed, optimizer)
        moved.append((traffic.swapped_in["optimizer"], traffic.swapped_out["optimizer"]))
    # Weights, gradients and both moments come; then weights and gradients, and weights go.
    assert moved[1] == pytest.approx((4 * weights, weights), abs=64)
    assert moved[2:] == [pytest.approx((2 * weights, weights), abs=64)] * 2
    assert streamed.home.num_bytes == pytest.approx(2 * weights, abs=64)
    assert streamed.home.moved_share(members) == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("capacity", [30_000, 40_000, 60_000])
def test_what_there_is_no_room_for_comes_and_goes(capacity: int) -> None:
    members, expected = parameters(), parameters()
    optimizer, plain = AdamW(members), AdamW(expected)
    streamed = keeping(members, capacity)
    for number in range(4):
        update_both(streamed, optimizer, plain, number)
    assert streamed.home.num_bytes < 2 * sum(p.nbytes for p in members)
    assert streamed.device.peak_bytes() <= capacity
    streamed.bring_back()
    assert_same(plain, optimizer)


def test_state_that_is_another_tensor_by_now_comes_anew() -> None:
    """As a checkpoint that is loaded leaves it."""
    members, expected = parameters(), parameters()
    optimizer, plain = AdamW(members), AdamW(expected)
    streamed = keeping(members)
    for number in range(6):
        if number == 3:
            streamed.bring_back()
        if number in (3, 4):
            # In the second case it is here when it is replaced.
            for one in (optimizer, plain):
                one.state[one.param_groups[0]["params"][0]]["exp_avg"] = torch.full((40, 60), 0.25)
        update_both(streamed, optimizer, plain, number)
    streamed.bring_back()
    assert_same(plain, optimizer)


def test_state_in_memory_that_is_slow_to_copy_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system locks no more memory, no place on the host is a better one: what is newer goes back to the same."""
    monkeypatch.setattr(VirtualDevice, "copies_fast", lambda *_: False)
    members, expected = parameters(), parameters()
    optimizer, plain = AdamW(members), AdamW(expected)
    streamed = keeping(members)
    for number in range(4):
        update_both(streamed, optimizer, plain, number)
    assert streamed.home.num_bytes > 0
    streamed.bring_back()
    assert_same(plain, optimizer)


class Renewing(AdamW):
    """Puts new tensors in the place of its moments, of another type in the end."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for state in self.state.values():
            late = float(state["step"]) > 3
            state["exp_avg"] = state["exp_avg"].double().to(torch.float64 if late else torch.float32)
            if late:
                state["exp_avg"] = state["exp_avg"].float()
        return result


def test_state_that_a_step_replaces_is_that_of_the_step() -> None:
    members, expected = parameters(), parameters()
    optimizer, plain = Renewing(members), Renewing(expected)
    streamed = keeping(members)
    for number in range(5):
        update_both(streamed, optimizer, plain, number)
    streamed.bring_back()
    assert_same(plain, optimizer)


def test_nothing_stays_that_may_not() -> None:
    members = parameters()
    optimizer, streamed = AdamW(members), keeping(members[:2])
    for number in range(3):
        step(members, number)
        update(streamed, optimizer)
    kept: list[Tensor] = [v for p in members[:2] for v in optimizer.state[p].values() if v.dim() > 0]
    assert streamed.home.num_bytes == sum(value.nbytes for value in kept)
    assert streamed.home.keeps_others_than(frozenset(members[:1]))
    assert not streamed.home.keeps_others_than(frozenset(members))
    streamed.bring_back()
    streamed.home.is_open = False
    step(members, 3)
    update(streamed, optimizer)
    assert streamed.home.num_bytes == 0

"""Optimizer state on disk: each update is the step of the whole, however its pieces and their buffers follow each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from lightning_harmony.engine.devices.stream import Happened
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.model.disk_store import BLOCK
from lightning_harmony.engine.updates.disk_home import NUM_BUFFERS, Buffer, DiskHome
from lightning_harmony.engine.updates.optimizer_twin import Share
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from support.sampling import combined
from support.small_host import hold_writes

# Pieces of 16 KiB.
CAPACITY = 32 * 4 * BLOCK
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": AdamW,
    "amsgrad": lambda parameters: AdamW(parameters, amsgrad=True),
    "fused": lambda parameters: AdamW(parameters, fused=True),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": Adafactor,
}
# Whose state lives on disk.
CHOSEN = {"all": slice(None), "some": slice(1, None, 2)}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskHome]:
    disk = DiskHome(tmp_path)
    yield disk
    disk.close()


def parameters() -> list[nn.Parameter]:
    """Of some pieces, one transposed, one smaller than a block, and one whose parts end within blocks."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator) for size in ((1024, 40), (24, 1100), (7,), (33333,), (2048, 3))]
    made[1] = made[1].t()
    return [nn.Parameter(tensor) for tensor in made]


def set_gradients(members: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for parameter in members:
        parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))


def share_of(optimizer: Optimizer, members: list[nn.Parameter]) -> Share:
    return Share(optimizer, dict.fromkeys(members, 0))


def same(one: Optimizer, other: Optimizer) -> bool:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    pairs = zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def on_disk(disk: DiskHome, optimizer: Optimizer) -> list[bool]:
    """Whether each part of the state that has a block is there."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [disk.holds(value) for value in values if value.nbytes >= BLOCK]


@pytest.mark.parametrize(
    ("chosen", "name", "number_of_devices", "weights"),
    combined(product(CHOSEN, OPTIMIZERS), [*product([1, 2], [None, *CHOSEN])]),
)
@pytest.mark.sampled
def test_pieces_from_disk_have_the_bits_of_a_step(
    chosen: str, name: str, number_of_devices: int, weights: str | None, disk: DiskHome
) -> None:
    members, expected = parameters(), parameters()
    optimizer, plain = OPTIMIZERS[name](members), OPTIMIZERS[name](expected)
    several = [StreamedUpdate(VirtualDevice(CAPACITY), disk=disk) for _ in range(number_of_devices)]
    streamed = several[0]
    streamed.move_to_disk({p: 2 * p.nbytes for p in members[CHOSEN[chosen]]}, optimizer.state)
    if weights:
        disk.take_weights([p for p in members[CHOSEN[weights]] if p.nbytes >= BLOCK])
    for step in range(4):
        for each in (members, expected):
            set_gradients(each, step)
        plain.step()
        # Each device at the same time, from the same disk.
        shares = [share_of(optimizer, members[number::number_of_devices]) for number in range(number_of_devices)]
        with ThreadPoolExecutor(number_of_devices) as pool:
            list(pool.map(StreamedUpdate.update, several, shares))
        streamed.disk.settle()
        assert same(plain, optimizer)
    assert any(on_disk(disk, optimizer))
    assert all(on_disk(disk, optimizer)) == (chosen == "all")
    # What was expected becomes what there is.
    streamed.bring_to_disk(optimizer.state)
    values = [value for state in optimizer.state.values() for value in state.values()]
    assert disk.bytes_of(members) - disk.weight_bytes == sum(value.nbytes for value in values if disk.holds(value))
    assert bool(disk.weight_bytes) == bool(weights)
    for each in several:
        each.close()


def test_updates_that_come_between_pieces_find_buffers(disk: DiskHome) -> None:
    """Each holds buffers of pieces that are read ahead, whatever is more urgent."""
    members, expected = ([p for _ in range(4) for p in parameters()] for _ in range(2))
    optimizer, plain = AdamW(members), AdamW(expected)
    streamed = StreamedUpdate(VirtualDevice(CAPACITY), disk=disk)
    streamed.move_to_disk({p: 2 * p.nbytes for p in members}, optimizer.state)
    for step in range(3):
        for each in (members, expected):
            set_gradients(each, step)
        plain.step()
        shares = [share_of(optimizer, members[start : start + 5]) for start in range(0, 20, 5)]

        def more_urgent(shares: list[Share] = shares) -> None:
            if shares:
                streamed.update(shares.pop(), between=more_urgent)

        more_urgent()
        streamed.disk.settle()
        assert same(plain, optimizer)
        assert len(disk._ring) == NUM_BUFFERS
    streamed.close()


def test_what_there_is_of_state_moves_and_what_is_loaded_follows(disk: DiskHome) -> None:
    members, expected = parameters(), parameters()
    optimizer, plain = AdamW(members), AdamW(expected)
    streamed = StreamedUpdate(VirtualDevice(CAPACITY), disk=disk)
    for step in range(6):
        for each in (members, expected):
            set_gradients(each, step)
        if step == 2:
            assert not any(on_disk(disk, optimizer))
            streamed.move_to_disk({p: 2 * p.nbytes for p in members}, optimizer.state)
            assert all(on_disk(disk, optimizer))
        if step == 4:
            # As ordinary tensors: those of before have ended, and their places are for these.
            used = disk.used_bytes
            values = {p: {name: value.clone() for name, value in state.items()} for p, state in optimizer.state.items()}
            optimizer.state.clear()
            optimizer.state.update(values)
            assert disk.used_bytes == 0
            assert not any(on_disk(disk, optimizer))
        plain.step()
        streamed.update(share_of(optimizer, members))
        streamed.disk.settle()
        assert same(plain, optimizer)
    assert all(on_disk(disk, optimizer))
    assert disk.used_bytes == used
    streamed.close()


def test_a_place_that_is_read_again_at_once_has_what_was_written(disk: DiskHome) -> None:
    """When a write is settled, and not before, others may read."""
    streamed = StreamedUpdate(VirtualDevice(CAPACITY), disk=disk)
    parameter = nn.Parameter(torch.zeros(BLOCK))
    streamed.move_to_disk({parameter: parameter.nbytes}, {parameter: {"value": torch.zeros(BLOCK)}})
    assert disk._store is not None
    value = disk._store.empty(parameter.shape, parameter.stride(), parameter.dtype)
    for number in range(50):
        loan = disk.borrow([value], reads=False)
        loan.there[0].fill_(number)
        loan.write_after(Happened())
        disk.settle()
        again = disk.borrow([value], reads=True)
        again.arrive()
        assert (again.there[0] == number).all()
        assert (value == number).all()
        again.drop()
        again.drop()
        assert len(disk._ring) == NUM_BUFFERS
    streamed.close()


def test_weights_that_are_on_the_device_are_not_read_and_are_written(disk: DiskHome) -> None:
    members, expected = parameters(), parameters()
    optimizer, plain = SGD(members, lr=0.1), SGD(expected, lr=0.1)
    streamed = StreamedUpdate(VirtualDevice(CAPACITY), disk=disk)
    weights = [p for p in members if p.nbytes >= BLOCK]
    disk.take_weights(weights)
    streamed.open()
    for step in range(3):
        for each in (members, expected):
            set_gradients(each, step)
        plain.step()
        share = share_of(optimizer, members)
        share.masters.update({p: p.detach().clone() for p in weights})
        versions = [p._version for p in members]
        streamed.update(share)
        streamed.disk.settle()
        assert same(plain, optimizer)
        assert disk.take_moved_bytes() == (0, disk.weight_bytes)
        # Who has kept a copy can tell that it is old.
        assert all(p._version > version for p, version in zip(members, versions, strict=True))
    streamed.close()


def test_who_reads_weights_waits_for_their_own_write_alone(disk: DiskHome, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = StreamedUpdate(VirtualDevice(CAPACITY), disk=disk)
    slow, other = (nn.Parameter(torch.zeros(BLOCK)) for _ in range(2))
    disk.take_weights([slow, other])
    streamed.open()
    may_go_on = hold_writes(monkeypatch)
    loan = disk.borrow([slow.detach()], reads=False)
    loan.there[0].fill_(1)
    loan.write_after(Happened())
    buffer = Buffer(lambda size: torch.empty(size, dtype=torch.uint8), BLOCK)
    assert (disk.read(other.detach(), buffer) == 0).all()
    with ThreadPoolExecutor(1) as pool:
        # A part, which begins within a block.
        reading = pool.submit(disk.read, slow.detach()[100:200], buffer)
        assert not reading.done()
        may_go_on.set()
        assert (reading.result() == 1).all()
    streamed.close()


def test_state_that_a_step_makes_in_another_type_has_a_new_place(disk: DiskHome) -> None:
    """As an optimizer may do after some steps."""

    class Grows(SGD):
        pass

    def step(self: Any, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            total = state.get("total", torch.zeros_like(parameter, dtype=torch.float32))
            state["total"] = (total + parameter.grad).to(torch.float64 if len(state) else torch.float32)
            parameter.data.sub_(state["total"].float())

    Grows.step = step  # type: ignore[method-assign]
    members, expected = parameters(), parameters()
    optimizer, plain = Grows(members, lr=0.1), Grows(expected, lr=0.1)
    streamed = StreamedUpdate(VirtualDevice(CAPACITY), disk=disk)
    streamed.move_to_disk({p: 2 * p.nbytes for p in members}, optimizer.state)
    for number in range(3):
        for each in (members, expected):
            set_gradients(each, number)
        plain.step()
        streamed.update(share_of(optimizer, members))
        streamed.disk.settle()
        assert same(plain, optimizer)
    assert all(on_disk(disk, optimizer))
    streamed.close()

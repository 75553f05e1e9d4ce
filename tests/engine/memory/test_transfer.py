"""Copies from device to device: what code may ask of them beside their values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import Event
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.memory.transfer import LaneTransfers, Launched, Transfers
from lightning_harmony.engine.structures.parts import are_equal, num_bytes_of, parts_of
from support.composed import Nested


@pytest.fixture
def devices() -> Iterator[list[VirtualDevice]]:
    devices = [VirtualDevice(None), VirtualDevice(None)]
    yield devices
    for device in devices:
        device.close()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_what_is_moved_needs_gradients_as_what_it_is_a_copy_of(
    devices: list[VirtualDevice], requires_grad: bool, mode: type
) -> None:
    # Without a graph a weight was moved as a tensor that needs none. Kernels of GPUs then sum in another order, so that
    # predictions on two of them were not those of one.
    with devices[0].computing():
        weight = nn.Parameter(torch.randn(4, 4), requires_grad)
    transfers = Transfers(devices, Traffic(), lambda to, num_bytes: None, lambda *of_a_copy: nullcontext())
    lane = LaneTransfers(Launched(transfers))
    with mode():
        moved = lane.moved(weight, 1)
        assert transfers.home(moved) == 1
        assert moved.requires_grad == requires_grad
        # As products ask: of a view.
        assert moved.t().requires_grad == weight.t().requires_grad
        assert torch.equal(moved, weight)
        assert lane.moved(weight, 0) is weight
        # One copy serves all.
        assert lane.moved(weight, 1).untyped_storage()._cdata == moved.untyped_storage()._cdata


def test_a_composed_tensor_is_copied_part_by_part(devices: list[VirtualDevice]) -> None:
    with devices[0].computing():
        weight = Nested.of(torch.randn(8, 8))
    traffic = Traffic()
    transfers = Transfers(devices, traffic, lambda to, num_bytes: None, lambda *of_a_copy: nullcontext())
    assert transfers.home(weight) == 0
    copied = transfers.copy(weight, 1)
    assert are_equal(copied, weight)
    assert [transfers.home(part) for part in parts_of(copied)] == [1, 1, 1, 1]
    assert traffic.transferred == num_bytes_of(weight)


class Recorded:
    """An event that tells who has waited for it."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1

    synchronize = wait

    def done(self) -> bool:
        return False


class Recording(VirtualDevice):
    """Tells what what is sent from it waits for, and has sent it after an event."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.sent: list[tuple[Tensor, Event | None]] = []
        self.event = Recorded()

    def record(self) -> Event:
        return Recorded()

    def send(self, copy: Callable[[], Tensor], source: Tensor, after: Event | None) -> tuple[Tensor, Event | None]:
        self.sent.append((source, after))
        return copy(), self.event


@pytest.fixture
def recording() -> Iterator[list[Recording]]:
    devices = [Recording(), Recording()]
    yield devices
    for device in devices:
        device.close()


def transfers_of(devices: list[Recording]) -> Transfers:
    return Transfers(devices, Traffic(), lambda to, num_bytes: None, lambda *of_a_copy: nullcontext())


class TestLaunched:
    """What goes from device to device waits for its own lane's work, and not for what others have launched since."""

    def test_what_an_earlier_turn_has_made_waits_for_that_turn(self, recording: list[Recording]) -> None:
        launched, tensor = Launched(transfers_of(recording)), torch.ones(4)
        launched.begin(0)
        launched.note_made([tensor])
        assert launched.until(0, tensor) is None
        launched.end_turn()
        event = launched.until(0, tensor)
        assert event is not None
        # A turn elsewhere changes nothing there.
        launched.begin(1)
        launched.end_turn()
        assert launched.until(0, tensor) is event

    def test_what_nobody_knows_waits_for_all(self, recording: list[Recording]) -> None:
        launched, tensor = Launched(transfers_of(recording)), torch.ones(4)
        launched.begin(0)
        launched.note_made([tensor])
        launched.end_turn()
        assert launched.until(0, torch.ones(4)) is None
        assert launched.until(1, tensor) is None
        tensor.add_(1.0)
        assert launched.until(0, tensor) is None

    def test_what_comes_later_waits_for_what_was_sent_once(self, recording: list[Recording]) -> None:
        launched, event = Launched(transfers_of(recording)), Recorded()
        launched.note_sent(0, event)
        launched.begin(1)
        assert event.num_waits == 0
        for _ in range(2):
            launched.begin(0)
            launched.end_turn()
        assert event.num_waits == 1

    def test_a_gradient_goes_over_in_the_turn_that_follows(self, recording: list[Recording]) -> None:
        """Behind what has made it, whatever others have launched on its device meanwhile."""
        launched = Launched(transfers_of(recording), lambda to: launched.end_turn())
        with recording[1].computing():
            gradient, other = torch.ones(4), torch.ones(4)
        launched.begin(1)
        assert launched.transfers.home(launched.returned(gradient, 0)) == 0
        # Nothing of the turn that has begun by now is known to have made this.
        launched.begin(0)
        assert launched.transfers.home(launched.returned(other, 0)) == 0
        (_, first), (_, second) = recording[1].sent
        assert (first is not None, second is not None) == (True, False)


def test_what_is_kept_until_it_is_sent_keeps_no_graph(recording: list[Recording]) -> None:
    """Graphs of whole microbatches stayed: a head of 128,256 words had no room for its next one."""
    with recording[0].computing():
        tensor = torch.ones(4, requires_grad=True) * 2
    LaneTransfers(Launched(transfers_of(recording))).moved(tensor, 1)
    ((source, _),) = recording[0].sent
    assert source.grad_fn is None
    assert source.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_a_graph_does_not_keep_the_copies_of_a_layer_s_call(devices: list[VirtualDevice]) -> None:
    """Each layer's copies stayed until the backward, beside what the stash has of them."""
    transfers = Transfers(devices, Traffic(), lambda to, num_bytes: None, lambda *of_a_copy: nullcontext())
    with devices[0].computing():
        tensor = torch.ones(4, requires_grad=True)
    within = LaneTransfers(Launched(transfers)).within([], 1)
    moved, alive = within.moved(tensor, 1), weakref.ref(within)
    del within
    gc.collect()
    assert moved.grad_fn is not None
    assert alive() is None


def test_what_no_lane_sends_may_be_changed_at_once(recording: list[Recording]) -> None:
    """As sums that are added on another device: whatever is launched where they were waits for the copy."""
    transfers = transfers_of(recording)
    with recording[0].computing():
        tensor = torch.ones(4)
    transfers.copy(tensor, 1)
    assert recording[0].event.num_waits == 1
    # A lane waits when it launches something there.
    lane = LaneTransfers(Launched(transfers))
    lane.copy(tensor, 1)
    assert recording[0].event.num_waits == 1
    lane.launched.begin(0)
    assert recording[0].event.num_waits == 2

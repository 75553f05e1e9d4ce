"""Copies from device to device: what code may ask of them beside their values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.memory.transfer import LaneTransfers, Transfers
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
    lane = LaneTransfers(transfers)
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

"""What an update on a device brings there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import HostStream
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.updates.device_update import DeviceUpdates
from lightning_harmony.engine.updates.postponed import Overlap, PostponedUpdate
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate


class ReadOnce(dict[Any, Any]):
    """A state that may be gone through no more."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("all of the state was read again")


@pytest.fixture
def updates() -> Iterator[DeviceUpdates]:
    device, stream = VirtualDevice(None), HostStream("update")
    yield DeviceUpdates(
        device, Traffic(), lambda parameter: False, PostponedUpdate(stream, StreamedUpdate([]), Overlap())
    )
    stream.close()
    device.close()


def stepped(kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = kind(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "options", "copies"),
    [
        (torch.optim.AdamW, {}, 2.0),
        (torch.optim.AdamW, {"amsgrad": True}, 3.0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 1.0),
    ],
    ids=["two moments", "and the largest", "momentum"],
)
def test_how_much_state_there_is_for_each_byte_of_a_parameter(
    updates: DeviceUpdates, kind: type[torch.optim.Optimizer], options: dict[str, Any], copies: float
) -> None:
    updates.begin(stepped(kind, **options), None, may_update=True)
    assert updates.state_copies() == copies


def test_state_is_gone_through_once_for_an_optimizer(updates: DeviceUpdates) -> None:
    """It was after each step, which took longer the more parameters there were."""
    optimizer = stepped(torch.optim.AdamW)
    updates.begin(optimizer, None, may_update=True)
    assert updates.state_copies() == 2.0
    optimizer.state = ReadOnce(optimizer.state)  # type: ignore[assignment]
    assert updates.state_copies() == 2.0
    updates.begin(stepped(torch.optim.SGD, lr=0.1, momentum=0.9), None, may_update=True)
    assert updates.state_copies() == 1.0
    updates.begin(None, None, may_update=True)
    assert updates.state_copies() is None


def test_before_the_first_step_nothing_is_known(updates: DeviceUpdates) -> None:
    parameter: Tensor = nn.Parameter(torch.ones(3))
    updates.begin(torch.optim.AdamW([parameter]), None, may_update=True)
    assert updates.state_copies() is None

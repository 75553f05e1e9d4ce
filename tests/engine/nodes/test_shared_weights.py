"""Weights that go to other nodes: those of the update that is over, wherever they live."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import Happened
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.model.disk_store import BLOCK
from lightning_harmony.engine.nodes.weights import DividedUpdate
from lightning_harmony.engine.updates.disk_home import DiskHome
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from support.small_host import hold_writes


class OneNode:
    """Stands for a division between nodes, and for what they tell each other."""

    def __init__(self) -> None:
        self.exchange, self.sent = self, list[Tensor]()

    def begin(self, futures: Any) -> None:
        """Nobody else waits for these."""

    def beside(self) -> Any:
        return nullcontext()

    def owner_of(self, parameter: nn.Parameter) -> int:
        return 0

    def merge(self, tensor: Tensor) -> None:
        """Nobody else has one."""

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        self.sent += [tensor.clone() for tensor in tensors]


def test_weights_that_live_on_disk_are_sent_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, parameter, node = DiskHome(tmp_path), nn.Parameter(torch.zeros(BLOCK)), OneNode()
    streamed = StreamedUpdate(VirtualDevice(1 << 20), disk=disk)
    disk.take_weights([parameter])
    streamed.open()
    may_go_on = hold_writes(monkeypatch)
    loan = disk.borrow([parameter.detach()], reads=False)
    loan.there[0].fill_(1)
    loan.write_after(Happened())
    division: Any = node
    events = DividedUpdate(division, [parameter]).share({parameter: Happened()}, streamed.disk.settle)
    assert not events[parameter].done()
    may_go_on.set()
    events[parameter].synchronize()
    assert (node.sent[0] == 1).all()
    streamed.close()
    disk.close()

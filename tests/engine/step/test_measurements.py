"""What is measured of steps, and recalled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.profile import Profiler, UpdateSpeeds
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.measure.workspace import WorkSpace
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.step.measurements import Measurements
from lightning_harmony.engine.updates.disk_home import DiskHome
from lightning_harmony.plan.values.cost import SECONDS
from lightning_harmony.plan.values.profile import DeviceLimits
from lightning_harmony.plan.values.record import Origin, Record, SeenSize
from lightning_harmony.plan.values.task import Phase

# Two calls share what graphs take.
COUNTED = (
    "forward_work_bytes",
    "backward_work_bytes",
    "graph_bytes",
    "copied_bytes",
    "input_bytes",
    "stash_bytes",
    "arriving_bytes",
    "returning_bytes",
)


def updater() -> Any:
    """One whose optimizer has no state."""
    return SimpleNamespace(
        state_bytes=lambda parameters: 0,
        kept_bytes=lambda: [0, 0],
        speeds=UpdateSpeeds(),
        streamed=SimpleNamespace(disk=DiskHome()),
    )


@pytest.fixture
def devices() -> Iterator[list[VirtualDevice]]:
    devices = [VirtualDevice(1000), VirtualDevice(800)]
    yield devices
    for device in devices:
        device.close()


def test_what_is_recalled_is_as_if_it_had_been_measured(devices: list[VirtualDevice]) -> None:
    module = torch.nn.Linear(2, 2)
    store = HostStore(list(module.parameters()), devices[0])
    layer = SwappedLayer(0, "layer", module, list(module.parameters()))
    measured = Measurements(devices, store, Profiler(Traffic()), WorkSpace(), updater())
    nothing = measured.cost(layer)
    assert measured.machine() == DeviceLimits(800)
    seen: dict[str, Any] = {**dict.fromkeys(COUNTED, 6), **dict.fromkeys(SECONDS, 0.5)}
    cost = replace(nothing, **seen)
    record = Record(
        Origin("", "", ""),
        ("layer", "layer"),
        False,
        (),
        (SeenSize(4, (cost,)),),
        DeviceLimits(None, 10.0, 20.0, 30.0, 40.0),
    )
    measured.recall(record, 4, {"layer": layer})
    assert measured.cost(layer) == cost
    on_device = devices[1].empty(100)
    assert measured.machine() == DeviceLimits(800, 10.0, 20.0, 30.0, 40.0, occupied_bytes=on_device.numel())
    measured.forget_layers()
    assert measured.cost(layer) == nothing
    assert measured.machine().transfer_bytes_per_second == 30.0
    store.close()


@pytest.mark.parametrize("has_state", [True, False], ids=["state", "weights alone"])
def test_a_layer_costs_the_disk_what_its_state_and_weights_take_there(
    devices: list[VirtualDevice], has_state: bool
) -> None:
    class Disk:
        bytes_per_second = 50.0

        def is_home_of(self, parameter: torch.nn.Parameter) -> bool:
            return has_state

        def bytes_of(self, parameters: Sequence[torch.nn.Parameter]) -> int:
            return 2 * sum(parameter.nbytes for parameter in parameters)

    module = torch.nn.Linear(2, 2)
    store = HostStore(list(module.parameters()), devices[0])
    layer = SwappedLayer(0, "layer", module, list(module.parameters()))
    of_state = updater()
    of_state.state_bytes, of_state.streamed.disk = lambda parameters: 7, Disk()
    measured = Measurements(devices, store, Profiler(Traffic()), WorkSpace(), of_state)
    assert measured.cost(layer).disk_bytes == 2 * 6 * 4
    # State that lives on the host may stay on a device.
    assert measured.cost(layer).optimizer_bytes == (0 if has_state else 7)
    assert measured.machine().disk_bytes_per_second == 50.0
    store.close()


@pytest.mark.parametrize("keeps_work", [False, True])
def test_what_layers_allocated_may_be_kept_where_what_they_took_is_forgotten(
    devices: list[VirtualDevice], keeps_work: bool
) -> None:
    """Layers that are trained in turns were planned with what those took alone that were measured last."""
    module = torch.nn.Linear(2, 2)
    store = HostStore(list(module.parameters()), devices[0])
    layer = SwappedLayer(0, "layer", module, list(module.parameters()))
    measured = Measurements(devices, store, Profiler(Traffic()), WorkSpace(), updater())
    measured.work.note([layer], Phase.BACKWARD, 7)
    measured.forget_layers(keeps_work=keeps_work)
    measured.work.note([layer], Phase.BACKWARD, 5)
    assert measured.work.bytes([layer], Phase.BACKWARD) == (7 if keeps_work else 5)

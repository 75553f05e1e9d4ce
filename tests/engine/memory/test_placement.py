"""Where layers are by a plan."""

import pytest
from torch import nn

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.memory.placement import Placement
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.memory.stash import Stash
from lightning_harmony.engine.memory.sums import Sums
from lightning_harmony.engine.memory.swap import Swapper
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.plan.values.plan import Plan
from support.queues import postponed_update


def layers(number: int) -> list[SwappedLayer]:
    modules = [nn.Linear(4, 4, bias=False) for _ in range(number)]
    return [SwappedLayer(i, str(i), module, list(module.parameters())) for i, module in enumerate(modules)]


def placement_of(layers: list[SwappedLayer], num_devices: int) -> Placement:
    devices = [VirtualDevice(None) for _ in range(num_devices)]
    store = HostStore([p for layer in layers for p in layer.parameters], devices[0])
    update = postponed_update(*devices)
    residents = []
    for number, device in enumerate(devices):
        pool = HostPool(device.host_buffer)
        swapper = Swapper(device, store, pool, Traffic(), update)
        residents.append(
            Residents(
                device,
                swapper,
                Sums(device, pool, Traffic(), lambda parameter: False, lambda layer, parameter: True),
                Stash(device, pool, Traffic()),
                number,
            )
        )
    return Placement(store, residents)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_each_device_has_packs_of_its_own_of_the_same_layers(num_devices: int) -> None:
    model = layers(3)
    placement = placement_of(model, num_devices)
    plan = Plan((("0", "1"), ("2",)), (0, 1), 1, num_devices=num_devices)
    placement.use(plan, model)
    assert placement.plan is plan
    assert placement.pack_of == {0: 0, 1: 0, 2: 1}
    copies = placement.copies(0)
    assert len({id(pack) for pack in copies}) == num_devices
    assert all(pack.layers == model[:2] for pack in copies)
    assert all(residents.agenda.plan is plan for residents in placement.residents)


def test_a_layer_that_the_plan_does_not_know_is_a_pack_of_its_own_until_the_next_plan() -> None:
    *known, new = model = layers(3)
    placement = placement_of(model, 2)
    placement.use(Plan((("0", "1"),), (0,), 0, num_devices=2), known)
    placement.add(new)
    assert placement.pack_of[new.index] == 1
    assert [pack.layers for pack in placement.copies(1)] == [[new], [new]]
    placement.use(Plan((("0",), ("1",), ("2",)), (0, 1, 2), 2, num_devices=2), model)
    assert placement.pack_of == {0: 0, 1: 1, 2: 2}


def test_outside_of_lanes_all_runs_on_the_root() -> None:
    model = layers(2)
    placement = placement_of(model, 2)
    placement.use(Plan((("0",), ("1",)), (0, 1), 1, num_devices=2), model)
    assert placement.plan.device_of(1, 0) == 1
    assert placement.device_of(1) == 0
    assert placement.residents_of(1) is placement.residents[0]

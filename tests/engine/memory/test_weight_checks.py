"""What layers do to weights on a device is found, whatever no version tells."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import Event
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.memory.swap import Swapper
from lightning_harmony.engine.memory.weight_checks import WeightChecks
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.errors import UnsupportedModelError
from support.queues import postponed_update


class Packed:
    """Two packs on a device."""

    def __init__(self) -> None:
        self.device = VirtualDevice(None)
        modules = [nn.Linear(200, 200), nn.Linear(4, 4)]
        store = HostStore([p for module in modules for p in module.parameters()], self.device)
        update = postponed_update(self.device)
        self.swapper = Swapper(self.device, store, HostPool(self.device.host_buffer), Traffic(), update)
        self.checks = WeightChecks(self.device)
        layers = [SwappedLayer(n, f"layer {n}", m, list(m.parameters())) for n, m in enumerate(modules)]
        self.packs = [SwappedPack(layer.index, [layer], store) for layer in layers]

    def begin(self) -> None:
        for pack in self.packs:
            self.swapper.swap_in(pack)
            assert pack.residency is not None
            pack.residency.ready.wait()
            self.checks.begin(pack)

    def weight(self, number: int) -> Tensor:
        residency, pack = self.packs[number].residency, self.packs[number]
        assert residency is not None
        return residency.leaves[pack.parameters[0]].detach()

    def end(self) -> None:
        for pack in self.packs:
            self.checks.end(pack)
        self.checks.conclude()


@pytest.fixture
def packed() -> Iterator[Packed]:
    made = Packed()
    yield made
    made.checks.close()
    made.device.close()


@pytest.mark.parametrize("number", [0, 1])
def test_the_pack_whose_weights_have_changed_is_named(packed: Packed, number: int) -> None:
    packed.begin()
    array = packed.weight(number).numpy()
    array[-1, -1] += 1
    packed.end()
    with pytest.raises(UnsupportedModelError, match=f"layer 'layer {number}' changes the data of a parameter"):
        packed.checks.refuse_changed()
    packed.checks.refuse_changed()


def test_what_is_compared_takes_memory_no_longer_than_that(packed: Packed) -> None:
    """Checksums stayed on the device until the step's end, those of all visits."""
    packed.begin()
    checksums = []
    for pack in packed.packs:
        assert pack.residency is not None
        assert pack.residency.checksum is not None
        checksums.append(weakref.ref(pack.residency.checksum))
    for pack in packed.packs:
        packed.checks.end(pack)
    assert [checksum() for checksum in checksums] == [None, None]
    packed.checks.conclude()
    packed.checks.refuse_changed()


def test_what_was_only_read_is_as_it_was(packed: Packed) -> None:
    for _ in range(2):
        packed.begin()
        packed.weight(0).sum()
        packed.end()
        packed.checks.refuse_changed()
        for pack in packed.packs:
            packed.swapper.evict(pack)


def test_what_happens_after_the_forward_is_not_compared(packed: Packed) -> None:
    packed.begin()
    packed.end()
    packed.weight(0).fill_(torch.pi)
    packed.end()
    packed.checks.refuse_changed()


def test_a_step_that_has_failed_is_forgotten(packed: Packed) -> None:
    packed.begin()
    packed.weight(0).numpy()[:] = 0
    packed.end()
    packed.checks.forget()
    packed.checks.refuse_changed()


def test_memory_is_not_used_again_while_its_weights_are_compared(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code between layers read them once more, whose end is not known: then nothing waited for the comparison."""
    waited_for: list[Event] = []
    monkeypatch.setattr(packed.device, "free", lambda buffer, uses, is_kept=False: waited_for.extend(uses))
    packed.begin()
    packed.end()
    pack = packed.packs[0]
    residency = pack.residency
    assert residency is not None
    (compared,) = residency.beside
    residency.last_use = None
    packed.swapper.evict(pack)
    assert compared in waited_for

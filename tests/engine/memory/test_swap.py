"""Buffers that layers change: they leave the device under what follows, and are the user's again before anyone looks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import Happened
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.memory.stash import Stash
from lightning_harmony.engine.memory.sums import Sums
from lightning_harmony.engine.memory.swap import Swapper
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import SummedGradients, SwappedPack
from lightning_harmony.engine.updates.postponed import PostponedUpdate
from lightning_harmony.engine.updates.queue import Overlap
from lightning_harmony.errors import UnsupportedModelError
from support.queues import queues_of


class Norm:
    """A pack of one norm on a device, in a training step."""

    def __init__(self) -> None:
        self.device = VirtualDevice(None)
        self.module = nn.BatchNorm1d(8)
        self.layer = SwappedLayer(0, "norm", self.module, list(self.module.parameters()))
        self.layer.is_training = True
        store = HostStore(self.layer.parameters, self.device)
        self.pool = HostPool(self.device.host_buffer)
        overlap = Overlap()
        (self.queue,) = queues_of([self.device], overlap)
        update = PostponedUpdate([self.queue], overlap)
        self.swapper = Swapper(self.device, store, self.pool, Traffic(), update)
        self.pack = SwappedPack(0, [self.layer], store)
        self.residents = Residents(
            self.device,
            self.swapper,
            Sums(self.device, self.pool, Traffic(), lambda parameter: False, lambda layer, parameter: True),
            Stash(self.device, self.pool, Traffic()),
        )
        self.residents.packs = [self.pack]

    def swap_in(self, *, keeps_masters: bool = False) -> dict[str, Tensor]:
        self.swapper.swap_in(self.pack, keeps_masters=keeps_masters)
        assert self.pack.residency is not None
        self.pack.residency.ready.wait()
        return {name: tensor for (_, name), tensor in self.pack.residency.buffers.items()}

    def change(self, **values: Tensor) -> None:
        """As a layer's call does."""
        assert self.pack.residency is not None
        for name, value in values.items():
            key = self.module, name
            self.pack.residency.buffers[key] = value
            self.pack.residency.dirty_buffers.add(key)


@pytest.fixture
def norm() -> Iterator[Norm]:
    norm = Norm()
    yield norm
    norm.queue.close()
    norm.device.close()


def test_sums_that_make_way_on_a_host_last_until_the_copy_to_there_has_ended(norm: Norm) -> None:
    """On the way out of an error they were dropped at once, and a GPU went on to write to memory that was another's."""
    ended: list[str] = []

    class Unfinished(Happened):
        def synchronize(self) -> None:
            ended.append("copy")

        def done(self) -> bool:
            return "copy" in ended

    buffer, _ = norm.pool.take(64)
    weakref.finalize(buffer.untyped_storage(), ended.append, "buffer")
    norm.pack.parked = {0: SummedGradients(0, buffer, Unfinished(), {}, set())}
    del buffer
    norm.residents.reset()
    assert ended == ["copy", "buffer"]
    assert norm.pack.parked == {}


def test_nobody_waits_for_buffers_to_leave(norm: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each eviction waited for all that the device was to compute, and the host had nothing ready for it then."""
    # Memory that tests overwrite is waited for.
    monkeypatch.setattr(VirtualDevice, "free", lambda *args, **options: None)
    norm.swap_in()
    norm.change(running_mean=torch.full((8,), 3.0))
    release = threading.Event()
    norm.device.swap_out.submit(lambda: assert_released(release))
    norm.swapper.evict(norm.pack)
    assert torch.equal(norm.module.running_mean, torch.zeros(8))
    release.set()
    norm.swapper.finish_write_back(norm.pack)
    assert torch.equal(norm.module.running_mean, torch.full((8,), 3.0))


def assert_released(release: threading.Event) -> None:
    assert release.wait(10)


def test_buffers_have_their_values_when_they_come_again(norm: Norm) -> None:
    norm.swap_in()
    norm.change(running_mean=torch.full((8,), 3.0), num_batches_tracked=torch.tensor(1))
    norm.swapper.evict(norm.pack)
    buffers = norm.swap_in()
    assert torch.equal(buffers["running_mean"], torch.full((8,), 3.0))
    assert buffers["num_batches_tracked"] == 1
    assert torch.equal(buffers["running_var"], torch.ones(8))


def test_buffers_are_the_user_s_when_the_device_is_left(norm: Norm) -> None:
    norm.swap_in()
    norm.change(running_var=torch.full((8,), 2.0))
    norm.residents.reset()
    assert torch.equal(norm.module.running_var, torch.full((8,), 2.0))


def test_a_buffer_that_became_another_kind_of_tensor_takes_the_place_of_the_old_one(norm: Norm) -> None:
    norm.swap_in()
    norm.change(running_mean=torch.full((4,), 3.0, dtype=torch.float64), running_var=torch.full((8,), 2.0))
    norm.swapper.evict(norm.pack)
    buffers = norm.swap_in()
    assert torch.equal(buffers["running_mean"], torch.full((4,), 3.0, dtype=torch.float64))
    assert torch.equal(buffers["running_var"], torch.full((8,), 2.0))


def test_what_somebody_wrote_meanwhile_is_not_overwritten(norm: Norm) -> None:
    norm.swap_in()
    norm.change(running_mean=torch.full((8,), 3.0))
    norm.swapper.evict(norm.pack)
    norm.module.running_mean.fill_(7.0)
    with pytest.raises(UnsupportedModelError, match="'running_mean' of layer 'norm' is changed within a step"):
        norm.swapper.finish_write_back(norm.pack)
    assert torch.equal(norm.module.running_mean, torch.full((8,), 7.0))


@pytest.mark.parametrize("changes", [False, True])
def test_the_memory_they_pass_through_is_used_again(norm: Norm, *, changes: bool) -> None:
    for number in range(3):
        norm.swap_in()
        if changes:
            norm.change(running_mean=torch.full((8,), float(number)))
        norm.swapper.evict(norm.pack)
    norm.swapper.finish_write_back(norm.pack)
    _, num_bytes = norm.pack.buffer_layout()
    assert norm.pool.num_bytes == num_bytes


def test_each_counts_its_own_changes(norm: Norm) -> None:
    """They lie in one memory, but a layer that changes one has not changed the others."""
    buffers = norm.swap_in()
    versions = {name: tensor._version for name, tensor in buffers.items()}
    buffers["running_mean"].add_(1)
    assert {name for name, tensor in buffers.items() if tensor._version != versions[name]} == {"running_mean"}


def test_an_update_takes_over_weights_as_they_are_on_the_host(norm: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[Tensor] = []
    monkeypatch.setattr(VirtualDevice, "free", lambda self, buffer, *args, **options: freed.append(buffer))
    norm.swap_in(keeps_masters=True)
    residency = norm.pack.residency
    assert residency is not None
    masters = residency.hand_over()
    assert masters is not None
    norm.swapper.evict(norm.pack)
    assert not any(buffer is residency.weights for buffer in freed)
    weight = norm.module.weight
    found = masters.find(weight)
    assert found is not None
    assert torch.equal(found, weight.detach())
    with torch.no_grad():
        weight.add_(1)
    # What is on the device is not what the host has any more.
    assert masters.find(weight) is None
    bias = norm.module.bias
    assert masters.find(bias) is not None
    # A hook of its own may change it by way of its `data`, which leaves no trace.
    handle = bias.register_hook(lambda gradient: None)
    assert masters.find(bias) is None
    handle.remove()


def test_weights_that_somebody_keeps_are_not_taken_over(norm: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    """An autograd function may have them beside what autograd saves: their memory is not the update's to let go."""
    kept: list[bool] = []
    monkeypatch.setattr(VirtualDevice, "free", lambda self, buffer, uses, is_kept=False: kept.append(is_kept))
    norm.swap_in(keeps_masters=True)
    residency = norm.pack.residency
    assert residency is not None
    view = residency.leaves[norm.module.weight].view(-1)
    assert residency.hand_over() is None
    norm.swapper.evict(norm.pack)
    assert kept[0]
    del view


class Scaled(nn.Module):
    """A frozen weight, beside which something lies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)
        self.weight.scale = torch.ones(8)  # type: ignore[attr-defined]


def test_what_lies_beside_frozen_weights_does_not_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device found it in use when their pack had left."""
    device, module, overlap, kept = VirtualDevice(None), Scaled(), Overlap(), list[bool]()
    monkeypatch.setattr(VirtualDevice, "free", lambda self, buffer, uses, is_kept=False: kept.append(is_kept))
    layer = SwappedLayer(0, "scaled", module, [module.weight])
    assert layer.companions.apart
    store = HostStore(layer.parameters, device, companions=[layer.companions])
    swapper = Swapper(
        device, store, HostPool(device.host_buffer), Traffic(), PostponedUpdate(queues_of([device], overlap), overlap)
    )
    pack = SwappedPack(0, [layer], store)
    swapper.swap_in(pack)
    # The copy is over, and who made it has let the memory go.
    swapper.finish_reading()
    residency = pack.residency
    assert residency is not None
    swapper.evict(pack)
    assert kept == [False]

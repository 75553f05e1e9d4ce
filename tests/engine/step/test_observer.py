"""What turns are seen to take of the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.stream import Happened
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.profile import Profiler
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.engine.memory.stash import Stash
from lightning_harmony.engine.model.host_pool import HostPool
from lightning_harmony.engine.model.host_store import HostStore
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.engine.model.pack import SwappedPack
from lightning_harmony.engine.step.observer import Observer
from lightning_harmony.engine.step.step import Grant
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.task import Phase
from support.clocks import set_clock


class Leaving(Happened):
    """A copy that is over when it was waited for.

    Args:
        wait: waits.
    """

    def __init__(self, wait: Any) -> None:
        self.synchronize = wait

    def done(self) -> bool:
        return False


def test_a_turn_does_not_last_longer_for_buffers_that_are_made_once_and_for_room_that_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head of a large vocabulary was planned with ten times as long as it takes: its first turn makes large buffers."""
    now = 0.0
    set_clock(monkeypatch, lambda: now)

    def lasting(seconds: float) -> None:
        nonlocal now
        now += seconds

    def made(num_bytes: int) -> Tensor:
        lasting(50.0)
        return torch.empty(num_bytes, dtype=torch.uint8)

    device, pool, traffic = VirtualDevice(None), HostPool(made), Traffic()
    module = nn.Linear(2, 2)
    layer = SwappedLayer(0, "layer", module, list(module.parameters()))
    store = HostStore(layer.parameters, device)
    pack = SwappedPack(0, [layer], store)
    nothing: Any = None
    residents = Residents(device, nothing, nothing, Stash(device, pool, traffic))
    placement: Any = SimpleNamespace(residents=[residents], plan=Plan((("layer",),), (0,), 0), packs=[pack])
    lanes = [SimpleNamespace(task=(Phase.FORWARD, 0)), SimpleNamespace(task=None)]
    step: Any = SimpleNamespace(turns=SimpleNamespace(running=lanes), runs_whole=False, is_sequential=False)
    profiler = Profiler(traffic)
    observer = Observer(step, placement, traffic, profiler, pool)
    observer.begin_step(4, is_training=True, is_measuring=True, is_watching=False, is_timing=False)
    for progress in lanes:
        observer.begin_turn(device, Phase.FORWARD, pack)
        lasting(3.0)
        if progress is lanes[0]:
            pool.take(64)
            device.leaving.keep(Leaving(lambda: lasting(20.0)), torch.empty(1))
            assert device.leaving.retire() is False
            assert residents.make_room(SimpleNamespace(pack=pack))  # type: ignore[arg-type]
        observer.end_turn(Grant(progress, 0, Phase.FORWARD, pack))  # type: ignore[arg-type]
        lasting(0.5)
    # The first turn lasts 73 seconds, the second one 3, and each half a second behind it.
    assert now == 3.0 + 50.0 + 20.0 + 0.5 + 50.0 + 3.0 + 0.5
    assert profiler.complete(Cost("layer", 1, 1), layer).forward_seconds == 3.5
    store.close()
    device.close()


def test_what_a_lane_does_to_each_pack_is_timed_in_a_step_by_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane may go through several packs in one turn, and back, without their recompute."""
    now = 0.0
    set_clock(monkeypatch, lambda: now)
    device, pool, traffic = VirtualDevice(None), HostPool(lambda size: torch.empty(size, dtype=torch.uint8)), Traffic()
    layers = [
        SwappedLayer(number, name, (m := nn.Linear(2, 2)), list(m.parameters())) for number, name in enumerate("ab")
    ]
    store = HostStore([p for layer in layers for p in layer.parameters], device)
    packs = [SwappedPack(layer.index, [layer], store) for layer in layers]
    nothing: Any = None
    residents = Residents(device, nothing, nothing, Stash(device, pool, traffic))
    plan = Plan((("a",), ("b",)), (0, 1), 1)
    placement: Any = SimpleNamespace(residents=[residents], plan=plan, packs=packs)
    step: Any = SimpleNamespace(fuses=True, turns=SimpleNamespace(running=[]))
    profiler = Profiler(traffic)
    for layer in layers:
        profiler.recall(
            layer, Cost(layer.name, 1, 1, forward_seconds=9.0, backward_seconds=30.0, recompute_seconds=10.0)
        )
    observer = Observer(step, placement, traffic, profiler, pool)
    observer.begin_step(4, is_training=True, is_measuring=False, is_watching=False, is_timing=True)
    # A turn in the first pack, on to the second, and back through that; then the backward of the first one.
    observer.begin_turn(device, Phase.FORWARD, packs[0])
    now += 3.0
    observer.go_on(device, Phase.FORWARD, packs[1])
    now += 6.0
    observer.go_on(device, Phase.BACKWARD, packs[1])
    now += 5.0
    observer.end_turn(Grant(SimpleNamespace(), 0, Phase.BACKWARD, packs[1]))  # type: ignore[arg-type]
    # The host is not done with it yet.
    now += 1.0
    observer.begin_turn(device, Phase.BACKWARD, packs[0])
    now += 15.0
    observer.end_turn(Grant(SimpleNamespace(), 0, Phase.BACKWARD, packs[0]))  # type: ignore[arg-type]
    profiler.keep_faster_visits()
    first, second = (tuple(profiler.complete(Cost("", 1, 1), layer).seconds.values()) for layer in layers)
    assert plan.fused == {1}
    assert first == (3.0, 15.0, 5.0)
    # 6 of 20 seconds, as it has its graph.
    assert second == pytest.approx((6.0, 9.0, 3.0))
    store.close()
    device.close()

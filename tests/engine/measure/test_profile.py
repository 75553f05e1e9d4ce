"""What a step measures while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.measure.profile import Profiler, Speed, UpdateSpeeds, Visit
from lightning_harmony.engine.measure.report import Traffic
from lightning_harmony.engine.model.layer import SwappedLayer
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.task import Phase


@dataclass
class At:
    """A moment that is told, not measured."""

    seconds: float

    def seconds_since(self, earlier: At) -> float:
        return self.seconds - earlier.seconds


LAYER = SwappedLayer(3, "layer", torch.nn.Linear(2, 2), [])


@pytest.fixture
def traffic() -> Traffic:
    return Traffic()


@pytest.fixture
def profiler(traffic: Traffic) -> Profiler:
    return Profiler(traffic)


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    device = VirtualDevice(None)
    yield device
    device.close()


def test_a_middle_turn_counts(profiler: Profiler) -> None:
    for began, ended in ((0.0, 50.0), (10.0, 12.0), (20.0, 23.0), (30.0, 34.0)):
        profiler.note_turn(LAYER, Phase.FORWARD, (At(began), At(ended)))
    assert profiler.complete(Cost("layer", 1, 1), LAYER).forward_seconds == 3.0
    profiler.note_turn(LAYER, Phase.FORWARD, (At(0.0), At(3.5)))
    profiler.note_turn(LAYER, Phase.BACKWARD, (At(0.0), At(4.0)))
    cost = profiler.complete(Cost("layer", 1, 1), LAYER)
    assert (cost.forward_seconds, cost.backward_seconds) == (3.0, 4.0)


def test_a_recompute_is_all_that_a_turn_ran_again(profiler: Profiler) -> None:
    for recomputes in ([(At(1.0), At(9.0))], [(At(1.0), At(2.0)), (At(3.0), At(5.0))], []):
        profiler.note_turn(LAYER, Phase.BACKWARD, (At(0.0), At(10.0)), recomputes)
    cost = profiler.complete(Cost("layer", 1, 1), LAYER)
    assert (cost.backward_seconds, cost.recompute_seconds, cost.spared_backward_seconds) == (10.0, 3.0, 7.0)


def test_layers_need_no_longer_than_visits_by_the_plan_have_shown(profiler: Profiler) -> None:
    """Where the host bounds turns, it is busier in steps that are measured: these foretold 1.5 times as long as later ones."""
    other = SwappedLayer(1, "other", torch.nn.Linear(2, 2), [])
    for layer in (LAYER, other):
        profiler.note_turn(layer, Phase.FORWARD, (At(0.0), At(3.0)))
        profiler.note_turn(layer, Phase.BACKWARD, (At(0.0), At(10.0)), [(At(0.0), At(2.0))])
    profiler.begin_visits()
    for ended in (3.0, 2.0, 50.0):
        profiler.note_visit(Visit((3, 1), Phase.FORWARD, recomputes=False), (At(0.0), At(ended)))
    # Without its recompute the backward of the first is known to take 8.0 seconds; that of the other waits for something.
    profiler.note_visit(Visit((3,), Phase.BACKWARD, recomputes=False), (At(0.0), At(4.0)))
    profiler.note_visit(Visit((1,), Phase.BACKWARD, recomputes=True), (At(0.0), At(12.0)))
    profiler.keep_faster_visits()
    costs = [profiler.complete(Cost("layer", 1, 1), layer) for layer in (LAYER, other)]
    assert [tuple(cost.seconds.values()) for cost in costs] == [(1.5, 5.0, 1.0), (1.5, 10.0, 2.0)]


def test_a_visit_lasts_as_long_as_the_host_is_busy_with_it(profiler: Profiler) -> None:
    profiler.note_turn(LAYER, Phase.FORWARD, (At(0.0), At(10.0)))
    profiler.begin_visits()
    visit = Visit((3,), Phase.FORWARD, recomputes=False)
    profiler.note_visit(visit, (At(0.0), At(1.0)))
    profiler.note_visit_period(visit, 5.0)
    profiler.keep_faster_visits()
    assert profiler.complete(Cost("layer", 1, 1), LAYER).forward_seconds == 5.0


@pytest.mark.parametrize(("period", "expected"), [(1.0, 3.0), (7.0, 7.0)])
def test_a_turn_lasts_as_long_as_the_host_is_busy_with_it(profiler: Profiler, period: float, expected: float) -> None:
    profiler.note_turn(LAYER, Phase.FORWARD, (At(0.0), At(3.0)))
    profiler.note_period(LAYER, Phase.FORWARD, period)
    assert profiler.complete(Cost("layer", 1, 1), LAYER).forward_seconds == expected


def test_bytes_are_those_of_the_largest_microbatch(profiler: Profiler, traffic: Traffic, device: VirtualDevice) -> None:
    for num_bytes in (5, 9, 7):
        profiler.note_stash(LAYER, num_bytes)
        profiler.note_input(LAYER, num_bytes - 1)
    with profiler.swapping_in(LAYER, device):
        traffic.count_in("weights", 40)
    cost = profiler.complete(Cost("layer", 1, 1), LAYER)
    assert (cost.stash_bytes, cost.input_bytes, cost.copied_bytes) == (9, 8, 40)


def test_copies_are_counted_while_they_are_timed(profiler: Profiler, traffic: Traffic, device: VirtualDevice) -> None:
    traffic.count_in("weights", 1000)
    with profiler.swapping_in(LAYER, device):
        traffic.count_in("weights", 30)
        traffic.count_in("stash", 7)
    with profiler.swapping_out(device):
        traffic.count_out("gradients", 20)
        traffic.count_out("stash", 7)
    assert (profiler.swap_in.num_bytes, profiler.swap_out.num_bytes) == (30, 20)
    assert profiler.swap_in.seconds > 0


def test_what_goes_from_device_to_device_is_timed_where_it_comes_from(
    profiler: Profiler, device: VirtualDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter((1.0, 2.0, 10.0, 14.0))
    source, target = VirtualDevice(None), device
    monkeypatch.setattr(source, "lane_moment", lambda: At(next(moments)))
    assert profiler.transfer.bytes_per_second is None
    for num_bytes in (10, 40):
        with profiler.transferring(source, target, num_bytes):
            pass
    assert profiler.transfer.bytes_per_second == 10.0
    assert profiler.transfer.num_bytes == 50
    source.close()


def test_a_speed_is_that_of_all_together() -> None:
    speed = Speed()
    assert speed.bytes_per_second is None
    speed.note(10, 1.0)
    speed.note(20, 4.0)
    assert speed.bytes_per_second == 6.0


def test_of_two_speeds_the_faster_is_kept() -> None:
    speed = Speed()
    for num_bytes, seconds, kept in ((0, 0.0, None), (10, 2.0, 5.0), (10, 5.0, 5.0), (30, 3.0, 10.0), (0, 0.0, 10.0)):
        speed.keep_faster(Speed(num_bytes, seconds))
        assert speed.bytes_per_second == kept


def test_what_is_forgotten_is_measured_anew_but_speeds_stay(
    profiler: Profiler, traffic: Traffic, device: VirtualDevice
) -> None:
    profiler.note_turn(LAYER, Phase.FORWARD, (At(0.0), At(1.0)))
    profiler.note_stash(LAYER, 5)
    profiler.note_input(LAYER, 5)
    with profiler.swapping_in(LAYER, device):
        traffic.count_in("weights", 30)
    profiler.clear()
    assert profiler.complete(Cost("layer", 1, 1), LAYER) == Cost("layer", 1, 1)
    assert profiler.swap_in.num_bytes == 30


def test_layers_that_are_not_timed_alone_any_more_need_time_in_proportion(profiler: Profiler) -> None:
    def seconds() -> float:
        return profiler.complete(Cost("layer", 1, 1), LAYER).forward_seconds

    profiler.begin(10)
    profiler.note_turn(LAYER, Phase.FORWARD, (At(0.0), At(2.0)))
    assert seconds() == 2.0
    profiler.begin(30)
    assert seconds() == 6.0
    # Where one is, that counts, and the shorter times of smaller microbatches don't.
    profiler.note_turn(LAYER, Phase.FORWARD, (At(0.0), At(5.0)))
    profiler.note_turn(LAYER, Phase.FORWARD, (At(0.0), At(7.0)))
    assert seconds() == 5.0
    profiler.begin(20)
    assert seconds() == 5.0


def test_what_is_recalled_is_as_if_it_had_been_measured(profiler: Profiler) -> None:
    counted = Cost("layer", 1, 1, copied_bytes=4, input_bytes=2, stash_bytes=3)
    cost = replace(counted, forward_seconds=0.5, backward_seconds=1.5, recompute_seconds=0.25)
    profiler.recall(LAYER, cost)
    assert profiler.complete(Cost("layer", 1, 1), LAYER) == cost
    speed = Speed()
    speed.recall(None)
    assert speed.bytes_per_second is None
    speed.recall(20.0)
    assert speed.bytes_per_second == 20.0
    speed.note(20, 3.0)
    speed.recall(99.0)
    assert speed.bytes_per_second == 10.0


def test_updates_are_as_fast_as_ever_until_it_is_settled_how_fast_they_are() -> None:
    speeds = UpdateSpeeds()
    for num_bytes in (10, 30, 20):
        speeds.note(Speed(num_bytes, 1.0))
    # A step without any.
    speeds.note(Speed())
    assert (speeds.fastest.bytes_per_second, speeds.newest.bytes_per_second) == (30.0, 20.0)
    speeds.settle(25.0)
    speeds.note(Speed(20, 1.0))
    assert speeds.fastest.bytes_per_second == 25.0

"""Work, and what lies between two sizes of a microbatch."""

from dataclasses import replace

from lightning_harmony.plan.outlook.work import Held, LayerProfile, StepProfile, Work, between
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.machine import H200


def profile(samples: int) -> StepProfile:
    cost = Cost("layer", 100, 80, 10 * samples + 3, 20 * samples, 5 * samples)
    work = Work({"float32": 7 * samples}, 11 * samples, 13)
    held = Held(3 * samples, 4 * samples, samples)
    layer = LayerProfile(cost, cost, 100, 80, 20, held, held, samples, 2 * samples, 1, work, work, work)
    return StepProfile((layer, layer), (0, 1), 200, 50, 4, 9 * samples, samples, 2 * samples)


def test_what_grows_along_a_line_is_told_for_any_size() -> None:
    for size in (1, 2, 3, 5, 8, 13):
        assert between(profile(2), profile(8), (size - 2) / 6) == profile(size)


def test_a_size_at_which_the_step_goes_another_way_takes_the_nearer_one() -> None:
    one, other = profile(2), replace(profile(8), calls=(1, 0))
    assert between(one, other, 0.25) == one
    assert between(one, other, 0.75) == other


def test_work_adds_and_takes_its_time() -> None:
    work = Work({"float32": 10}, 5, 1) + Work({"float32": 1, "bfloat16": 2}, 5, 2)
    assert work == Work({"float32": 11, "bfloat16": 2}, 10, 3)
    machine = replace(
        H200, flops_per_second={"float32": 11.0, "bfloat16": 2.0}, memory_bytes_per_second=10.0, operation_seconds=4.0
    )
    assert work.device_seconds(machine) == 3.0
    assert work.host_seconds(machine) == 12.0

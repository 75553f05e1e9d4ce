"""The rules of a step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.simulate.device_memory import LATE_TURNS
from lightning_harmony.plan.simulate.lowering import lower
from lightning_harmony.plan.simulate.replay import predict, replay
from lightning_harmony.plan.simulate.schedule import Schedule
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.profile import DeviceLimits, Profile
from lightning_harmony.plan.values.task import Errand, Task
from support.plans import CannotRun, compute, machines, names, parse_schedule, plans

# Weights 10 (of which 20 cross the bus), gradients 8, work 3 and 5, graph 6, input 2, stash 4; 1 s forward, 2 s backward.
PACK = Cost("pack", 10, 8, 3, 5, 6, 20, 2, 4, 1.0, 2.0, 1.0)
FREE = DeviceLimits()
Planned = tuple[Plan, tuple[Cost, ...]]


def chain(num_packs: int, first_fused: int, num_microbatches: int, **more: object) -> Plan:
    packs = tuple(range(num_packs))
    return Plan(names(num_packs), packs, first_fused, num_microbatches=num_microbatches, **more)  # type: ignore[arg-type]


def grid(*lines: str) -> Schedule:
    return parse_schedule("\n".join(f"device {number} | {line}" for number, line in enumerate(lines)))


TWO = chain(2, 1, 1)
TWO_TASKS = "0SWAP_IN 0F0 0STASH_OUT0 1SWAP_IN 1F0 1B0 1SWAP_OUT 1U 1EVICT 0STASH_IN0 0B0 0SWAP_OUT 0U 0EVICT"


THREE_TASKS = (
    "0SWAP_IN 0F0 0STASH_OUT0 1SWAP_IN 1F0 1STASH_OUT0 2SWAP_IN 2F0 2B0 2SWAP_OUT 2U 2EVICT "
    "1STASH_IN0 1B0 1SWAP_OUT 1U 1EVICT 0STASH_IN0 0B0 0SWAP_OUT 0U 0EVICT"
)


def updates_of(update_bytes_per_second: float) -> tuple[float, dict[int, tuple[float, float]]]:
    """How long a step of three packs takes, and when each is updated. Forwards begin at 2, 4 and 6; all else ends at 12.8."""
    machine = DeviceLimits(None, 10.0, 10.0, None, update_bytes_per_second)
    found = replay(chain(3, 2, 1), grid(THREE_TASKS), [PACK] * 3, machine)
    spans = [span for span in found.devices[0].spans if span.task.kind is Errand.UPDATE]
    return found.seconds, {span.task.pack: (round(span.start_seconds, 6), round(span.end_seconds, 6)) for span in spans}


class TestUpdates:
    """A step lasts until the next may begin, whose forward waits for each pack's update when it fetches it."""

    def test_at_once(self) -> None:
        seconds, updates = updates_of(80.0)
        # Gradients arrive at 8.8, 10.8 and 12.8.
        assert updates == {2: (8.8, 8.9), 1: (10.8, 10.9), 0: (12.8, 12.9)}
        # The next forward fetches the first pack first of all.
        assert seconds == pytest.approx(12.9)

    def test_state_on_disk_takes_the_time_of_the_disk_where_that_is_longer(self) -> None:
        machine = DeviceLimits(None, 10.0, 10.0, None, 80.0, disk_bytes_per_second=10.0)
        packs = [PACK, replace(PACK, disk_bytes=30), replace(PACK, disk_bytes=1)]
        found = replay(chain(3, 2, 1), grid(THREE_TASKS), packs, machine)
        spans = [span for span in found.devices[0].spans if span.task.kind is Errand.UPDATE]
        seconds = {span.task.pack: pytest.approx(span.end_seconds - span.start_seconds) for span in spans}
        assert seconds == {2: 0.1, 1: 3.0, 0: 0.1}

    def test_of_what_has_arrived_that_first_which_the_next_forward_needs_first(self) -> None:
        seconds, updates = updates_of(8 / 5)
        assert updates == {2: (8.8, 13.8), 0: (13.8, 18.8), 1: (18.8, 23.8)}
        # The second pack is fetched from 2 on, and there at 4; the first from the beginning on.
        assert seconds == pytest.approx(23.8 - 2)

    def test_where_weights_may_be_looked_at_between_steps_each_waits_for_its_own(self) -> None:
        """Steps that updates bound were predicted a quarter too short for whoever has a callback between them."""
        machine = DeviceLimits(None, 10.0, 10.0, None, 8 / 5, updates_outlast=False)
        found = replay(chain(3, 2, 1), grid(THREE_TASKS), [PACK] * 3, machine)
        assert found.seconds == pytest.approx(23.8)

    def test_the_gradients_of_few_packs_wait_for_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Steps that updates bound took up to 1.2 times as long as predicted: the backward waits for room on the host."""
        monkeypatch.setattr("lightning_harmony.plan.simulate.gradient_rules.RING", 2)
        seconds, updates = updates_of(8 / 5)
        # Those of the first pack leave from 13.8 on, and have not arrived when the second one's update begins.
        assert updates == {2: (8.8, 13.8), 1: (13.8, 18.8), 0: (18.8, 23.8)}
        assert seconds == pytest.approx(23.8)

    def test_what_is_asked_for_behind_gradients_waits_with_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lightning_harmony.plan.simulate.gradient_rules.RING", 1)
        machine = DeviceLimits(None, 10.0, 10.0, None, 8 / 5)
        found = replay(chain(3, 2, 1), grid(THREE_TASKS), [PACK] * 3, machine)
        starts = {str(span.task): span.start_seconds for span in found.devices[0].spans}
        # The first one's update ends at 13.8, the second one's 5.8 s after its gradients have left.
        assert starts["1SWAP_OUT"] == pytest.approx(13.8)
        assert starts["0B0"] == pytest.approx(14.2)
        assert starts["0SWAP_OUT"] == pytest.approx(19.6)

    def test_no_step_is_shorter_than_all_updates_take(self) -> None:
        seconds, updates = updates_of(8 / 100)
        assert updates[1][1] == pytest.approx(308.8)
        assert seconds == pytest.approx(max(300, 308.8 - 2))


class TestTimes:
    def test_what_does_not_wait_for_anything_runs_beside_the_rest(self) -> None:
        # Swaps take 20 s in and 8 s out, an update 4 s; a stash 4 s either way.
        machine = DeviceLimits(None, 1.0, 1.0, None, 2.0)
        times = {
            str(span.task): (span.start_seconds, span.end_seconds)
            for span in replay(TWO, grid(TWO_TASKS), [PACK] * 2, machine).devices[0].spans
        }
        assert times == {
            "0SWAP_IN": (0, 20),
            "0F0": (20, 21),
            "0STASH_OUT0": (21, 25),
            # Its stream is free, and it was issued behind the forward.
            "1SWAP_IN": (20, 40),
            "1F0": (40, 41),
            # Its graph was kept: no forward again.
            "1B0": (41, 42),
            "1SWAP_OUT": (42, 50),
            "1U": (50, 54),
            "0STASH_IN0": (41, 45),
            "0B0": (45, 47),
            # Its stream is busy until then.
            "0SWAP_OUT": (50, 58),
            "0U": (58, 62),
        }

    def test_weights_that_are_not_fetched_ahead_come_when_the_device_has_nothing_to_do(self) -> None:
        machine = DeviceLimits(None, 1.0, 1.0, None, 2.0)
        spans = replay(replace(TWO, lookahead=0), grid(TWO_TASKS), [PACK] * 2, machine).devices[0].spans
        starts = {str(span.task): span.start_seconds for span in spans}
        # The forward of the pack before lasts from 20 to 21.
        assert (starts["0F0"], starts["1SWAP_IN"]) == (20, 21)

    def test_a_task_waits_for_room_that_an_earlier_one_leaves(self) -> None:
        machine = DeviceLimits(None, 1.0, 1.0, None, None)
        # Both packs (20), the gradients of one (8), its graph (6) and what the code behind it keeps (2), and the gradient
        # that it makes (2): the stash of the other (4) has to be gone.
        machine = replace(machine, swap_out_bytes_per_second=0.1)
        tight = replay(TWO, grid(TWO_TASKS), [PACK] * 2, replace(machine, capacity_bytes=38))
        assert tight.peak_bytes == (38,)
        starts = {str(span.task): span.start_seconds for span in tight.devices[0].spans}
        # The stash began to leave at 21.
        assert starts["1B0"] == 61
        with pytest.raises(PlanError, match=r"1B0 on device 0: it takes 10 B, for which the capacity is 1 B short"):
            replay(TWO, grid(TWO_TASKS), [PACK] * 2, DeviceLimits(37))

    def test_memory_is_told_for_every_moment(self) -> None:
        machine = DeviceLimits(None, 1.0, 1.0, None, None)
        (device,) = replay(TWO, grid(TWO_TASKS), [PACK] * 2, machine).devices
        # Weights; more of them, and what becomes output and stash; the output alone; what becomes the graph with it; ...
        assert device.memory[:4] == ((0.0, 10), (20.0, 26), (25.0, 22), (40.0, 31))
        assert device.memory[-1] == (58.0, 0)
        assert device.peak_bytes == max(num_bytes for _, num_bytes in device.memory)

    def test_what_a_step_finds_taken_counts(self) -> None:
        machine = DeviceLimits(48, 1.0, 1.0, None, None)
        free, taken = (
            replay(TWO, grid(TWO_TASKS), [PACK] * 2, replace(machine, occupied_bytes=occupied)).devices[0]
            for occupied in (0, 5)
        )
        assert taken.peak_bytes == free.peak_bytes + 5
        assert taken.memory[0] == (0.0, 15)
        assert taken.memory[-1] == (58.0, 5)
        assert replace(machine, occupied_bytes=5).free_bytes == 43
        with pytest.raises(PlanError, match="short"):
            replay(TWO, grid(TWO_TASKS), [PACK] * 2, replace(machine, occupied_bytes=11))

    def test_what_is_copied_away_counts_in_some_turns_after_it_has_ended(self) -> None:
        """The host asks for room ahead of the copies: what was predicted was then less than what was there."""
        tasks = "0SWAP_IN 0F0 1SWAP_IN 1F0 1B0 1SWAP_OUT 1U 0B0 0SWAP_OUT 0U 1EVICT 0EVICT"
        packs = [Cost("pack", 0, 8, forward_seconds=1.0, backward_seconds=1.0)] * 2
        (device,) = replay(TWO, grid(tasks), packs, FREE).devices
        assert max(num_bytes for _, num_bytes in device.memory) == 8
        assert device.peak_bytes == 8 + 8
        # It is waited for where there is no room.
        assert replay(TWO, grid(tasks), packs, DeviceLimits(9)).peak_bytes == (9,)
        forth = " ".join(f"{pack}SWAP_IN {pack}F0" for pack in range(6))
        back = " ".join(f"{pack}B0 {pack}SWAP_OUT {pack}U {pack}EVICT" for pack in reversed(range(6)))
        six = replay(chain(6, 0, 1), grid(f"{forth} {back}"), packs[:1] * 6, FREE)
        assert six.peak_bytes == (8 + LATE_TURNS * 8,)
        # Where copies never end by themselves, all of it is there, as far as there is room.
        assert six.devices[0].bound_bytes == 6 * 8
        (narrow,) = replay(chain(6, 0, 1), grid(f"{forth} {back}"), packs[:1] * 6, DeviceLimits(37)).devices
        assert narrow.bound_bytes == 37

    def test_what_casting_takes_is_there_while_weights_come(self) -> None:
        packs = [Cost("pack", 10, 0, copied_bytes=20, forward_seconds=1.0, staging_bytes=7)] * 2
        tasks = "0SWAP_IN 0F0 1SWAP_IN 1F0 1B0 0B0 1EVICT 0EVICT"
        (device,) = replay(TWO, grid(tasks), packs, DeviceLimits(27, swap_in_bytes_per_second=1.0)).devices
        assert device.memory[:4] == ((0.0, 17), (20.0, 27), (40.0, 20), (41.0, 0))
        with pytest.raises(PlanError, match="1 B short"):
            replay(TWO, grid(tasks), packs, DeviceLimits(26))

    def test_devices_of_a_pipeline_work_at_the_same_time(self) -> None:
        packs = [replace(PACK, gradient_bytes=0)] * 2
        alone = chain(2, 1, 8)
        together = replace(alone, num_devices=2)
        one = replay(alone, lower(alone, packs, DeviceLimits()), packs, FREE)
        two = replay(together, lower(together, packs, DeviceLimits()), packs, FREE)
        assert one.seconds == 8 * (3 + 2)
        # The first device never waits: the second one, whose graphs are kept, has less to do.
        assert two.seconds == 8 * 3
        assert [device.compute_seconds for device in two.devices] == [24, 16]

    def test_a_heavy_pack_that_is_spread_bounds_no_device(self) -> None:
        packs = [PACK, replace(PACK, forward_seconds=4.0, backward_seconds=8.0, recompute_seconds=0.0)]
        alone = chain(2, 1, 8, num_devices=2)
        spread = replace(alone, spread=frozenset({1}))
        one, other = (replay(plan, lower(plan, packs, DeviceLimits()), packs, FREE) for plan in (alone, spread))
        assert [device.compute_seconds for device in one.devices] == [8 * 3, 8 * 12]
        assert [device.compute_seconds for device in other.devices] == [8 * 3 + 4 * 12, 4 * 12]
        # It waits for the first microbatch, and that for its way back.
        assert (one.seconds, other.seconds) == (1 + 8 * 12 + 2, 8 * 3 + 4 * 12)

    def test_gradients_are_gathered_beside_all_else(self) -> None:
        """Those of another device cross over, 8 s each; the sum of one waits for that of the one before."""
        plan = chain(2, 1, 4, num_devices=2, spread=frozenset({1}))
        machine = DeviceLimits(None, None, None, 1.0)
        devices = replay(plan, lower(plan, [PACK] * 2, DeviceLimits()), [PACK] * 2, machine).devices
        times = {str(s.task): (s.start_seconds, s.end_seconds) for device in devices for s in device.spans}
        assert {name: times[name] for name in times if "1B" in name or "GATHER" in name or name == "1SWAP_OUT"} == {
            "1B0": (4, 5),
            "1GATHER0": (5, 5),
            "1B1": (5, 6),
            "1GATHER1": (6, 14),
            # Neither waits for what is gathered.
            "1B2": (7, 8),
            "1B3": (7, 8),
            "1GATHER2": (14, 14),
            "1GATHER3": (14, 22),
            "1SWAP_OUT": (22, 22),
        }

    def test_microbatches_on_devices_of_their_own_take_a_share_of_the_time(self) -> None:
        plan = chain(2, 1, 8, num_devices=4, parallel="data")
        assert replay(plan, lower(plan, [PACK] * 2, DeviceLimits()), [PACK] * 2, FREE).seconds == 2 * (3 + 2)


class TestBytes:
    @pytest.mark.parametrize("num_devices", [1, 2, 4])
    def test_a_pipeline_swaps_three_times_the_weights_less_what_stays(self, num_devices: int) -> None:
        """Weights come in forward and in backward and gradients leave, whatever the number of devices; the last pack stays."""
        num_packs, num_microbatches = 12, 6
        pack = Cost("pack", 10, 10, copied_bytes=10)
        plan = chain(num_packs, num_packs - 1, num_microbatches, num_devices=num_devices)
        machine = DeviceLimits(20)
        swapped = replay(plan, lower(plan, [pack] * num_packs, machine), [pack] * num_packs, machine)
        weights = sum(device.swapped_in_bytes["weights"] for device in swapped.devices)
        gradients = sum(device.swapped_out_bytes["gradients"] for device in swapped.devices)
        assert gradients == num_packs * 10
        # A device keeps the pack that it ran last: with several, more than one stays.
        assert weights + gradients == 3 * num_packs * 10 - num_devices * 10

    @pytest.mark.parametrize("num_devices", [1, 2, 4])
    def test_data_placement_swaps_weights_for_each_device_and_gradients_once(self, num_devices: int) -> None:
        pack = Cost("pack", 10, 10, copied_bytes=10)
        plan = chain(12, 11, 8, num_devices=num_devices, parallel="data")
        swapped = replay(plan, lower(plan, [pack] * 12, DeviceLimits(20)), [pack] * 12, DeviceLimits(20))
        assert {device.swapped_in_bytes["weights"] for device in swapped.devices} == {10 * (24 - 1)}
        assert sum(device.swapped_out_bytes["gradients"] for device in swapped.devices) == 120
        assert sum(device.transferred_bytes for device in swapped.devices) == 120 * (num_devices - 1)

    @pytest.mark.parametrize("num_devices", [2, 4])
    def test_a_pack_that_is_spread_swaps_weights_for_each_device_and_its_gradients_once(self, num_devices: int) -> None:
        # Narrow weights, whose gradients are as narrow until they are summed.
        pack = Cost("pack", 5, 10, copied_bytes=10)
        plan = chain(1, 0, 8, num_devices=num_devices, spread=frozenset({0}))
        home, *others = replay(plan, lower(plan, [pack], DeviceLimits()), [pack], FREE).devices
        assert [device.swapped_in_bytes["weights"] for device in (home, *others)] == [10] * num_devices
        assert (home.swapped_out_bytes, home.transferred_bytes) == ({"gradients": 10}, 5 * (8 - 8 // num_devices))
        assert all(not device.swapped_out_bytes and not device.transferred_bytes for device in others)

    def test_gradients_take_room_until_they_are_gathered(self) -> None:
        """At home the sums and what comes, elsewhere gradients until they have come; weights leave room for neither."""
        pack = Cost("pack", 10, 8, forward_seconds=1.0, backward_seconds=1.0)
        plan = chain(1, 0, 2, num_devices=2, spread=frozenset({0}))
        machine = DeviceLimits(None, None, None, 1.0)
        home, other = replay(plan, lower(plan, [pack], DeviceLimits()), [pack], machine).devices
        assert home.memory == ((0.0, 10), (1.0, 18), (2.0, 16), (10.0, 0))
        assert other.memory == ((0.0, 10), (1.0, 18), (2.0, 8), (10.0, 0))
        replay(plan, lower(plan, [pack], DeviceLimits(26)), [pack], replace(machine, capacity_bytes=26))
        with pytest.raises(PlanError, match="0GATHER0 on device 0: it takes 8 B, for which the capacity is 1 B short"):
            replay(plan, lower(plan, [pack], DeviceLimits()), [pack], replace(machine, capacity_bytes=25))

    def test_what_crosses_the_bus_may_be_more_than_what_arrives(self) -> None:
        (device,) = replay(TWO, grid(TWO_TASKS), [PACK] * 2, FREE).devices
        assert device.swapped_in_bytes == {"weights": 40, "stash": 4}
        assert device.swapped_out_bytes == {"gradients": 16, "stash": 4}


def problem_of(plan: Plan, schedule: Schedule, packs: list[Cost]) -> str:
    with pytest.raises(PlanError) as refused:
        replay(plan, schedule, packs, FREE)
    return str(refused.value)


class TestRules:
    @pytest.mark.parametrize(
        ("before", "after", "problem"),
        [
            ("0SWAP_IN ", "0SWAP_IN 0SWAP_IN ", "0SWAP_IN on device 0: pack 0 is there already"),
            ("0SWAP_IN ", "", "0F0 on device 0: the weights of pack 0 are not there"),
            ("1EVICT", "1EVICT 1EVICT", "1EVICT on device 0: the weights of pack 1 are not there"),
            (" 0EVICT", "", "the end on device 0: the weights of pack 0 are still there"),
            ("1F0 1B0", "1F0 1EVICT 1SWAP_IN 1B0", "graphs that need the weights of pack 1 are kept"),
            ("0F0 0STASH_OUT0 1SWAP_IN 1F0", "1SWAP_IN 1F0 0F0 0STASH_OUT0", "microbatch 0 has to run 0F0 before"),
            (" 0STASH_IN0 0B0 0SWAP_OUT 0U", "", "the end on device 0: microbatch 0 never runs 0B0"),
            ("0STASH_OUT0 ", "", "the stash of pack 0 for microbatch 0 is on the device"),
            ("0STASH_OUT0", "0STASH_OUT0 0STASH_OUT0", "the stash of pack 0 for microbatch 0 is on the host"),
            ("0STASH_IN0 ", "", "0B0 on device 0: its stash is on the host"),
            ("1F0", "1F0 1STASH_OUT0", "pack 1 has no stash of microbatch 0"),
            ("1B0 1SWAP_OUT", "1SWAP_OUT 1B0", "1 backwards of pack 1 have not run"),
            ("1SWAP_OUT", "1SWAP_OUT 1SWAP_OUT", "the gradients of pack 1 are on the host already"),
            (" 0SWAP_OUT 0U", "", "the end on device 0: the gradients of pack 0 are never swapped out"),
            ("0SWAP_OUT 0U", "0U 0SWAP_OUT", "0U on device 0: the gradients of pack 0 are not on the host"),
            ("0U", "0U 0U", "pack 0 has been updated"),
            (" 0U", "", "the end on device 0: pack 0 is never updated"),
            ("0U", "0U 0B0", "microbatch 0 has come to its end"),
            ("0U", "0U 2SWAP_IN", "there is no pack 2"),
            ("0U", "0U 0F1", "there is no microbatch 1"),
            ("0U", "0U 0TRANSFER_F0", "microbatch 0 has come to its end"),
            ("1F0", "1TRANSFER_F0 1F0", "the tensors of microbatch 0 are there already"),
        ],
    )
    def test_what_breaks_one_is_refused_by_name(self, before: str, after: str, problem: str) -> None:
        assert before in TWO_TASKS
        assert problem in problem_of(TWO, grid(TWO_TASKS.replace(before, after, 1)), [PACK] * 2)

    def test_the_culprit_is_marked_in_the_grid(self) -> None:
        text = problem_of(TWO, grid(TWO_TASKS.replace("0STASH_IN0 ", "")), [PACK] * 2)
        assert text.splitlines()[1:] == [
            "device 0 | 0F0 0STASH_OUT0 1SWAP_IN 1F0 1B0 1SWAP_OUT 1U 1EVICT >0B0< 0SWAP_OUT 0U 0EVICT"
        ]

    def test_gradients_are_summed_in_the_order_of_the_microbatches(self) -> None:
        plan = chain(1, 1, 2)
        tasks = "0SWAP_IN 0F0 0F1 {} 0SWAP_OUT 0U 0EVICT"
        replay(plan, grid(tasks.format("0B0 0B1")), [PACK], FREE)
        assert "gradients of microbatch 0 are to be summed first" in problem_of(
            plan, grid(tasks.format("0B1 0B0")), [PACK]
        )
        # Without gradients there is no sum.
        frozen = replace(PACK, gradient_bytes=0)
        replay(plan, grid("0SWAP_IN 0F0 0F1 0B1 0B0 0EVICT"), [frozen], FREE)

    def test_work_is_done_where_the_plan_places_it(self) -> None:
        plan = chain(2, 1, 1, num_devices=2)
        problem = problem_of(plan, grid("0SWAP_IN 0F0 1SWAP_IN 1F0", ""), [PACK] * 2)
        assert "the plan places pack 1 for microbatch 0 on device 1" in problem

    def test_what_comes_from_another_device_is_transferred_once(self) -> None:
        plan = chain(2, 2, 1, num_devices=2)
        first, second = map(
            str, str(lower(plan, [PACK] * 2, DeviceLimits())).replace("device 0 |", "").split("device 1 |")
        )
        replay(plan, grid(first, second), [PACK] * 2, FREE)
        assert "its input is on device 0" in problem_of(
            plan, grid(first, second.replace("1TRANSFER_F0", "")), [PACK] * 2
        )
        twice = second.replace("1TRANSFER_F0", "1TRANSFER_F0 1TRANSFER_F0")
        assert "there already" in problem_of(plan, grid(first, twice), [PACK] * 2)
        problem = problem_of(plan, grid(first.replace("0TRANSFER_B0", ""), second), [PACK] * 2)
        assert "the gradient that it begins with is on device 1" in problem

    def test_gradients_of_all_devices_are_added_in_their_order(self) -> None:
        plan = chain(1, 1, 3, num_devices=3, parallel="data")
        first, *others = (" ".join(map(str, tasks)) for tasks in lower(plan, [PACK], DeviceLimits()).devices)
        assert "0REDUCE1 0REDUCE2" in first
        for after, problem in (
            ("0REDUCE2 0REDUCE1", "on device 2 are not what is to be added next"),
            ("0REDUCE1", "on other devices are not added"),
            ("0REDUCE1 0REDUCE2 0REDUCE2", "on device 2 are not what is to be added next"),
        ):
            changed = grid(first.replace("0REDUCE1 0REDUCE2", after), *others)
            assert problem in problem_of(plan, changed, [PACK])

    @pytest.mark.parametrize(
        ("before", "after", "problem"),
        [
            ("0GATHER0 0GATHER1", "0GATHER1 0GATHER0", "gradients of microbatch 0 are to be summed first"),
            ("0GATHER1 ", "", "0GATHER2 on device 0: gradients of microbatch 1 are to be summed first"),
            ("0GATHER2 ", "", "1 backwards of pack 0 have not run or been added"),
            ("0GATHER1", "0GATHER1 0GATHER1", "there are no gradients of pack 0 for microbatch 1 to be added"),
            ("0GATHER2 0SWAP_OUT 0U", "", "the gradients of pack 0 for microbatch 2 are never added"),
            ("0GATHER0", "0GATHER0 0PARK", "0GATHER1 on device 0: its gradients are parked on the host"),
            ("0GATHER1 0F2 0B2", "0F2 0B2 0GATHER1", ""),
            ("0GATHER0 0GATHER1 0F2 0B2", "0F2 0B2 0GATHER0 0GATHER1", "that it has made before are still to be added"),
        ],
    )
    def test_gradients_of_a_pack_that_is_spread_are_added_one_by_one_at_its_home(
        self, before: str, after: str, problem: str
    ) -> None:
        plan = chain(1, 0, 3, num_devices=2, spread=frozenset({0}))
        home, other = (" ".join(map(str, tasks)) for tasks in lower(plan, [PACK], DeviceLimits()).devices)
        assert before in home
        changed = grid(home.replace(before, after, 1), other)
        if problem:
            assert problem in problem_of(plan, changed, [PACK])
        else:
            replay(plan, changed, [PACK], FREE)
        elsewhere = grid(home.replace("0GATHER2 0SWAP_OUT 0U ", ""), f"{other} 0GATHER2")
        assert "the gradients of pack 0 leave from device 0" in problem_of(plan, elsewhere, [PACK])

    @pytest.mark.parametrize(
        ("before", "after", "problem"),
        [
            ("0UNPARK1 ", "", "0B1 on device 0: its gradients are parked on the host"),
            ("0PARK ", "0PARK 0PARK ", "0PARK on device 0: pack 0 has no gradients"),
            ("0PARK ", "", "no gradients of pack 0 are parked that microbatch 1 adds to"),
            ("0UNPARK1 0B1", "0B1 0UNPARK1", "its gradients are parked on the host"),
            ("0UNPARK1 0B1 0SWAP_OUT 0U", "", "the end on device 0: microbatch 1 never runs 0B1"),
            ("0SWAP_OUT 0U", "0PARK", "the end on device 0: the gradients of pack 0 are parked for ever"),
            ("0SWAP_OUT 0U", "0U 0SWAP_OUT", "0U on device 0: the gradients of pack 0 on device 0 are not on the host"),
            ("0SWAP_OUT 0U", "0SWAP_OUT 0U 0U", "pack 0 has been updated"),
        ],
    )
    def test_sums_that_make_way_come_back(self, before: str, after: str, problem: str) -> None:
        plan = chain(1, 1, 2, reuse="none", lookahead=0)
        tasks = "0SWAP_IN 0F0 0F1 0B0 0PARK 0UNPARK1 0B1 0SWAP_OUT 0U 0EVICT"
        (device,) = replay(plan, grid(tasks), [PACK], FREE).devices
        assert (device.swapped_in_bytes["gradients"], device.swapped_out_bytes["gradients"]) == (8, 16)
        assert before in tasks
        assert problem in problem_of(plan, grid(tasks.replace(before, after, 1)), [PACK])

    def test_no_update_begins_before_the_whole_backward_has_ended(self) -> None:
        plan = chain(2, 2, 1, reuse="visit", lookahead=0)
        (tasks,) = lower(plan, [PACK] * 2, DeviceLimits()).devices
        text = " ".join(map(str, tasks))
        replay(plan, grid(text), [PACK] * 2, FREE)
        early = text.replace(" 1U", "").replace("1SWAP_OUT", "1SWAP_OUT 1U")
        assert "1U on device 0: the backward of microbatch 0 has not ended" in problem_of(plan, grid(early), [PACK] * 2)

    def test_devices_that_share_microbatches_each_send_their_sums_where_nothing_is_done_just_in_time(self) -> None:
        plan = chain(1, 1, 2, num_devices=2, parallel="data", reuse="visit", lookahead=0)
        first, second = (" ".join(map(str, tasks)) for tasks in lower(plan, [PACK], DeviceLimits()).devices)
        devices = replay(plan, grid(first, second), [PACK], FREE).devices
        assert [device.swapped_out_bytes["gradients"] for device in devices] == [8, 8]
        problem = problem_of(plan, grid(first, second.replace(" 0SWAP_OUT", "")), [PACK])
        assert "the gradients of pack 0 on device 1 are not on the host" in problem

    def test_a_task_that_another_device_never_does_is_waited_for_in_vain(self) -> None:
        plan = chain(2, 1, 1, kept=frozenset({0}), num_devices=2)
        first, second = lower(plan, [PACK] * 2, DeviceLimits()).devices
        without = tuple(task for task in first if str(task) != "0F0")
        text = problem_of(plan, Schedule((without, second)), [PACK] * 2)
        assert "1TRANSFER_F0 on device 1: microbatch 0 has to run 0F0 before" in text
        assert ">1TRANSFER_F0<" in text

    def test_a_schedule_for_another_number_of_devices_is_refused(self) -> None:
        assert "the plan is for 1 devices" in problem_of(TWO, grid("", ""), [PACK] * 2)


class TestMutations:
    @given(plans(), machines, st.data())
    def test_what_is_dropped_is_missed(self, planned: Planned, machine: DeviceLimits, data: st.DataObject) -> None:
        plan, packs, schedule = accepted(planned, machine)
        device, place = data.draw(places(schedule))
        tasks = schedule.devices[device]
        mutant = changed(schedule, device, (*tasks[:place], *tasks[place + 1 :]))
        if tasks[place].kind is Errand.PARK:
            # Sums that nothing is in the way of may as well stay.
            refused_or_harmless(plan, packs, schedule, mutant, machine)
        else:
            refused(plan, packs, mutant, machine)

    @given(plans(), machines, st.data())
    def test_what_is_repeated_is_noticed(self, planned: Planned, machine: DeviceLimits, data: st.DataObject) -> None:
        plan, packs, schedule = accepted(planned, machine)
        device, place = data.draw(places(schedule))
        tasks = schedule.devices[device]
        again = data.draw(st.integers(place, len(tasks)))
        mutant = changed(schedule, device, (*tasks[:again], tasks[place], *tasks[again:]))
        refused_or_harmless(plan, packs, schedule, mutant, machine)

    @given(plans(), machines, st.data())
    def test_what_is_exchanged_is_noticed_or_harmless(
        self, planned: Planned, machine: DeviceLimits, data: st.DataObject
    ) -> None:
        plan, packs, schedule = accepted(planned, machine)
        device, place = data.draw(places(schedule))
        _, other = data.draw(places(schedule, device))
        tasks = list(schedule.devices[device])
        tasks[place], tasks[other] = tasks[other], tasks[place]
        refused_or_harmless(plan, packs, schedule, changed(schedule, device, tuple(tasks)), machine)


def accepted(planned: Planned, machine: DeviceLimits) -> tuple[Plan, tuple[Cost, ...], Schedule]:
    plan, packs = planned
    schedule = lower(plan, packs, machine)
    assume(any(schedule.devices))
    try:
        replay(plan, schedule, packs, machine)
    except PlanError:
        assume(False)
    return plan, packs, schedule


def places(schedule: Schedule, device: int | None = None) -> st.SearchStrategy[tuple[int, int]]:
    found = [
        (d, place) for d, tasks in enumerate(schedule.devices) for place in range(len(tasks)) if device in (None, d)
    ]
    return st.sampled_from(found)


def changed(schedule: Schedule, device: int, tasks: tuple[Task, ...]) -> Schedule:
    return Schedule(tuple(tasks if d == device else others for d, others in enumerate(schedule.devices)))


def refused(plan: Plan, packs: tuple[Cost, ...], mutant: Schedule, machine: DeviceLimits) -> None:
    with pytest.raises(PlanError, match=r" \| "):
        replay(plan, mutant, packs, machine)


def refused_or_harmless(
    plan: Plan, packs: tuple[Cost, ...], schedule: Schedule, mutant: Schedule, machine: DeviceLimits
) -> None:
    """A mutant that passes computes the same, and keeps within the capacity."""
    expected = compute(plan, packs, schedule)
    try:
        result = replay(plan, mutant, packs, machine)
    except PlanError:
        return
    assert compute(plan, packs, mutant) == expected
    assert machine.capacity_bytes is None or max(result.peak_bytes) <= machine.capacity_bytes


class TestProperties:
    @given(plans(), machines)
    def test_without_a_limit_what_lowering_emits_is_accepted(self, planned: Planned, machine: DeviceLimits) -> None:
        plan, packs = planned
        schedule = lower(plan, packs, DeviceLimits())
        result = replay(plan, schedule, packs, replace(machine, capacity_bytes=None))
        for device, tasks in zip(result.devices, schedule.devices, strict=True):
            others = [span.task for span in device.spans if span.task.kind is not Errand.UPDATE]
            assert others == [t for t in tasks if t.kind not in (Errand.EVICT, Errand.UPDATE)]
            # They take place in the order in which the next forward needs them.
            assert {span.task for span in device.spans} == {t for t in tasks if t.kind is not Errand.EVICT}
            assert result.seconds >= device.compute_seconds
            assert not device.memory or device.memory[-1][1] == 0
            assert all(num_bytes >= 0 for _, num_bytes in device.memory)

    @given(plans(), machines)
    def test_the_capacity_is_never_exceeded(self, planned: Planned, machine: DeviceLimits) -> None:
        plan, packs, schedule = accepted(planned, machine)
        result = replay(plan, schedule, packs, machine)
        assert machine.capacity_bytes is None or max(result.peak_bytes) <= machine.capacity_bytes

    @given(plans(), machines)
    def test_a_stream_does_one_task_at_a_time(self, planned: Planned, machine: DeviceLimits) -> None:
        plan, packs, schedule = accepted(planned, machine)
        result = replay(plan, schedule, packs, machine)
        by_stream: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        for number, device in enumerate(result.devices):
            for span in device.spans:
                by_stream[number, span.stream].append((span.start_seconds, span.end_seconds))
        for times in by_stream.values():
            times.sort()
            assert all(end <= start for (_, end), (start, _) in pairwise(times))

    @given(plans(), machines)
    def test_faster_copies_never_make_an_unlimited_step_slower(self, planned: Planned, machine: DeviceLimits) -> None:
        plan, packs = planned
        schedule = lower(plan, packs, DeviceLimits())
        slow = replay(plan, schedule, packs, replace(machine, capacity_bytes=None))
        assert replay(plan, schedule, packs, DeviceLimits()).seconds <= slow.seconds

    @given(plans(), machines)
    def test_what_passes_computes(self, planned: Planned, machine: DeviceLimits) -> None:
        plan, packs, schedule = accepted(planned, machine)
        try:
            updated = compute(plan, packs, schedule)
        except CannotRun as error:
            pytest.fail(str(error))
        assert updated.keys() == {pack for pack in plan.visits if packs[pack].gradient_bytes}


class TestPredict:
    def test_a_prediction_rests_on_the_profile_of_the_plan(self) -> None:
        layers = tuple(replace(PACK, name=f"layer {index}") for index in range(2))
        plan = replace(TWO, profile=Profile(layers, DeviceLimits(60, 1.0, 1.0)))
        assert predict(plan).peak_bytes[0] <= 60
        assert predict(plan, FREE).seconds == 5
        with pytest.raises(PlanError, match="does not say what its layers cost"):
            predict(TWO)

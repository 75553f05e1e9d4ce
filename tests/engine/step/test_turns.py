"""Which lane goes on, told on lanes that never run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_harmony.engine.step.turns import LaneProgress, Request, Turns
from lightning_harmony.plan.values.plan import Parallel, Plan
from lightning_harmony.plan.values.task import Phase

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
# A request: the phase, the pack, and the position.
Asked = tuple[Phase, int | None, int] | None


def lanes(requests: Sequence[Asked], **state: Any) -> list[LaneProgress]:
    running = []
    for number, asked in enumerate(requests):
        lane: Any = SimpleNamespace(microbatch=number, finished=False, request=asked and Request(*asked))
        nothing: Any = None
        running.append(LaneProgress(lane, nothing, [], nothing, None, **state))
    return running


def turns(running: list[LaneProgress], devices: int = 1, parallel: Parallel = "pipeline", **options: Any) -> Turns:
    plan = Plan((("a",), ("b",), ("c",), ("d",)), (0, 1, 2, 3), 3, num_devices=devices, parallel=parallel)
    plan = replace(plan, reuse=options.pop("reuse", "just-in-time"), spread=options.pop("spread", frozenset()))
    return Turns(running, plan, options.pop("having_buffers", ()), fuses=options.pop("fuses", False))


def chosen(of: Turns, until: Phase = BACKWARD, previous: LaneProgress | None = None) -> int | None:
    progress = of.next(until, previous)
    return None if progress is None else progress.lane.microbatch


class TestOneDevice:
    @pytest.mark.parametrize(
        ("requests", "expected"),
        [
            ([(FORWARD, 1, 1), (FORWARD, 0, 0), None], 2),
            ([(FORWARD, 1, 1), (FORWARD, 0, 0), (FORWARD, 0, 0)], 1),
            ([(BACKWARD, 3, 0), (FORWARD, 2, 2)], 1),
            ([(BACKWARD, 2, 1), (BACKWARD, 3, 0)], 1),
            ([(BACKWARD, 2, 1), (BACKWARD, None, 0)], 1),
            ([(BACKWARD, None, 0), (BACKWARD, 3, 0)], 1),
        ],
        ids=[
            "a start first",
            "behind first",
            "forward first",
            "as planned",
            "a loss",
            "what the last one's gradient is for",
        ],
    )
    def test_lanes_behind_catch_up(self, requests: list[Asked], expected: int) -> None:
        assert chosen(turns(lanes(requests, differentiating=True))) == expected

    def test_without_grouping_each_goes_through_all_packs_before_the_next(self) -> None:
        running = lanes([(FORWARD, 2, 2), (FORWARD, 0, 0), None], differentiating=True)
        of = turns(running, reuse="none")
        assert chosen(of) == 0
        running[0].lane.request = Request(BACKWARD, 0, 3)
        assert chosen(of) == 0
        running[0].lane.finished = True
        assert chosen(of) == 1

    def test_a_lane_that_has_ended_has_no_turn(self) -> None:
        running = lanes([None, (FORWARD, 1, 1)])
        running[0].lane.finished = True
        assert chosen(turns(running)) == 1
        running[1].lane.finished = True
        assert chosen(turns(running)) is None

    def test_until_all_losses_are_there_no_backward_begins(self) -> None:
        running = lanes([(BACKWARD, None, 0), (BACKWARD, None, 0)])
        assert chosen(turns(running), until=FORWARD) is None

    def test_a_gradient_that_the_step_itself_asks_for_belongs_to_the_forward(self) -> None:
        assert chosen(turns(lanes([(BACKWARD, 2, 1)])), until=FORWARD) == 0

    def test_sums_are_made_in_the_order_of_microbatches(self) -> None:
        running = lanes([(BACKWARD, 3, 0), (BACKWARD, 2, 1)], differentiating=True)
        of = turns(running)
        running[0].pending[2] = running[1].pending[2] = 1
        assert of.is_overtaking(running[1], 2)
        assert not of.is_overtaking(running[0], 2)
        assert of.expects_backward(2)
        running[0].lane.finished = True
        assert chosen(of) == 1

    def test_fused_packs_are_entered_one_after_the_other(self) -> None:
        running = lanes([(FORWARD, 2, 2), (FORWARD, 3, 3)])
        of = turns(running, fuses=True)
        assert chosen(of) == 0
        running[0].lane.finished = True
        assert chosen(of) == 1
        assert not of.have_come_to_their_losses()


class TestSeveralDevices:
    def test_the_device_that_is_free_soonest_goes_on(self) -> None:
        running = lanes([(FORWARD, 0, 0), (FORWARD, 1, 1)])
        of = turns(running, 2)
        of.take(running[0], 0)
        assert [of.device_of(progress) for progress in running] == [0, 1]
        assert chosen(of) == 1

    def test_a_lane_goes_on_without_parking_where_its_device_is_its_own(self) -> None:
        running = lanes([(FORWARD, 0, 0), (FORWARD, 1, 1)])
        assert chosen(turns(running, 2), previous=running[1]) == 1
        running = lanes([(FORWARD, 0, 0), (FORWARD, 2, 2)])
        assert chosen(turns(running, 2), previous=running[1]) == 0

    def test_the_backward_of_a_loss_is_where_the_last_pack_is(self) -> None:
        running = lanes([(BACKWARD, None, 0), (BACKWARD, 2, 1), None])
        assert [turns(running, 2).device_of(progress) for progress in running] == [1, 0, 0]

    def test_lanes_come_to_a_spread_pack_side_by_side_and_in_their_order(self) -> None:
        running = lanes([(FORWARD, 3, 3), (FORWARD, 3, 3), (FORWARD, 2, 2)])
        of = turns(running, 2, fuses=True, spread=frozenset({3}))
        assert [of.device_of(progress) for progress in running] == [1, 0, 0]
        # The second one's device is free sooner, but sums are made in the order of microbatches.
        of.take(running[0], 1)
        assert chosen(of) == 2
        running[2].lane.finished = True
        assert chosen(of) == 0
        running[0].lane.finished = True
        assert chosen(of) == 1

    def test_no_lane_goes_on_alone_before_all_have_begun(self) -> None:
        """Lanes that share the microbatches begin together: what one brings to its device is for all of them there."""
        running = lanes([(FORWARD, 0, 0), (FORWARD, 0, 0), None, None])
        of = turns(running, 2, "data")
        of.take(running[0], 0)
        assert chosen(of, previous=running[1]) == 2
        running[2].lane.request = running[3].lane.request = Request(FORWARD, 0, 0)
        assert chosen(of, previous=running[3]) == 1

    def test_without_grouping_devices_still_work_side_by_side(self) -> None:
        running = lanes([(FORWARD, 1, 1), (FORWARD, 0, 0), (FORWARD, 0, 0)])
        of = turns(running, 2, "data", reuse="none")
        of.take(running[0], 0)
        assert chosen(of, previous=running[0]) == 1
        of.take(running[1], 1)
        # Of those that come to the same device, the one before.
        assert chosen(of) == 0

    @pytest.mark.parametrize("parallel", ["pipeline", "data"])
    def test_buffers_change_in_the_order_of_microbatches(self, parallel: Parallel) -> None:
        """Also where the later one's device is free sooner, and both are at the same place."""
        running = lanes([(FORWARD, 1, 1), (FORWARD, 1, 1)])
        of = turns(running, 2, parallel, having_buffers={1})
        of.take(running[0], of.device_of(running[0]))
        assert chosen(of) == 0
        running[0].lane.request = Request(FORWARD, 2, 2)
        assert chosen(of) == 1

    @pytest.mark.parametrize("parallel", ["pipeline", "data"])
    def test_the_code_behind_the_last_layer_runs_in_the_order_of_microbatches(self, parallel: Parallel) -> None:
        """It appends losses to lists: those were in the order in which devices came to an end."""
        running = lanes([(FORWARD, 2, 2), (FORWARD, 3, 3), (FORWARD, 3, 3)])
        of = turns(running, 2, parallel)
        of.take(running[0], of.device_of(running[0]))
        assert chosen(of) == 0
        running[0].lane.request = Request(FORWARD, 3, 3)
        assert chosen(of) == 0
        running[0].lane.request = Request(BACKWARD, None)
        assert chosen(of, until=FORWARD) == 1

    def test_without_buffers_they_do_not_wait_for_each_other(self) -> None:
        running = lanes([(FORWARD, 1, 1), (FORWARD, 1, 1)])
        of = turns(running, 2, "data")
        of.take(running[0], 0)
        assert chosen(of) == 1

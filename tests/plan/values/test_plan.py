"""What follows from the order in which a step visits its packs."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan, Predicted, fingerprint, merge_calls, visits_of
from lightning_harmony.plan.values.profile import DeviceLimits, Profile
from lightning_harmony.plan.values.task import Phase
from support.plans import full_plans

# Packs 0 1 2 0 3: the first is visited twice.
TWICE = Plan((("embed",), ("block.0", "block.1"), ("block.2",), ("head",)), (0, 1, 2, 0, 3), 4)
NUM_PACKS = 4
visits_lists = st.lists(st.integers(0, NUM_PACKS - 1), min_size=1, max_size=8).map(visits_of)
call_lists = st.lists(st.integers(0, 5), max_size=8)


def order(plan: Plan, phase: Phase) -> tuple[int, ...]:
    """The visits of one phase."""
    return plan.visits if phase is Phase.FORWARD else plan.visits[::-1]


def plan_of(visits: tuple[int, ...]) -> Plan:
    return Plan(tuple((f"layer {index}",) for index in range(NUM_PACKS)), visits, len(visits) - 1)


class TestText:
    def test_a_plan_prints_its_packs_and_visits(self) -> None:
        expected = """\
pack 0: embed
pack 1: block.0, block.1
pack 2: block.2
pack 3: head
visits: 0 1 2 0 [3]"""
        assert str(TWICE) == expected

    def test_the_text_names_the_packs_that_keep_their_graphs(self) -> None:
        plan = Plan((("one",), ("two",), ("three",)), (0, 1, 2), 2, frozenset({1, 0}))
        assert str(plan).splitlines()[-2:] == ["visits: 0 1 [2]", "keep their graphs: 0 1"]

    def test_the_text_joins_what_a_turn_of_the_forward_takes(self) -> None:
        plan = replace(TWICE, joined=frozenset({1, 3}))
        assert str(plan).splitlines()[-1] == "visits: 0+1 2+0 [3]"

    def test_the_text_tells_what_the_plan_was_made_for_and_what_was_predicted(self) -> None:
        predicted = Predicted(1.2345, (2**30, 2**29))
        plan = Plan((("one",),), (0,), 0, num_microbatches=8, num_devices=2, parallel="data", predicted=predicted)
        expected = ["data on 2 devices", "microbatches: 8", "predicted: 1.23 s, at most 1 GiB, 512 MiB"]
        assert str(plan).splitlines()[-3:] == expected

    def test_the_text_names_the_packs_that_are_spread(self) -> None:
        plan = Plan((("one",), ("two",)), (0, 1), 1, spread=frozenset({1, 0}), num_devices=2)
        assert str(plan).splitlines()[-2:] == ["pipeline on 2 devices", "spread over all devices: 0 1"]

    def test_the_text_says_what_the_plan_does_without(self) -> None:
        plan = Plan((("one",),), (0,), 1, reuse="visit", lookahead=0)
        assert str(plan).splitlines()[1:] == ["visits: 0 []", "reuse: visit", "packs fetched ahead: 0"]


def test_turns_of_the_forward_are_runs_of_visits() -> None:
    plan = Plan(tuple((name,) for name in "abcde"), (0, 1, 2, 3, 4), 4, joined=frozenset({1, 2}))
    assert plan.forward_turns == (range(0, 3), range(3, 4))
    assert [plan.packs_of_turn(position) for position in range(5)] == [{0, 1, 2}] * 3 + [{3}, set()]
    assert replace(plan, joined=frozenset()).forward_turns == tuple(range(place, place + 1) for place in range(4))
    assert Plan((), (), 0).forward_turns == ()


FULL = Plan(
    (("one", "two"), ("three",)),
    (0, 1),
    1,
    frozenset({0}),
    num_microbatches=4,
    fingerprint="abc",
    profile=Profile((Cost("one", 1, 2, forward_seconds=0.5),), DeviceLimits(100, 1e9)),
    predicted=Predicted(1.5, (99,)),
)


def test_what_is_stashed_is_told_of_visits_that_keep_no_graph() -> None:
    costs = tuple(Cost(name, 1, 1, stash_bytes=number) for number, name in enumerate("abcd", 1))
    plan = Plan((("a",), ("b",), ("c", "d")), (0, 1, 2, 0), 3, kept=frozenset({1}), num_microbatches=2)
    assert plan.stash_bytes == 0
    assert replace(plan, profile=Profile(costs)).stash_bytes == 2 * (1 + 3 + 4)


class TestJson:
    @given(plan=full_plans())
    def test_reads_what_was_written(self, plan: Plan) -> None:
        assert Plan.from_json(plan.to_json()) == plan

    @pytest.mark.parametrize(
        ("before", "after", "problem"),
        [
            ("{", "", "not JSON"),
            ('"lightning-harmony plan"', '"something"', 'no "format"'),
            ('"version": 11', '"version": 12', "version 12, but this release reads version 11"),
            ('"visits"', '"order"', "plan: Object missing required field `visits`"),
            ('"first_fused": 1', '"first_fused": 1, "colour": 1', "plan has 'colour', which is not known"),
            ('"first_fused": 1', '"first_fused": "1"', "plan.first_fused: Expected `int`, got `str`"),
            ('"first_fused": 1', '"first_fused": true', "plan.first_fused: Expected `int`, got `bool`"),
            ('"kept": [\n  0', '"kept": [\n  "0"', r"plan.kept\[0\]: Expected `int`, got `str`"),
            ('"pipeline"', '"sideways"', "plan.parallel: Invalid enum value 'sideways'"),
            (
                '"forward_seconds": 0.5',
                '"forward_seconds": null',
                r"layers\[0\].forward_seconds: Expected `float`",
            ),
            ('"predicted": {', '"predicted": 3, "other": {', "plan"),
        ],
    )
    def test_what_is_not_a_plan_is_refused_with_the_place(self, before: str, after: str, problem: str) -> None:
        text = FULL.to_json()
        assert before in text
        with pytest.raises(PlanError, match=problem):
            Plan.from_json(text.replace(before, after, 1))

    @pytest.mark.parametrize("text", ["", "[]", "null", "3", "\x00"])
    def test_other_text_is_refused(self, text: str) -> None:
        with pytest.raises(PlanError, match="this is not a plan"):
            Plan.from_json(text)

    def test_whole_numbers_of_seconds_are_read_as_numbers(self) -> None:
        plan = Plan.from_json(FULL.to_json().replace('"seconds": 1.5', '"seconds": 2'))
        assert plan.predicted == Predicted(2.0, (99,))


class TestPlacement:
    def test_without_grouping_each_device_has_a_stage(self) -> None:
        plan = replace(plan_of((0, 1, 2, 3)), num_devices=2, reuse="none")
        assert [plan.device_of(pack, 5) for pack in range(4)] == [0, 0, 1, 1]
        # A pack that the plan doesn't know.
        assert plan.device_of(7, 0) == 1
        assert [plan.runs_on(2, device) for device in range(2)] == [False, True]

    @pytest.mark.parametrize(("parallel", "expected"), [("pipeline", [0, 1, 2, 0, 1]), ("data", [1, 1, 1, 1, 1])])
    def test_packs_or_microbatches_go_round_the_devices(
        self, parallel: Literal["pipeline", "data"], expected: Any
    ) -> None:
        plan = Plan((), (), 0, num_devices=3, parallel=parallel)
        assert [plan.device_of(pack, 4) for pack in range(5)] == expected

    def test_microbatches_of_a_pack_that_is_spread_go_round_from_its_home(self) -> None:
        plan = replace(plan_of((0, 1, 2, 3)), num_devices=3, spread=frozenset({1}))
        assert [[plan.device_of(pack, microbatch) for microbatch in range(4)] for pack in (1, 2)] == [
            [1, 2, 0, 1],
            [2, 2, 2, 2],
        ]
        assert [[plan.runs_on(pack, device) for device in range(3)] for pack in (1, 2)] == [
            [True, True, True],
            [False, False, True],
        ]

    def test_graphs_are_kept_by_fused_and_kept_packs(self) -> None:
        assert [FULL.keeps_graph(position) for position in range(2)] == [True, True]
        assert [TWICE.keeps_graph(position) for position in range(5)] == [False, False, False, False, True]


class TestFingerprint:
    def test_tells_names_and_shapes_apart(self) -> None:
        models = [
            [("one", [(2, 3), (3,)]), ("two", [(3,)])],
            [("one", [(2, 3), (3,)]), ("three", [(3,)])],
            [("one", [(3, 2), (3,)]), ("two", [(3,)])],
            [("one", [(2, 3)]), ("two", [(3,), (3,)])],
            [("two", [(3,)]), ("one", [(2, 3), (3,)])],
        ]
        assert len({fingerprint(model) for model in models}) == len(models)
        assert fingerprint(models[0]) == fingerprint([("one", [[2, 3], [3]]), ("two", [[3]])])


class TestPosition:
    @given(visits=visits_lists, phase=st.sampled_from(Phase), data=st.data())
    def test_is_the_next_place_of_the_pack(self, visits: tuple[int, ...], phase: Phase, data: st.DataObject) -> None:
        plan = plan_of(visits)
        place = data.draw(st.integers(0, len(visits) - 1))
        start = data.draw(st.integers(0, place))
        pack = order(plan, phase)[place]
        found = plan.position(phase, pack, start)
        assert start <= found <= place
        assert order(plan, phase)[found] == pack
        assert pack not in order(plan, phase)[start:found]

    def test_of_a_second_visit_is_behind_the_first(self) -> None:
        assert TWICE.position(Phase.FORWARD, 0, 0) == 0
        assert TWICE.position(Phase.FORWARD, 0, 1) == 3

    def test_backward_counts_from_the_end(self) -> None:
        assert TWICE.position(Phase.BACKWARD, 3, 0) == 0
        assert TWICE.position(Phase.BACKWARD, 1, 0) == 3

    @pytest.mark.parametrize("start", [0, 2, 4])
    def test_of_a_pack_that_was_not_expected_is_where_the_lane_stands(self, start: int) -> None:
        assert Plan((), (0, 1, 0, 1, 0), 4).position(Phase.FORWARD, 7, start) == start

    def test_the_fused_visits_are_those_where_the_forward_ends(self) -> None:
        assert TWICE.fused_visits == (3,)
        assert TWICE.fused == {3}
        assert Plan((), (), 0).fused == set()


class TestUpcoming:
    def test_goes_to_the_end_of_the_step(self) -> None:
        assert list(TWICE.upcoming(Phase.FORWARD, 2)) == [0, 3, 3, 0, 2, 1, 0]
        assert list(TWICE.upcoming(Phase.BACKWARD, 2)) == [1, 0]

    def test_is_empty_at_the_end(self) -> None:
        assert list(TWICE.upcoming(Phase.BACKWARD, 4)) == []

    @given(visits=visits_lists, data=st.data())
    def test_each_step_takes_one_visit_off_the_front(self, visits: tuple[int, ...], data: st.DataObject) -> None:
        plan = plan_of(visits)
        position = data.draw(st.integers(0, len(visits) - 1))
        for phase in Phase:
            following = order(plan, phase)[position]
            before = list(plan.upcoming(phase, position - 1))
            assert before == [following, *plan.upcoming(phase, position)]


class TestNeededLast:
    @given(visits=visits_lists, phase=st.sampled_from(Phase), data=st.data())
    def test_no_other_choice_is_needed_later(self, visits: tuple[int, ...], phase: Phase, data: st.DataObject) -> None:
        plan = plan_of(visits)
        position = data.draw(st.integers(0, len(visits) - 1))
        packs = data.draw(st.lists(st.integers(0, NUM_PACKS - 1), min_size=1, unique=True))
        rest = [*visits, *reversed(visits)][position + (len(visits) if phase is Phase.BACKWARD else 0) + 1 :]

        def next_use(pack: int) -> int:
            return rest.index(pack) if pack in rest else len(rest)

        chosen = plan.needed_last(packs, phase, position)
        assert chosen in packs
        assert next_use(chosen) == max(map(next_use, packs))

    def test_a_pack_is_over_with_its_last_backward(self) -> None:
        plan = plan_of((0, 1, 0, 2))
        backward = order(plan, Phase.BACKWARD)
        assert [plan.is_over(0, Phase.BACKWARD, place) for place in range(len(backward))] == [False, False, False, True]
        assert not any(plan.is_over(pack, Phase.FORWARD, 3) for pack in plan.visits)
        assert plan.is_over(2, Phase.BACKWARD, 0)

    @given(visits=visits_lists, slots=st.integers(1, 3))
    def test_evicting_it_swaps_in_as_seldom_as_any_choice_could(self, visits: tuple[int, ...], slots: int) -> None:
        plan = plan_of(visits)
        step = [(phase, place, pack) for phase in Phase for place, pack in enumerate(order(plan, phase))]

        resident: list[int] = []
        num_swaps = 0
        for phase, place, pack in step:
            if pack not in resident:
                num_swaps += 1
                if len(resident) == slots:
                    resident.remove(plan.needed_last(resident, phase, place))
                resident.append(pack)

        assert num_swaps == fewest_swaps([pack for _, _, pack in step], slots)


def fewest_swaps(order: list[int], slots: int) -> int:
    """Brute force: every choice of what to evict, kept as the cheapest way to each set of residents."""
    ways: dict[frozenset[int], int] = {frozenset(): 0}
    for pack in order:
        following: dict[frozenset[int], int] = {}
        for resident, swaps in ways.items():
            if pack in resident:
                choices, cost = [resident], swaps
            elif len(resident) < slots:
                choices, cost = [resident | {pack}], swaps + 1
            else:
                choices, cost = [resident - {evicted} | {pack} for evicted in resident], swaps + 1
            for choice in choices:
                following[choice] = min(cost, following.get(choice, cost))
        ways = following
    return min(ways.values())


class TestVisitsOf:
    @given(calls=call_lists)
    def test_no_visit_follows_another_of_the_same_pack(self, calls: list[int]) -> None:
        assert all(first != second for first, second in pairwise(visits_of(calls)))

    @given(visits=visits_lists, data=st.data())
    def test_consecutive_calls_are_one_visit(self, visits: tuple[int, ...], data: st.DataObject) -> None:
        calls = [pack for pack in visits for _ in range(data.draw(st.integers(1, 3)))]
        assert visits_of(calls) == visits


class TestMergeCalls:
    @given(records=st.lists(call_lists, max_size=4))
    def test_holds_every_call_and_keeps_the_order_of_the_first_record(self, records: list[list[int]]) -> None:
        merged = merge_calls(records)
        assert set(merged) == {call for record in records for call in record}
        remaining = iter(merged)
        assert all(call in remaining for call in (records[0] if records else []))

    @given(calls=call_lists, num_records=st.integers(1, 4))
    def test_of_equal_records_is_that_record(self, calls: list[int], num_records: int) -> None:
        assert merge_calls([calls] * num_records) == calls

    def test_what_only_others_called_comes_behind_its_predecessor(self) -> None:
        assert merge_calls([[0, 1, 3], [0, 1, 2, 3]]) == [0, 1, 2, 3]
        assert merge_calls([[1, 2], [0, 1, 2]]) == [0, 1, 2]
        assert merge_calls([[], [4, 5]]) == [4, 5]

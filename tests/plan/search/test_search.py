"""The search for the fastest plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, count
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.search import search as module
from lightning_harmony.plan.search.bound import least_seconds
from lightning_harmony.plan.search.graphs import fusable_from, kept
from lightning_harmony.plan.search.packing import has_room
from lightning_harmony.plan.search.search import (
    ALL_LAYERS,
    CLEAR_SHARE,
    MOST_TASKS,
    SHORT_SECONDS,
    SPARE_SHARE,
    SPREAD_SHARE,
    TURN_SECONDS,
    Space,
    search_better,
)
from lightning_harmony.plan.simulate.replay import predict, with_prediction
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Parallel, Plan, Predicted, visits_of
from lightning_harmony.plan.values.profile import DeviceLimits, Profile
from support.plans import LAYER, costs, machines, plans, speeds
from support.sampling import IS_WHOLE

SPEEDS = ("swap_in_bytes_per_second", "swap_out_bytes_per_second", "update_bytes_per_second")


@pytest.fixture(autouse=True)
def no_search() -> None:
    """Here it is what is tested."""


@st.composite
def profiles(draw: st.DrawFn, most_layers: int = 5) -> Profile:
    number = draw(st.integers(1, most_layers))
    layers = tuple(draw(costs(f"layer {index}")) for index in range(number))
    return Profile(layers, draw(machines))


def chain(num_layers: int, machine: DeviceLimits, **cost: float) -> Profile:
    return Profile(tuple(replace(LAYER, name=f"layer {i}", **cost) for i in range(num_layers)), machine)  # type: ignore[arg-type]


def every_plan(profile: Profile, calls: Sequence[int], num_microbatches: int) -> Iterator[Plan]:
    """All that is claimed to be searched on one device, told apart from how it is searched."""
    order = list(dict.fromkeys(calls))
    layers, capacity = profile.layers, profile.machine.capacity_bytes
    for number in range(len(order)):
        for inner in combinations(range(1, len(order)), number):
            cut = [order[a:b] for a, b in zip((0, *inner), (*inner, len(order)), strict=True)]
            if any(len(pack) > 1 and not has_room([layers[i] for i in pack], capacity) for pack in cut):
                continue
            pack_of = {layer: pack for pack, members in enumerate(cut) for layer in members}
            visits = visits_of([pack_of[call] for call in calls])
            names = tuple(tuple(layers[i].name for i in pack) for pack in cut)
            packs = profile.pack_costs(names)
            for first in (len(visits), *fusable_from(visits, packs, capacity, may_be=True)):
                keeping = kept(visits, first, packs, num_microbatches, capacity)
                for size in range(len(keeping) + 1):
                    plan = Plan(names, visits, first, frozenset(keeping[:size]), profile=profile)
                    yield replace(plan, num_microbatches=num_microbatches)


def with_every_forward(plan: Plan) -> Iterator[Plan]:
    """The plan with each of the packs of the forward that are claimed to be searched."""
    end = plan.first_fused
    for length in range(1, end + 1):
        starts = {0, *range(end, 0, -length)}
        yield replace(plan, joined=frozenset(range(end)) - starts)
    yield replace(plan, joined=frozenset())


def with_head(profile: Profile, seconds: float) -> Profile:
    """The profile, the last layer of which takes longer."""
    head = replace(profile.layers[-1], name="layer head", forward_seconds=seconds, backward_seconds=2 * seconds)
    return replace(profile, layers=(*profile.layers[:-1], head))


def seconds_of(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.seconds


def search_if_any(
    profile: Profile,
    calls: Sequence[int],
    num_microbatches: int,
    *,
    num_devices: int = 1,
    parallel: Parallel = "pipeline",
    most_tasks: float = MOST_TASKS,
) -> Plan | None:
    """The best of all that is searched, however little it gains; None if none fits."""
    return Space(profile, calls, num_microbatches, num_devices, parallel).best(most_tasks, inf, 0.0)


def search(profile: Profile, calls: Sequence[int], num_microbatches: int, **options: Any) -> Plan:
    found = search_if_any(profile, calls, num_microbatches, **options)
    assert found is not None
    return found


def found_seconds(profile: Profile, calls: Sequence[int], num_microbatches: int, **options: Any) -> float:
    found = search_if_any(profile, calls, num_microbatches, most_tasks=inf, **options)
    return inf if found is None else seconds_of(found)


def replayed_seconds(plan: Plan) -> float:
    try:
        return predict(plan).seconds
    except PlanError:
        return inf


class TestBruteForce:
    @given(profiles(), st.integers(1, 3), st.data())
    @settings(max_examples=60, deadline=None)
    def test_no_plan_is_faster(self, profile: Profile, num_microbatches: int, data: st.DataObject) -> None:
        calls: Sequence[int] = range(len(profile.layers))
        if data.draw(st.booleans()):
            calls = data.draw(st.lists(st.sampled_from(calls), min_size=1, max_size=6))
        self.check(profile, calls, num_microbatches)

    def test_no_plan_of_eight_layers_is_faster(self) -> None:
        layers = tuple(
            replace(LAYER, name=f"layer {i}", gradient_bytes=40 + i * 37 % 100, forward_seconds=float(1 + i % 3))
            for i in range(ALL_LAYERS)
        )
        self.check(Profile(layers, DeviceLimits(900, 50.0, 50.0, None, 30.0)), range(8), 2)

    def check(self, profile: Profile, calls: Sequence[int], num_microbatches: int) -> None:
        fastest = min(map(replayed_seconds, every_plan(profile, calls, num_microbatches)))
        plan = search_if_any(profile, calls, num_microbatches, most_tasks=inf)
        if plan is None:
            assert fastest == inf
            return
        assert replayed_seconds(replace(plan, joined=frozenset())) == fastest
        assert seconds_of(plan) == min(map(replayed_seconds, with_every_forward(plan)))

    @given(profiles(4), st.integers(1, 3), st.integers(2, 3), st.sampled_from(["pipeline", "data"]))
    @settings(max_examples=30, deadline=None)
    def test_plans_for_several_devices_can_be_run(
        self, profile: Profile, num_microbatches: int, num_devices: int, parallel: Parallel
    ) -> None:
        calls = range(len(profile.layers))
        plan = search_if_any(profile, calls, num_microbatches, num_devices=num_devices, parallel=parallel)
        if plan is None:
            return
        assert (plan.num_devices, plan.parallel) == (num_devices, parallel)
        assert predict(plan).seconds == seconds_of(plan)


class TestLeastSeconds:
    @pytest.mark.nightly
    @given(plans(), machines)
    @settings(max_examples=300)
    def test_no_replay_takes_less(self, planned: tuple[Plan, tuple[Cost, ...]], machine: DeviceLimits) -> None:
        plan, packs = planned
        layers = tuple(replace(cost, name=name) for cost, (name,) in zip(packs, plan.packs, strict=True))
        plan = replace(plan, profile=Profile(layers, machine))
        assert least_seconds(plan, packs, machine) <= replayed_seconds(plan) * (1 + 1e-9)

    def test_counts_what_each_device_has_where_these_are_stages(self) -> None:
        """Packs go round the devices, but not where each microbatch goes through all of them by itself."""
        costs = tuple(Cost(f"layer {number}", 0, 0, backward_seconds=float(number in (0, 4))) for number in range(5))
        plan = Plan(tuple((cost.name,) for cost in costs), tuple(range(5)), 5, num_devices=2, num_microbatches=2)
        plan = replace(plan, reuse="none", lookahead=0, profile=Profile(costs, DeviceLimits()))
        assert least_seconds(plan, costs, DeviceLimits()) == replayed_seconds(plan) == 3.0

    def test_is_reached_where_nothing_but_computing_counts(self) -> None:
        profile = chain(3, DeviceLimits())
        plan = Plan(tuple((cost.name,) for cost in profile.layers), (0, 1, 2), 2, frozenset({1}), profile=profile)
        plan = replace(plan, num_microbatches=4)
        assert least_seconds(plan, profile.layers, profile.machine) == predict(plan).seconds == 4 * (4 + 3 + 3)


class TestCapacity:
    @given(profiles(4), st.integers(1, 3), st.integers(10, 100), st.integers(1, 60))
    @settings(max_examples=60, deadline=None)
    def test_a_larger_one_only_adds_plans(
        self, profile: Profile, num_microbatches: int, capacity: int, more: int
    ) -> None:
        calls = range(len(profile.layers))

        def alternatives(num_bytes: int) -> set[tuple[object, ...]]:
            limited = replace(profile, machine=replace(profile.machine, capacity_bytes=num_bytes))
            return {(plan.packs, plan.first_fused, plan.kept) for plan in every_plan(limited, calls, num_microbatches)}

        assert alternatives(capacity) <= alternatives(capacity + more)

    @pytest.mark.parametrize("num_layers", [6, 16, pytest.param(40, marks=pytest.mark.nightly)])
    @pytest.mark.parametrize("num_devices", [1, 2])
    def test_a_larger_one_is_not_predicted_to_be_slower(self, num_layers: int, num_devices: int) -> None:
        profile = chain(num_layers, DeviceLimits(None, 150.0, 150.0, 1000.0, 90.0))
        found = [
            found_seconds(
                replace(profile, machine=replace(profile.machine, capacity_bytes=capacity)),
                range(num_layers),
                3,
                num_devices=num_devices,
            )
            for capacity in (420, 500, 640, 900, 1300, 2000, 4000, 10000, None)
        ]
        assert found == sorted(found, reverse=True)
        assert found[-1] < found[0] < inf


class TestManyLayers:
    @given(st.integers(ALL_LAYERS + 1, 14), st.integers(1, 3), speeds, st.none() | st.integers(420, 3000))
    @settings(max_examples=20, deadline=None)
    def test_the_plan_holds_every_layer_once_in_order(
        self, num_layers: int, num_microbatches: int, speed: float | None, capacity: int | None
    ) -> None:
        profile = chain(num_layers, DeviceLimits(capacity, speed, speed, None, speed))
        plan = search(profile, range(num_layers), num_microbatches)
        assert [name for pack in plan.packs for name in pack] == [cost.name for cost in profile.layers]
        assert plan.predicted == Predicted(predict(plan).seconds, predict(plan).peak_bytes)

    def test_layers_that_are_not_called_are_packs_behind_the_others(self) -> None:
        plan = search(chain(12, DeviceLimits()), [*range(10), 0], 2)
        assert plan.packs[-2:] == (("layer 10",), ("layer 11",))
        assert set(plan.visits) == set(range(len(plan.packs) - 2))
        assert plan.visits[0] == plan.visits[-1]

    def test_a_pipeline_is_balanced_by_time(self) -> None:
        # The first layers are small and slow, the last ones large and fast.
        layers = tuple(
            replace(LAYER, name=f"layer {i}", weight_bytes=10 if i < 8 else 100, forward_seconds=9.0 if i < 8 else 1.0)
            for i in range(16)
        )
        plan = search(Profile(layers, DeviceLimits()), range(16), 8, num_devices=2)
        one = search(Profile(layers, DeviceLimits()), range(16), 8)
        assert seconds_of(plan) < 0.65 * seconds_of(one)

    @pytest.mark.parametrize("num_layers", [5, 33])
    @pytest.mark.parametrize("num_devices", [2, 4])
    def test_a_heavy_last_layer_of_a_pipeline_is_spread(self, num_layers: int, num_devices: int) -> None:
        profile = with_head(chain(num_layers, DeviceLimits(None, 1e3, 1e3, 1e3)), 12.0)
        options = {"num_devices": num_devices, "most_tasks": 20_000}
        plan = search(profile, range(num_layers), 8, **options)
        assert ("layer head",) in [plan.packs[pack][-1:] for pack in plan.spread]
        alone = predict(replace(plan, spread=frozenset())).seconds
        assert seconds_of(plan) < (1 - SPREAD_SHARE) * alone
        assert plan == search(profile, range(num_layers), 8, **options)

    def test_one_device_spreads_nothing_nor_do_microbatches_with_devices_of_their_own(self) -> None:
        profile = with_head(chain(5, DeviceLimits()), 12.0)
        for options in ({}, {"num_devices": 2, "parallel": "data"}):
            assert not search(profile, range(5), 4, **options).spread

    @pytest.mark.parametrize("num_devices", [2, 4])
    def test_a_balanced_pipeline_spreads_nothing(self, num_devices: int) -> None:
        profile = chain(8, DeviceLimits(None, 1e3, 1e3, 1e3), recompute_seconds=0.0)
        plan = search(profile, range(8), 8, num_devices=num_devices)
        assert not plan.spread

    def test_nothing_is_spread_whose_gradients_are_long_on_their_way(self) -> None:
        for transfer, spreads in ((1e3, True), (1.0, False)):
            profile = with_head(chain(5, DeviceLimits(None, 1e3, 1e3, transfer)), 12.0)
            assert bool(search(profile, range(5), 8, num_devices=2).spread) == spreads

    def test_what_is_replayed_is_limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replayed = []

        def counting(plan: Plan) -> Plan:
            replayed.append(plan)
            return with_prediction(plan)

        monkeypatch.setattr("lightning_harmony.plan.search.search.with_prediction", counting)
        profile = chain(40, DeviceLimits(2000, 100.0, 100.0, None, 100.0))
        assert search_if_any(profile, range(40), 4, most_tasks=0) is None
        assert not replayed
        search(profile, range(40), 4, most_tasks=3000)
        assert 1 < len(replayed) < 30


class TestBetter:
    def plan(self, **cost: float) -> Plan:
        """By packs that are much too large: nothing hides their way."""
        profile = chain(6, DeviceLimits(None, 10.0, 10.0, None, 10.0), **cost)
        names = tuple(cost.name for cost in profile.layers)
        plan = Plan((names[:3], names[3:]), (0, 1), 1, num_microbatches=2, fingerprint="of the model", profile=profile)
        return replace(plan, predicted=Predicted(predict(plan).seconds, ()))

    def test_packs_are_fused_where_a_replay_says_that_they_fit(self) -> None:
        """Forward and backward of the largest pack counted together, though they follow each other.

        As of preference optimization: behind the head of the policy, whose logits go to the host for the backward if it is not
        fused, comes a frozen model, whose head allocates the most.
        """
        machine = DeviceLimits(100, 4.0, 4.0)
        blocks = [Cost(f"block {n}", 4, 4, copied_bytes=4, forward_seconds=1.0, backward_seconds=2.0) for n in range(4)]
        head = replace(blocks[0], name="head", stash_bytes=20, forward_work_bytes=20, backward_work_bytes=20)
        frozen = Cost("frozen", 10, 0, forward_work_bytes=45, backward_work_bytes=40, forward_seconds=1.0)
        profile = Profile((*blocks, head, frozen), machine)
        names = tuple((cost.name,) for cost in profile.layers)
        plan = Plan(names, tuple(range(6)), 5, num_microbatches=4, profile=profile)
        plan = replace(plan, predicted=Predicted(predict(plan).seconds, ()))
        assert search_better(plan, range(6)).first_fused <= 4

    def test_a_faster_plan_is_found_for_the_same_model(self) -> None:
        plan = self.plan()
        better = search_better(plan, range(6))
        assert seconds_of(better) < seconds_of(plan) * (1 - CLEAR_SHARE)
        assert (better.fingerprint, better.profile, better.num_microbatches) == ("of the model", plan.profile, 2)
        assert seconds_of(better) == seconds_of(search(plan.profile, range(6), 2))  # type: ignore[arg-type]

    @pytest.mark.parametrize("capacity", [None, 1200])
    def test_the_forward_joins_turns_that_take_longer_than_what_that_costs(
        self, capacity: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        profile = chain(6, DeviceLimits(capacity, 150.0, 150.0, 1000.0, 90.0))
        names = tuple(cost.name for cost in profile.layers)
        plan = Plan(tuple((name,) for name in names), tuple(range(6)), 6, num_microbatches=3, profile=profile)
        plan = replace(plan, predicted=Predicted(1000.0, ()))
        for seconds in (0.0, 0.01, 5.0):
            monkeypatch.setattr("lightning_harmony.plan.search.search.TURN_SECONDS", seconds)
            better = search_better(plan, range(6))
            assert better.profile is not None
            spared = replace(better.profile.machine, capacity_bytes=capacity and int(capacity * (1 - SPARE_SHARE)))

            def score(one: Plan, seconds: float = seconds, spared: DeviceLimits = spared) -> float:
                turns = 3 * (len(one.forward_turns) + one.first_fused + 1)
                return replayed_seconds(replace(one, profile=Profile(profile.layers, spared))) + seconds * turns

            assert score(better) == pytest.approx(min(map(score, with_every_forward(better))))
        assert better.joined

    @pytest.mark.parametrize(("seconds", "spreads"), [(2.0, True), (0.9, False)])
    def test_a_plan_with_the_same_packs_spread_has_to_gain_less(self, seconds: float, spreads: bool) -> None:
        """All else in it is as well or badly predicted: it gains 8 % or 4 %, both less than `CLEAR_SHARE`."""
        profile = with_head(chain(17, DeviceLimits(), recompute_seconds=0.0), seconds)
        names, visits = tuple((cost.name,) for cost in profile.layers), tuple(range(17))
        plan = Plan(names, visits, 16, num_devices=2, num_microbatches=16, fingerprint="of it", profile=profile)
        plan = replace(plan, predicted=Predicted(predict(plan).seconds, ()))
        better = search_better(plan, range(17), with_its_packs=True)
        assert (better.spread, better.packs) == (frozenset({16} if spreads else ()), plan.packs)
        assert (better is plan) != spreads
        assert (better.fingerprint, better.profile) == ("of it", profile)

    def test_packs_of_a_better_plan_may_stay(self) -> None:
        plan = replace(self.plan(graph_bytes=0), first_fused=2)
        plan = replace(plan, predicted=Predicted(predict(plan).seconds + 1000.0, ()))
        better = search_better(plan, range(6), with_its_packs=True)
        assert better.packs == plan.packs
        assert better.first_fused < 2 or better.kept

    def test_a_small_gain_is_none(self) -> None:
        best = search(self.plan().profile, range(6), 2)  # type: ignore[arg-type]
        seconds = seconds_of(best)
        rival = replace(best, packs=(*best.packs, ("another",)), first_fused=0, kept=frozenset())
        rival = replace(rival, predicted=Predicted(seconds / (1 - CLEAR_SHARE), ()))
        assert search_better(rival, range(6)) is rival
        rival = replace(rival, predicted=Predicted((seconds + 100 * TURN_SECONDS) / (1 - CLEAR_SHARE), ()))
        assert seconds_of(search_better(rival, range(6))) == seconds

    def test_a_short_step_is_left_as_it_is(self) -> None:
        machine = DeviceLimits(None, 1e3 / SHORT_SECONDS, 1e3 / SHORT_SECONDS, None, 1e3 / SHORT_SECONDS)
        profile = chain(6, machine, forward_seconds=0.0, backward_seconds=0.0)
        names = tuple(cost.name for cost in profile.layers)
        plan = Plan((names,), (0,), 0, num_microbatches=1, profile=profile)
        plan = replace(plan, predicted=Predicted(predict(plan).seconds, ()))
        assert SHORT_SECONDS < seconds_of(plan) < 2 * SHORT_SECONDS
        assert search_better(plan, range(6)) is not plan
        short = replace(profile, machine=replace(machine, **dict.fromkeys(SPEEDS, 2e3 / SHORT_SECONDS)))
        plan = replace(plan, profile=short, predicted=None)
        plan = replace(plan, predicted=Predicted(predict(plan).seconds, ()))
        assert search_better(plan, range(6)) is plan

    def test_a_plan_that_does_not_fit_gives_way_to_one_that_does(self) -> None:
        """It stayed, and the step found its room by trial, where others would have fitted."""
        plan = replace(self.plan(), predicted=None)
        better = search_better(plan, range(6))
        assert better.profile == plan.profile
        assert seconds_of(better) == predict(better).seconds

    def test_a_plan_that_fits_barely_is_better_than_none_that_fits(self) -> None:
        plan = self.plan()
        assert plan.profile is not None
        least = next(
            capacity
            for capacity in count(150, 10)
            if search_if_any(replace(plan.profile, machine=DeviceLimits(capacity)), range(6), 2) is not None
        )
        tight = replace(plan, profile=replace(plan.profile, machine=DeviceLimits(least)), predicted=None)
        assert search_better(tight, range(6)).predicted is not None
        assert search_better(replace(tight, predicted=Predicted(1e9, ())), range(6)).predicted == Predicted(1e9, ())

    @pytest.mark.parametrize("predicted", [None, Predicted(1e9, ())])
    def test_where_no_other_fits_the_plan_stays(self, predicted: Predicted | None) -> None:
        plan = self.plan()
        assert plan.profile is not None
        plan = replace(plan, profile=replace(plan.profile, machine=DeviceLimits(150)), predicted=predicted)
        assert search_better(plan, range(6)) is plan

    def test_a_part_of_the_capacity_is_spared(self) -> None:
        plan = self.plan()
        assert plan.profile is not None
        machine = replace(plan.profile.machine, capacity_bytes=1600)
        better = search_better(replace(plan, profile=replace(plan.profile, machine=machine)), range(6))
        assert better.profile is not None
        assert better.profile.machine == machine
        assert max(predict(better, replace(machine, capacity_bytes=1440)).peak_bytes) <= 1440

    def test_a_plan_without_costs_is_refused(self) -> None:
        with pytest.raises(PlanError, match="with a profile"):
            search_better(replace(self.plan(), profile=None), range(6))


def uneven(num_layers: int) -> Profile:
    """Layers whose sizes, times and graphs do not follow from each other, as those of convolutions."""
    drawn = Random(num_layers)
    layers = tuple(
        replace(
            LAYER,
            name=f"layer {number}",
            weight_bytes=(size := drawn.choice([5, 20, 80, 200])),
            gradient_bytes=size,
            copied_bytes=size,
            graph_bytes=drawn.choice([2, 20, 80]),
            forward_seconds=(seconds := drawn.uniform(0.2, 3.0)),
            backward_seconds=2 * seconds,
            recompute_seconds=seconds,
        )
        for number in range(num_layers)
    )
    return Profile(layers, DeviceLimits(1600, 50.0, 50.0, 100.0, 19.0))


class TestClimb:
    @pytest.mark.parametrize(("num_devices", "parallel"), [(1, "pipeline"), (2, "pipeline"), (2, "data")])
    def test_it_finds_faster_plans_for_uneven_layers(
        self, monkeypatch: pytest.MonkeyPatch, num_devices: int, parallel: Parallel
    ) -> None:
        sizes = range(ALL_LAYERS + 4, ALL_LAYERS + (24 if IS_WHOLE or num_devices == 1 else 12), 4)

        def found() -> list[float]:
            return [
                seconds_of(search(uneven(size), range(size), 4, num_devices=num_devices, parallel=parallel))
                for size in sizes
            ]

        climbed = found()
        monkeypatch.setattr(module, "CLIMB_SHARE", 0.0)
        without = found()
        assert all(one <= other for one, other in zip(climbed, without, strict=True))
        assert climbed != without

    def test_it_begins_with_the_given_plan_where_nothing_else_is_fast_enough(self) -> None:
        profile = uneven(ALL_LAYERS + 8)
        space = Space(profile, range(len(profile.layers)), 4, 2, "data")
        slow = with_prediction(
            Plan(
                tuple((cost.name,) for cost in profile.layers),
                tuple(range(len(profile.layers))),
                len(profile.layers),
                num_devices=2,
                parallel="data",
                num_microbatches=4,
                profile=profile,
            )
        )
        # So few that no plan of the ladder is replayed.
        found = space.best(400.0, seconds_of(slow), 0.0, slow)
        assert found is not None
        assert seconds_of(found) < seconds_of(slow)

    @pytest.mark.parametrize("num_devices", [1, 2])
    def test_it_leaves_given_packs_as_they_are(self, num_devices: int) -> None:
        profile = uneven(ALL_LAYERS + 6)
        names = [cost.name for cost in profile.layers]
        packs = tuple(tuple(names[start : start + 2]) for start in range(0, len(names), 2))
        found = Space(profile, range(len(names)), 4, num_devices, "data", packs).best(MOST_TASKS, inf, 0.0)
        assert found is not None
        assert found.packs == packs

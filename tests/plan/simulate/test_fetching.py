"""What is fetched ahead comes as early as there is room for good."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_harmony.plan.simulate.fetching import Residence, fetch_ahead
from lightning_harmony.plan.simulate.lowering import lower
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.profile import DeviceLimits
from lightning_harmony.plan.values.task import Errand
from support.plans import names, plans

# Three packs of 10, one after the other; each goes when it was used.
FOLLOWING = [[1, 2], [2], []]


def chain(staging_bytes: int = 0) -> list[Residence]:
    return [Residence(pack, 10, staging_bytes, pack, pack, pack + 1) for pack in range(3)]


def first(residences: list[Residence]) -> list[int]:
    return [each.first for each in residences]


def test_a_pack_comes_as_soon_as_there_is_room_until_its_use() -> None:
    for capacity, expected in ((None, [0, 0, 0]), (30, [0, 0, 0]), (29, [0, 0, 1]), (19, [0, 1, 2])):
        residences = chain()
        fetch_ahead(residences, [0, 0, 0], FOLLOWING, capacity)
        assert first(residences) == expected


def test_no_earlier_than_it_may() -> None:
    residences = chain()
    fetch_ahead(residences, [0, 0, 0], [[1], [2], []], None)
    assert first(residences) == [0, 0, 1]


def test_room_for_what_each_stay_needs_is_left() -> None:
    residences = chain()
    # There is room for the third while the first runs, but not while the second does: it would have to go before its use.
    fetch_ahead(residences, [0, 11, 0], FOLLOWING, 30)
    assert first(residences) == [0, 0, 2]


def test_what_casting_takes_counts_while_it_comes() -> None:
    residences = chain(staging_bytes=1)
    fetch_ahead(residences, [0, 0, 0], FOLLOWING, 20)
    assert first(residences) == [0, 1, 2]


def test_what_would_go_before_its_use_and_is_not_used_meanwhile_goes_earlier() -> None:
    idle = Residence(9, 10, 0, 0, 0, 3, goes_at_once=True)
    used = Residence(8, 10, 0, 0, 2, 3)
    coming = Residence(1, 10, 0, 3, 3, 4)
    fetch_ahead([idle, used, coming], [0] * 4, [[], [1], [1], []], 20)
    assert (coming.first, idle.end, idle.goes_at_once) == (1, 1, False)
    assert used.end == 3


def test_a_pack_that_was_there_before_comes_no_sooner_than_it_went() -> None:
    before, again = Residence(0, 10, 0, 0, 0, 2), Residence(0, 10, 0, 3, 3, 4)
    fetch_ahead([before, again], [0] * 4, [[], [0], [0], []], None)
    assert again.first == 2


@given(plans(max_devices=1), st.none() | st.integers(10, 200))
def test_to_fetch_ahead_swaps_what_is_swapped_on_demand(
    planned: tuple[Plan, tuple[Cost, ...]], capacity: int | None
) -> None:
    """Packs that were fetched ahead made way before their use, and came again: up to three quarters more was swapped."""
    plan, packs = planned
    ahead, on_demand = (
        [task.pack for task in lower(each, packs, DeviceLimits(capacity)).devices[0] if task.kind is Errand.SWAP_IN]
        for each in (plan, replace(plan, lookahead=0))
    )
    assert sorted(ahead) == sorted(on_demand)


def test_the_schedule_fetches_ahead() -> None:
    plan = Plan(names(3), (0, 1, 2), 2, num_microbatches=1)
    (tasks,) = lower(plan, [Cost("pack", 10, 0, copied_bytes=10)] * 3, DeviceLimits(20)).devices
    assert " ".join(map(str, tasks[:8])) == "0SWAP_IN 1SWAP_IN 0F0 0EVICT 2SWAP_IN 1F0 2F0 2B0"

"""Layers cut into packs."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from lightning_harmony.plan.search.packing import (
    BUFFERING,
    USEFUL_PACKS,
    balanced,
    fill_capacity,
    filled,
    filled_from_end,
    smallest,
)
from lightning_harmony.plan.values.cost import Cost

num_bytes = st.integers(0, 40)
costs_lists = st.lists(st.builds(Cost, st.just("layer"), num_bytes, num_bytes, num_bytes, num_bytes), max_size=14)
capacities = st.integers(1, 600)


def pack_bytes(pack: list[Cost]) -> int:
    """What the packing promises to fit: three packs of this size, and the work space of the hungriest layer."""
    state = sum(cost.weight_bytes + cost.gradient_bytes for cost in pack)
    return 3 * state + max(cost.forward_work_bytes + cost.backward_work_bytes for cost in pack)


def share(costs: list[Cost]) -> float:
    """A pack's part of the model."""
    return sum(cost.state_bytes for cost in costs) / USEFUL_PACKS


def layer(weight_bytes: int, work_bytes: int = 0) -> Cost:
    return Cost("layer", weight_bytes, 0, 0, work_bytes)


@given(costs=costs_lists, capacity=st.none() | capacities)
def test_packs_are_consecutive_and_hold_every_layer_once_in_order(costs: list[Cost], capacity: int | None) -> None:
    packs = fill_capacity(costs, capacity)
    assert [index for pack in packs for index in pack] == list(range(len(costs)))
    assert all(packs)


@given(costs=costs_lists, capacity=capacities)
def test_a_pack_over_budget_is_a_single_layer(costs: list[Cost], capacity: int) -> None:
    for pack in fill_capacity(costs, capacity):
        assert len(pack) == 1 or pack_bytes([costs[index] for index in pack]) <= capacity


@given(costs=costs_lists, capacity=capacities)
def test_no_pack_had_room_for_the_layer_behind_it(costs: list[Cost], capacity: int) -> None:
    packs = fill_capacity(costs, capacity)
    for pack, following in pairwise(packs):
        larger = [costs[index] for index in (*pack, following[0])]
        assert pack_bytes(larger) > capacity or sum(cost.state_bytes for cost in larger) > share(costs)


@given(costs=costs_lists, capacity=capacities, more=st.integers(0, 300))
def test_more_capacity_never_makes_more_packs(costs: list[Cost], capacity: int, more: int) -> None:
    assert len(fill_capacity(costs, capacity + more)) <= len(fill_capacity(costs, capacity))


@given(costs=costs_lists)
def test_without_a_limit_there_is_one_pack(costs: list[Cost]) -> None:
    assert fill_capacity(costs, None) == ((tuple(range(len(costs))),) if costs else ())


def among_others(layers: list[Cost]) -> list[Cost]:
    """Some layers at the beginning of a model of which they are a small part."""
    return [*layers, layer(100 * sum(cost.state_bytes for cost in layers))]


def test_a_pack_leaves_room_for_its_neighbours_on_the_device() -> None:
    four = among_others([layer(10)] * 4)
    assert fill_capacity(four, BUFFERING * 20)[:-1] == ((0, 1), (2, 3))
    assert fill_capacity(four, BUFFERING * 20 - 1)[:-1] == ((0,), (1,), (2,), (3,))


def test_work_space_is_needed_once_however_many_layers_share_it() -> None:
    three = among_others([layer(10, work_bytes=40)] * 3)
    assert fill_capacity(three, 130)[:-1] == ((0, 1, 2),)
    assert fill_capacity(three, 129)[:-1] == ((0, 1), (2,))


def test_a_layer_larger_than_the_capacity_stands_alone() -> None:
    assert fill_capacity([layer(1), layer(100), layer(1), layer(1)], 12) == ((0,), (1,), (2, 3))


def test_however_much_fits_there_are_packs_to_hide_copies_behind() -> None:
    assert len(fill_capacity([layer(10)] * 2 * USEFUL_PACKS, 10**9)) == USEFUL_PACKS
    assert len(fill_capacity([layer(10)] * 3, 10**9)) == 3


def test_packs_are_balanced() -> None:
    assert balanced([1, 1, 1, 1], 2) == (0, 2)
    assert balanced([5, 1, 1, 1], 2) == (0, 1)
    assert balanced([1, 1, 1, 5], 2) == (0, 3)
    assert balanced([0, 0, 0], 3) == (0,)


def test_filled_from_either_end() -> None:
    assert filled([1, 1, 1, 1, 1], 2) == (0, 2, 4)
    assert filled_from_end([1, 1, 1, 1, 1], 2) == (0, 1, 3)
    assert filled([3, 1, 3], 2) == (0, 1, 2)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 30))
def test_cuts_begin_at_the_first_layer_and_go_up(sizes: list[int], number: int, most: int) -> None:
    for starts in (balanced(sizes, number), filled(sizes, most), filled_from_end(sizes, most)):
        assert starts[0] == 0
        assert sorted(set(starts)) == list(starts)
        assert starts[-1] < len(sizes)
    assert len(balanced(sizes, number)) <= number


def test_the_smallest_device_counts() -> None:
    assert smallest([None, 5, 3]) == 3
    assert smallest([None, None]) is None

"""Whose graphs are kept."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_harmony.plan.search.graphs import fused_from, kept
from lightning_harmony.plan.values.cost import Cost
from lightning_harmony.plan.values.plan import visits_of

NUM_PACKS = 5
num_bytes = st.integers(0, 40)
costs = st.builds(Cost, st.just("pack"), num_bytes, num_bytes, num_bytes, num_bytes, num_bytes)
models = st.lists(costs, min_size=NUM_PACKS, max_size=NUM_PACKS)
visit_lists = st.lists(st.integers(0, NUM_PACKS - 1), min_size=1, max_size=8).map(visits_of)
capacities = st.integers(1, 1000)

PACK = Cost("pack", weight_bytes=10, gradient_bytes=10, forward_work_bytes=4, backward_work_bytes=6, graph_bytes=5)


class TestFusedFrom:
    @given(visits=visit_lists, model=models, capacity=st.none() | capacities)
    def test_no_fused_pack_is_visited_before(
        self, visits: tuple[int, ...], model: list[Cost], capacity: int | None
    ) -> None:
        first = fused_from(visits, model, capacity)
        assert not set(visits[:first]) & set(visits[first:])
        assert first < len(visits) or visits[-1] in visits[:-1]

    @given(visits=visit_lists, model=models, capacity=capacities, more=st.integers(0, 500))
    def test_more_capacity_fuses_no_less(
        self, visits: tuple[int, ...], model: list[Cost], capacity: int, more: int
    ) -> None:
        assert fused_from(visits, model, capacity + more) <= fused_from(visits, model, capacity)

    def test_takes_as_many_packs_as_fit_beside_two_others(self) -> None:
        # Weights and gradients of two others, work space, and three packs with their graphs.
        room = 2 * 20 + 10 + 3 * 25
        assert fused_from(range(16), [PACK] * 16, room) == 13
        assert fused_from(range(16), [PACK] * 16, room - 1) == 14

    def test_leaves_most_of_the_model_to_hide_the_update_under(self) -> None:
        assert fused_from(range(16), [PACK] * 16, None) == 12

    def test_of_one_pack_is_that(self) -> None:
        assert fused_from([0], [PACK], 1) == 0
        assert fused_from([], [], None) == 0


class TestKept:
    @given(visits=visit_lists, model=models, capacity=st.none() | capacities, number=st.integers(1, 4))
    def test_are_packs_before_the_fused_ones(
        self, visits: tuple[int, ...], model: list[Cost], capacity: int | None, number: int
    ) -> None:
        first = fused_from(visits, model, capacity)
        assert set(kept(visits, first, model, number, capacity)) <= set(visits[:first])

    def test_are_the_last_ones_for_which_there_is_room(self) -> None:
        room = (2 * 20 + 10 + 4 * 25) + 2 * (10 + 3 * 5)
        assert kept(range(8), 4, [PACK] * 8, 3, room) == (3, 2)
        assert kept(range(8), 4, [PACK] * 8, 3, room - 1) == (3,)

    def test_are_all_without_a_limit(self) -> None:
        assert kept(range(8), 4, [PACK] * 8, 3, None) == (3, 2, 1, 0)

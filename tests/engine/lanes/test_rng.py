"""Random streams: what a lane draws depends on its seed and on nothing else."""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_harmony.engine.lanes import rng
from lightning_harmony.engine.lanes.rng import RandomState, RandomStreams, stream_seed

GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(()).item(),
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The tests' own generators, whatever ran before, and those of others back afterwards."""
    before, numpy_before = RandomState.capture(None), np.random.get_state()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    yield
    before.restore(None)
    np.random.set_state(numpy_before)


def draw() -> tuple[Any, ...]:
    return tuple(generator() for generator in GENERATORS.values())


def drawn_by(order: list[int], seeds: list[int | None]) -> dict[int, list[Any]]:
    """What each lane draws if they run in this order."""
    streams = RandomStreams(seeds, [])
    drawn: dict[int, list[Any]] = {lane: [] for lane in range(len(seeds))}
    for lane in order:
        streams.switch_to(lane)
        drawn[lane].append(draw())
    streams.switch_back()
    return drawn


class TestStreamSeed:
    def test_is_the_same_on_every_machine_and_in_every_version(self) -> None:
        assert stream_seed(42, 0, 0) == 3941742668803117099
        assert stream_seed(42, 0, 1) == 2293639463547277185
        assert stream_seed(42, 1, 0) == 7368034086796004841
        assert stream_seed(0) == 2631537505891389924

    def test_differs_for_different_keys(self) -> None:
        keys = [(seed, step, number) for seed in (0, 1, 42) for step in range(20) for number in range(8)]
        keys += [(1, 23, 4), (12, 3, 4), (1, 2, 34)]
        assert len({stream_seed(*key) for key in keys}) == len(set(keys))

    @given(seed=st.integers(-(2**63), 2**64 - 1), step=st.integers(0, 2**40))
    def test_is_one_that_every_generator_takes(self, seed: int, step: int) -> None:
        assert 0 <= stream_seed(seed, step, 0) < 2**63
        torch.Generator().manual_seed(stream_seed(seed, step, 0))


class TestInterleaving:
    @given(order=st.lists(st.integers(0, 2), max_size=12))
    def test_does_not_change_what_a_lane_draws(self, order: list[int]) -> None:
        mixed = drawn_by(order, [1, 2, 3])
        in_turn = drawn_by(sorted(order), [1, 2, 3])
        assert mixed == in_turn

    def test_lanes_draw_different_numbers(self) -> None:
        drawn = drawn_by([0, 1, 2], [1, 2, 3])
        for index in range(len(GENERATORS)):
            assert len({drawn[lane][0][index] for lane in range(3)}) == 3

    def test_a_lane_draws_what_its_seed_gives(self) -> None:
        (torch_number, python_number, _) = drawn_by([1, 0], [11, 12])[0][0]
        torch.manual_seed(11)
        random.seed(11)
        assert (torch_number, python_number) == (torch.rand(()).item(), random.random())

    def test_a_stream_goes_on_after_the_caller_had_its_own_in_between(self) -> None:
        expected = drawn_by([0, 0], [5])[0]
        streams = RandomStreams([5], [])
        streams.switch_to(0)
        found = [draw()]
        streams.switch_back()
        draw()
        streams.switch_to(0)
        found.append(draw())
        streams.switch_back()
        assert found == expected


class TestCaller:
    def test_goes_on_as_if_nothing_had_been_drawn(self) -> None:
        before, numpy_before = RandomState.capture(None), np.random.get_state()
        expected = draw()
        before.restore(None)
        np.random.set_state(numpy_before)
        drawn_by([0, 1, 0, 1], [7, 8])
        assert draw() == expected

    def test_keeps_the_numpy_generator_object(self) -> None:
        generator = np.random.get_bit_generator()
        drawn_by([0, 1], [7, 8])
        assert np.random.get_bit_generator() is generator

    def test_what_it_draws_does_not_change_the_lanes(self) -> None:
        first = drawn_by([0, 1], [7, 8])
        draw()
        assert drawn_by([0, 1], [7, 8]) == first

    def test_switching_back_without_having_switched_does_nothing(self) -> None:
        expected = torch.get_rng_state()
        RandomStreams([1], []).switch_back()
        assert torch.equal(torch.get_rng_state(), expected)


class TestSingleLane:
    def test_without_a_seed_goes_on_with_the_callers_stream(self) -> None:
        before, numpy_before = RandomState.capture(None), np.random.get_state()
        expected = [draw(), draw(), draw()]
        before.restore(None)
        np.random.set_state(numpy_before)
        found = drawn_by([0, 0], [None])[0]
        assert [*found, draw()] == expected


class TestRandomState:
    def test_restores_what_it_captured(self) -> None:
        state = RandomState.capture(None)
        expected = torch.rand(3), random.random()
        torch.manual_seed(99)
        random.seed(99)
        state.restore(None)
        assert torch.equal(torch.rand(3), expected[0])
        assert random.random() == expected[1]

    def test_can_be_restored_again(self) -> None:
        state = RandomState.capture(None)
        first = torch.rand(3)
        for _ in range(2):
            state.restore(None)
            assert torch.equal(torch.rand(3), first)


class TestPythonsGenerator:
    """Its state is copied as bytes where CPython has it, through the public functions elsewhere."""

    @pytest.fixture(params=[True, False], ids=["bytes", "public functions"])
    def copies_bytes(self, seeded: None, request: pytest.FixtureRequest) -> Iterator[bool]:
        if request.param and rng._python_state() is None:
            pytest.skip("this interpreter has it elsewhere")
        with pytest.MonkeyPatch.context() as patch:
            if not request.param:
                patch.setattr(rng, "_python_state", lambda: None)
            yield request.param

    @pytest.mark.parametrize("num_draws", [0, 1, 311, 312, 1000])
    def test_goes_on_where_it_was(self, copies_bytes: bool, num_draws: int) -> None:
        for _ in range(num_draws):
            random.random()
        # One of a pair of normal numbers is kept for the next call.
        random.gauss(0, 1)
        public = random.getstate()
        state = RandomState.capture(None)
        expected = [random.random() for _ in range(700)] + [random.gauss(0, 1), random.getrandbits(32)]
        state.restore(None)
        assert random.getstate() == public
        assert [random.random() for _ in range(700)] + [random.gauss(0, 1), random.getrandbits(32)] == expected

    def test_is_where_cpython_has_it(self) -> None:
        assert (rng._python_state() is not None) == (sys.implementation.name == "cpython")

"""NumPy's global generator, as layers that draw from it in their forward find it in their recompute."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lightning_harmony.engine.lanes.numpy_random import NumpyState


@pytest.fixture(autouse=True)
def its_own_generator() -> Iterator[None]:
    generator, before = np.random.get_bit_generator(), np.random.get_state(legacy=False)
    np.random.seed(3)
    yield
    np.random.set_bit_generator(generator)
    np.random.set_state(before)


DRAWS: dict[str, Callable[[], Any]] = {
    "uniform": lambda: float(np.random.rand()),
    # One of a pair, of which the other is kept ready.
    "normal": lambda: float(np.random.randn()),
    "three normal": lambda: np.random.randn(3).tolist(),
    "many": lambda: np.random.rand(700).tolist(),
    "integers": lambda: int(np.random.randint(1000)),
    "normal, then uniform": lambda: (float(np.random.randn()), float(np.random.rand())),
}


@pytest.mark.parametrize("before", DRAWS)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_restored_state_draws_the_same_numbers_again(before: str, draw: str) -> None:
    DRAWS[before]()
    state = NumpyState.capture()
    assert state is not None
    drawn = [DRAWS[draw](), DRAWS[draw]()]
    for _ in range(2):
        state.restore()
        assert NumpyState.capture() == state
        assert [DRAWS[draw](), DRAWS[draw]()] == drawn


def test_states_are_restored_in_any_order() -> None:
    choose = random.Random(1)
    states: list[tuple[NumpyState, Any]] = []
    for _ in range(30):
        choose.choice(list(DRAWS.values()))()
        state = NumpyState.capture()
        assert state is not None
        states.append((state, np.random.get_state(legacy=False)))
    for _ in range(100):
        state, expected = choose.choice(states)
        state.restore()
        if choose.random() < 0.5:
            np.testing.assert_equal(np.random.get_state(legacy=False), expected)
        else:
            NumpyState.capture()


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 7, 2**63 - 1])
def test_a_seed_gives_what_a_new_generator_with_it_gives(seed: int) -> None:
    np.random.randn()
    state = NumpyState.seeded(seed)
    assert state is not None
    state.restore()
    assert np.random.randn(3).tolist() == np.random.RandomState([seed % 2**32, seed // 2**32]).randn(3).tolist()


@pytest.mark.parametrize("other", [np.random.PCG64, np.random.Philox])
def test_generators_of_another_kind_are_restored_too(other: Any) -> None:
    twister = NumpyState.capture()
    np.random.set_bit_generator(other(5))
    np.random.randn()
    state = NumpyState.capture()
    drawn = np.random.randn(2).tolist()
    assert state is not None
    assert twister is not None
    state.restore()
    assert np.random.randn(2).tolist() == drawn
    seeded = NumpyState.seeded(7)
    assert seeded is not None
    seeded.restore()
    assert np.random.rand() == np.random.RandomState(other(7)).rand()

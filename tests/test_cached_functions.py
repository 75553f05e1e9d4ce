"""Functions with a cache of `functools`: what fills it draws once, also where a layer's code runs again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_harmony import HarmonyStrategy
from lightning_harmony.held.cached_functions import CacheThen, filling_of
from support.chains import BATCH, MICROBATCHES, WIDTH, Block, Chain, samples
from support.same_training import Net, compare, room, root, train_harmony, train_plain

STEPS = 3
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*")


def random(*args: Any, **kwargs: Any) -> Tensor:
    return 1 + torch.rand(())


class Cached(Block):
    """Multiplies by random numbers that are drawn once, and drops out behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.keep()

    def keep(self) -> None:
        self.factor = functools.lru_cache(random)

    def found(self) -> Any:
        return self.factor(0)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return super().forward(F.dropout(x * self.found(), 0.3))


class WithoutBound(Cached):
    def keep(self) -> None:
        self.factor = functools.cache(random)  # type: ignore[assignment]


class OfOneResult(Cached):
    """Which lets go of the other one in each call."""

    def keep(self) -> None:
        self.factor = functools.lru_cache(1)(random)

    def found(self) -> Any:
        return self.factor(0) * self.factor(1)


class ByNamesAndTypes(Cached):
    def keep(self) -> None:
        self.factor = functools.lru_cache(4, typed=True)(random)

    def found(self) -> Any:
        return self.factor(1) * self.factor(1.0) * self.factor(1, b=2) * self.factor((1, 2), c=1, b=2) * self.factor()


class AMethod(Cached):
    @functools.lru_cache  # noqa: B019
    def of_layer(self, key: int) -> Tensor:
        return random()

    def found(self) -> Any:
        return self.of_layer(0)


class AStaticMethod(Cached):
    @staticmethod
    @functools.cache
    def of_all(key: int) -> Tensor:
        return random()

    def keep(self) -> None:
        self.of_all.cache_clear()

    def found(self) -> Any:
        return self.of_all(0)


@functools.lru_cache
def among_globals(key: int) -> Tensor:
    return random()


class AGlobal(Cached):
    def keep(self) -> None:
        among_globals.cache_clear()

    def found(self) -> Any:
        return among_globals(0)


class OfAnIterator(Cached):
    """From which the layer draws once more."""

    def keep(self) -> None:
        numbers = self.numbers = itertools.cycle((1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6))
        self.factor = functools.cache(lambda key: next(numbers))  # type: ignore[assignment]

    def found(self) -> Any:
        return self.factor(0) * next(self.numbers)


class ATable(Cached):
    """As rotary embeddings have it: the same whenever it is made."""

    def keep(self) -> None:
        self.factor = functools.lru_cache(lambda width: torch.arange(width, device=root()) / width)

    def found(self) -> Any:
        return self.factor(WIDTH)


def build(make: Callable[[], nn.Module]) -> Net:
    torch.manual_seed(0)
    module = Net(Chain())
    module.net.blocks = nn.ModuleList(make() for _ in range(5))
    return module


@pytest.mark.parametrize(
    "make",
    [
        *(Cached, WithoutBound, OfOneResult, ByNamesAndTypes, AMethod, AStaticMethod, AGlobal, OfAnIterator, ATable),
    ],
)
def test_a_layer_that_runs_again_finds_in_a_cache_what_it_found(make: type[Cached]) -> None:
    """It found the result that it was to draw: what it dropped out then was something else, without a word."""
    plain = train_plain(build(make), samples(STEPS), MICROBATCHES, BATCH)
    compare(plain, train(build(make)))


def test_tables_in_caches_let_microbatches_take_turns(caplog: pytest.LogCaptureFixture) -> None:
    module = build(ATable)
    with caplog.at_level("INFO"):
        train(module)
    assert "one after the other" not in caplog.text
    assert module.net.blocks[0].factor.cache_info().misses == 1


class ForEach(Chain):
    """Fills a cache with something for each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = functools.lru_cache(16)(random)

    def through(self, x: Tensor) -> Tensor:
        key = float(x.sum())
        for block in self.blocks:
            x = F.dropout(block(x) * self.factor(key), 0.2)
        return x


def test_microbatches_that_fill_a_cache_run_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain = train_plain(Net(ForEach()), samples(STEPS), MICROBATCHES, BATCH)
    torch.manual_seed(0)
    module = Net(ForEach())
    with caplog.at_level("INFO"):
        compare(plain, train(module))
    assert "a _lru_cache_wrapper held by 'net' is changed" in caplog.text


@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("typed", [False, True])
def test_a_cache_as_it_was_answers_as_that_did(size: int | None, typed: bool) -> None:
    calls: list[Any] = []

    @functools.lru_cache(size, typed=typed)
    def count(*args: Any, **kwargs: Any) -> dict[str, int]:
        calls.append(args)
        return {"result": len(calls)}

    count.name = "its own"  # type: ignore[attr-defined]
    asked: list[tuple[Any, dict[str, Any]]] = [
        *(
            ((1,), {}),
            ((1.0,), {}),
            (("a",), {}),
            (((1, 2),), {}),
            ((1, 2), {"z": 3, "y": "q"}),
            ((), {"y": 1}),
            ((), {}),
        ),
        ((object,), {}),
    ]
    for args, kwargs in asked:
        count(*args, **kwargs)
    kept = [count(*args, **kwargs) for args, kwargs in asked[-5:]]
    then, num_calls = CacheThen(count), len(calls)
    count.cache_clear()
    again = then.again()
    assert [again(*args, **kwargs) for args, kwargs in asked[-5:]] == kept
    assert len(calls) == num_calls
    assert again.name == "its own"
    again(3)
    assert len(calls) == num_calls + 1
    assert filling_of(count)[-1] == 0


def train(module: Net) -> Any:
    strategy = HarmonyStrategy(device_memory=room("64KiB"), num_microbatches=MICROBATCHES, profile_cache=False)
    return train_harmony(module, samples(STEPS), strategy, BATCH, with_gradients=False)

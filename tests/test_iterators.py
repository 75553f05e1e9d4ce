"""Steps draw from generators and iterators as in plain Lightning: each value once, in the order of microbatches."""

from __future__ import annotations

import csv
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy
from support import nets
from support.same_training import SEED, Net, Training, compare, room, train_harmony, train_plain
from support.sampling import combined
from support.taking_turns import samples, takes_turns

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

FACTORS = (1.0, 1.2, 1.4, 1.6, 1.7)
Draw = Callable[[], float]
among_globals: Iterator[float] = iter(())
in_a_list: list[Iterator[float]] = []


class OfClass:
    """An attribute of it is for all."""

    factors: Iterator[float] = iter(())


def generated() -> Iterator[float]:
    for number in itertools.count():
        yield FACTORS[number % 5]


def an_attribute(module: Any) -> Draw:
    module.factors = itertools.cycle(FACTORS)
    return lambda: next(module.factors)


def a_generator(module: Any) -> Draw:
    module.factors = generated()
    return lambda: next(module.factors)


def a_count(module: Any) -> Draw:
    module.numbers = itertools.count()
    return lambda: FACTORS[next(module.numbers) % 5]


def an_iterator_over_a_list(module: Any) -> Draw:
    module.factors = iter(list(FACTORS) * 100)
    return lambda: next(module.factors)


def an_object(module: Any) -> Draw:
    module.schedule = SimpleNamespace(of=SimpleNamespace(factors=map(float, itertools.cycle(FACTORS))))
    return lambda: next(module.schedule.of.factors)


def an_entry(module: Any) -> Draw:
    module.by_name = {"factors": itertools.cycle(FACTORS)}
    return lambda: next(module.by_name["factors"])


def a_tuple(module: Any) -> Draw:
    module.pair = 1, itertools.cycle(FACTORS)
    return lambda: next(module.pair[1])


def a_method(module: Any) -> Draw:
    module.draw_factor = itertools.cycle(FACTORS).__next__
    # Looked up each time: something else may be in its place.
    return lambda: module.draw_factor(*())


def a_variable(module: Any) -> Draw:
    factors = itertools.cycle(FACTORS)
    return lambda: next(factors)


def a_global(module: Any) -> Draw:
    global among_globals  # noqa: PLW0603
    among_globals = itertools.cycle(FACTORS)
    return lambda: next(among_globals)


def a_list_among_globals(module: Any) -> Draw:
    in_a_list[:] = [itertools.cycle(FACTORS)]
    return lambda: next(in_a_list[0])


def an_attribute_of_a_class(module: Any) -> Draw:
    OfClass.factors = itertools.cycle(FACTORS)
    return lambda: next(OfClass.factors)


def a_generator_that_is_sent_to(module: Any) -> Draw:
    def running_sum() -> Any:
        total = 0.0
        while True:
            total = (total + (yield 1 + total / 7)) % 3

    module.sums = running_sum()
    next(module.sums)
    return lambda: module.sums.send(0.4)


def a_set(module: Any) -> Draw:
    module.all_factors = {itertools.cycle(FACTORS)}
    return lambda: next(next(iter(module.all_factors)))


def a_frozenset(module: Any) -> Draw:
    module.all_factors = frozenset({itertools.cycle(FACTORS)})
    return lambda: next(next(iter(module.all_factors)))


class Pair(NamedTuple):
    """A tuple of another class."""

    number: int
    factors: Iterator[float]


def a_named_tuple(module: Any) -> Draw:
    module.pair = Pair(1, itertools.cycle(FACTORS))
    return lambda: next(module.pair.factors)


def a_default(module: Any) -> Draw:
    cycle = itertools.cycle(FACTORS)

    def draw(factors: Iterator[float] = cycle) -> float:
        return next(factors)

    return draw


def a_default_by_name(module: Any) -> Draw:
    def draw(*, factors: Iterator[float]) -> float:
        return next(factors)

    draw.__kwdefaults__ = {"factors": itertools.cycle(FACTORS)}
    return draw


def an_argument(module: Any) -> Draw:
    def draw(factors: Iterator[float]) -> float:
        return next(factors)

    return partial(draw, itertools.cycle(FACTORS))


def a_reader(module: Any) -> Draw:
    module.rows = csv.reader([str(FACTORS[number % 5]) for number in range(500)])
    return lambda: float(next(module.rows)[0])


def an_attribute_of_a_function(module: Any) -> Draw:
    """Which has it in a variable, too: what is rewound in two places is to go on where it was."""
    factors = itertools.cycle(FACTORS)

    def draw() -> float:
        return next(factors)

    draw.factors = factors  # type: ignore[attr-defined]
    return draw


HELD = [
    a_set, a_frozenset, a_named_tuple, a_default, a_default_by_name, an_argument, a_reader, an_attribute_of_a_function,
    an_attribute, a_generator, a_count, an_iterator_over_a_list, an_object, an_entry, a_tuple, a_method, a_variable,
    a_global, a_list_among_globals, an_attribute_of_a_class, a_generator_that_is_sent_to,
]  # fmt: skip


class Draws(nn.Module):
    """Draws a factor before each of its layers, from what it or its layers keep."""

    def __init__(self, hold: Callable[[Any], Draw], where: str) -> None:
        super().__init__()
        self.where = where
        self.layers = nn.ModuleList(DrawingBlock(where == "in layers") for _ in range(3))
        self.draw = hold(self)
        for layer in self.layers:
            layer.kept = SimpleNamespace(draw=self.draw)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        if self.where == "before layers":
            x = x * self.draw()
        for layer in self.layers:
            x = layer(x * self.draw() if self.where == "between layers" else x)
        return F.mse_loss(x, y) * (self.draw() if self.where == "behind layers" else 1.0)


class MakesPlaces(Draws):
    """Has a new object in each step, so that all places are gone to once more."""

    def forward(self, batch: Any) -> Tensor:
        self.fresh = SimpleNamespace(numbers=[1])
        loss: Tensor = super().forward(batch)
        return loss


class DrawingBlock(nets.Block):
    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws, self.kept = draws, SimpleNamespace(draw=float)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.kept.draw() if self.draws else x)


def seeded(make: Callable[[], nn.Module]) -> Net:
    # Iterators cannot be copied: each training has its own.
    torch.manual_seed(SEED)
    return Net(make())


def build(hold: Callable[[Any], Draw], where: str) -> Net:
    return seeded(lambda: Draws(hold, where))


def train(module: Net, num_microbatches: int) -> Training:
    strategy = HarmonyStrategy(num_microbatches=num_microbatches, device_memory=room("60KiB"))
    return train_harmony(module, samples(32), strategy, 8, with_gradients=False)


def assert_trains_as_plain(make: Callable[[], nn.Module], num_microbatches: int) -> None:
    plain = train_plain(seeded(make), samples(32), num_microbatches, 8)
    compare(plain, train(seeded(make), num_microbatches))


WHERE = ["between layers", "in layers", "before layers", "behind layers"]


def named(value: Any) -> str:
    return str(getattr(value, "__name__", value))


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize(
    ("hold", "where", "num_microbatches"),
    combined(HELD, [(where, number) for number in (4, 1) for where in WHERE]),
    ids=named,
)
def test_each_value_is_drawn_once_and_in_order(hold: Any, where: str, num_microbatches: int) -> None:
    """Microbatches that took turns drew in another order, and recomputes drew once more: other weights, without a word."""
    assert_trains_as_plain(lambda: Draws(hold, where), num_microbatches)


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize(
    ("hold", "num_microbatches"), combined([a_variable, a_default, an_argument, a_frozenset], [(4,), (1,)]), ids=named
)
def test_iterators_are_found_again_when_places_are(hold: Any, num_microbatches: int) -> None:
    """What stood in the place of one was none itself: when places were gone to anew, its variable was no place any more."""

    assert_trains_as_plain(lambda: MakesPlaces(hold, "in layers"), num_microbatches)


class CallsAProxy(nn.Module):
    """Calls an object by way of a weak reference, which has all methods that Python has, those of iterators too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nets.Block() for _ in range(3))
        self.owner = partial(torch.mul, 2.0)
        self.times_two = weakref.proxy(self.owner)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = self.times_two(layer(x))
        return F.mse_loss(x, y)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_weak_reference_is_no_iterator(num_microbatches: int) -> None:
    """It was replaced by one, which cannot be called."""

    assert_trains_as_plain(CallsAProxy, num_microbatches)


@pytest.mark.parametrize("where", WHERE)
def test_microbatches_take_turns_where_that_changes_no_order(where: str, caplog: pytest.LogCaptureFixture) -> None:
    # Of the third microbatch on, calls of layers were not always looked at: what it had drawn counted as drawn behind them.
    turns, said = takes_turns(Draws(an_attribute, where), caplog)
    assert not turns or "has run twice" not in caplog.text
    assert turns == (where in ("before layers", "behind layers"))
    assert all("is drawn from again" in each for each in said)


def test_between_steps_iterators_are_the_users_own() -> None:
    module = build(an_entry, "in layers")
    factors = module.net.by_name["factors"]
    train(module, 4)
    assert module.net.by_name["factors"] is factors


class RunsDry(nn.Module):
    """A new iterator in each step, which layers draw from to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DrawingBlock(True) for _ in range(3))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        self.factors = iter(FACTORS[:3])
        for layer in self.layers:
            layer.kept.draw = lambda: next(self.factors)
            x = layer(x)
        assert next(self.factors, None) is None
        return F.mse_loss(x, y)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_an_iterator_that_each_microbatch_makes_is_its_own(num_microbatches: int) -> None:
    assert_trains_as_plain(RunsDry, num_microbatches)

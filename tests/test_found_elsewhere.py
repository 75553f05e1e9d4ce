"""What a layer's code finds elsewhere than on its modules, its recompute finds as its call did, whoever changes it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy
from lightning_harmony.errors import UnsupportedModelError
from support import another_file, nets
from support.another_file import Context
from support.another_file import context as CONTEXT
from support.same_training import Net, assert_same_training, room, root, trainer_for
from support.sampling import combined
from support.taking_turns import ONE_AFTER_THE_OTHER, samples

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

LARGE = 5000
SCALE: Any = 1.0
SCALES: list[Any] = [1.0]
LOCAL = threading.local()


class OfClass:
    """Of a class of its own, whose attribute counts for all."""

    scale: Any = 1.0


def function() -> None:
    """Something has an attribute."""


class Model(nn.Module):
    """Layers that compute with a scale that is nobody's argument."""

    def __init__(self, place: Place, change: Callable[[Model, int, Tensor], None]) -> None:
        super().__init__()
        self.place, self.change = place, change
        self.context = SimpleNamespace(scale=1.0)
        self.held: dict[str, Any] = {"scale": (1.0,)}
        self.generators = SimpleNamespace(
            python=random.Random(3), numpy=np.random.default_rng(3), torch=torch.Generator().manual_seed(3)
        )
        self.arrays = SimpleNamespace(scale=np.ones(1))
        self.blocks = nn.ModuleList(Scaled(self) for _ in range(3))
        self.scale: Any = 1.0

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        for number, block in enumerate(self.blocks):
            self.change(self, number, x)
            x = block(x)
        return F.mse_loss(x, y)


class Scaled(nets.Block):
    def __init__(self, model: Model) -> None:
        super().__init__()
        # Past registration: a module is no part of its parts.
        self.model = SimpleNamespace(of=model)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.model.of.place.get(self.model.of))


class Place:
    """Where the scale is."""

    def __init__(self, get: Callable[[Model], Any], put: Callable[[Model, Any], None]) -> None:
        self.get, self.put = get, put


def put_global(_: Model, value: Any) -> None:
    global SCALE  # noqa: PLW0603
    SCALE = value


def variable() -> Place:
    kept: Any = 1.0

    def put(_: Model, value: Any) -> None:
        nonlocal kept
        kept = value

    return Place(lambda _: kept, put)


PLACES: dict[str, Callable[[], Place]] = {
    "global": lambda: Place(lambda _: SCALE, put_global),
    "list among globals": lambda: Place(lambda _: SCALES[0], lambda _, value: SCALES.__setitem__(0, value)),
    "attribute of a class": lambda: Place(lambda _: OfClass.scale, lambda _, value: setattr(OfClass, "scale", value)),
    "attribute of a function": lambda: Place(
        lambda _: getattr(function, "scale", 1.0), lambda _, value: setattr(function, "scale", value)
    ),
    "object": lambda: Place(lambda m: m.context.scale, lambda m, value: setattr(m.context, "scale", value)),
    "tuple in a dict": lambda: Place(
        lambda m: m.held["scale"][0], lambda m, value: m.held.__setitem__("scale", (value,))
    ),
    "attribute of the model": lambda: Place(lambda m: m.scale, lambda m, value: setattr(m, "scale", value)),
    "variable": variable,
    "threading.local": lambda: Place(
        lambda _: getattr(LOCAL, "scale", 1.0), lambda _, value: setattr(LOCAL, "scale", value)
    ),
    "global of another file": lambda: Place(lambda _: another_file.get(), lambda _, value: another_file.put(value)),
    "object of another file": lambda: Place(
        lambda _: another_file.context.scale, lambda _, value: setattr(another_file.context, "scale", value)
    ),
    "dict behind a class of another file": lambda: Place(lambda _: Context.get(), lambda _, value: CONTEXT.put(value)),
}


def of_layer(number: int) -> float:
    return 1.0 + number / 4


VALUES: dict[str, Callable[[int, Tensor], Any]] = {
    "number": lambda number, _: of_layer(number),
    "tensor": lambda number, x: x.detach().mean() + of_layer(number),
    "large tensor": lambda number, x: x.detach().mean() + torch.full((LARGE,), of_layer(number), device=x.device),
}


def assert_trains_as_plain(model: Callable[[], Model], num_microbatches: int, memory: str = "40KiB") -> None:
    put_global(model(), 1.0)
    assert_same_training(
        Net(model()),
        samples(24),
        batch_size=8,
        num_microbatches=num_microbatches,
        device_memory=room(memory),
        updates=["just in time"],
    )


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_what_a_thread_keeps_for_itself_its_lanes_find(
    num_microbatches: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lanes are threads: a flag that was set before the fit was not there, without a word."""
    monkeypatch.setattr(LOCAL, "scale", 2.0, raising=False)
    assert_trains_as_plain(lambda: Model(PLACES["threading.local"](), lambda *_: None), num_microbatches)
    assert ONE_AFTER_THE_OTHER not in caplog.text


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize(("place", "value", "num_microbatches"), combined(product(PLACES, VALUES), [(1,), (4,)]))
def test_what_is_set_for_each_layer_its_recompute_finds(place: str, value: str, num_microbatches: int) -> None:
    """The recompute of each found what was set for the last one: other weights, without a word."""

    def model() -> Model:
        where = PLACES[place]()
        put, get = where.put, where.get
        # Of a large one, the first element.
        where.get = lambda m: found[:1] if isinstance(found := get(m), Tensor) and found.ndim else found
        return Model(where, lambda m, number, x: put(m, VALUES[value](number, x)))

    assert_trains_as_plain(model, num_microbatches, "160KiB" if value == "large tensor" else "40KiB")


def drawn(model: Model) -> Any:
    of = model.generators
    return 1 + 0.1 * (of.python.random() + of.numpy.random() + float(torch.rand((), generator=of.torch)))


def averaged(model: Model) -> Any:
    model.arrays.scale *= 0.9
    model.arrays.scale += 0.2
    return float(model.arrays.scale[0])


def averaged_tensor(model: Model) -> Any:
    if type(model.context.scale) is float:
        model.context.scale = torch.ones(1, device=root())
    return model.context.scale.mul_(0.9).add_(0.2).clone()


def averaged_anew(model: Model) -> Any:
    model.context.scale = 0.9 * model.context.scale + 0.2 * torch.ones(1, device=root())
    return model.context.scale


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("code", [drawn, averaged, averaged_tensor, averaged_anew])
def test_what_a_layers_own_code_changes_in_place_its_recompute_finds_as_the_call_did(
    code: Callable[[Model], Any], num_microbatches: int
) -> None:
    assert_trains_as_plain(lambda: Model(Place(code, lambda *_: None), lambda *_: None), num_microbatches)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_what_first_changes_in_a_later_step_is_found_as_it_was(num_microbatches: int) -> None:
    """What layers' code changed elsewhere for the first time in a later step, its recompute changed once more."""

    def late(model: Model) -> Any:
        model.context.calls = getattr(model.context, "calls", 0)
        if model.scale > 4:
            model.context.calls += 1
        return 1 + 0.1 * model.context.calls

    def count(model: Model, number: int, _: Tensor) -> None:
        if number == 0:
            model.scale += 1

    assert_trains_as_plain(lambda: Model(Place(late, lambda *_: None), count), num_microbatches)


def test_a_large_tensor_that_layers_read_and_others_change_in_place_is_refused() -> None:
    def in_place(model: Model, number: int, _: Tensor) -> None:
        if number == 0:
            model.context.scale = torch.ones(LARGE, device=root())
        model.context.scale.mul_(of_layer(number))

    model = Model(Place(lambda m: m.context.scale[:1].clone(), lambda *_: None), in_place)
    with pytest.raises(UnsupportedModelError, match=r"reads a tensor in 'net.context' which was changed in place"):
        assert_trains_as_plain(lambda: model, 1, "100KiB")


def test_a_large_tensor_that_code_between_layers_alone_reads_may_be_changed_in_place() -> None:
    """As a queue of keys."""

    def in_place(model: Model, number: int, x: Tensor) -> None:
        if type(model.context.scale) is float:
            model.context.scale = torch.ones(LARGE, device=root())
        if number == 2:
            model.context.scale.mul_(0.9)
            x.mul_(model.context.scale[0])

    assert_trains_as_plain(lambda: Model(Place(lambda _: 1.0, lambda *_: None), in_place), 1, "100KiB")


class Collector:
    """Collects in a thread of its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.items: list[int] = []


def test_what_another_thread_collects_meanwhile_stays() -> None:
    """A recompute puts back what its call has found, and would lose what has come since."""
    model = Model(
        Place(lambda m: m.context.scale, lambda *_: None), lambda m, number, _: setattr(m.context, "scale", number + 1)
    )
    collector, number = Collector(), 0
    model.context.collector = collector
    ended = threading.Event()

    def collect() -> None:
        nonlocal number
        while not ended.wait(1e-4):
            with collector.lock:
                collector.items.append(number)
                number += 1

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        strategy = HarmonyStrategy(num_microbatches=1, device_memory=room("40KiB"), profile_cache=False)
        trainer_for(strategy, 6, []).fit(Net(model), torch.utils.data.DataLoader(samples(24), batch_size=4))
    finally:
        ended.set()
        thread.join()
    assert collector.items == list(range(number))
    assert number > 10


class ByHand(Net):
    """Steps its optimizer itself, with the graph of one step in the next one, too."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.net(batch)
        self.losses.append(loss.detach().clone())
        self.kept.append(loss)
        if len(self.kept) == 2:
            for each in self.kept:
                self.manual_backward(each)
            self.kept = []
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_what_a_layer_counts_counts_once_where_optimizers_are_stepped_by_hand() -> None:
    """Such steps were not looked at; and a graph may be kept for longer than its step."""

    def trained(strategy: Any) -> ByHand:
        torch.manual_seed(0)
        module = ByHand(Model(Place(averaged_anew, lambda *_: None), lambda *_: None))
        trainer_for(strategy, 3, []).fit(module, torch.utils.data.DataLoader(samples(48), batch_size=8))
        return module

    plain = trained("auto")
    harmony = trained(HarmonyStrategy(num_microbatches=1, device_memory=room("40KiB"), profile_cache=False))
    assert all(map(torch.equal, plain.losses, harmony.losses))
    assert all(map(torch.equal, plain.parameters(), harmony.parameters()))

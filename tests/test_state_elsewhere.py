"""What layers' own code keeps in objects, closures, functions, classes and globals counts once, though it runs again."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.memory.kept_tensor import KeptTensor
from lightning_harmony.engine.memory.stash import Alias
from lightning_harmony.engine.step.runtime import Runtime
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.held.held_state import Held, Kind
from lightning_harmony.microbatches.state_elsewhere import _Moment
from support import nets
from support.counters import counter
from support.same_training import Net, assert_same_training
from support.sampling import combined
from support.taking_turns import samples

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

COUNT = 0
CALLS: list[int] = []
BY_NAME = {"calls": 0}


class Counts(nets.Block):
    """Computes with how often it was called, which it counts itself."""

    def count(self) -> int:
        raise NotImplementedError

    def counted(self) -> Any:
        """All that was counted."""

    def begin(self) -> None:
        """Nothing was counted yet."""

    def forward(self, x: Tensor) -> Tensor:
        # First: a recompute ends with the last tensor that is saved.
        y: Tensor = super().forward(x * (1 + 0.1 * (self.count() % 7)))
        return y


class InAGlobal(Counts):
    def count(self) -> int:
        global COUNT  # noqa: PLW0603
        COUNT += 1
        return COUNT

    def counted(self) -> Any:
        return COUNT

    def begin(self) -> None:
        global COUNT  # noqa: PLW0603
        COUNT = 0


class InAListOfGlobals(Counts):
    def count(self) -> int:
        CALLS.append(len(CALLS))
        return len(CALLS)

    def counted(self) -> Any:
        return list(CALLS)

    def begin(self) -> None:
        CALLS.clear()


class InADictOfGlobals(Counts):
    def count(self) -> int:
        BY_NAME["calls"] += 1
        return BY_NAME["calls"]

    def counted(self) -> Any:
        return dict(BY_NAME)

    def begin(self) -> None:
        BY_NAME["calls"] = 0


class InItsClass(Counts):
    calls = 0

    def count(self) -> int:
        type(self).calls += 1
        return self.calls

    def counted(self) -> Any:
        return self.calls

    def begin(self) -> None:
        type(self).calls = 0


class InAnObject(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace(calls=0, inner=SimpleNamespace(seen=[]))

    def count(self) -> int:
        self.kept.calls += 1
        self.kept.inner.seen.append(self.kept.calls)
        return len(self.kept.inner.seen)

    def counted(self) -> Any:
        return self.kept.calls, list(self.kept.inner.seen)


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class InASlot(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Slotted()

    def count(self) -> int:
        self.kept.calls += 1
        return self.kept.calls

    def counted(self) -> Any:
        return self.kept.calls


class Tally(OrderedDict[str, Any]):
    """Its entries cannot be read by their names alone."""

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(value=super().__getitem__(name))


class InADictOfItsOwn(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Tally(calls=0)

    def count(self) -> int:
        self.kept["calls"] = calls = self.kept["calls"].value + 1
        return int(calls)

    def counted(self) -> Any:
        return self.kept["calls"].value


class History(list[int]):
    """A list with a number beside its items."""

    calls = 0


class InAListOfItsOwn(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.kept = History()

    def count(self) -> int:
        self.kept.calls += 1
        self.kept.append(self.kept.calls)
        return len(self.kept)

    def counted(self) -> Any:
        return self.kept.calls, list(self.kept)


class InAClosure(Counts):
    def begin(self) -> None:
        self.how, self.so_far = counter()

    def count(self) -> int:
        return self.how()

    def counted(self) -> Any:
        return self.so_far()


def called() -> int:
    called.calls += 1  # type: ignore[attr-defined]
    return called.calls  # type: ignore[attr-defined,no-any-return]


class InAFunction(Counts):
    def begin(self) -> None:
        called.calls = 0  # type: ignore[attr-defined]

    def count(self) -> int:
        return called()

    def counted(self) -> Any:
        return called.calls  # type: ignore[attr-defined]


class InAHookWithinIt(Counts):
    def begin(self) -> None:
        how, self.so_far = counter()
        self.up.register_forward_hook(lambda module, args, output: output * (1 + 0.1 * (how() % 5)))

    def count(self) -> int:
        return 0

    def counted(self) -> Any:
        return self.so_far()


class InADictThatItMakes(Counts):
    """In its first call, for all others."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace()

    def count(self) -> int:
        counts = vars(self.kept).setdefault("counts", {}).setdefault("calls", [0])
        counts[0] += 1
        return int(counts[0])

    def counted(self) -> Any:
        return list(self.kept.counts["calls"])


class InAnObjectThatItMakes(Counts):
    """In its first call, and then in an entry of a list."""

    kept: Slotted | None = None

    def count(self) -> int:
        if self.kept is None:
            self.kept, self.all = Slotted(), [Slotted()]
        self.kept.calls += 1
        self.all[-1].calls += self.kept.calls
        if self.kept.calls % 3 == 0:
            self.all.append(Slotted())
        return self.all[-1].calls

    def counted(self) -> Any:
        return [each.calls for each in self.all]


class Model(nn.Module):
    def __init__(self, kind: type[Counts]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(kind(), kind(), nets.Block(), kind())

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.blocks(batch[0]), batch[1])


class Counting(Net):
    """Begins to count with the fit, and compares in the end what was counted, as one loss more."""

    def of_layers(self) -> list[Counts]:
        return [block for block in self.net.blocks if isinstance(block, Counts)]

    def on_train_start(self) -> None:
        for block in self.of_layers():
            block.begin()

    def on_train_end(self) -> None:
        self.losses.append(torch.tensor(tree_leaves([block.counted() for block in self.of_layers()])))


KINDS = [
    InAGlobal,
    InAListOfGlobals,
    InADictOfGlobals,
    InItsClass,
    InAnObject,
    InASlot,
    InADictOfItsOwn,
    InAListOfItsOwn,
    InAClosure,
    InAFunction,
    InAHookWithinIt,
    InADictThatItMakes,
    InAnObjectThatItMakes,
]


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize(("kind", "num_microbatches"), combined(KINDS, [(1,), (4,)]))
def test_what_a_layer_counts_elsewhere_counts_once(kind: type[Counts], num_microbatches: int) -> None:
    assert_same_training(
        Counting(Model(kind)),
        samples(40),
        batch_size=8,
        num_microbatches=num_microbatches,
        device_memory="44KiB",
        updates=["just in time"],
    )


class Given:
    """Is given to layers, which count in it, or leave losses or tensors."""

    def __init__(self) -> None:
        self.count, self.losses, self.mean = 0, [], torch.zeros(())  # type: ignore[var-annotated]


class OfAFunction(Given):
    """Cannot be taken apart: of such no copy is made."""

    def __init__(self) -> None:
        super().__init__()
        self.function = lambda: 0


class Called(Given):
    def __call__(self) -> int:
        return self.count


def a_closure() -> Any:
    count, losses = [0], []

    def function() -> tuple[list[int], list[Any]]:
        return count, losses

    return function


GIVEN: dict[str, Any] = {
    "a list": lambda: [0, [], torch.zeros(())],
    "a dict": lambda: {0: 0, 1: [], 2: torch.zeros(())},
    "an object": Given,
    "an object with a function": OfAFunction,
    "an object that is called": Called,
    "a closure": a_closure,
}


class CountsInGiven(nets.Block):
    def __init__(self, sets: bool) -> None:
        super().__init__()
        self.sets, self.scale = sets, nn.Parameter(torch.ones(nets.WIDTH), requires_grad=False)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        if self.sets:
            with torch.no_grad():
                self.scale.lerp_(self.norm.weight, 0.1)
        if isinstance(given, Given):
            given.count += 1
            given.losses.append(x.square().mean())
            given.mean = given.mean + x.detach().mean()
            count = given.count
        else:
            content = given if isinstance(given, list | dict) else given()[0]
            content[0] += 1
            count = content[0]
            (given[1] if isinstance(given, list | dict) else given()[1]).append(x.square().mean())
        return super().forward(x * (1 + 0.1 * count)) * self.scale


class GivesObjects(nn.Module):
    def __init__(self, kind: str, *, sets: bool, trained: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.trained = kind, trained
        self.blocks = nn.ModuleList(CountsInGiven(sets) for _ in range(3))
        self.head = nn.Linear(nets.WIDTH, nets.WIDTH)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, given = batch[0], GIVEN[self.kind]()
        with torch.set_grad_enabled(self.trained):
            for block in self.blocks:
                x = block(x, given)
        self.counted = partial(self.count, given)
        count, losses, mean = self.counted()
        return F.mse_loss(self.head(x), batch[1]) + 0.01 * (sum(losses) + count + mean)

    def count(self, given: Any) -> tuple[int, list[Tensor], Tensor]:
        if isinstance(given, Given):
            return given.count, given.losses, given.mean
        if isinstance(given, list | dict):
            return given[0], given[1], given[2]
        (count,), losses = given()
        return count, losses, torch.zeros(())


class CountsOnce(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        count, losses, _ = self.net.counted()  # type: ignore[operator]
        assert (count, len(losses)) == (3, 3)


@pytest.mark.parametrize(("kind", "sets", "num_microbatches"), combined(GIVEN, list(product([False, True], [1, 4]))))
def test_what_a_layer_leaves_in_what_it_is_called_with_counts_once(
    kind: str, sets: bool, num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its code runs once more at once, as it sets a frozen parameter for the first time."""
    monkeypatch.setattr(Runtime, "keep_graph", lambda *args: False)
    module = CountsOnce(GivesObjects(kind, sets=sets))
    assert_same_training(module, samples(40), batch_size=8, num_microbatches=num_microbatches)


@pytest.mark.parametrize("kind", GIVEN)
def test_so_it_does_where_narrow_weights_are_tried_without_a_graph(kind: str) -> None:
    module = CountsOnce(GivesObjects(kind, sets=False, trained=False))
    assert_same_training(module, samples(40), batch_size=8, num_microbatches=2, precision="bf16-mixed")


def test_of_a_tuple_what_was_copied_is_as_it_was_and_the_rest_is_refused_if_it_has_changed() -> None:
    copied, same = torch.zeros(2), torch.zeros(2)
    content = {"both": (copied, same), "other": 1}
    held = Held("place", content, Kind.OBJECT)
    moment = _Moment()
    moment.keep(held, lambda tensor: KeptTensor(Alias.of_copy(tensor), tensor) if tensor is copied else None, 0)
    copied.add_(1)
    moment.put(held)
    assert content["both"][0].tolist() == [0, 0]
    assert content["both"][1] is same
    same.add_(1)
    moment.put(held)
    assert content["both"][0].tolist() == [0, 0]
    with pytest.raises(UnsupportedModelError, match="'place' which was changed in place"):
        content["both"][1].sum()


def test_a_set_of_tensors_is_as_it_was() -> None:
    tensors = [torch.tensor(float(number)) for number in range(20)]
    content = set(tensors)
    held = Held("place", content, Kind.OBJECT)
    moment = _Moment()
    moment.keep(held, lambda tensor: KeptTensor(Alias.of_copy(tensor), tensor) if tensor < 10 else None, 0)
    tensors[3].add_(100)
    moment.put(held)
    assert sorted(map(float, content)) == list(range(20))

"""Looking at what a step keeps runs no code of the user's: whatever their classes make of being read, nothing changes."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from support import nets
from support.same_training import Net, assert_same_training
from support.taking_turns import samples, takes_turns

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

READ: Counter[str] = Counter()


class MakesWhatIsAskedFor(OrderedDict[str, Any]):
    """As transformers keeps its activation functions: each time another one is made."""

    def __getitem__(self, name: str) -> Any:
        READ["item"] += 1
        return super().__getitem__(name)()


class MakesWhatIsMissing(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        READ["missing"] += 1
        self[name] = made = object()
        return made


class CountsReaders(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        READ["list"] += 1
        return iter([object()])

    def __len__(self) -> int:
        READ["length"] += 1
        return READ["length"]


class Rotates(deque[Any]):
    def __iter__(self) -> Iterator[Any]:
        READ["deque"] += 1
        self.rotate()
        return super().__iter__()


class ReadsAsAnother:
    """A proxy that says it is what it stands for, once that is there."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        READ["class"] += 1
        raise RuntimeError("not there yet")

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        READ["dict"] += 1
        return {"made": object()}


class Lazy:
    """Its slot is filled when it is first read."""

    __slots__ = ("value",)

    def __getattr__(self, name: str) -> Any:
        READ["slot"] += 1
        made = object()
        setattr(self, name, made)
        return made


class Attributes:
    def __getattribute__(self, name: str) -> Any:
        READ["attribute"] += 1
        return super().__getattribute__(name)


class Copies(UserDict[str, Any]):
    def __getitem__(self, name: str) -> Any:
        READ["user dict"] += 1
        return object()


KINDS: dict[str, Any] = {
    "dict that makes what is asked for": lambda: MakesWhatIsAskedFor(gelu=nn.GELU),
    "dict that makes what is missing": lambda: MakesWhatIsMissing(one=object()),
    "list that counts": lambda: CountsReaders([object()]),
    "deque that rotates": lambda: Rotates([object(), object()]),
    "proxy": ReadsAsAnother,
    "slot that is filled when read": Lazy,
    "object that counts": Attributes,
    "user's dict": lambda: Copies(one=object()),
}
HELD: dict[str, Any] = {}


class Model(nn.Module):
    """Holds something and never reads it."""

    def __init__(self, held: Any, *, in_global: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nets.Block() for _ in range(3)])
        HELD.clear()
        if in_global:
            HELD["held"] = held
        else:
            self.held = [held]

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.blocks(x), y)


@pytest.mark.parametrize("in_global", [False, True], ids=["attribute", "global"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_what_it_holds_past_its_code(kind: str, in_global: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Each look at transformers' activation functions made new ones, so microbatches ran one after the other."""
    held = KINDS[kind]()
    model = Model(held, in_global=in_global)
    READ.clear()
    turns, said = takes_turns(model, caplog)
    assert turns, said
    assert not READ


class Remembers(dict[str, Any]):
    """A dict with a number beside its entries."""

    count = 0


class RemembersItems(list[Any]):
    count = 0


class RemembersInSlot(dict[str, Any]):
    __slots__ = ("_count",)

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        self._count = value


class Refuses(dict[str, Any]):
    """Its entries are set by a method of its own alone."""

    count = property(lambda self: self.get("count", 0), lambda self, value: self.put("count", value))

    def put(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("frozen")


class CountsInContainer(nn.Module):
    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nets.Block() for _ in range(3)])
        self.memory = memory

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        before = self.memory.count
        x = self.blocks[1](self.blocks[0](x))
        self.memory.count = before + 1
        return nn.functional.mse_loss(self.blocks[2](x) * (1 + 0.1 * before), y)


@pytest.mark.parametrize("kind", [Remembers, RemembersItems, RemembersInSlot, Refuses])
def test_what_containers_of_ones_own_keep_trains_as_plain_lightning(kind: type) -> None:
    """Attributes of dicts and lists were not looked at: the second microbatch found what the first one had found."""
    data = samples()
    assert isinstance(data, TensorDataset)
    assert_same_training(
        Net(CountsInContainer(kind())), list(data), device_memory="64KiB", num_microbatches=2, batch_size=4
    )

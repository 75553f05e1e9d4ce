"""State that microbatches leave to the next, wherever it is kept and whenever it is first read: as in plain Lightning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy
from lightning_harmony.held.reads import Readers, Watched, version_of
from support import nets
from support.same_training import Net, assert_same_training, room, root, train_harmony, train_plain
from support.sampling import combined
from support.taking_turns import samples, takes_turns

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

# Microbatches of four to a step.
THIRD_STEP = 8
Read = Callable[[], Any]
Write = Callable[[Tensor], None]


def number_of(x: Tensor) -> float:
    return x.detach().mean().item()


def mean_of(x: Tensor) -> Tensor:
    return x.detach().mean(0)


def zeros() -> Tensor:
    return torch.zeros(nets.WIDTH, device=root())


class Keeps(nn.Module):
    """Three layers. Between some of them something is kept, and between others read, from some microbatch on."""

    def __init__(self, keep: Callable[[Keeps], tuple[Read, Write]], when: tuple[int, int, int, str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[nets.Block() for _ in range(3)])
        self.keep, self.when = keep, when
        self.seen = 0
        self.read, self.write = keep(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Keeps:
        return Keeps(self.keep, self.when)

    def at(self, point: int, x: Tensor, number: int) -> Tensor:
        written, read, first, which = self.when
        if point == read and number >= first and (which == "all" or number % 2):
            x = x * (1 + self.read())
        if point == written and (which == "all" or not number % 2):
            self.write(x)
        return x

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        self.seen += 1
        number = self.seen - 1
        for point, block in enumerate(self.blocks):
            x = block(self.at(point, x, number))
        return F.mse_loss(self.at(len(self.blocks), x, number), y)


# ---- attributes, and what hangs on them ------------------------------------------------------------------------------------


def a_number(net: Any) -> tuple[Read, Write]:
    net.kept = 0.1
    return lambda: net.kept, lambda x: setattr(net, "kept", number_of(x))


def a_flag(net: Any) -> tuple[Read, Write]:
    net.kept = False
    return lambda: 0.5 if net.kept else 0.0, lambda x: setattr(net, "kept", not net.kept)


def a_tensor(net: Any) -> tuple[Read, Write]:
    net.kept = zeros()
    return lambda: net.kept, lambda x: setattr(net, "kept", mean_of(x))


def a_tensor_in_place(net: Any) -> tuple[Read, Write]:
    net.kept = zeros()
    return lambda: net.kept, lambda x: net.kept.copy_(mean_of(x))


def a_list(net: Any) -> tuple[Read, Write]:
    net.kept = [zeros()]
    return lambda: net.kept[-1], lambda x: net.kept.append(mean_of(x))


def a_list_of_numbers(net: Any) -> tuple[Read, Write]:
    net.kept = [0.1]
    return lambda: net.kept[-1], lambda x: net.kept.append(number_of(x))


def an_entry(net: Any) -> tuple[Read, Write]:
    net.kept = {"newest": 0.1}
    return lambda: net.kept["newest"], lambda x: net.kept.update(newest=number_of(x))


def an_entry_each(net: Any) -> tuple[Read, Write]:
    net.kept = {}
    return lambda: 0.1 * len(net.kept), lambda x: net.kept.update({len(net.kept): number_of(x)})


def a_buffer(net: Any) -> tuple[Read, Write]:
    net.register_buffer("kept", torch.zeros(nets.WIDTH))
    return lambda: net.kept, lambda x: setattr(net, "kept", mean_of(x))


def a_buffer_in_place(net: Any) -> tuple[Read, Write]:
    net.register_buffer("kept", torch.zeros(nets.WIDTH))
    return lambda: net.kept, lambda x: net.kept.copy_(mean_of(x))


def an_object(net: Any) -> tuple[Read, Write]:
    net.kept = SimpleNamespace(number=0.1)
    return lambda: net.kept.number, lambda x: setattr(net.kept, "number", number_of(x))


class WithSlots:
    __slots__ = ("number",)


def a_slot(net: Any) -> tuple[Read, Write]:
    net.kept = WithSlots()
    net.kept.number = 0.1
    return lambda: net.kept.number, lambda x: setattr(net.kept, "number", number_of(x))


# ---- functions -------------------------------------------------------------------------------------------------------------


def a_variable_of_a_closure(net: Any) -> tuple[Read, Write]:
    kept = 0.1

    def write(x: Tensor) -> None:
        nonlocal kept
        kept = number_of(x)

    return lambda: kept, write


def a_tensor_of_a_closure(net: Any) -> tuple[Read, Write]:
    kept = zeros()

    def write(x: Tensor) -> None:
        nonlocal kept
        kept = mean_of(x)

    return lambda: kept, write


def a_count_of_a_closure(net: Any) -> tuple[Read, Write]:
    kept = 0

    def write(x: Tensor) -> None:
        nonlocal kept
        kept += 1

    return lambda: 0.1 * (kept % 3), write


def a_list_of_a_closure(net: Any) -> tuple[Read, Write]:
    kept = [0.1]
    return lambda: kept[-1], lambda x: kept.append(number_of(x))


def an_attribute_of_a_function(net: Any) -> tuple[Read, Write]:
    def read() -> Any:
        return read.kept  # type: ignore[attr-defined]

    read.kept = 0.1  # type: ignore[attr-defined]
    return read, lambda x: setattr(read, "kept", number_of(x))


def a_default(net: Any) -> tuple[Read, Write]:
    def read_or_write(x: Tensor | None = None, kept: list[float] = [0.1]) -> Any:  # noqa: B006
        if x is not None:
            kept[0] = number_of(x)
        return kept[0]

    read_or_write.__defaults__ = (None, [0.1])
    return read_or_write, read_or_write


def arguments_of_a_partial(net: Any) -> tuple[Read, Write]:
    kept = {"number": 0.1}
    return partial(kept.get, "number"), partial(lambda kept, x: kept.update(number=number_of(x)), kept)


class Keeper:
    number = 0.1

    def read(self) -> float:
        return self.number

    def write(self, x: Tensor) -> None:
        self.number = number_of(x)


def what_a_method_is_bound_to(net: Any) -> tuple[Read, Write]:
    keeper = Keeper()
    return keeper.read, keeper.write


# ---- classes and globals ---------------------------------------------------------------------------------------------------


class OfItsOwn:
    number = 0.1
    numbers: list[float] = []  # noqa: RUF012


def an_attribute_of_a_class(net: Any) -> tuple[Read, Write]:
    OfItsOwn.number = 0.1
    net.kept = OfItsOwn()
    return lambda: net.kept.number, lambda x: setattr(OfItsOwn, "number", number_of(x))


def an_attribute_of_a_modules_class(net: Any) -> tuple[Read, Write]:
    class Block(nets.Block):
        number = 0.1

    net.blocks[1] = Block()
    return lambda: Block.number, lambda x: setattr(Block, "number", number_of(x))


def a_list_of_a_class(net: Any) -> tuple[Read, Write]:
    OfItsOwn.numbers[:] = [0.1]
    return lambda: OfItsOwn.numbers[-1], lambda x: OfItsOwn.numbers.append(number_of(x))


NUMBER = 0.1
NUMBERS: list[float] = []
OBJECT = SimpleNamespace(number=0.1)


def a_global(net: Any) -> tuple[Read, Write]:
    def write(x: Any) -> None:
        global NUMBER  # noqa: PLW0603
        NUMBER = x if isinstance(x, float) else number_of(x)

    write(0.1)
    return lambda: NUMBER, write


def a_global_list(net: Any) -> tuple[Read, Write]:
    NUMBERS[:] = [0.1]
    return lambda: NUMBERS[-1], lambda x: NUMBERS.append(number_of(x))


def a_global_object(net: Any) -> tuple[Read, Write]:
    OBJECT.number = 0.1
    return lambda: OBJECT.number, lambda x: setattr(OBJECT, "number", number_of(x))


KEPT = [
    a_number, a_flag, a_tensor, a_tensor_in_place, a_list, a_list_of_numbers, an_entry, an_entry_each, a_buffer,
    a_buffer_in_place, an_object, a_slot, a_variable_of_a_closure, a_tensor_of_a_closure, a_count_of_a_closure,
    a_list_of_a_closure, an_attribute_of_a_function, a_default, arguments_of_a_partial, what_a_method_is_bound_to,
    an_attribute_of_a_class, an_attribute_of_a_modules_class, a_list_of_a_class, a_global, a_global_list, a_global_object,
]  # fmt: skip
# Before which layer it is written, and where it is read; from which microbatch on; and by which ones.
BEHIND = (3, 0, THIRD_STEP, "all")
WHEN = [
    BEHIND, (3, 1, THIRD_STEP, "all"), (3, 3, THIRD_STEP, "all"), (1, 0, THIRD_STEP, "all"), (1, 2, THIRD_STEP, "all"),
    (2, 3, 0, "all"), (3, 0, 0, "all"), (3, 1, 0, "in turns"), (3, 1, THIRD_STEP, "in turns"),
]  # fmt: skip


def named(value: Any) -> str:
    return getattr(value, "__name__", "") or "{} to {} from {} by {}".format(*value)


@pytest.mark.parametrize(("keep", "when"), combined(KEPT, [(when,) for when in WHEN]), ids=named)
def test_what_is_first_read_in_a_later_step_is_what_the_microbatch_before_has_left(keep: Any, when: Any) -> None:
    module = Net(Keeps(keep, when))
    assert_same_training(module, samples(32), batch_size=8, device_memory=room("40KiB"), updates=["just in time"])


@pytest.mark.parametrize("keep", [a_number, a_tensor, a_list_of_numbers, a_count_of_a_closure], ids=named)
def test_what_nobody_reads_before_writing_it_does_not_keep_microbatches_from_taking_turns(
    keep: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert takes_turns(Keeps(keep, (3, 3, 0, "all")), caplog) == (True, [])


def test_what_is_read_late_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    _, (said,) = takes_turns(Keeps(a_tensor, (3, 0, 4, "all")), caplog)
    assert "the attribute 'kept' of module 'net' passes something on from one microbatch to the next" in said


def test_a_variable_that_nothing_tells_the_reads_of_is_named(caplog: pytest.LogCaptureFixture) -> None:
    takes, (said,) = takes_turns(Keeps(a_variable_of_a_closure, BEHIND), caplog)
    assert not takes
    assert "the variable 'net.write.kept' passes something on from one microbatch to the next" in said


class Hooked(nn.Module):
    """Three layers, one with a hook that keeps what it gives in a variable of a closure, or on the module."""

    def __init__(self, hook: Callable[[Hooked], tuple[Any, Read]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[nets.Block() for _ in range(3)])
        self.features: list[Tensor] = []
        self.hook = hook
        hooked, self.read = hook(self)
        self.blocks[1].register_forward_hook(hooked)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hooked:
        return Hooked(self.hook)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.blocks(batch[0]) * (1 + self.read()), batch[1])


def read_and_empty(features: Any) -> Tensor:
    mean = features[-1].mean(0) * len(features)
    features.clear()
    return mean


def features_of_a_closure(net: Hooked) -> tuple[Any, Read]:
    features: list[Tensor] = []
    return lambda module, args, output: features.append(output.detach()), lambda: read_and_empty(features)


def features_of_the_module(net: Hooked) -> tuple[Any, Read]:
    return lambda module, args, output: net.features.append(output.detach()), lambda: read_and_empty(net.features)


def newest_of_a_closure(net: Hooked) -> tuple[Any, Read]:
    newest: dict[str, Tensor] = {}
    return lambda module, args, output: newest.update(block=output.detach()), lambda: newest["block"].mean(0)


def count_of_a_closure(net: Hooked) -> tuple[Any, Read]:
    count = 0

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal count
        count += 1

    return hook, lambda: 0.1 * (count % 5)


HOOKS = [features_of_a_closure, features_of_the_module, newest_of_a_closure, count_of_a_closure]


@pytest.mark.parametrize("hook", HOOKS, ids=named)
def test_what_hooks_keep_is_each_microbatchs_own(hook: Any) -> None:
    module = Net(Hooked(hook))
    assert_same_training(module, samples(32), batch_size=8, device_memory=room("40KiB"), updates=["just in time"])


@pytest.mark.parametrize("hook", HOOKS, ids=named)
def test_what_hooks_keep_does_not_keep_microbatches_from_taking_turns(hook: Any, caplog: Any) -> None:
    assert takes_turns(Hooked(hook), caplog) == (True, [])


AVERAGING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copied": lambda average, weight: average.copy_(weight),
    "moved": lambda average, weight: average.lerp_(weight, 0.1),
    "of detached ones": lambda average, weight: average.sub_(0.1 * (average - weight.detach())),
}


class FollowsWeights(nn.Module):
    """Its step changes averages of its weights, which are in a list, as those of packages for averages are."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[nets.Block() for _ in range(3)])
        self.change = change
        self.followed = list(self.blocks.parameters())
        self.averages = [parameter.detach().clone() for parameter in self.followed]

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.blocks(x), y)
        with torch.no_grad():
            for average, weight in zip(self.averages, self.followed, strict=True):
                self.change(average, weight)
        return loss


# On a GPU, the averages stay on the host.
@pytest.mark.cpu
@pytest.mark.parametrize("change", AVERAGING.values(), ids=AVERAGING)
def test_averages_of_weights_in_a_list_are_those_of_plain_lightning(change: Any) -> None:
    """They were no numbers: what watches who reads them took what stands for a weight in a step for the weight itself."""
    module = Net(FollowsWeights(change))
    plain, swapped = copy.deepcopy(module), copy.deepcopy(module)
    train_plain(plain, samples(), 4, 8)
    train_harmony(swapped, samples(), HarmonyStrategy(num_microbatches=4), 8, with_gradients=False)
    assert all(map(torch.equal, plain.net.averages, swapped.net.averages))


class Halved(Tensor):
    """Products of these are half of what they are elsewhere."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert all(issubclass(kind, Halved) for kind in types)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result / 2 if func in (torch.mul, Tensor.mul) else result


def test_what_is_watched_leaves_operations_to_other_classes() -> None:
    """Their code was passed over, without a word."""
    read: list[str] = []
    readers, tensor = Readers((), lambda place: None, read.append), torch.ones(3)
    other = torch.ones(3).as_subclass(Halved)
    readers.watch(tensor, "found")
    tensor.copy_(other)
    assert (type(tensor), read) == (Watched, [])
    assert torch.mul(tensor, other).tolist() == [0.5] * 3
    assert (type(tensor), read) == (Tensor, ["found"])
    readers.close()


def test_to_look_at_the_version_of_what_is_watched_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a list of losses that a module keeps, each was asked in Python at both ends of each turn: a millisecond for sixty."""
    asked: list[Any] = []
    monkeypatch.setattr(Watched, "__torch_function__", classmethod(lambda cls, func, *args: asked.append(func)))
    readers, tensor = Readers((), lambda place: None, asked.append), torch.zeros(3)
    readers.watch(tensor, "found")
    assert version_of(tensor) == 0
    assert not asked
    readers.close()

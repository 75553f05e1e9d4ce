"""State that one microbatch leaves to the next is what it would be if each ran alone after the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy
from lightning_harmony.held.reads import Reads
from support import nets
from support.same_training import Net, assert_same_training, root, trainer_for
from support.taking_turns import samples, takes_turns

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
PASSED_ON = "passes something on from one microbatch to the next"


class Carries(nn.Module):
    """Three layers around which a class below keeps something for the next batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[nets.Block() for _ in range(3)])
        self.number = 0.1
        self.count = 0
        self.flag = False
        self.tensor = torch.zeros(nets.WIDTH, device=root())
        self.memories: Any = None
        self.by_name: dict[str, Any] = {}
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.helper = Helper()
        self.namespace = SimpleNamespace(number=0.1)
        self.register_buffer("buffer", torch.zeros(nets.WIDTH))

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.run(batch[0]), batch[1])


class Helper:
    number = 0.1
    state: Any = None


def mean_of(x: Tensor) -> Tensor:
    return x.detach().mean(0)


class ANumber(Carries):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x * (1 + self.number))
        self.number = x.detach().mean().item()
        return x


class ACount(Carries):
    """It is counted behind the last layer, and read before the first one."""

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x * (1 + self.count % 3))
        self.count += 1
        return x


class AFlag(Carries):
    def run(self, x: Tensor) -> Tensor:
        if self.flag:
            x = x * 2
        self.flag = not self.flag
        return self.blocks(x)


class ATensor(Carries):
    """The state of a recurrent network: read before a layer, written behind it."""

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x) + self.tensor)
        self.tensor = mean_of(x)
        return self.blocks[2](x)


class ATensorInPlace(Carries):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x + self.tensor)
        self.tensor.copy_(mean_of(x))
        return x


class ABuffer(Carries):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x + self.buffer)
        self.buffer = mean_of(x)
        return x


class ABufferInPlace(Carries):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x + self.buffer)
        self.buffer.mul_(0.5).add_(mean_of(x))
        return self.blocks[2](self.blocks[1](x))


class AListForEachLayer(Carries):
    """As the memories of Transformer-XL."""

    def run(self, x: Tensor) -> Tensor:
        memories = self.memories or [0.0] * len(self.blocks)
        inputs = []
        for block, memory in zip(self.blocks, memories, strict=True):
            inputs.append(mean_of(x))
            x = block(x + memory)
        self.memories = inputs
        return x


class AnEntryOfADict(Carries):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x) + self.by_name.get("state", 0.0))
        self.by_name["state"] = mean_of(x)
        return self.blocks[2](x)


class ANumberInADict(Carries):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x * (1 + self.by_name.get("factor", 0.1)))
        self.by_name["factor"] = x.detach().mean().item()
        return x


class AQueue(Carries):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x + sum(self.recent))
        self.recent.append(mean_of(x))
        return x


class Remembers(nets.Block):
    def forward(self, x: Tensor, past: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + past


class WhatALayerIsGiven(Carries):
    """From a list that another object has, too. The layer reads it when others may have had their turn."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Remembers()
        self.memories = self.helper.state = []

    def run(self, x: Tensor) -> Tensor:
        past = self.helper.state
        x = self.blocks[1](self.blocks[0](x), past[-1] if past else torch.zeros_like(self.tensor))
        past.append(mean_of(x))
        return self.blocks[2](x)


class AnObject(Carries):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x * (1 + self.helper.number))
        self.helper.number = x.detach().mean().item()
        return x


class AnObjectOfAClassThatCannotBeChanged(Carries):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x * (1 + self.namespace.number))
        self.namespace.number = x.detach().mean().item()
        return x


class State:
    """What a registry holds, and never changes: another one takes its place."""

    def __init__(self, number: float, names: list[str]) -> None:
        self.number, self.names = number, names

    def looked_up(self, number: float) -> State:
        return State(number, list(self.names))


class ACopyOfAnObject(Carries):
    """Around each layer, as in libraries whose registries hold what nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.helper.state = State(0.1, ["torch"])

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * (1 + self.helper.state.number))
            self.helper.state = self.helper.state.looked_up(self.helper.state.number)
        return x


class ACopyThatIsChangedForAWhile(ACopyOfAnObject):
    """By who has made it, and finds the change where it has put the copy."""

    def run(self, x: Tensor) -> Tensor:
        state = self.helper.state = self.helper.state.looked_up(0.1)
        for block in self.blocks:
            x = block(x)
            state.number = 0.5
            x = x * (1 + self.helper.state.number)
            state.number = 0.1
        return x


class AnotherObject(ACopyOfAnObject):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x * (1 + self.helper.state.number))
        self.helper.state = self.helper.state.looked_up(x.detach().mean().item())
        return x


class Gated(nets.Block):
    factor = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.factor)


class WhatALayerReads(Carries):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Gated() for _ in range(3)])

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        for block in self.blocks:
            block.factor = x.detach().mean().item()
        return x


CARRIED = [
    ANumber, ACount, AFlag, ATensor, ATensorInPlace, ABuffer, ABufferInPlace, AListForEachLayer, AnEntryOfADict,
    ANumberInADict, AQueue, WhatALayerIsGiven, AnObject, AnObjectOfAClassThatCannotBeChanged, AnotherObject, WhatALayerReads,
]  # fmt: skip


class AMeanBetweenTwoLayers(Carries):
    """Read and written where microbatches come in their order."""

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.tensor = 0.5 * self.tensor + mean_of(x)
        return self.blocks[2](self.blocks[1](x - self.tensor))


class ABufferBehindTheLayers(Carries):
    """The queue of MoCo, a running mean of losses."""

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        y = x - self.buffer.clone()
        self.buffer.mul_(0.5).add_(mean_of(x))
        self.number = 0.5 * self.number + x.detach().mean().item()
        return y * (1 + self.number)


class Counts(nets.Block):
    """A layer whose own code keeps something for its next call."""

    flips = False
    state: tuple[Any, Any] = (0.0, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.flips = not self.flips
        y: Tensor = super().forward(-x if self.flips else x) + self.state[0]
        self.state = mean_of(y), mean_of(x)
        return y


class WhatALayerLeavesToItself(Carries):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Counts() for _ in range(3)])

    def run(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class WhatIsMadeOnce(Carries):
    """A mask that the first batch makes, and all others find."""

    def run(self, x: Tensor) -> Tensor:
        if self.memories is None:
            self.memories = torch.ones_like(x[0])
        x = self.blocks(x * self.memories)
        self.by_name["newest"] = mean_of(x)
        return x


class WhatIsWrittenBeforeItIsRead(Carries):
    def run(self, x: Tensor) -> Tensor:
        self.tensor = mean_of(x)
        self.by_name["mean"] = mean_of(x)
        return self.blocks(x) - self.tensor - self.by_name["mean"]


class TheGradientOfWhatItKeeps(Carries):
    """The layers' backward runs within the step, as where an input's gradient is penalized."""

    def run(self, x: Tensor) -> Tensor:
        self.tensor = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.blocks(self.tensor).square().sum(), self.tensor)
        return self.blocks(x) - gradient


class CalledForEachToken(Carries):
    """A decoder whose recurrent layer notes in each call, by weak references, which weights it has."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.GRU(nets.WIDTH, nets.WIDTH)

    def run(self, x: Tensor) -> Tensor:
        x, state = self.blocks(x), None
        for _ in range(3):
            made, state = self.decoder(x[None], state)
            x = x + made[0]
        return x


class Penalizing(nn.Linear):
    """Leaves a penalty beside its result, for the loss."""

    penalty: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.penalty = x.pow(2).mean()
        return x


class WhatLayersLeaveTwice(Carries):
    """Two passes of a batch, each with its penalties. What a layer keeps for its recompute was taken for a use of it."""

    def __init__(self) -> None:
        super().__init__()
        self.penalizing = nn.Sequential(*[Penalizing(nets.WIDTH, nets.WIDTH) for _ in range(2)])

    def run(self, x: Tensor) -> Tensor:
        made = x
        for _ in range(2):
            made = made + self.penalizing(x)
            for module in self.penalizing:
                made = made + 0.1 * module.penalty
        return made


IN_ORDER = [
    AMeanBetweenTwoLayers, ABufferBehindTheLayers, WhatALayerLeavesToItself, WhatIsMadeOnce, WhatIsWrittenBeforeItIsRead,
    ACopyOfAnObject, ACopyThatIsChangedForAWhile,
]  # fmt: skip


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("net", [*CARRIED, *IN_ORDER])
def test_what_a_batch_leaves_to_the_next_is_as_in_plain_lightning(net: type[Carries]) -> None:
    assert_same_training(Net(net()), samples(), batch_size=8, updates=["just in time"])


@pytest.mark.parametrize("net", CARRIED)
def test_microbatches_that_pass_something_on_run_one_after_the_other(
    net: type[Carries], caplog: pytest.LogCaptureFixture
) -> None:
    takes, said = takes_turns(net(), caplog)
    assert not takes
    assert len(said) == 1


def test_what_is_passed_on_is_named(caplog: pytest.LogCaptureFixture) -> None:
    _, (said,) = takes_turns(ATensor(), caplog)
    assert f"the attribute 'tensor' of module 'net' {PASSED_ON}" in said


@pytest.mark.parametrize("net", IN_ORDER)
def test_microbatches_that_come_in_their_order_to_what_they_read_and_write_take_turns(
    net: type[Carries], caplog: pytest.LogCaptureFixture
) -> None:
    assert takes_turns(net(), caplog) == (True, [])


@pytest.mark.parametrize("net", [TheGradientOfWhatItKeeps, CalledForEachToken, WhatLayersLeaveTwice])
def test_what_nothing_is_computed_with_is_not_passed_on(net: type[Carries], caplog: pytest.LogCaptureFixture) -> None:
    assert_same_training(Net(net()), samples(), batch_size=8, updates=["just in time"], tolerance=1e-6)
    assert takes_turns(net(), caplog) == (True, [])


def test_a_class_and_tensors_that_were_watched_are_what_they_were() -> None:
    nets_of_own = AnObject(), ATensor()
    for net in nets_of_own:
        trainer = trainer_for(HarmonyStrategy(num_microbatches=4), 1, [])
        trainer.fit(Net(net), torch.utils.data.DataLoader(samples(), batch_size=8))
    assert vars(Helper)["number"] == 0.1
    assert "tensor" not in vars(ATensor)
    assert type(nets_of_own[1].tensor) is Tensor


class Fails(Carries):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x * (1 + self.number) + self.tensor.sum())
        self.number, self.count, self.tensor = x.detach().mean().item(), self.count + 1, mean_of(x)
        if self.count == 2:
            raise LookupError
        return x


def test_nothing_is_watched_any_more_once_a_step_has_failed() -> None:
    module = Net(Fails())
    trainer = trainer_for(HarmonyStrategy(num_microbatches=4), 3, [])
    with pytest.raises(LookupError):
        trainer.fit(module, torch.utils.data.DataLoader(samples(), batch_size=8))
    assert "number" not in vars(Fails)
    assert type(module.net.tensor) is Tensor


class Attributed:
    pass


class Named(NamedTuple):
    """What is told of a place that is read."""

    name: str


def test_a_class_is_as_it_was_when_the_last_of_several_has_watched_it() -> None:
    """Fits in threads that ended in the order in which they had begun left what one had put there."""
    read: list[str] = []
    one, other = Attributed(), Attributed()
    one.value = other.value = 1  # type: ignore[attr-defined]

    def watch(name: str, watched: Attributed) -> Callable[[], None]:
        return Reads.watch(Attributed, "value", {id(vars(watched)): [Named(name)]}, lambda each: read.append(each.name))

    ends = [watch("first", one), watch("second", other)]
    assert one.value + other.value == 2  # type: ignore[attr-defined]
    assert read == ["first", "second"]
    ends[0]()
    assert one.value + other.value == 2  # type: ignore[attr-defined]
    assert read == ["first", "second", "second"]
    ends[1]()
    assert "value" not in vars(Attributed)
    assert one.value == 1  # type: ignore[attr-defined]

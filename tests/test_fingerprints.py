"""What is changed and tells nobody so: such steps run one microbatch after the other, or are refused where layers do it."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from io import StringIO
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_harmony import HarmonyStrategy
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.microbatches import fingerprints
from support.chains import BATCH, MICROBATCHES, WIDTH, Block, Chain, build, samples
from support.same_training import (
    Net,
    Training,
    assert_same_training,
    compare,
    room,
    root,
    train_harmony,
    train_plain,
)
from support.sampling import combined

STEPS = 3
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*")


class Between(Chain):
    """Does something between its second and its third layer, and with what it has left behind the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.keep()

    def keep(self) -> None:
        """What there is."""

    def through(self, x: Tensor) -> Tensor:
        one, two, three, four, five = self.blocks
        x = two(one(x))
        self.change(x.detach())
        return five(four(three(x)) * (1 + 0.1 * self.found(x.detach())))

    def change(self, x: Tensor) -> None:
        """Change it."""

    def found(self, x: Tensor) -> Any:
        """What is computed with."""
        return 0.0


class ThroughData(Between):
    def keep(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def change(self, x: Tensor) -> None:
        self.mean.data.mul_(0.5).add_(x.flatten(0, -2).mean(0))

    def found(self, x: Tensor) -> Any:
        return self.mean


class OfAnAttribute(ThroughData):
    def keep(self) -> None:
        self.mean = torch.zeros(WIDTH)


class ByNumPy(ThroughData):
    def change(self, x: Tensor) -> None:
        self.mean.numpy()[:] = x.flatten(0, -2).mean(0).numpy()


class InInferenceMode(Between):
    def keep(self) -> None:
        with torch.inference_mode():
            self.mean = torch.zeros(WIDTH, device=root())

    def change(self, x: Tensor) -> None:
        with torch.inference_mode():
            self.mean.mul_(0.5).add_(x.flatten(0, -2).mean(0))

    def found(self, x: Tensor) -> Any:
        return self.mean.clone()


class RunningStatistics(ThroughData):
    """A kernel of torch's changes them, and torch does not count that."""

    def keep(self) -> None:
        super().keep()
        self.register_buffer("square", torch.ones(WIDTH))

    def change(self, x: Tensor) -> None:
        F.batch_norm(x.flatten(0, -2), self.mean, self.square, training=True)


class AMetric(Between):
    def keep(self) -> None:
        self.metric = MeanMetric()

    def change(self, x: Tensor) -> None:
        self.metric.update(x)

    def found(self, x: Tensor) -> Any:
        return self.metric.compute()


class AMetricThatIsReset(AMetric):
    def change(self, x: Tensor) -> None:
        self.metric.reset()
        self.metric.update(x)


class Sobol(Between):
    def keep(self) -> None:
        self.engine = torch.quasirandom.SobolEngine(WIDTH)

    def change(self, x: Tensor) -> None:
        self.drawn = self.engine.draw(1)[0]

    def found(self, x: Tensor) -> Any:
        return self.engine.draw(1)[0] + self.drawn


class MoreData(Between):
    """As where each step takes samples without labels, too."""

    def keep(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.iterator = iter(DataLoader(torch.randn(64, WIDTH, generator=generator), batch_size=1))

    def change(self, x: Tensor) -> None:
        self.drawn = next(self.iterator)[0]

    def found(self, x: Tensor) -> Any:
        return next(self.iterator)[0] + self.drawn


class ASchedule(Between):
    def keep(self) -> None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def change(self, x: Tensor) -> None:
        self.schedule.optimizer.step()
        self.schedule.step()

    def found(self, x: Tensor) -> Any:
        return self.schedule.get_last_lr()[0]


class ADataset(Between):
    def keep(self) -> None:
        self.data = TensorDataset(torch.zeros(1))
        self.data.difficulty = 1.0  # type: ignore[attr-defined]

    def change(self, x: Tensor) -> None:
        self.data.difficulty = float(x.mean())  # type: ignore[attr-defined]

    def found(self, x: Tensor) -> Any:
        return self.data.difficulty  # type: ignore[attr-defined]


class ALargeArray(Between):
    def keep(self) -> None:
        self.bank = np.zeros((1024, WIDTH))

    def change(self, x: Tensor) -> None:
        self.bank[:] = x.flatten(0, -2).mean(0).numpy()

    def found(self, x: Tensor) -> Any:
        return float(self.bank.mean())


class ANumberOfC(Between):
    def keep(self) -> None:
        self.scale = ctypes.c_double(1.0)

    def change(self, x: Tensor) -> None:
        self.scale.value = float(x.mean())

    def found(self, x: Tensor) -> Any:
        return self.scale.value


class AFile(Between):
    def keep(self) -> None:
        self.file = StringIO("".join(f"{number:3}" for number in range(200)))

    def change(self, x: Tensor) -> None:
        self.read = int(self.file.read(3))

    def found(self, x: Tensor) -> Any:
        return 0.01 * (self.read + int(self.file.read(3)))


class AHash(Between):
    def keep(self) -> None:
        self.hash = hashlib.sha256()

    def change(self, x: Tensor) -> None:
        self.hash.update(x.numpy().tobytes())

    def found(self, x: Tensor) -> Any:
        return self.hash.digest()[0] / 256


class AHashWithAKey(AHash):
    """Written in Python, with slots."""

    def keep(self) -> None:
        self.hash = hmac.new(b"key", digestmod="sha256")  # type: ignore[assignment]


class AHashOfAnyLength(AHash):
    def keep(self) -> None:
        self.hash = hashlib.shake_128()  # type: ignore[assignment]

    def found(self, x: Tensor) -> Any:
        return self.hash.digest(1)[0] / 256  # type: ignore[call-arg]


class AQueue(Between):
    queue: SimpleQueue[float]

    def keep(self) -> None:
        self.queue = SimpleQueue()
        for number in range(500):
            self.queue.put(0.1 * (number % 7))

    def change(self, x: Tensor) -> None:
        self.taken = torch.tensor(self.queue.get())

    def found(self, x: Tensor) -> Any:
        return self.queue.get() + self.taken


class AQueueOfAClassOfItsOwn(AQueue):
    class Queue(SimpleQueue[float]):
        """It has attributes, too."""

    def keep(self) -> None:
        self.queue = self.Queue()
        for number in range(500):
            self.queue.put(0.1 * (number % 7))


class OnAParameter(Between):
    def change(self, x: Tensor) -> None:
        self.blocks[0].one.weight.importance = float(x.mean())

    def found(self, x: Tensor) -> Any:
        return self.blocks[0].one.weight.importance


_count: ContextVar[int] = ContextVar("count", default=0)


class LeftInTheContext(Between):
    def keep(self) -> None:
        _count.set(0)

    def change(self, x: Tensor) -> None:
        _count.set(_count.get() + 1)

    def found(self, x: Tensor) -> Any:
        return _count.get() % 5


@pytest.mark.parametrize(
    "make",
    [
        *(ThroughData, OfAnAttribute, ByNumPy, InInferenceMode, RunningStatistics, AMetric, AMetricThatIsReset),
        *(Sobol, MoreData, ASchedule, ADataset, ALargeArray, ANumberOfC, AFile, OnAParameter),
        *(AHash, AHashWithAKey, AHashOfAnyLength, AQueue, AQueueOfAClassOfItsOwn),
    ],
)
def test_what_changes_and_tells_nobody_is_each_microbatch_s_own(
    make: type[Between], caplog: pytest.LogCaptureFixture
) -> None:
    # Not a copy of one module: some of what they keep cannot be copied.
    plain = train_plain(build(make), samples(STEPS), MICROBATCHES, BATCH)
    with caplog.at_level("INFO"):
        compare(plain, train(build(make)))
    assert "microbatches run one after the other" in caplog.text


def test_what_a_microbatch_leaves_in_the_context_the_next_one_finds(caplog: pytest.LogCaptureFixture) -> None:
    """Each lane has a context of its own."""
    torch.manual_seed(0)
    module = Net(LeftInTheContext())
    with caplog.at_level("INFO"):
        train(module)
    assert "a context variable is set for good" in caplog.text
    assert _count.get() == STEPS * MICROBATCHES


class Curriculum(pl.Callback):
    level = 1.0


class ByACallback(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        callback = next(each for each in self.trainer.callbacks if isinstance(each, Curriculum))
        one, two, *rest = self.net.blocks
        x = one(batch[0])
        callback.level = 1.0 + float(x.detach().mean())
        x = two(x)
        for block in rest:
            x = block(x)
        loss = (x * callback.level).square().mean()
        self.losses.append(loss.detach().clone())
        return loss


def test_what_a_step_keeps_on_a_callback_is_each_microbatch_s_own(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    with caplog.at_level("INFO"):
        assert_same_training(
            ByACallback(Chain()),
            samples(STEPS),
            device_memory="64KiB",
            num_microbatches=MICROBATCHES,
            batch_size=BATCH,
            updates=["just in time"],
            make_callbacks=lambda: [Curriculum()],
        )
    assert "'level' in 'Curriculum' is changed" in caplog.text


class Counts(pl.Callback):
    """Counts calls of layers, for itself."""

    def __init__(self) -> None:
        self.calls = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, Block):
                module.register_forward_hook(self.count)

    def count(self, *args: Any) -> None:
        self.calls += 1


def test_callbacks_keep_what_is_theirs(caplog: pytest.LogCaptureFixture) -> None:
    """Those that time layers would have ended turns, or layers were refused that only they look at."""
    counts = Counts()
    with caplog.at_level("INFO"):
        train(build(Chain), [counts])
    assert counts.calls >= STEPS * MICROBATCHES * len(Chain().blocks)
    assert "microbatches run one after the other" not in caplog.text


class MeanInALayer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH, device=root())

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.mean.data.mul_(0.5).add_(x.detach().flatten(0, -2).mean(0))
        return super().forward(x - self.mean)


class SobolInALayer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.engine = torch.quasirandom.SobolEngine(WIDTH)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return super().forward(x + self.engine.draw(1)[0].to(x))


class UsageInALayer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.usage = np.zeros(16 * 1024)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.usage += 1
        return super().forward(x)


class HashInALayer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.hash = hashlib.md5()

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.hash.update(b"a call")
        return super().forward(x * (1 + self.hash.digest()[0] / 2560))


class QueueInALayer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.queue: SimpleQueue[int] = SimpleQueue()
        for number in range(500):
            self.queue.put(number % 7)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return super().forward(x * (1 + 0.1 * self.queue.get()))


@pytest.mark.parametrize(
    ("block", "what", "num_microbatches"),
    combined(
        [
            *((HashInALayer, "a HASH"), (QueueInALayer, "a SimpleQueue")),
            *((MeanInALayer, "a tensor"), (SobolInALayer, "a SobolEngine"), (UsageInALayer, "a ndarray")),
        ],
        [(1,), (MICROBATCHES,)],
    ),
)
def test_layers_that_change_what_tells_nobody_are_refused_before_anything_is_updated(
    block: type[Block], what: str, num_microbatches: int
) -> None:
    """Their code runs again in the backward, and changed it once more; of steps of one microbatch nobody was told."""
    module = Net(Chain())
    module.net.blocks = nn.ModuleList(block() for _ in range(5))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(UnsupportedModelError, match=rf"^{what} held by 'net\.blocks\.4' is changed by a layer's code"):
        train(module, num_microbatches=num_microbatches)
    assert all(map(torch.equal, module.parameters(), before))


class InAnObject(threading.local):
    """What it keeps it shows."""

    flag = False


class Settings(OrderedDict[str, Any]):
    """A dict of its own."""


class Ordinary(Between):
    """Metrics add up, generators and caches are kept, and objects of libraries stay as they are."""

    def keep(self) -> None:
        self.shown, self.settings, self.names = InAnObject(), Settings(flag=False), SimpleNamespace(flag=False)
        self.hash, self.queue = hashlib.sha256(b"a config"), SimpleQueue[int]()
        self.metric, self.last = MeanMetric(), MeanMetric()
        self.engine = torch.quasirandom.SobolEngine(WIDTH)
        self.array, self.scale = np.ones((1024, WIDTH)), ctypes.c_double(0.5)
        self.register_buffer("mask", torch.ones(WIDTH))

    def change(self, x: Tensor) -> None:
        self.metric.update(x)

    def found(self, x: Tensor) -> Any:
        return self.mask * self.scale.value

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        found = super().forward(batch)
        self.last.update(found.detach())
        self.last.compute()
        return found


class Library(ModuleType):
    """Imports what is in it when that is first asked for, as that of `transformers` does."""

    strength = 0.5


_library = Library("library")


class OfALibrary(Chain):
    def through(self, x: Tensor) -> Tensor:
        return _library.strength * super().through(x)


class ReadsAnAttribute(Block):
    """A layer that computes with a tensor that is no buffer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.scale = torch.ones(rows, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x * self.scale[0].to(x.device))
        return out


class ChangesAnAttribute(nn.Module):
    """Changes the tensor before the layer's call, or behind it."""

    def __init__(self, how: str, rows: int, *, is_before: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = Block(), ReadsAnAttribute(rows), Block()
        self.how, self.is_before = how, is_before

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        x = self.first(batch[0])
        if self.is_before:
            self.change(x.detach())
        x = self.second(x)
        if not self.is_before:
            self.change(x.detach())
        loss: Tensor = self.last(x).pow(2).mean()
        return loss

    def change(self, x: Tensor) -> None:
        scale = self.second.scale
        match self.how:
            case "through data":
                scale.data.mul_(0.5).add_(float(x.mean()))
            case "other data":
                scale.data = scale * 0.5
            case "through NumPy":
                array = scale.numpy()
                array *= 0.5
            case "as statistics":
                F.batch_norm(x.cpu().flatten(0, 1), scale[0], torch.ones(WIDTH), training=True)
            case "assigned":
                self.second.scale = scale * 0.5


WAYS = ["through data", "other data", "through NumPy", "as statistics"]


@pytest.mark.parametrize(("how", "rows"), combined(WAYS, [(1,), (512,)]))
def test_an_unseen_change_of_a_tensor_behind_a_layer_that_has_found_it_is_refused(how: str, rows: int) -> None:
    """The backward ran the layer with the changed tensor."""
    strategy = HarmonyStrategy(num_microbatches=1, layers=[Block, ReadsAnAttribute])
    with pytest.raises(
        UnsupportedModelError, match="the tensor in the attribute 'scale' of a layer is changed between"
    ):
        train_harmony(
            Net(ChangesAnAttribute(how, rows, is_before=False)), samples(STEPS), strategy, BATCH, with_gradients=False
        )


@pytest.mark.parametrize(
    ("how", "is_before"), [*((how, True) for how in WAYS), ("assigned", True), ("assigned", False)]
)
def test_a_change_before_the_call_or_that_is_seen_gives_equal_bits(how: str, is_before: bool) -> None:
    assert_same_training(
        Net(ChangesAnAttribute(how, 1, is_before=is_before)),
        samples(STEPS),
        layers=[Block, ReadsAnAttribute],
        batch_size=BATCH,
        num_microbatches=MICROBATCHES,
    )


def test_modules_of_python_are_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `transformers` was written down four times in a step, each time for 40 ms."""
    seen: list[Any] = []
    state_of = fingerprints._state_of
    monkeypatch.setattr(fingerprints, "_state_of", lambda value: (seen.append(value), state_of(value))[1])
    train_harmony(
        build(OfALibrary),
        samples(STEPS),
        HarmonyStrategy(device_memory=OfALibrary.memory, num_microbatches=MICROBATCHES),
        BATCH,
        with_gradients=False,
    )
    assert not any(value is _library for value in seen)
    assert not fingerprints.is_silent(_library)


def test_what_stays_as_it_is_lets_microbatches_take_turns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        train(Net(Ordinary()))
    assert "one after the other" not in caplog.text


def train(module: Net, callbacks: Sequence[pl.Callback] = (), *, num_microbatches: int = MICROBATCHES) -> Training:
    strategy = HarmonyStrategy(device_memory=room("64KiB"), num_microbatches=num_microbatches, profile_cache=False)
    return train_harmony(module, samples(STEPS), strategy, BATCH, with_gradients=False, more_callbacks=callbacks)

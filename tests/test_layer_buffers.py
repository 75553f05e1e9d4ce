"""Buffers that a layer changes in a step are read by the code between layers as plain Lightning has them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_harmony import HarmonyStrategy
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.plan.values.plan import Plan
from support import nets, same_training
from support.same_training import (
    Between,
    Net,
    assert_same_training,
    compare,
    room,
    train_harmony,
    train_plain,
    trainer_for,
)
from support.sampling import combined
from support.taking_turns import samples, takes_turns

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*normalize with the statistics of microbatches"),
]


class Remembers(nets.Block):
    """A layer that keeps the mean of what it has returned."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * y.mean(0))
        return y


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[Remembers() for _ in range(3)])
        self.step = 0

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.run(batch[0]), batch[1])


class BehindTheCall(Reads):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x - block.mean.clone()
        return x


class BehindAllCalls(Reads):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x * (1 + sum(block.mean.square().sum() for block in self.blocks))


class BeforeTheCall(Reads):
    """What the batch before has left."""

    def run(self, x: Tensor) -> Tensor:
        return self.blocks(x + self.blocks[2].mean)


class FromTheThirdStepOn(Reads):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x * (1 + self.blocks[1].mean.mean().item()) if self.step >= 2 else x


class BeforeTheCallFromTheThirdStepOn(Reads):
    """All microbatches that took turns would read what the batch before has left."""

    def run(self, x: Tensor) -> Tensor:
        return self.blocks(x + self.blocks[0].mean if self.step >= 2 else x)


class InTheBackward(Reads):
    """A hook of a gradient reads what the forward of its own microbatch has left."""

    begins = 0

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if x.requires_grad and self.step >= self.begins:
            x.register_hook(lambda gradient: gradient * (1 + self.blocks[1].mean))
        return self.blocks[2](self.blocks[1](x))


class InTheBackwardFromTheThirdStepOn(InTheBackward):
    begins = 2


class Fixed(nets.Block):
    """A layer with a buffer that nobody changes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y * self.scale


class ReadsOther(nets.Block):
    """A layer that reads a buffer of another one, which it knows past its attributes."""

    def __init__(self, others: list[Fixed]) -> None:
        super().__init__()
        self.others = others

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y + self.others[0].scale


class Unchanged(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Fixed() for _ in range(3)])
        self.last = ReadsOther([self.blocks[0]])

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x * self.blocks[2].scale)
        return self.last(x) + self.blocks[1].scale[:1].square()


class Statistics(Reads):
    """A penalty on the statistics of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nets.Block(), nn.BatchNorm1d(nets.WIDTH)) for _ in range(3)])

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return x * sum(block[1].running_var.mean() for block in self.blocks) / self.blocks[0][1].num_batches_tracked


class Steps(Net):
    """Tells the net which step it is in."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.step = self.trainer.global_step


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize(
    "net",
    [
        BehindTheCall,
        BehindAllCalls,
        BeforeTheCall,
        FromTheThirdStepOn,
        BeforeTheCallFromTheThirdStepOn,
        InTheBackward,
        Unchanged,
        Statistics,
    ],
)
def test_a_buffer_that_is_read_between_layers_is_what_its_layer_has_left(net: Any, num_microbatches: int) -> None:
    module = Steps(net())
    assert_same_training(
        module,
        samples(),
        batch_size=8,
        num_microbatches=num_microbatches,
        device_memory="44KiB",
        updates=["just in time"],
    )
    for name, buffer in module.named_buffers():
        assert type(buffer) is Tensor, name


def test_microbatches_whose_step_reads_such_a_buffer_run_one_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    takes, (said,) = takes_turns(BehindAllCalls(), caplog)
    assert not takes
    assert "buffer 'mean' of layer 'net.blocks.0' is read outside of its layer" in said


@pytest.mark.cpu
def test_to_read_it_in_the_backward_of_turns_is_refused() -> None:
    trainer: pl.Trainer = trainer_for(HarmonyStrategy(device_memory="44KiB", num_microbatches=4), 4, [])
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    with pytest.raises(UnsupportedModelError, match=r"buffer 'mean' of layer 'net\.blocks\.1' is read in the backward"):
        trainer.fit(Steps(InTheBackwardFromTheThirdStepOn()), loader)


class Asks(Reads):
    """Wants to know what a buffer is, and nothing of what it holds."""

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        assert [block.mean.shape for block in self.blocks] == [(nets.WIDTH,)] * 3
        return x.to(self.blocks[0].mean.dtype)


def test_a_buffer_that_no_layer_changes_is_read_in_turns(caplog: pytest.LogCaptureFixture) -> None:
    assert takes_turns(Unchanged(), caplog) == (True, [])


def test_to_ask_for_the_shape_of_a_buffer_is_not_to_read_it(caplog: pytest.LogCaptureFixture) -> None:
    assert takes_turns(Asks(), caplog) == (True, [])


class Validates(Net):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.validated: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.net(batch))


def test_a_buffer_that_is_read_in_a_validation_is_as_in_plain_lightning() -> None:
    assert_same_validation(BehindTheCall)


def assert_same_validation(net: Callable[[], nn.Module]) -> None:
    results = []
    for strategy in ("auto", HarmonyStrategy(device_memory="20KiB", num_microbatches=1)):
        module = Validates(net())
        trainer = trainer_for(strategy, 1, [])
        loader = torch.utils.data.DataLoader(samples(16), batch_size=4)
        trainer.validate(module, loader, verbose=False)
        results.append((torch.stack(module.validated), *module.buffers()))
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)


class Resets(Reads):
    """Code between layers gives a buffer of a layer another value before the layer is called, or is called again."""

    def __init__(
        self, how: str, index: int, *, layer: Callable[[], nn.Module] = Remembers, again: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[layer() for _ in range(3)])
        self.how, self.index, self.again = how, index, again

    def run(self, x: Tensor) -> Tensor:
        if self.again:
            x = self.blocks(x)
        owner, name = self.blocks[self.index], next(name for name, _ in self.blocks[0].named_buffers())
        if self.how == "in place":
            getattr(owner, name).mul_(0.5)
        elif self.how == "an element":
            getattr(owner, name)[0] = 3.0
        else:
            setattr(owner, name, torch.linspace(0, 1, nets.WIDTH, device=x.device))
        x = self.blocks(x)
        return x + sum(buffer.sum() for buffer in self.blocks.buffers())


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("how", ["in place", "an element", "assigned"])
def test_a_validation_may_write_a_buffer_between_layers(how: str, index: int) -> None:
    assert_same_validation(lambda: Resets(how, index))
    assert_same_validation(lambda: Resets(how, index, layer=Fixed, again=True))


@pytest.mark.parametrize("how", ["in place", "an element", "assigned"])
def test_a_validation_may_write_a_buffer_behind_a_layer_that_has_changed_it(how: str) -> None:
    """It was refused."""
    assert_same_validation(lambda: Resets(how, 0, again=True))


class Writes(Reads):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        mean = self.blocks[0].mean
        match self.how:
            case "in place":
                mean.zero_()
            case "an element":
                mean[0] = 0.0
            case "assigned":
                self.blocks[0].mean = torch.zeros_like(x[0])
            case "through data":
                mean.data.mul_(0.5)
            case "a view":
                mean[:2].zero_()
            case "through NumPy":
                mean.numpy()[:] = 0.0
            case "as an output":
                torch.mean(x.detach(), 0, out=mean)
            case "as statistics":
                F.batch_norm(x.detach(), mean, torch.ones(nets.WIDTH, device=x.device), training=True)
        return x


WAYS_TO_WRITE = [
    "in place",
    "an element",
    "assigned",
    "through data",
    "a view",
    pytest.param("through NumPy", marks=pytest.mark.cpu),
    "as an output",
    "as statistics",
]


@pytest.mark.parametrize("how", WAYS_TO_WRITE)
def test_a_buffer_may_be_written_between_layers(how: str) -> None:
    """It was refused."""
    assert_same_training(Net(Writes(how)), samples(), num_microbatches=2, updates=["just in time"])


class WritesLater(Writes):
    """Not in the first step."""

    calls = 0

    def run(self, x: Tensor) -> Tensor:
        how = self.how
        self.calls += 1
        if self.calls <= 2:
            self.how = ""
        x = super().run(x)
        self.how = how
        return x


@pytest.mark.parametrize("how", WAYS_TO_WRITE)
def test_a_buffer_that_is_first_written_in_a_later_step_is_refused_by_name(how: str) -> None:
    trainer = trainer_for(HarmonyStrategy(num_microbatches=2), 4, [])
    loader = torch.utils.data.DataLoader(samples(), batch_size=4)
    with pytest.raises(
        UnsupportedModelError, match=r"buffer 'mean' of layer 'net\.blocks\.0' is changed within a step"
    ):
        trainer.fit(Net(WritesLater(how)), loader)


class WritesInHook(Net):
    """A hook before the backward writes it."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.net.blocks[0].mean.data.mul_(0.5)


def test_a_buffer_that_a_hook_before_the_backward_writes_is_refused_before_any_update() -> None:
    module = WritesInHook(BehindTheCall())
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    with pytest.raises(UnsupportedModelError, match=r"buffer 'mean' of layer 'net\.blocks\.0' is changed"):
        trainer_for(HarmonyStrategy(num_microbatches=2), 2, []).fit(module, loader)
    assert all(torch.equal(parameter.cpu(), before[name]) for name, parameter in module.named_parameters())


class Recurs(nn.Module):
    """A layer whose state is a buffer, through which gradients come to earlier calls, as in spiking networks."""

    state: Tensor

    def __init__(self, begins: str) -> None:
        super().__init__()
        self.linear, self.begins = nn.Linear(nets.WIDTH, nets.WIDTH), begins
        self.register_buffer("state", torch.zeros(1, nets.WIDTH), persistent=False)

    def forward(self, x: Tensor, is_first: bool) -> Tensor:
        if is_first and self.begins == "in the layer":
            self.state = torch.zeros_like(x)
        elif is_first and self.begins == "from the last":
            self.state = self.state.detach().mean(0, keepdim=True)
        self.state = torch.tanh(self.linear(x) + self.state)
        return self.state


class Recurrent(nn.Module):
    def __init__(self, begins: str, first: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = Recurs(begins), nn.Linear(nets.WIDTH, nets.WIDTH)
        self.begins, self.first, self.num_calls = begins, first, 0

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if self.begins == "between layers":
            self.cell.state = torch.zeros_like(x)
        self.num_calls += 1
        with torch.set_grad_enabled(self.num_calls > self.first):
            outputs = [self.cell(x * scale, scale == 1.0) for scale in (1.0, 0.5, -0.5)]
        return F.mse_loss(self.head(sum(outputs)), y)


WAYS_TO_BEGIN = ["between layers", "in the layer", "from the last"]


@pytest.mark.parametrize(("begins", "num_microbatches", "devices"), combined(WAYS_TO_BEGIN, [(1, 1), (4, 1), (2, 2)]))
def test_a_gradient_comes_through_a_buffer_to_earlier_calls(begins: str, num_microbatches: int, devices: int) -> None:
    """It was lost. Gradients of a layer that is called several times are summed in another order."""
    assert_same_training(
        Net(Recurrent(begins)),
        samples(),
        layers=[Recurs, nn.Linear],
        num_microbatches=num_microbatches,
        devices=devices,
        tolerance=0.0 if num_microbatches == 1 else 1e-6,
    )


def test_that_a_buffer_is_not_swapped_any_more_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert_same_training(
            Net(Recurrent("in the layer")), samples(), layers=[Recurs], num_microbatches=1, updates=["just in time"]
        )
    said = [each for each in caplog.messages if "leaves a tensor that needs gradients in its buffer 'state'" in each]
    assert len(said) == 1
    assert "a step begins again" in said[0]


def test_a_graph_that_a_buffer_first_has_in_a_later_step_is_refused() -> None:
    trainer = trainer_for(HarmonyStrategy(num_microbatches=1, layers=[Recurs]), 3, [])
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    with pytest.raises(UnsupportedModelError, match="leaves a tensor that needs gradients in its buffer 'state'"):
        trainer.fit(Net(Recurrent("in the layer", first=1)), loader)


class ReadsAnother(nets.Block):
    """A layer that reads a buffer of a layer that is no part of it, and that changes."""

    def __init__(self, others: list[Remembers]) -> None:
        super().__init__()
        self.others = others

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.others[0].mean


class ReadByAnother(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.last = ReadsAnother([self.blocks[0]])

    def run(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(x))


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_layer_reads_a_buffer_that_another_has_changed(
    num_microbatches: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It was refused."""
    with caplog.at_level("INFO"):
        assert_same_training(
            Net(ReadByAnother()), samples(), num_microbatches=num_microbatches, updates=["just in time"]
        )
    said = (
        "layer 'net.last' reads buffer 'mean' of layer 'net.blocks.0', which has changed it in this step: a step begins"
    )
    assert any(said in message for message in caplog.messages)


class Averaged(nets.Block):
    """Uses a mean that the code between layers keeps, and that it may change itself."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.changes = changes
        self.mean: Tensor
        self.register_buffer("mean", torch.ones(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * self.mean.clone()
        if self.changes:
            self.mean.mul_(0.9)
        return x


class ChangesBetween(nn.Module):
    """Changes buffers of layers between their calls."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Averaged(how == "in turn") for _ in range(4))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        blocks: Any = self.blocks
        for block, following in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
            x = block(x)
            mean = x.detach().mean(0)
            if self.how in ("in place", "in turn"):
                block.mean.mul_(0.9).add_(mean, alpha=0.1)
            elif self.how == "through data":
                block.mean.data[:4] = mean[:4]
            elif self.how == "replaced":
                block.mean = 0.9 * block.mean + 0.1 * mean
            elif self.how == "before its call":
                following.mean.copy_(mean)
        if self.how == "of weights":
            for block in blocks:
                block.mean.lerp_(block.down.weight.detach().mean(1), 0.1)
        elif self.how == "all at once":
            torch._foreach_mul_([block.mean for block in blocks], 0.9)
        return F.mse_loss(x, y)


HOW_THEY_CHANGE = (
    "in place",
    "in turn",
    "through data",
    "replaced",
    "before its call",
    "of weights",
    "all at once",
)


@pytest.mark.parametrize(("how", "num_microbatches", "devices"), combined(HOW_THEY_CHANGE, [(1, 1), (4, 1), (2, 2)]))
def test_code_between_layers_changes_their_buffers(how: str, num_microbatches: int, devices: int) -> None:
    """That was refused."""
    assert_same_training(Net(ChangesBetween(how)), samples(), num_microbatches=num_microbatches, devices=devices)


class Expands(nets.Block):
    """Replaces a buffer by one number for all its elements, or by one for each from the second call on."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.each, self.calls = each, 0
        self.register_buffer("scale", torch.ones(1).expand(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.scale
        self.calls += 1
        mean = y.detach().tanh().mean(0)
        self.scale = mean if self.each and self.calls > 1 else mean.mean().view(1).expand(nets.WIDTH)
        return y


class ExpandedBuffers(nn.Module):
    def __init__(self, each: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Expands(each) for _ in range(3)])

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.blocks(batch[0]), batch[1])


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("each", [False, True])
def test_a_buffer_that_is_expanded_may_be_replaced(each: bool) -> None:
    """The layer's was written into the user's, of which PyTorch says that several elements are one place in memory."""
    torch.manual_seed(0)
    assert_same_training(Net(ExpandedBuffers(each)), samples(), num_microbatches=4)


class Observes(nets.Block):
    """Makes buffers larger where they are, as observers of quantization do: in its first call, or in a later one."""

    low: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(self, from_call: int = 0) -> None:
        super().__init__()
        self.from_call, self.calls = from_call, 0
        self.register_buffer("low", torch.empty(0))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("offset", torch.ones(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        if self.calls >= self.from_call:
            # More than what memory is laid out by.
            lowest = y.detach().amin(0).repeat(64)
            self.low.resize_(len(lowest)).copy_(lowest)
            self.scale.resize_(len(lowest)).copy_(1 + lowest.abs())
        self.calls += 1
        return y / self.scale[-nets.WIDTH :] + self.offset


class Observed(ExpandedBuffers):
    def __init__(self, from_call: int = 0) -> None:
        super().__init__(each=False)
        self.blocks = nn.Sequential(*[Observes(from_call) for _ in range(3)])


@pytest.mark.devices(1, 2)
def test_a_buffer_that_a_layer_makes_larger_is_not_written_over_the_next_one() -> None:
    torch.manual_seed(0)
    assert_same_training(Net(Observed()), samples(), num_microbatches=4)


def test_a_buffer_that_is_made_larger_in_a_late_call_is_refused_by_name() -> None:
    trainer = trainer_for(HarmonyStrategy(num_microbatches=4), 4, [])
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    with pytest.raises(UnsupportedModelError, match=r"'net\.blocks\.0' makes its buffer 'low' larger in place"):
        trainer.fit(Net(Observed(from_call=10)), loader)


class Late(nets.Block):
    """Registers a buffer in its first call, or fills one in that was None: statistics whose shape the data tell."""

    mean: Tensor | None

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "first None":
            self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "mean", None) is None:
            self.register_buffer("mean", x.new_zeros(nets.WIDTH), persistent=self.how != "not persistent")
        assert self.mean is not None
        if self.how == "in place":
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        else:
            self.mean = self.mean * 0.9 + x.detach().mean(0)
        y: Tensor = super().forward(x)
        return y + self.mean.clone()


class WithLate(Reads):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Late(how) for _ in range(3)])

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        y = self.blocks(batch[0])
        return F.mse_loss(y + self.blocks[1].mean if self.blocks[1].how == "read between layers" else y, batch[1])


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("how", ["assigned", "in place", "first None", "not persistent", "read between layers"])
def test_a_buffer_that_a_layer_registers_in_a_call_is_changed_once_in_each(how: str, num_microbatches: int) -> None:
    """The recompute changed it once more."""
    torch.manual_seed(0)
    assert_same_training(Net(WithLate(how)), samples(), num_microbatches=num_microbatches)


class Deletes(nets.Block):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("scale", torch.ones(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "deleted":
            del self.scale
        else:
            self.scale = None
        y: Tensor = super().forward(x)
        return y


@pytest.mark.parametrize("how", ["deleted", "made None"])
def test_a_layer_that_deletes_its_buffer_is_refused_by_name(how: str) -> None:
    """The next call found it again."""
    net = WithLate("assigned")
    net.blocks[1] = Deletes(how)
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    with pytest.raises(UnsupportedModelError, match=r"'net\.blocks\.1' deletes its buffer 'scale'"):
        trainer_for(HarmonyStrategy(num_microbatches=4), 2, []).fit(Net(net), loader)


class Divides(nets.Block):
    """Divides by a running mean, which autograd saves, and changes it in place in the next call."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.scale.mul_(0.9).add_(0.1 * y.detach().abs().mean(0))
        return y / self.scale


class Divided(ExpandedBuffers):
    def __init__(self) -> None:
        super().__init__(each=False)
        self.blocks = nn.Sequential(*[Divides() for _ in range(3)])


@pytest.mark.devices(1, 2)
def test_a_buffer_that_a_kept_graph_has_saved_may_be_changed_by_the_next_microbatch() -> None:
    torch.manual_seed(0)
    module, devices = Net(Divided()), same_training.default_devices
    packs = tuple((f"net.blocks.{number}",) for number in range(3))
    plan = Plan(packs, (0, 1, 2), 3, kept=frozenset({1, 2}), num_microbatches=4, num_devices=devices)
    plain = train_plain(copy.deepcopy(module), samples(), 4, 8)
    strategy = HarmonyStrategy(plan=plan)
    compare(plain, train_harmony(module, samples(), strategy, 8, with_gradients=True, devices=devices))


class Noisy(nn.Module):
    """A layer of a Bayesian network, which draws its noise into a buffer."""

    noise: Tensor

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mean, self.width = (nn.Parameter(torch.randn(nets.WIDTH, nets.WIDTH) / 8) for _ in range(2))
        self.register_buffer("noise", torch.zeros(nets.WIDTH, nets.WIDTH))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.mean + self.width * self.draw(self.noise)).tanh()


class Bayesian(nn.Module):
    """Averages several draws."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[Noisy(draw) for _ in range(3)])

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.layers(x) + self.layers(x), y)


def into_the_buffer(noise: Tensor) -> Tensor:
    return noise.data.normal_()


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("memory", ["64KiB", "1MiB"])
def test_the_gradients_of_all_calls_have_the_noise_that_the_last_one_has_drawn_into_a_buffer(
    memory: str, num_microbatches: int
) -> None:
    """Each call fills the same memory, and no version tells. Ours had the noise of its own in each."""
    plain = train_plain(Net(Bayesian(into_the_buffer)), samples(), num_microbatches, 8)
    strategy = HarmonyStrategy(device_memory=room(memory), num_microbatches=num_microbatches, profile_cache=False)
    harmony = train_harmony(Net(Bayesian(into_the_buffer)), samples(), strategy, 8, with_gradients=False)
    # Of several microbatches, gradients of two calls are added in another order.
    compare(plain, harmony, tolerance=0.0 if num_microbatches == 1 else 1e-6)


class Penalized(Bayesian):
    """Uses the noise between layers, too, before a draw and behind it, as the energy of a Bayesian network does."""

    def __init__(self, num_calls: int) -> None:
        super().__init__(into_the_buffer)
        self.num_calls = num_calls

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        loss = self.penalty()
        for _ in range(self.num_calls):
            loss = loss + F.mse_loss(self.layers(x), y) + self.penalty()
        return loss

    def penalty(self) -> Tensor:
        penalties = [(layer.width[1:] * layer.noise[1:]).square().mean() for layer in self.layers]
        return torch.stack(penalties).sum()


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("num_calls", [1, 3])
def test_so_have_those_of_code_between_layers_that_uses_the_noise(num_calls: int, num_microbatches: int) -> None:
    """It was given copies of the buffer, which no later call fills."""
    plain = train_plain(Net(Penalized(num_calls)), samples(), num_microbatches, 8)
    strategy = HarmonyStrategy(device_memory=room("64KiB"), num_microbatches=num_microbatches, profile_cache=False)
    harmony = train_harmony(Net(Penalized(num_calls)), samples(), strategy, 8, with_gradients=False)
    # Gradients of several uses are added in another order.
    compare(plain, harmony, tolerance=1e-5)


@pytest.mark.cpu
def test_so_have_those_of_a_kept_graph() -> None:
    plan = Plan(
        tuple((f"net.layers.{n}",) for n in range(3)), (0, 1, 2), 3, kept=frozenset({0, 1, 2}), num_microbatches=1
    )
    plain = train_plain(Net(Bayesian(into_the_buffer)), samples(), 1, 8)
    harmony = train_harmony(
        Net(Bayesian(into_the_buffer)), samples(), HarmonyStrategy(plan=plan), 8, with_gradients=False
    )
    compare(plain, harmony, tolerance=1e-6)


def test_a_tensor_that_each_call_draws_for_itself_stays_its_own() -> None:
    def of_its_own(noise: Tensor) -> Tensor:
        return torch.empty_like(noise).normal_()

    plain = train_plain(Net(Bayesian(of_its_own)), samples(), 1, 8)
    strategy = HarmonyStrategy(device_memory=room("64KiB"), num_microbatches=1, profile_cache=False)
    compare(
        plain,
        train_harmony(Net(Bayesian(of_its_own)), samples(), strategy, 8, with_gradients=False),
        tolerance=1e-6,
    )


class Uncounted(nn.Module):
    """Keeps statistics, and does not count how often it was called, as InstanceNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(nets.WIDTH))
        self.register_buffer("running_var", torch.ones(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, training=True)  # type: ignore[arg-type]


class RunsAgain(nets.Block):
    """A part of it runs once more in the backward, as that of a DenseNet that saves memory."""

    counted: Tensor

    def __init__(self, kind: str, *, use_reentrant: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(nets.WIDTH) if kind == "statistics" else nn.Identity()
        if kind == "uncounted":
            self.norm = Uncounted()
        self.register_buffer("counted", torch.zeros(()))
        self.kind, self.use_reentrant = kind, use_reentrant

    def part(self, x: Tensor) -> Tensor:
        if self.kind == "in place":
            self.counted += 1
        elif self.kind == "replaced":
            self.counted = self.counted + 1
        return self.norm(super().forward(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.part, x, use_reentrant=self.use_reentrant)
        return y * 1.5


class WithCheckpoints(Reads):
    def __init__(self, kind: str, *, use_reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[RunsAgain(kind, use_reentrant=use_reentrant) for _ in range(3)])

    def run(self, x: Tensor) -> Tensor:
        # Reentrant checkpoints need an input that requires a gradient.
        return self.blocks(x.clone().requires_grad_())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "use_reentrant", "num_microbatches", "has_capacity"),
    combined(
        product(["statistics", "uncounted", "in place", "replaced"], [False, True]), [(1, True), (4, True), (4, False)]
    ),
)
@pytest.mark.sampled
def test_what_a_checkpoint_within_a_layer_changes_when_it_runs_again_is_changed_as_in_plain_training(
    kind: str, use_reentrant: bool, num_microbatches: int, has_capacity: bool
) -> None:
    """BatchNorm took statistics once for each microbatch, where plain Lightning takes them twice."""
    module = Net(WithCheckpoints(kind, use_reentrant=use_reentrant))
    capacity = room("40KiB") if has_capacity else None
    assert_same_training(module, samples(), device_memory=capacity, num_microbatches=num_microbatches)


class OfOneModule(WithCheckpoints):
    """Its layers share the module of their statistics."""

    def __init__(self) -> None:
        super().__init__("statistics")
        for block in self.blocks:
            block.norm = self.blocks[0].norm


@pytest.mark.parametrize(("num_microbatches", "devices"), [(1, 1), (4, 1), (1, 2)])
def test_so_is_what_layers_share_that_are_in_several_packs(num_microbatches: int, devices: int) -> None:
    """In the backward a pack found the statistics as its own call had left them, without what came later."""
    assert_same_training(
        Net(OfOneModule()),
        samples(),
        device_memory=room("40KiB"),
        num_microbatches=num_microbatches,
        devices=devices,
        # All have the weights of the module.
        tolerance=1e-5,
    )


def test_it_is_said_that_no_turns_are_taken_then(caplog: pytest.LogCaptureFixture) -> None:
    has_turns, (said,) = takes_turns(WithCheckpoints("in place"), caplog)
    assert not has_turns
    assert "buffer 'counted' of layer 'net.blocks.0' is changed in the backward" in said


def test_so_it_is_where_batches_accumulate() -> None:
    """The backwards of the second batch followed all of its forwards, and that was refused."""
    module = Net(WithCheckpoints("in place"))
    strategy = HarmonyStrategy(num_microbatches=4)
    plain = train_plain(copy.deepcopy(module), samples(), 4, 8, accumulate_grad_batches=2)
    compare(plain, train_harmony(module, samples(), strategy, 8, with_gradients=False, accumulate_grad_batches=2))


def test_where_the_backward_follows_all_forwards_it_is_refused_with_the_way_out() -> None:
    module, strategy = Net(WithCheckpoints("in place")), HarmonyStrategy(num_microbatches=4)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "more_callbacks": [Between()]}
    with pytest.raises(UnsupportedModelError, match=r"'counted' of layer .* in the backward.*num_microbatches=1"):
        train_harmony(module, samples(), strategy, 8, with_gradients=False, **options)


class AroundLayers(WithCheckpoints):
    """The caller's checkpoint runs layers again, with or without something between them for which it has to."""

    def __init__(self, kind: str, region: str) -> None:
        super().__init__(kind)
        self.region = region
        for block in self.blocks:
            block.forward = block.part  # type: ignore[method-assign, assignment]

    def run(self, x: Tensor) -> Tensor:
        def all_of_them(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                if self.region == "between":
                    x = x * torch.sigmoid(x)
            return x

        if self.region == "nested":
            x = checkpoint(
                lambda x: checkpoint(self.blocks[0], self.blocks[1](x), use_reentrant=False), x, use_reentrant=False
            )
            return self.blocks[2](x)  # type: ignore[no-any-return]
        if self.region == "twice":
            return checkpoint(lambda x: self.blocks[0](self.blocks[0](x)), x, use_reentrant=False)  # type: ignore[no-any-return]
        return checkpoint(all_of_them, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "region", "num_microbatches"),
    combined(
        product(["statistics", "uncounted", "in place", "replaced"], ["layers", "between", "nested"]), [(1,), (4,)]
    ),
)
@pytest.mark.sampled
def test_what_layers_change_in_a_checkpoint_around_them_is_changed_as_in_plain_training(
    kind: str, region: str, num_microbatches: int
) -> None:
    """It heard of nothing that they save, and so it never ran them again."""
    assert_same_training(Net(AroundLayers(kind, region)), samples(), num_microbatches=num_microbatches)


def test_two_calls_in_a_checkpoint_around_them_are_refused_with_the_way_out() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"'net.blocks.0' is called twice within .* Leave the checkpoint out"
    ):
        train_harmony(Net(AroundLayers("in place", "twice")), samples(), HarmonyStrategy(), 8, with_gradients=False)


class Borrowing(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(nets.WIDTH, nets.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))  # type: ignore[no-any-return]


class SharesANorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(nets.WIDTH)
        self.blocks = nn.ModuleList([Borrowing(norm), Borrowing(norm)])

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.blocks[1](self.blocks[0](x)), x * 1.0, use_reentrant=False)
        return x.square().mean()


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_so_are_two_layers_there_that_share_buffers(num_microbatches: int) -> None:
    """Statistics differed, and nothing told of it."""
    strategy = HarmonyStrategy(num_microbatches=num_microbatches, layers=[Borrowing])
    with pytest.raises(
        UnsupportedModelError, match=r"'net.blocks.1' shares buffers with 'net.blocks.0', .* checkpoint out"
    ):
        train_harmony(Net(SharesANorm()), torch.randn(40, nets.WIDTH), strategy, 8, with_gradients=False)


class Refuses(nets.Block):
    """A layer that counts its calls in a buffer, and fails in every second one."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if int(self.calls) % 2 == 0:
            raise ArithmeticError("an even call")
        y: Tensor = super().forward(x) * self.calls
        return y


class GoesOn(nn.Module):
    """Code between layers that leaves out a layer that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nets.Block(), Refuses(), nets.Block())

    def forward(self, batch: list[Tensor]) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            try:
                x = block(x)
            except ArithmeticError:
                continue
        return x.square().mean()


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_what_a_layer_has_counted_before_it_failed_stays_counted_where_the_step_goes_on(num_microbatches: int) -> None:
    """The count was as before the call, so that each later call failed, too."""
    torch.manual_seed(0)
    assert_same_training(Net(GoesOn()), samples(), num_microbatches=num_microbatches)


def test_nothing_is_kept_of_a_call_that_has_failed() -> None:
    """Its error and its frames referred to each other, and no garbage is collected within steps."""
    work: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Works(Refuses):
        def forward(self, x: Tensor) -> Tensor:
            more = x * 2
            work.append(weakref.ref(more))
            return super().forward(more)

    class Looks(GoesOn):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1] = Works()

        def forward(self, batch: list[Tensor]) -> Tensor:
            loss = super().forward(batch)
            alive.append(sum(each() is not None for each in work))
            return loss

    gc.disable()
    try:
        train_harmony(Net(Looks()), samples(), HarmonyStrategy(num_microbatches=1), 8, with_gradients=False)
    finally:
        gc.enable()
    assert alive
    assert not any(alive)

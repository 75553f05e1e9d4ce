"""Steps that change weights: evaluations that put averages in their place, and training steps that change a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.errors import UnsupportedModelError
from support import nets
from support.device_updates import OPTIMIZERS
from support.same_training import (
    Net,
    assert_same_training,
    compare,
    room,
    root,
    train_harmony,
    train_plain,
    trainer_for,
)
from support.sampling import combined

STEPS = 3
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")


class Averaged(Net):
    """Keeps averages of its weights, and evaluates with them, as latent diffusion does."""

    def __init__(self) -> None:
        super().__init__(nets.Language(), OPTIMIZERS["AdamW"])
        for name, parameter in list(self.net.named_parameters()):
            self.register_buffer(name.replace(".", "_"), parameter.detach().clone())
        self.seen: list[Tensor] = []

    def averages(self) -> list[Tensor]:
        return [self.get_buffer(name.replace(".", "_")) for name, _ in self.net.named_parameters()]

    def on_train_batch_end(self, *args: Any) -> None:
        for average, parameter in zip(self.averages(), self.net.parameters(), strict=True):
            average.lerp_(parameter.detach().to(average.device), 0.3)

    @contextmanager
    def with_averages(self) -> Iterator[None]:
        own = [parameter.clone() for parameter in self.net.parameters()]
        self.put(self.averages())
        try:
            yield
        finally:
            self.put(own)

    def put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.net.parameters(), values, strict=True):
            parameter.data.copy_(value.data)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        before = self.net(batch)
        with self.with_averages():
            averaged = self.net(batch)
        self.seen += [before.detach().cpu(), averaged.detach().cpu(), self.net(batch).detach().cpu()]


class Together(Averaged):
    def put(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self.net.parameters()), values)


class Assigned(Averaged):
    def put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.net.parameters(), values, strict=True):
            parameter.data = value.clone()


class Shared(Averaged):
    """Has averages and weights in the same memory for the time."""

    def put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.net.parameters(), values, strict=True):
            parameter.data = value.data


class Mixed(Averaged):
    """What is put in their place is computed of what is there, and of other parameters."""

    def put(self, values: list[Tensor]) -> None:
        parameters = list(self.net.parameters())
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.sub_(parameter.data).add_(value.data)
        parameters[-1].data.add_(parameters[-1].data, alpha=2.0).div_(3.0)


class Viewed(Averaged):
    """As it looks at parts of the weights before, and keeps none."""

    def put(self, values: list[Tensor]) -> None:
        self.norms = [parameter.view(-1).norm().item() for parameter in self.net.parameters()]
        super().put(values)


class Initialised(Averaged):
    """As it writes into some rows, by their numbers."""

    def put(self, values: list[Tensor]) -> None:
        super().put(values)
        with torch.no_grad():
            self.net.head.weight[0] = values[-1][0]


def run(module: Averaged, strategy: Any, devices: int = 1) -> Averaged:
    module = copy.deepcopy(module)
    trainer = trainer_for(strategy, STEPS, [], devices=devices, val_check_interval=2, num_sanity_val_steps=0)
    torch.manual_seed(7)
    loader = DataLoader(nets.tokens(8 * STEPS), batch_size=8)
    trainer.fit(module, loader, DataLoader(nets.tokens(16), batch_size=8))
    return module


def swapped() -> HarmonyStrategy:
    return HarmonyStrategy(
        device_memory="160KiB" if root().type == "cpu" else "1GiB",
        num_microbatches=1,
        profile_cache=False,
        cuda_graphs=False,
    )


@pytest.mark.parametrize(
    ("kind", "devices"), combined([Averaged, Together, Assigned, Mixed, Initialised, Viewed, Shared], [(1,), (2,)])
)
def test_evaluations_with_other_weights_are_those_of_plain_lightning(kind: type[Averaged], devices: int) -> None:
    torch.manual_seed(0)
    module = kind()
    plain, harmony = run(module, "auto"), run(module, swapped(), devices)
    assert len(plain.seen) == len(harmony.seen) > 0
    assert all(map(torch.equal, plain.seen, harmony.seen))
    assert not torch.equal(plain.seen[-3], plain.seen[-2])
    for ours, theirs in zip(harmony.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "another shape": lambda net: setattr(net.head.weight, "data", torch.zeros(3)),
    "a view": lambda net: net.head.weight.data.view(-1).zero_(),
    "shape": lambda net: net.head.weight.data.resize_(1),
    "strides": lambda net: net.head.weight.data.t_(),
    "one that has a view": lambda net: (net.head.weight.t(), net.head.weight.data.zero_()),
    "one that is differentiated": lambda net: torch.enable_grad()(net.head.weight.zero_)(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_more_than_values_are_changed_is_refused(change: str) -> None:
    class Changes(Averaged):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            CHANGES[change](self.net)

    with pytest.raises(UnsupportedModelError, match="is changed inside the step"):
        run(Changes(), swapped())


class Momentum(Net):
    """Averages a frozen copy in its step, and tells features of both apart from a queue of earlier ones, as MoCo does."""

    def __init__(self) -> None:
        super().__init__(
            nets.Language(), lambda parameters: OPTIMIZERS["AdamW"]([p for p in parameters if p.requires_grad])
        )
        self.key = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("queue", torch.randn(nets.WIDTH, 16))

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.key.parameters(), self.net.parameters(), strict=True)

    def average(self) -> None:
        for key, query in self.pairs():
            key.data = key.data * 0.9 + query.data * 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.net.body(self.net.embed(batch)).mean(1)
        with torch.no_grad():
            self.average()
            keys = self.key.body(self.key.embed(batch)).mean(1)
        same, others = (features * keys).sum(1, keepdim=True), features @ self.queue.clone()
        with torch.no_grad():
            self.queue.copy_(torch.cat([keys.T, self.queue], 1)[:, :16])
        return nn.functional.cross_entropy(torch.cat([same, others], 1), same.new_zeros(len(same), dtype=torch.long))


class MomentumInPlace(Momentum):
    def average(self) -> None:
        for key, query in self.pairs():
            key.data.mul_(0.9).add_(query.data, alpha=0.1)


class MomentumTogether(Momentum):
    def average(self) -> None:
        keys, queries = zip(*self.pairs(), strict=True)
        torch._foreach_lerp_(list(keys), [query.detach() for query in queries], 0.1)


class MomentumFirst(Momentum):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.average()
            self.average()
        return super().training_step(batch, batch_idx)


class TargetNetwork(Momentum):
    """Copies its weights to a network that no optimizer has and nobody has frozen, as deep Q-learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.key.requires_grad_(True)
        self.num_steps = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS["AdamW"](list(self.net.parameters()))

    def average(self) -> None:
        if self.num_steps % 2 == 0:
            self.key.load_state_dict(self.net.state_dict())
        self.num_steps += 1


@pytest.mark.parametrize(
    ("kind", "num_microbatches", "devices"),
    combined([Momentum, MomentumInPlace, MomentumTogether, MomentumFirst, TargetNetwork], [(1, 1), (4, 1), (4, 2)]),
)
def test_a_copy_that_a_step_changes_and_nothing_trains_is_that_of_plain_lightning(
    kind: type[Momentum], num_microbatches: int, devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What had come ahead of its time was as before: each copy that is changed goes from the devices."""
    torch.manual_seed(0)
    module, data = kind(), nets.tokens(8 * STEPS)
    plain = train_plain(copy.deepcopy(module), data, num_microbatches, 8)
    memory = "160KiB" if root().type == "cpu" else "1GiB"
    strategy = HarmonyStrategy(device_memory=memory, num_microbatches=num_microbatches, profile_cache=False)
    with caplog.at_level("INFO"):
        training = train_harmony(module, data, strategy, 8, with_gradients=False, devices=devices)
    compare(plain, training)
    said = caplog.text.count("the step changes parameter 'key.")
    assert said == (num_microbatches > 1)


@pytest.mark.cpu
def test_a_copy_that_a_step_changes_takes_no_room_on_the_device_once_it_is_changed() -> None:
    """All that a step had changed counted there until its end: a net's averages needed as much memory as the net."""

    class Averaging(Net):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(*[nn.Linear(nets.WIDTH, nets.WIDTH) for _ in range(24)]))
            self.copy = copy.deepcopy(self.net)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for mine, theirs in zip(self.copy.parameters(), self.net.parameters(), strict=True):
                mine.data = mine.data * 0.9 + theirs.data * 0.1
            return self.net(batch).square().mean()

    reports = assert_same_training(
        Averaging(), torch.randn(8 * STEPS, nets.WIDTH), device_memory="16KiB", num_microbatches=1
    )
    assert max(reports[-1].peak_device_bytes) < sum(p.nbytes for p in Averaging().copy.parameters())


class UsedInAGraph(Momentum):
    """The copy is changed when its layers have been called with a graph, which their recompute would not find."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.key.head(self.net.body(self.net.embed(batch))).square().mean()
        self.average()
        return loss


class KeepsWhatItAssigns(Momentum):
    def average(self) -> None:
        made = [key.data * 0.9 for key in self.key.parameters()]
        for key, value in zip(self.key.parameters(), made, strict=True):
            key.data = value
        made[0].mul_(0.5)


@pytest.mark.parametrize("kind", [UsedInAGraph, KeepsWhatItAssigns])
def test_a_frozen_copy_that_is_used_otherwise_is_not_changed_within_a_step(kind: type[Momentum]) -> None:
    memory = "160KiB" if root().type == "cpu" else "1GiB"
    strategy = HarmonyStrategy(device_memory=memory, num_microbatches=4, profile_cache=False)
    with pytest.raises(UnsupportedModelError, match="is changed inside the step"):
        train_harmony(kind(), nets.tokens(16), strategy, 8, with_gradients=False)


class Contrasted(nn.Module):
    """Two towers, whose products are scaled by a parameter that the step keeps within bounds, as CLIP's.

    Args:
        bound: does that.
        reads: multiplies what the backward reads the scale for, instead of what has its exponential.
        late: in which call of a microbatch's the first bound is; 0 for all.
    """

    def __init__(self, bound: Callable[[nn.Parameter], object], *, reads: bool = False, late: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (nn.Sequential(*[nets.Block() for _ in range(3)]) for _ in range(2))
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.1))
        self.bound, self.reads, self.late = bound, reads, late
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        one, other = (nn.functional.normalize(tower(x), dim=-1) for tower in (self.one, self.other))
        if self.num_calls > self.late:
            self.bound(self.scale)
        scores = (self.scale * one) @ other.T if self.reads else self.scale.exp() * (one @ other.T)
        return nn.functional.cross_entropy(scores + self.bias, torch.arange(len(x), device=x.device))


def clamped(scale: nn.Parameter) -> None:
    with torch.no_grad():
        scale.clamp_(0.0, 1.45)


BOUNDS: dict[str, Callable[[nn.Parameter], object]] = {
    "clamp_": clamped,
    "data.clamp_": lambda scale: scale.data.clamp_(0.0, 1.45),
    "data =": lambda scale: setattr(scale, "data", scale.data.clamp(0.0, 1.45)),
    "copy_": lambda scale: scale.data.copy_(scale.detach().clamp(max=1.45)),
    "detach().mul_": lambda scale: scale.detach().mul_(0.9),
    "init": lambda scale: nn.init.constant_(scale, 1.2),
    "by name": lambda scale: torch.no_grad()(torch.clamp_)(input=scale, max=1.45),
}


@pytest.mark.one_after_the_other
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("way", BOUNDS)
def test_a_step_may_bound_a_trained_parameter_of_its_own_before_it_uses_it(
    way: str, num_microbatches: int, *, reads: bool
) -> None:
    """CLIP's scale: all of this was refused."""
    samples = torch.randn(8 * STEPS, nets.WIDTH, generator=torch.Generator().manual_seed(1))
    plain = train_plain(Net(Contrasted(BOUNDS[way], reads=reads), OPTIMIZERS["AdamW"]), samples, num_microbatches, 8)
    module = Net(Contrasted(BOUNDS[way], reads=reads), OPTIMIZERS["AdamW"])
    strategy = HarmonyStrategy(
        device_memory={"cpu": "64KiB", "cuda": None}[root().type],
        num_microbatches=num_microbatches,
        profile_cache=False,
    )
    compare(plain, train_harmony(module, samples, strategy, 8, with_gradients=False))
    assert plain.state["net.scale"] < 1.5


@pytest.mark.cpu
@pytest.mark.one_after_the_other
def test_it_may_begin_to_in_a_later_step(caplog: pytest.LogCaptureFixture) -> None:
    samples = torch.randn(8 * STEPS, nets.WIDTH, generator=torch.Generator().manual_seed(1))
    plain = train_plain(Net(Contrasted(clamped, late=9), OPTIMIZERS["AdamW"]), samples, 4, 8)
    strategy = HarmonyStrategy(device_memory="64KiB", num_microbatches=4, profile_cache=False)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        module = Net(Contrasted(clamped, late=9), OPTIMIZERS["AdamW"])
        compare(plain, train_harmony(module, samples, strategy, 8, with_gradients=False))
    assert any("microbatches run one after the other" in message for message in caplog.messages)


@pytest.mark.cpu
def test_it_may_not_when_it_has_used_it() -> None:
    """What the backward has of it would be told apart by nothing from what it has become."""

    class Late(Contrasted):
        def forward(self, x: Tensor) -> Tensor:
            bound, self.bound = self.bound, lambda scale: None
            loss = super().forward(x)
            self.bound = bound
            bound(self.scale)
            return loss

    samples = torch.randn(8, nets.WIDTH)
    strategy = HarmonyStrategy(device_memory="64KiB", num_microbatches=1, profile_cache=False)
    with pytest.raises(UnsupportedModelError, match=r"'net\.scale' is changed inside the step"):
        train_harmony(Net(Late(clamped)), samples, strategy, 8, with_gradients=False)


class WithItsAverage(nn.Module):
    """A network and an average of it, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.mean = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.training else self.mean(x)  # type: ignore[no-any-return]

    def update(self) -> None:
        for mean, new in zip(self.mean.parameters(), self.net.parameters(), strict=True):
            mean.data = mean.data * 0.9 + new.data * 0.1


class AveragedInTheStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = WithItsAverage()

    def forward(self, x: Tensor) -> Tensor:
        loss = self.model(x).square().mean()
        self.model.update()
        return loss  # type: ignore[no-any-return]


def test_an_average_within_the_layer_that_trains_is_refused_with_a_way_out() -> None:
    torch.manual_seed(0)
    module, data = Net(AveragedInTheStep()), torch.randn(16, 32)
    with pytest.raises(UnsupportedModelError, match=r"layers of smaller modules with HarmonyStrategy\(layers="):
        assert_same_training(module, data, layers=[WithItsAverage])
    assert_same_training(module, data, layers=[nn.Linear])


FOLLOWING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in place": lambda own, other: own.lerp_(other, 0.1),
    "past torch's count": lambda own, other: own.data.lerp_(other.data, 0.1),
    "by other data": lambda own, other: setattr(own, "data", 0.9 * own.data + 0.1 * other.data),
}


class HiddenTeacher(nn.Module):
    """A teacher that is no submodule, as it is not to be trained or saved, follows the weights at the end of each step.

    Args:
        is_listed: whether a list has it; else an object.
        is_whole: whether that is the module; else its parameters.
        follow: changes a weight of the teacher.
    """

    def __init__(self, is_listed: bool, is_whole: bool, follow: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nets.Block() for _ in range(4))
        self.last = nn.Linear(nets.WIDTH, nets.WIDTH)
        teacher = nn.Linear(nets.WIDTH, nets.WIDTH).requires_grad_(False)
        held: Any = teacher if is_whole else list(teacher.parameters())
        self.held: Any = [held] if is_listed else SimpleNamespace(held=held)
        self.follow = follow

    def forward(self, x: Tensor) -> Tensor:
        held = self.held[0] if isinstance(self.held, list) else self.held.held
        weight, bias = list(held.parameters()) if isinstance(held, nn.Module) else held
        x = self.blocks[0](x)
        taught = F.linear(x.detach(), weight, bias).tanh()
        for block in self.blocks[1:]:
            x = block(x)
        loss = F.mse_loss(self.last(x), taught)
        with torch.no_grad():
            for own, other in zip((weight, bias), self.last.parameters(), strict=True):
                self.follow(own, other)
        return loss


# On a GPU, nothing brings the teacher there.
@pytest.mark.cpu
@pytest.mark.parametrize("follow", FOLLOWING.values(), ids=FOLLOWING)
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_teacher_that_is_no_submodule_follows_as_in_plain_lightning(
    is_listed: bool, is_whole: bool, follow: Any
) -> None:
    """Microbatches that took turns all found it as the step began, without a word."""
    module = Net(HiddenTeacher(is_listed, is_whole, follow))
    assert_same_training(module, torch.randn(24, nets.WIDTH), device_memory=room("40KiB"))

"""What a module does from its third step on is looked at as what it does in the first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from operator import getitem
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from support.same_training import Net, assert_same_training, trainer_for
from support.sampling import combined

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Model(pl.LightningModule):
    """Does something else, in a layer or in the step, from its third step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(5)])
        self.at_first: Callable[[Tensor], Tensor] = lambda loss: loss
        self.of_step: Callable[[Model, Tensor], Tensor] = lambda model, loss: loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return self.of_step(self, loss) if batch_idx >= 2 else self.at_first(loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: Model, num_microbatches: int = 2, devices: int = 1) -> None:
    samples = list(torch.randn(32, 16, generator=torch.Generator().manual_seed(0)))
    strategy = HarmonyStrategy(num_microbatches=num_microbatches, profile_cache=False)
    trainer_for(strategy, 4, [], devices=devices).fit(model, DataLoader(samples, batch_size=8))


def of_closure(model: Model) -> Callable[[], nn.Parameter]:
    weight = model.net[2].weight
    assert isinstance(weight, nn.Parameter)
    return lambda: weight


# Each reaches a weight of a layer past its module.
REACHES: dict[str, Callable[[Model], Callable[[], nn.Parameter]]] = {
    "a tuple": lambda model: partial(getitem, tuple(model.net.parameters()), 4),
    "a closure": of_closure,
    "the optimizer's groups": lambda model: lambda: model.optimizers().param_groups[0]["params"][4],
}


@pytest.mark.parametrize(("way", "num_microbatches", "devices"), combined(REACHES, [(1, 1), (4, 1), (2, 2)]))
def test_a_parameter_that_is_reached_past_its_module_is_refused_when_that_sets_in(
    way: str, num_microbatches: int, devices: int
) -> None:
    """Its gradients came to p.grad, where nobody looked: they were lost, as only the first step's graph was looked at."""
    model = Model()
    hidden = REACHES[way](model)
    # No other number of nodes tells.
    model.at_first = lambda loss: loss * torch.ones((), requires_grad=True).mean()
    model.of_step = lambda model, loss: loss * hidden().mean()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(UnsupportedModelError, match="where swapping does not see it"):
        fit(model, num_microbatches, devices)
    assert model.trainer.global_step == 2
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


class Borrowing(nn.Linear):
    """Uses a tensor of its own that needs gradients, from its third step on."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        # In a set, which nothing stands in for.
        self.hidden = {nn.Parameter(torch.ones(16))}
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        y = super().forward(x)
        return y * next(iter(self.hidden)).to(x.device) if self.num_calls > 5 else y


def test_a_parameter_that_a_layer_borrows_is_refused_when_its_gradient_first_comes() -> None:
    model = Model()
    model.net[2] = borrowing = Borrowing()
    (model.lent,) = borrowing.hidden
    with pytest.raises(UnsupportedModelError, match=r"parameter 'lent' where swapping does not see it"):
        fit(model)


def test_a_tensor_that_belongs_to_no_module_gets_its_gradient_as_in_plain_training() -> None:
    def trained(strategy: Any) -> Tensor:
        model = Model()
        model.net[2] = borrowing = Borrowing()
        borrowing.num_calls = 4
        samples = list(torch.randn(32, 16, generator=torch.Generator().manual_seed(0)))
        trainer_for(strategy, 4, []).fit(model, DataLoader(samples, batch_size=8))
        found = next(iter(borrowing.hidden)).grad
        assert found is not None
        return found

    assert torch.equal(trained("auto"), trained(HarmonyStrategy(num_microbatches=1, profile_cache=False)))


class Evaluated(Model):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)


def decay(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.9)


def decay_past_autograd(weight: nn.Parameter) -> None:
    torch._foreach_mul_([weight.data], 0.9)


class Decaying(nn.Linear):
    """Changes its weight in evaluation, or in training from its third call on."""

    def __init__(self, change: Callable[[nn.Parameter], None], *, in_training: bool = False) -> None:
        super().__init__(16, 16)
        self.change, self.in_training, self.num_calls = change, in_training, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_calls += 1
        if self.num_calls > 2 if self.in_training else not self.training:
            self.change(self.weight)
        return super().forward(x)


@pytest.mark.parametrize("change", [decay, decay_past_autograd])
def test_a_layer_may_change_its_weight_in_evaluation_alone(change: Callable[[nn.Parameter], None]) -> None:
    """Without a backward, nobody looked, and the change was lost; later it was refused."""
    samples = DataLoader(list(torch.randn(32, 16, generator=torch.Generator().manual_seed(3))), batch_size=8)

    def trained(strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(4)
        model = Evaluated()
        model.net[2] = Decaying(change)
        trainer_for(strategy, 4, []).fit(model, samples, samples)
        return model.state_dict()

    plain, harmony = trained("auto"), trained(HarmonyStrategy(num_microbatches=1, profile_cache=False))
    assert all(torch.equal(plain[name], harmony[name]) for name in plain)


class ByHand(Model):
    """Optimizes manually."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch).square().mean())
        optimizer.step()


def test_a_layer_may_change_its_weight_past_autograd_in_manual_optimization() -> None:
    samples = DataLoader(list(torch.randn(32, 16, generator=torch.Generator().manual_seed(3))), batch_size=8)

    def trained(strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(4)
        model = ByHand()
        model.net[2] = Decaying(decay_past_autograd, in_training=True)
        trainer_for(strategy, 4, []).fit(model, samples)
        return model.state_dict()

    plain, harmony = trained("auto"), trained(HarmonyStrategy(num_microbatches=1, profile_cache=False))
    assert all(torch.equal(plain[name], harmony[name]) for name in plain)


class Reading(nn.Linear):
    """Reads the data of its weight, and keeps what it found in a buffer."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("norm", torch.zeros(()))
        self.norm: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.norm.copy_(self.weight.data.norm())
        return super().forward(x) / self.norm


def test_a_layer_may_read_the_data_of_its_weights() -> None:
    def model() -> Model:
        made = Model()
        torch.manual_seed(2)
        made.net[2] = Reading()
        return made

    samples = DataLoader(list(torch.randn(32, 16, generator=torch.Generator().manual_seed(0))), batch_size=8)
    plain, swapped = model(), model()
    trainer_for("auto", 4, []).fit(plain, samples)
    trainer_for(HarmonyStrategy(num_microbatches=1, profile_cache=False), 4, []).fit(swapped, samples)
    for (name, expected), found in zip(plain.state_dict().items(), swapped.state_dict().values(), strict=True):
        assert torch.equal(expected, found), name


# ---- tensors that layers find past their arguments ---------------------------------------------------------------------

found: Tensor | None = None


def set_global(tensor: Tensor) -> None:
    global found  # noqa: PLW0603
    found = tensor


class Shelf(nn.Module):
    """Has a tensor for others."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor: Any = 1
        self.tensors: list[Any] = [1]
        self.by_name: dict[str, Any] = {"one": 1}


PUTS: dict[str, tuple[Callable[[Shelf, Tensor], Any], Callable[[Shelf], Any]]] = {
    "a global": (lambda shelf, tensor: set_global(tensor), lambda shelf: found),
    "another module's attribute": (
        lambda shelf, tensor: setattr(shelf, "tensor", tensor),
        lambda shelf: shelf.tensor,
    ),
    "a list": (lambda shelf, tensor: shelf.tensors.__setitem__(0, tensor), lambda shelf: shelf.tensors[0]),
    "a dict": (lambda shelf, tensor: shelf.by_name.__setitem__("one", tensor), lambda shelf: shelf.by_name["one"]),
}


class Finds(nn.Linear):
    """Uses what the step has put somewhere, from a step on."""

    def __init__(self, find: Callable[[], Any]) -> None:
        super().__init__(16, 16)
        self.find = find
        self.starts = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (self.find() if self.starts else 1))


class Puts(Model):
    """Its layers find a tensor of the microbatch that is none of their arguments, from a step on."""

    def __init__(self, way: str, first_step: int, accumulated: int) -> None:
        super().__init__()
        put, find = PUTS[way]
        self.shelf = shelf = Shelf()
        self.put = partial(put, shelf)
        self.net = nn.Sequential(*[Finds(partial(find, shelf)) for _ in range(3)])
        self.embed = nn.Linear(16, 16)
        self.first_step, self.accumulated = first_step, accumulated

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.net:
            layer.starts = batch_idx // self.accumulated >= self.first_step
        x = self.embed(batch)
        self.put(x.sigmoid())
        loss: Tensor = self.net(x).square().mean()
        return loss


@pytest.mark.parametrize(
    ("way", "first_step", "accumulated", "num_microbatches", "devices"),
    combined(product(PUTS, [0, 3], [1, 3]), [(1, 1), (4, 1), (2, 2)]),
)
def test_a_tensor_that_a_layer_finds_past_its_arguments_is_that_of_its_microbatch_in_the_backward_too(
    way: str, num_microbatches: int, devices: int, first_step: int, accumulated: int
) -> None:
    """Where all forwards came before all backwards, layers that ran again found the tensor of the last microbatch."""
    samples = list(torch.randn(48 * accumulated, 16, generator=torch.Generator().manual_seed(0)))
    torch.manual_seed(1)
    swapped = Puts(way, first_step, accumulated)
    plain = Puts(way, first_step, num_microbatches * accumulated)
    plain.load_state_dict(swapped.state_dict())
    options = {"accumulate_grad_batches": num_microbatches * accumulated}
    trainer_for("auto", 6, [], **options).fit(plain, DataLoader(samples, batch_size=8 // num_microbatches))
    strategy = HarmonyStrategy(num_microbatches=num_microbatches, layers=[Finds, nn.Linear], profile_cache=False)
    trainer = trainer_for(strategy, 6, [], accumulate_grad_batches=accumulated, devices=devices)
    trainer.fit(swapped, DataLoader(samples, batch_size=8))
    assert trainer.global_step == 6
    for (name, expected), value in zip(plain.state_dict().items(), swapped.state_dict().values(), strict=True):
        assert torch.equal(expected, value), name


# ---- narrow weights ----------------------------------------------------------------------------------------------------


def without_autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(weight.dtype), weight)


def scaled_by_norm(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        norm = weight.norm()
    return F.linear(x, weight) / norm


def in_numpy(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight) * float(weight.detach().cpu().numpy().std())


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(x, row)
        return x * row

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, row = ctx.saved_tensors
        return (gradient * row).sum_to_size(x.shape), (gradient * x).sum_to_size(row.shape)


READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a penalty": lambda x, w: F.linear(x, w) + 0.01 * w.pow(2).sum(),
    "a penalty before the cast": lambda x, w: 0.01 * w.pow(2).sum() + F.linear(x, w),
    "three gradients": lambda x, w: 0.1 * w.pow(2).sum() + F.linear(x, w) * w.exp().mean() + w.sigmoid().std(),
    "two casts": lambda x, w: F.linear(F.linear(x, w), w),
    "autocast is off": without_autocast,
    "its type": lambda x, w: F.linear(x, w) + (1.001 * x).to(w.dtype).sigmoid(),
    "its norm": scaled_by_norm,
    "its data": lambda x, w: F.linear(x, w) / w.data.norm(),
    "an array": in_numpy,
    "a product": lambda x, w: F.linear(x, 2.1 * w),
    "a function": lambda x, w: F.linear(x, w) + Product.apply(x.sum(0), w).mean(),
    "a list": lambda x, w: F.linear(x, w) / torch._foreach_norm([w])[0],
    "a transposed part": lambda x, w: x @ w.t() + x[:, :2] @ w[:, :2].T,
    "a copy": lambda x, w: F.linear(x, copy.deepcopy(w)) + F.linear(x, w),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w) + torch.einsum("bi,ii->bi", x, w),
}


class ReadsLater(nn.Linear):
    """Its weight is what autocast alone reads at first, and from its fourth step on it reads it in another way, too."""

    def __init__(self, read: str, calls: int) -> None:
        super().__init__(16, 16)
        self.read, self.calls, self.num_calls = READS[read], calls, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls <= 4 * self.calls:
            return super().forward(x)
        y: Tensor = self.read(x, self.weight)
        return y + self.bias


def assert_read_later_as_in_plain_training(read: str, num_microbatches: int, devices: int, memory: str | None) -> None:
    torch.manual_seed(3)
    module = Net(nn.Sequential(*[ReadsLater(read, num_microbatches) for _ in range(3)], Loss()))
    assert_same_training(
        module,
        torch.randn(64, 16),
        layers=[ReadsLater],
        device_memory=memory,
        num_microbatches=num_microbatches,
        devices=devices,
        precision="bf16-mixed",
    )


class Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float().square().mean()


@pytest.mark.parametrize(("read", "num_microbatches"), combined(READS, [(1,), (4,)]))
def test_a_weight_that_autocast_alone_has_read_is_as_wide_as_it_is_when_code_reads_it(
    read: str, num_microbatches: int
) -> None:
    """It was narrow from the first steps on, whatever code did with it later."""
    assert_read_later_as_in_plain_training(read, num_microbatches, 1, None if num_microbatches == 1 else "16KiB")


@pytest.mark.parametrize("read", ["a penalty", "two casts", "autocast is off"])
def test_a_weight_that_autocast_alone_has_read_is_as_wide_as_it_is_on_two_devices(read: str) -> None:
    assert_read_later_as_in_plain_training(read, 4, 2, "12KiB")

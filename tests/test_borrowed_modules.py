"""Layers that use modules which are no parts of them: given as arguments, held past registration, or read for a parameter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, estimate
from lightning_harmony.errors import UnsupportedModelError
from support import nets
from support.same_training import Net, assert_same_training, room, trainer_for
from support.sampling import combined
from support.taking_turns import samples, takes_turns

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*normalize with the statistics")


class Decodes(nn.Module):
    """Reads the weight of a module that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(nets.WIDTH))

    def forward(self, x: Tensor, embedding: nn.Linear) -> Tensor:
        return F.linear(x, embedding.weight.t(), self.bias)


class Applies(Decodes):
    def forward(self, x: Tensor, embedding: nn.Module) -> Tensor:
        out: Tensor = embedding(x) + self.bias
        return out


class AppliesFunction(Decodes):
    def forward(self, x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        return apply(x) + self.bias


class Body(nn.Module):
    """Blocks, and something that one layer behind them is given."""

    def __init__(self, decode: nn.Module, given: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nets.Block() for _ in range(3))
        self.given, self.decode = given, decode

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.decode(x, self.given)
        return out

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.run(x), y)


class GivesFunction(Body):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.decode(x, partial(self.given.forward))
        return out


class Holds(nn.Module):
    """Has a module in a list, past registration."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.scale, self.other = nn.Linear(nets.WIDTH, nets.WIDTH), [other]

    def forward(self, x: Tensor, given: nn.Module) -> Tensor:
        out: Tensor = self.scale(x) + self.other[0](x)
        return out


class Biased(nets.Block):
    """A block that is given the bias of positions that all blocks have in common, as those of T5."""

    def forward(self, x: Tensor, bias: nn.Module) -> Tensor:  # type: ignore[override]
        return super().forward(x + bias(x))


class Positions(nn.Module):
    """Made of layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(nets.WIDTH, nets.WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class InCommon(nn.Module):
    def __init__(self, bias: nn.Module) -> None:
        super().__init__()
        self.bias, self.blocks = bias, nn.ModuleList(Biased() for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.bias)
        return x

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.run(x), y)


class UsesBefore(Body):
    """The given module is called between layers, too."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(self.given(x))


def linear() -> nn.Module:
    return nn.Linear(nets.WIDTH, nets.WIDTH)


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


def normalized() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(nets.WIDTH), nn.Dropout(0.5))


def holding() -> nn.Module:
    given = linear()
    return Body(Holds(given), given)


ONE_LAYER: dict[str, Callable[[], nn.Module]] = {
    "called": lambda: Body(Applies(), linear()),
    "its parameter read": lambda: Body(Decodes(), linear()),
    "of layers": lambda: Body(Applies(), Positions()),
    "with buffers": lambda: Body(Applies(), normalized()),
    "frozen": lambda: Body(Applies(), frozen()),
    "held past registration": holding,
    "called past its hooks": lambda: GivesFunction(AppliesFunction(), linear()),
}
# Gradients are summed in another order.
SEVERAL_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "in common": lambda: InCommon(linear()),
    "layers in common": lambda: InCommon(Positions()),
    "called before": lambda: UsesBefore(Applies(), linear()),
    "called before, its parameter read": lambda: UsesBefore(Decodes(), linear()),
}
WHERE = [(None, 1), ("40KiB", 1), (None, 2), ("40KiB", 2)]


@pytest.mark.parametrize(("name", "memory", "devices"), combined(ONE_LAYER, WHERE))
def test_a_module_that_a_layer_uses_and_is_no_part_of_it_trains_with_equal_bits(
    name: str, memory: str | None, devices: int
) -> None:
    torch.manual_seed(0)
    assert_same_training(Net(ONE_LAYER[name]()), samples(), device_memory=room(memory), devices=devices)


@pytest.mark.parametrize(("name", "memory", "devices"), combined(SEVERAL_LAYERS, WHERE))
def test_a_module_that_several_layers_use_trains_to_rounding_as_sums_have_another_order(
    name: str, memory: str | None, devices: int
) -> None:
    torch.manual_seed(0)
    assert_same_training(
        Net(SEVERAL_LAYERS[name]()), samples(), device_memory=room(memory), devices=devices, tolerance=1e-6
    )


def test_microbatches_take_turns_where_layers_use_modules_of_others(caplog: pytest.LogCaptureFixture) -> None:
    assert takes_turns(InCommon(Positions()), caplog) == (True, [])


class Counted(Net):
    """What its step does beside shows how often that ran."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.num_steps, self.drawn = 0, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        self.drawn.append(torch.rand(()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch))


@pytest.mark.parametrize("sanity", [0, 1])
def test_what_a_step_did_before_it_began_again_is_taken_back(sanity: int, caplog: pytest.LogCaptureFixture) -> None:
    module = Counted(InCommon(linear()))
    trainer = trainer_for(HarmonyStrategy(num_microbatches=2), 2, [], num_sanity_val_steps=sanity)
    with caplog.at_level("INFO"):
        trainer.fit(module, DataLoader(samples(), batch_size=4), DataLoader(samples(), batch_size=4))
    assert module.num_steps == len(module.drawn) == len(module.losses) == 4
    assert sum("a step begins again" in message for message in caplog.messages) == 1


def test_an_estimate_knows_what_layers_borrow() -> None:
    found = estimate(Net(InCommon(linear())), batch=[each[:4] for each in samples().tensors])
    assert found.num_parameters == sum(p.numel() for p in InCommon(linear()).parameters())


class Later(nets.Block):
    """From its second step on it calls another one."""

    num_calls = 0

    def forward(self, x: Tensor, other: nn.Module) -> Tensor:  # type: ignore[override]
        self.num_calls += 1
        return super().forward(x if self.num_calls <= 4 else other(x))


class ReadsItsOwner(nn.Module):
    """Its owner's own parameter cannot be lent without all of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(nets.WIDTH, nets.WIDTH)

    def forward(self, x: Tensor, given: Any) -> Tensor:
        out: Tensor = self.scale(x) * given.factor
        return out


class Scaling(Body):
    def __init__(self) -> None:
        super().__init__(ReadsItsOwner(), linear())
        self.factor = nn.Parameter(torch.ones(nets.WIDTH))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.decode(x, self)
        return out


class ByHand(Net):
    """Two optimizers in turns, each of which has its own parameters alone need gradients."""

    def __init__(self, net: nn.Module, *, steps_before: bool = False) -> None:
        super().__init__(net)
        self.automatic_optimization, self.steps_before = False, steps_before

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        if self.steps_before:
            self._make(first, self.net.blocks[0](batch[0]).mean())
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            loss = self.net(batch)
            self.losses.append(loss.detach().clone())
            self._make(optimizer, loss)
            self.untoggle_optimizer(optimizer)

    def _make(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        parameters = list(self.net.parameters())
        return [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in (parameters[::2], parameters[1::2])]


@pytest.mark.parametrize("name", ["called", "of layers"])
def test_a_manual_step_begins_again_before_an_optimizer_has_stepped(name: str) -> None:
    torch.manual_seed(0)
    assert_same_training(ByHand(ONE_LAYER[name]()), samples(), num_microbatches=1, updates=["after the backward"])


REFUSED: dict[str, tuple[Callable[[], pl.LightningModule], str]] = {
    "later": (lambda: Net(Body(Later(), linear())), "calls layer 'net.given', which is not a part of it"),
    "of its owner": (lambda: Net(Scaling()), "uses parameter 'net.factor', which is not its own"),
    "behind an update": (
        lambda: ByHand(Body(Applies(), linear()), steps_before=True),
        "calls layer 'net.given', which is not a part of it",
    ),
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_lent_before_anything_has_changed_is_refused(name: str, devices: int) -> None:
    make, message = REFUSED[name]
    trainer = trainer_for(HarmonyStrategy(num_microbatches=2), 3, [], devices=devices)
    with pytest.raises(UnsupportedModelError, match=message):
        trainer.fit(make(), DataLoader(samples(), batch_size=4))

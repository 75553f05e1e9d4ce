"""Code keeps tensors in the memory of weights: they change with these, wherever they are kept, and whoever reads them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony.errors import UnsupportedModelError
from support.kept_tensors import Kept
from support.lightning_fits import QUIET_MARKS, harmony, trainer_for
from support.same_training import root

pytestmark = QUIET_MARKS
SIZE = 32

# What code takes of a weight.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": Tensor.detach,
    "rows": lambda weight: weight.data[:2],
    "transposed": lambda weight: weight.detach().t(),
    "flat": lambda weight: weight.detach().view(-1)[3:],
    "bits": lambda weight: weight.detach().view(torch.int32),
}
PLACES = ("attribute", "object", "list", "parameter", "elsewhere")
MAKERS = ("beforehand", "on_fit_start", "step", "first call", "each call")
READERS = ("its layer", "an earlier layer", "step", "hook")


class Block(nn.Module):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.box, self.values = SimpleNamespace(), list[Any]()
        # Out of sight of the module.
        self.roles = {"kept": kept}

    def forward(self, x: Tensor) -> Tensor:
        return self.roles["kept"].during(self, x + torch.tanh(self.linear(x)))


def kept_of(view: str, place: str, maker: str, reader: str) -> Kept:
    """What is kept of the weight of one of the blocks."""
    return Kept(
        lambda block: block.linear.weight,
        VIEWS[view],
        place,
        maker,
        reader,
        lambda kept: 1 + kept.float().clamp(-1, 1).mean(),
    )


class Model(pl.LightningModule):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kept) for _ in range(6))
        self.roles, self.seen = {"kept": kept}, list[float]()
        kept.look_at(self.blocks)
        if kept.maker == "beforehand":
            kept.make()

    def on_fit_start(self) -> None:
        if self.roles["kept"].maker == "on_fit_start":
            self.roles["kept"].make()

    def training_step(self, x: Tensor, number: int) -> Tensor:
        kept = self.roles["kept"]
        if kept.maker == "step" and number == 0:
            kept.make()
        for block in self.blocks:
            x = block(x)
        return (kept.used(x) if kept.reader == "step" else x).pow(2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        kept = self.roles["kept"].find() if self.roles["kept"].reader == "hook" else None
        self.seen += [] if kept is None else [float(kept.double().sum())]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def fit(model: Any, strategy: Any) -> tuple[list[Tensor], list[float]]:
    samples = torch.randn(12, SIZE, generator=torch.Generator().manual_seed(1))
    trainer_for(strategy).fit(model, DataLoader(samples, batch_size=4))
    return [parameter.detach().cpu() for parameter in model.parameters()], model.seen


def equal(one: tuple[list[Tensor], list[float]], other: tuple[list[Tensor], list[float]]) -> bool:
    return all(map(torch.equal, one[0], other[0])) and one[1] == other[1]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("view", VIEWS)
def test_what_code_keeps_in_the_memory_of_a_weight_changes_with_it(
    view: str, place: str, maker: str, reader: str
) -> None:
    """It stayed what it was when it was taken, and nothing told of it."""
    if root().type != "cpu" and maker in ("beforehand", "on_fit_start") and reader != "hook":
        pytest.skip("it is on the host, also in plain Lightning")
    how = (view, place, maker, reader)
    if how == ("whole", "parameter", "step", "an earlier layer"):
        # It is what stands for the weight in the step, as if the layer had that.
        with pytest.raises(UnsupportedModelError, match="which is not its own"):
            fit(Model(kept_of(*how)), swapped())
        return
    assert equal(fit(Model(kept_of(*how)), "auto"), fit(Model(kept_of(*how)), swapped()))


def swapped() -> Any:
    return harmony(device_memory="48KiB", num_microbatches=1)


class Plain(Model):
    """Six blocks, of which nothing is kept."""

    def __init__(self) -> None:
        super().__init__(kept_of("rows", "attribute", "never", "nobody"))
        self.begin()

    def begin(self) -> None:
        """Before the fit."""


class FlatParameters(Plain):
    """All parameters lie in one tensor, which is scaled as a whole."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = list(self.parameters())
        self.flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        for parameter, part in zip(parameters, self.flat.split([each.numel() for each in parameters]), strict=True):
            parameter.data = part.view_as(parameter)
        return super().configure_optimizers()

    def on_train_batch_end(self, *_: Any) -> None:
        self.flat.mul_(0.95)
        self.seen.append(float(self.flat.double().sum()))


class WrittenThrough(Plain):
    """A tensor from before the fit is written to between steps."""

    def begin(self) -> None:
        self.rows = self.blocks[2].linear.weight.data[:4]

    def on_train_batch_end(self, *_: Any) -> None:
        self.rows.mul_(0.5)


class OfAnotherModule(Plain):
    """A module that is not trained has the memory of a weight."""

    def begin(self) -> None:
        other = nn.Linear(SIZE, SIZE)
        other.weight.data = self.blocks[2].linear.weight.data
        self.hidden = [other]

    def training_step(self, x: Tensor, number: int) -> Tensor:
        return super().training_step(x + self.hidden[0](x).detach(), number)


class AfterLoading(Plain):
    """Parameters were made of the tensors of a state dict, which is still there."""

    def begin(self) -> None:
        self.loaded = {name: torch.full_like(value, 0.01) for name, value in self.state_dict().items()}
        self.load_state_dict(self.loaded, assign=True)

    def training_step(self, x: Tensor, number: int) -> Tensor:
        return super().training_step(x * (1 + self.loaded["blocks.5.linear.weight"].mean()), number)


class FrozenAndScaled(Plain):
    """A frozen weight that a hook scales, and of which a tensor was kept."""

    def begin(self) -> None:
        self.rows = self.blocks[2].linear.weight.requires_grad_(False).data[:4]

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.blocks[2].linear.weight.mul_(0.5)
        self.seen.append(float(self.rows.double().sum()))


class OfAView(Plain):
    """A row is kept of what code between layers was given of a weight."""

    def training_step(self, x: Tensor, number: int) -> Tensor:
        if number == 0:
            self.row, self.turned = self.blocks[2].linear.weight[1].detach(), self.blocks[2].linear.weight.T
        self.seen.append(float(self.turned.detach().double().sum()))
        return super().training_step(x * (1 + self.row.mean()), number)


@pytest.mark.parametrize(
    "kind", [FlatParameters, WrittenThrough, OfAnotherModule, AfterLoading, FrozenAndScaled, OfAView]
)
def test_memory_of_parameters_is_that_of_others_as_in_plain_lightning(kind: type[Plain]) -> None:
    if root().type != "cpu" and kind is not OfAView:
        pytest.skip("parameters have left that memory, also in plain Lightning")
    assert equal(fit(kind(), "auto"), fit(kind(), swapped()))


class Changed(Model):
    """A kept tensor is changed in place between steps."""

    def on_train_batch_end(self, *_: Any) -> None:
        kept = self.roles["kept"].find()
        assert kept is not None
        kept.mul_(0.5)


@pytest.mark.parametrize("place", PLACES)
def test_who_changes_what_a_layer_has_left_of_a_weight_is_told_to_change_the_weight(place: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"keeps in the memory of a weight of layer .* was changed in place"
    ):
        fit(Changed(kept_of("rows", place, "first call", "nobody")), swapped())


def test_an_array_that_a_layer_keeps_of_a_weight_is_refused() -> None:
    if root().type != "cpu":
        pytest.skip("there are no arrays in a GPU's memory")
    VIEWS["array"] = lambda weight: weight.detach().numpy()  # type: ignore[return-value, assignment]
    try:
        model = Model(kept_of("array", "object", "first call", "nobody"))
    finally:
        del VIEWS["array"]
    with pytest.raises(UnsupportedModelError, match="keeps an array in the memory of a weight"):
        fit(model, swapped())

"""Code has tensors in the memory of buffers that layers change: they change with these, as in plain Lightning."""

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

# What code has of a buffer.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda buffer: buffer,
    "detached": Tensor.detach,
    "rows": lambda buffer: buffer.data[:2],
}
MAKERS = ("beforehand", "on_fit_start", "first batch", "step", "first call", "each call")
READERS = ("its layer", "an earlier layer", "step", "hook")


class Block(nn.Module):
    """Keeps a mean of what it is called with, in a buffer of any size."""

    def __init__(self, width: int = SIZE) -> None:
        super().__init__()
        self.linear, self.box = nn.Linear(SIZE, SIZE), SimpleNamespace()
        self.values = list[Any]()
        self.register_buffer("mean", torch.ones(width // SIZE, SIZE))
        # Out of sight of the module.
        self.roles: dict[str, Kept] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.roles["kept"].during(self, x)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + torch.tanh(self.linear(x)) * self.mean[0].clone()


def kept_of(view: str, maker: str, reader: str, place: str = "attribute") -> Kept:
    """What is kept of the buffer of one of the blocks."""
    return Kept(lambda block: block.mean, VIEWS[view], place, maker, reader, lambda kept: 1 + kept.mean())


class Model(pl.LightningModule):
    def __init__(self, kept: Kept, width: int = SIZE) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.roles, self.seen = {"kept": kept}, list[float]()
        kept.look_at(self.blocks)
        for block in self.blocks:
            block.roles = self.roles  # type: ignore[assignment]
        if kept.maker == "beforehand":
            kept.make()

    def on_fit_start(self) -> None:
        if self.roles["kept"].maker == "on_fit_start":
            self.roles["kept"].make()

    def on_train_batch_start(self, batch: Tensor, number: int) -> None:
        if self.roles["kept"].maker == "first batch" and number == 0:
            self.roles["kept"].make()

    def training_step(self, x: Tensor, number: int) -> Tensor:
        kept = self.roles["kept"]
        if kept.maker == "step" and number == 0 and kept.find() is None:
            kept.make()
        for block in self.blocks:
            x = block(x)
        return (kept.used(x) if kept.reader == "step" else x).pow(2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
        kept = self.roles["kept"].find() if self.roles["kept"].reader == "hook" else None
        if kept is not None and (number + 1) % self.trainer.accumulate_grad_batches == 0:
            self.seen.append(float(kept.double().sum()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def fit(model: Model, strategy: Any, num_microbatches: int = 1, num_batches: int = 3) -> list[Tensor]:
    samples = torch.randn(4 * num_batches, SIZE, generator=torch.Generator().manual_seed(1))
    accumulated = num_microbatches if strategy == "auto" else 1
    trainer = trainer_for(strategy, accumulate_grad_batches=accumulated)
    trainer.fit(model, DataLoader(samples, batch_size=4 // accumulated))
    return [*(tensor.detach().cpu() for tensor in model.state_dict().values()), torch.tensor(model.seen)]


def assert_same(make: Callable[[], Model], num_microbatches: int = 1, device_memory: str = "48KiB") -> None:
    swapped = harmony(device_memory=device_memory, num_microbatches=num_microbatches)
    pairs = zip(fit(make(), "auto", num_microbatches), fit(make(), swapped), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def is_on_host(view: str, maker: str, reader: str) -> bool:
    """Whether what is kept is on the host where layers are on a GPU, and is used there, or changes while layers run."""
    is_early = root().type != "cpu" and maker in ("beforehand", "on_fit_start", "first batch")
    return is_early and (reader != "hook" or (view == "rows" and maker != "beforehand"))


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("view", VIEWS)
def test_what_code_has_of_a_buffer_changes_with_it(view: str, maker: str, reader: str, num_microbatches: int) -> None:
    """It stayed what it was when it was taken, and nothing told of it."""
    if is_on_host(view, maker, reader):
        pytest.skip("it is on the host")
    assert_same(lambda: Model(kept_of(view, maker, reader)), num_microbatches)


@pytest.mark.parametrize("place", ["object", "elsewhere"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("view", VIEWS)
def test_wherever_it_is_kept(view: str, reader: str, place: str) -> None:
    assert_same(lambda: Model(kept_of(view, "first call", reader, place)))


@pytest.mark.parametrize("reader", READERS)
def test_a_large_buffer_is_what_it_was_when_its_layer_runs_again(reader: str) -> None:
    """Small ones alone are copied in any case."""
    assert_same(lambda: Model(kept_of("rows", "first call", reader), 512 * SIZE), device_memory="1MiB")


class OneStatistic(Model):
    """Two layers and the model have one buffer."""

    def __init__(self) -> None:
        super().__init__(kept_of("rows", "never", "nobody"))
        blocks: Any = self.blocks
        blocks[4].mean = blocks[1].mean
        self.register_buffer("mean", blocks[1].mean)

    def training_step(self, x: Tensor, number: int) -> Tensor:
        mean: Any = self.mean
        return super().training_step(x, number) * (1 + mean.mean())


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_several_modules_have_one_buffer(num_microbatches: int) -> None:
    if root().type != "cpu":
        pytest.skip("each has its own there, also in plain Lightning")
    assert_same(OneStatistic, num_microbatches)


def test_a_step_begins_again_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(Model(kept_of("rows", "first call", "hook")), harmony(device_memory="48KiB", num_microbatches=1))
    said = [each for each in caplog.messages if "changes its buffer 'mean', which other code has, too" in each]
    assert len(said) == 1
    assert "a step begins again" in said[0]


class Later(Model):
    """The buffer's rows are taken in a later step than the first."""

    def training_step(self, x: Tensor, number: int) -> Tensor:
        kept = self.roles["kept"]
        kept.maker = "first call" if self.trainer.global_step >= 9 else "never"
        return super().training_step(x, number)


def test_what_code_first_has_in_a_later_step_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"buffer 'mean', which other code has, .* let it have buffer.clone\(\)"
    ):
        fit(Later(kept_of("rows", "never", "hook")), harmony(device_memory="48KiB", num_microbatches=1), num_batches=12)


class Replacing(Block):
    """Replaces its mean: whoever has the old one has what that held."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.roles["kept"].during(self, x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + torch.tanh(self.linear(x)) * self.mean[0]


class OfReplacing(Model):
    def __init__(self, kept: Kept) -> None:
        super().__init__(kept)
        kinds = [Replacing() for _ in self.blocks]
        for block, kind in zip(self.blocks, kinds, strict=True):
            kind.load_state_dict(block.state_dict())
            kind.roles = self.roles  # type: ignore[assignment]
        self.blocks = nn.ModuleList(kinds)
        kept.look_at(self.blocks)
        if kept.maker == "beforehand":
            kept.make()


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("reader", ["an earlier layer", "step", "hook"])
@pytest.mark.parametrize("maker", ["beforehand", "on_fit_start", "first batch", "step"])
@pytest.mark.parametrize("view", VIEWS)
def test_what_code_has_of_a_buffer_that_is_replaced_stays(
    view: str, maker: str, reader: str, num_microbatches: int
) -> None:
    """It became what its layer had put into the buffer's place."""
    if is_on_host(view, maker, reader):
        pytest.skip("it is on the host")
    assert_same(lambda: OfReplacing(kept_of(view, maker, reader)), num_microbatches)

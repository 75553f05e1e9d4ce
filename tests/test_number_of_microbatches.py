"""Where nothing says into how many microbatches a batch is split: whole if it fits, else in the fewest that do."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_harmony import CapacityError, HarmonyStrategy
from support.same_training import Reports, placed

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*normalize with the statistics of microbatches"),
]
WIDTH, BATCH = 64, 64
SAID = "as it does not fit in fewer"


class Layer(nn.Module):
    """Takes far more room for its work than for its weights."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(torch.sin(self.linear(x).repeat(1, 64)).view(len(x), 64, WIDTH).mean(1))
        return out


class Module(pl.LightningModule):
    """Notes what runs, draws numbers, logs, and has statistics."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*[Layer(norm) for _ in range(4)])
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        self.drawn.append(random.random())
        loss = (self.net(x + 0.1 * torch.randn_like(x)) - x).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Fit:
    """A fit on batches of some sizes, and what it leaves behind."""

    def __init__(self, strategy: Any, module: Module, sizes: tuple[int, ...] = (BATCH,) * 3, **options: Any) -> None:
        self.module, self.reports, self.messages = module, Reports(), list[str]()
        self.trainer = pl.Trainer(
            strategy=strategy,
            **placed({"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}),
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[self.reports] if isinstance(strategy, HarmonyStrategy) else [],
        )
        samples = torch.randn(sum(sizes), WIDTH, generator=torch.Generator().manual_seed(1))
        ends = list(accumulate(sizes))
        batches = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
        torch.manual_seed(2)
        random.seed(2)
        self.trainer.fit(module, DataLoader(TensorDataset(samples), batch_sampler=batches))

    @property
    def numbers(self) -> list[int]:
        return [report.num_microbatches for report in self.reports.reports]

    def assert_equals(self, other: Fit) -> None:
        ours, theirs = self.module.state_dict(), other.module.state_dict()
        assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []
        assert self.module.drawn == other.module.drawn
        ours, theirs = self.trainer.callback_metrics, other.trainer.callback_metrics
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def harmony(capacity: str, **arguments: Any) -> HarmonyStrategy:
    return HarmonyStrategy(device_memory=capacity, profile_cache=False, **arguments)


# For the work of a layer on all samples of a batch, of half of them, and so on.
CAPACITIES = {1: "5MiB", 2: "3MiB", 4: "1500KiB"}


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}], ids=str)
def test_a_batch_that_fits_runs_whole_as_in_plain_lightning(options: dict[str, Any]) -> None:
    """Statistics of a batch, its mean and its random numbers are then those of plain Lightning, bit for bit."""
    fit = Fit(harmony(CAPACITIES[1]), Module(), **options)
    assert fit.numbers == [1, 1, 1]
    assert fit.reports.reports[-1].num_packs > 1
    fit.assert_equals(Fit("auto", Module(), **options))


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_batch_that_does_not_fit_is_split_as_far_as_it_must_be_and_leaves_no_trace_of_that(
    number: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        fit = Fit(harmony(CAPACITIES[number]), Module(), **options)
    assert fit.numbers == [number] * 3
    (line,) = [message for message in caplog.messages if SAID in message]
    assert f"HarmonyStrategy(num_microbatches={number})" in line
    requested = Fit(harmony(CAPACITIES[number], num_microbatches=number), Module(), **options)
    fit.assert_equals(requested)
    assert not [message for message in caplog.messages if SAID in message][1:]


class Scripted(Layer):
    """Does its work in a function of TorchScript, which tells any error as one of its own."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.work = torch.jit.script(_work)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.work(self.linear(x))
        return out


def _work(x: Tensor) -> Tensor:
    return torch.sin(x.repeat(1, 64)).view(len(x), 64, x.shape[1]).mean(1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_batch_that_does_not_fit_by_what_torchscript_allocates_is_split_too() -> None:
    """The fit ended with TorchScript's error, a RuntimeError, in memory and swapped."""
    module = Module()
    module.net = nn.Sequential(*[Scripted() for _ in range(4)])
    assert Fit(harmony(CAPACITIES[2]), module).numbers == [2, 2, 2]
    with pytest.raises(CapacityError, match=r"exceeds the capacity of 500 KiB by .*smaller microbatches"):
        Fit(harmony("500KiB", num_microbatches=1), module)


def test_a_larger_batch_that_comes_later_is_split_further() -> None:
    sizes = (BATCH // 2, BATCH // 2, BATCH, BATCH // 2)
    fit = Fit(harmony(CAPACITIES[2]), Module(), sizes)
    assert fit.numbers == [1, 1, 2, 2]
    assert len(fit.module.drawn) == 6


def test_statistics_need_two_samples() -> None:
    with pytest.raises(CapacityError, match="exceeds the capacity"):
        Fit(harmony("80KiB"), Module(), (4, 4))


def test_what_does_not_fit_sample_by_sample_is_refused_with_the_way_out() -> None:
    module = Module(norm=False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CapacityError, match=r"device_memory=\.\.\."):
        Fit(harmony("60KiB"), module, (4, 4))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_several_devices_have_two_microbatches_each() -> None:
    fit = Fit(harmony("5MiB"), Module(norm=False), devices=2)
    assert fit.numbers == [4, 4, 4]


@pytest.mark.parametrize("arguments", [{"num_microbatches": 2}, {"microbatch_size": 32}], ids=str)
def test_a_given_number_of_microbatches_goes_before_the_fewest_that_fit(arguments: dict[str, Any]) -> None:
    fit = Fit(harmony(CAPACITIES[1], **arguments), Module(norm=False))
    assert fit.numbers == [2, 2, 2]


def test_auto_is_another_name_of_the_default() -> None:
    assert Fit(harmony(CAPACITIES[1], num_microbatches="auto"), Module()).numbers == [1, 1, 1]
    with pytest.raises(ValueError, match="num_microbatches='many'"):
        HarmonyStrategy(num_microbatches="many")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_microbatches=auto, microbatch_size=2"):
        HarmonyStrategy(num_microbatches="auto", microbatch_size=2)

"""A batch whose loss does not follow from its microbatches' losses is said to be so, once, and nothing else happens."""

from __future__ import annotations

import random
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_harmony import CapacityError, HarmonyStrategy
from lightning_harmony.microbatches.split_check import explain_difference
from support import nets
from support.same_training import Net, trainer_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]


class Summed(nets.Language):
    """A sum over samples."""

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch) * len(batch)


class Contrastive(nets.Language):
    """Every other sample of the batch is a negative."""

    def forward(self, batch: Tensor) -> Tensor:
        x = F.normalize(self.body(self.embed(batch)).mean(1), dim=1)
        return F.cross_entropy(x @ x.roll(1, 1).T / 0.1, torch.arange(len(batch), device=batch.device))


class Padded(nets.Language):
    """A mean over tokens that are not padding, of which samples have unequally many."""

    def forward(self, batch: Tensor) -> Tensor:
        lengths = 2 + torch.arange(len(batch), device=batch.device).unsqueeze(1) * 2 % 5
        labels = batch.masked_fill(torch.arange(batch.shape[1], device=batch.device) >= lengths, -100)
        return F.cross_entropy(self.logits(self.body(self.embed(batch))).flatten(0, 1), labels.flatten())


class Drawing(nets.Language):
    """Draws in the step, from a generator of the process."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch) * (1 + self.draw())


class Fails(nets.Language):
    """Cannot be run on a part of a microbatch."""

    def forward(self, batch: Tensor) -> Tensor:
        assert len(batch) == 4
        return super().forward(batch) * len(batch)


def said(
    net: nn.Module, *, num_microbatches: int = 2, batch_size: int = 8, devices: int = 1, **options: Any
) -> list[str]:
    """The warnings of a fit."""
    precision = options.pop("precision", "32-true")
    strategy = HarmonyStrategy(num_microbatches=num_microbatches, **{"check_loss": True, **options})
    trainer = trainer_for(strategy, 3, [], precision=precision, devices=devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        trainer.fit(Net(net), DataLoader(nets.tokens(), batch_size=batch_size))
    assert trainer.global_step == 3
    return [str(warning.message) for warning in caught if "microbatches' losses" in str(warning.message)]


@pytest.mark.parametrize(
    ("net", "num_microbatches", "devices"), [(Contrastive, 2, 1), (Contrastive, 8, 1), (Padded, 2, 1), (Padded, 2, 2)]
)
def test_a_loss_that_is_no_mean_over_samples_is_named_once_with_the_difference_and_the_remedy(
    net: Any, num_microbatches: int, devices: int
) -> None:
    # Of some initial weights, microbatches differ less than is told from rounding.
    torch.manual_seed(0)
    (message,) = said(net(), num_microbatches=num_microbatches, devices=devices)
    assert f"the loss of {max(8 // num_microbatches, 2)} samples is" in message
    assert "num_microbatches=1" in message
    assert "loss_reduction='mean'" in message


@pytest.mark.in_memory
def test_the_loss_of_a_model_in_memory_is_checked_too() -> None:
    torch.manual_seed(0)
    (message,) = said(Contrastive())
    assert "the loss of 4 samples is" in message


def test_a_loss_that_is_a_sum_over_samples_is_told_from_others() -> None:
    (message,) = said(Summed())
    assert "loss_reduction='sum'" in message
    assert "num_microbatches" not in message


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_a_mean_over_samples_is_not_complained_of(precision: str) -> None:
    assert said(nets.Language(dropout=0.3), precision=precision) == []
    assert said(nets.Regularized(), precision=precision) == []


@pytest.mark.parametrize(
    ("net", "options"),
    [
        (Contrastive, {"num_microbatches": 1}),
        (Contrastive, {"check_loss": False}),
        (Fails, {}),
        (lambda: torch.compile(Contrastive(), backend="eager"), {}),
        (lambda: Drawing(lambda: float(torch.rand(()))), {}),
        (lambda: Drawing(random.random), {}),
        (lambda: Drawing(np.random.rand), {}),
    ],
    ids=["whole", "by default", "fails", "compiled", "torch", "python", "numpy"],
)
def test_nothing_is_said_where_nothing_can_be_told_or_nobody_wants_to_know(net: Any, options: Any) -> None:
    assert said(net(), **options) == []


class NeedsEight(nets.Language):
    def forward(self, batch: Tensor) -> Tensor:
        if len(batch) != 8:
            raise IndexError(f"8 samples are needed, not {len(batch)}")
        return super().forward(batch)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take no notes")
@pytest.mark.parametrize("memory", [None, "48KiB"], ids=["in memory", "swapped"])
def test_an_error_of_a_microbatch_says_how_its_batch_was_split(memory: str | None) -> None:
    def notes(**options: Any) -> list[str]:
        trainer = trainer_for(HarmonyStrategy(device_memory=memory, **options), 1, [])
        with pytest.raises(IndexError) as failed:
            trainer.fit(Net(NeedsEight()), DataLoader(nets.tokens(6), batch_size=6))
        return [note for note in getattr(failed.value, "__notes__", []) if "microbatches" in note]

    (note,) = notes(num_microbatches=4)
    assert "the batch of 6 samples was split into 4 microbatches of 2, 2, 1, 1" in note
    assert "num_microbatches=1" in note
    (note,) = notes(num_microbatches=3)
    assert "into 3 microbatches of 2; a step" in note
    # What is wrong with a whole batch has other reasons.
    assert notes(num_microbatches=1) == []


@pytest.mark.cpu
def test_what_does_not_fit_is_not_said_to_need_all_samples_at_once() -> None:
    trainer = trainer_for(HarmonyStrategy(device_memory="16KiB", num_microbatches=2), 1, [])
    with pytest.raises(CapacityError, match="16 KiB") as failed:
        trainer.fit(Net(nets.Language()), DataLoader(nets.tokens(512), batch_size=512))
    assert not [note for note in getattr(failed.value, "__notes__", []) if "at once" in note]


class Frozen(OrderedDict[str, Any]):
    """A config that nobody may change."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("it is frozen")


class Untidy(Net):
    """Leaves traces everywhere."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nets.Convolutions())
        self.metric, self.generator = MeanMetric(), torch.Generator().manual_seed(1)
        self.count, self.names, self.recent, self.by_name = 0, {"a"}, deque([1], maxlen=3), {"lengths": [0]}
        self.tensor, self.config = torch.zeros(2), Frozen(width=3)
        self.register_buffer("seen", torch.zeros(()))
        self.modes: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metric(loss.detach())
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, reduce_fx="sum")
        torch.rand((), generator=self.generator)
        self.count += 1
        self.names.add(str(self.count))
        self.recent.append(self.count)
        self.by_name["lengths"].append(len(batch[0]))
        self.tensor += 1
        self.seen = self.seen + 1
        self.modes.append(self.training and self.net.blocks[0].training)
        self.last = loss.detach()
        self.logger.log_metrics({"in_step": float(loss.detach())})
        return loss


class Rows(pl.loggers.logger.DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append(metrics)


@pytest.mark.filterwarnings("ignore:.*normalize with the statistics of microbatches")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("memory", [None, "1MiB"], ids=["in memory", "swapped"])
def test_the_check_leaves_no_trace(memory: str | None) -> None:
    left = []
    for check_loss in (True, False):
        module, logger = Untidy(), Rows()
        strategy = HarmonyStrategy(num_microbatches=2, check_loss=check_loss, device_memory=memory)
        trainer = trainer_for(strategy, 3, [])
        trainer.loggers = [logger]
        torch.manual_seed(1)
        trainer.fit(module, DataLoader(nets.images(), batch_size=8))
        states = (
            torch.get_rng_state(),
            module.generator.get_state(),
            module.state_dict(),
            dict(trainer.callback_metrics),
        )
        kept = module.count, module.names, module.recent, module.by_name, module.modes, module.config
        plain = *kept, logger.rows, random.getstate()
        left.append(((*states, module.losses, module.tensor, module.last), plain))
    torch.testing.assert_close(left[0][0], left[1][0], rtol=0, atol=0)
    assert left[0][1] == left[1][1]
    assert left[0][1][0] == len(left[0][1][4]) == 6
    assert all(left[0][1][4])
    assert left[0][1][5] == {"width": 3}


# --- The judgement.

finite = st.floats(-1e3, 1e3).filter(lambda x: abs(x) > 1e-2)


@given(parts=st.lists(finite, min_size=2, max_size=2), sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_each_reduction_accepts_what_it_makes(parts: list[float], sizes: tuple[int, int]) -> None:
    mean = (parts[0] * sizes[0] + parts[1] * sizes[1]) / sum(sizes)
    for reduction, whole in (("mean", mean), ("sum", sum(parts))):
        assert explain_difference(whole, parts, sizes, reduction=reduction, is_narrow=False) is None


def test_rounding_to_16_bits_explains_more() -> None:
    for is_narrow in (False, True):
        message = explain_difference(1.0, [1.01, 1.01], (1, 1), reduction="mean", is_narrow=is_narrow)
        assert (message is None) == is_narrow


def test_the_difference_is_measured() -> None:
    message = explain_difference(2.0, [1.0, 1.5], (2, 2), reduction="mean", is_narrow=False)
    assert message is not None
    assert "the loss of 4 samples is 2, but the mean of its microbatches' losses is 1.25 (0.38 of it)" in message


class Merging(nn.Linear):
    """Adds an adapter to its weight in evaluation mode, and takes it out again."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.adapter = nn.Parameter(torch.full((width, width), 0.01))
        self.is_merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.is_merged == mode:
            self.weight.data += -self.adapter.data if mode else self.adapter.data
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.is_merged else y + F.linear(x, self.adapter)


class Adapted(nets.Language):
    def __init__(self) -> None:
        super().__init__()
        self.merging = Merging(nets.WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.merging(x))


def test_the_check_merges_nothing_into_weights() -> None:
    # `eval()` did, and what undid the check knew no weights: training went on with the adapter counted twice.
    weights = []
    for check_loss in (True, False):
        torch.manual_seed(3)
        module = Net(Adapted())
        strategy = HarmonyStrategy(num_microbatches=2, check_loss=check_loss)
        trainer_for(strategy, 1, []).fit(module, DataLoader(nets.tokens(8), batch_size=8))
        weights.append(module.net.merging.weight.detach().clone())
    assert torch.equal(*weights)

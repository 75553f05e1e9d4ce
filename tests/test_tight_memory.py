"""Capacities that the first step just fits: later steps fit, too, and train the same, or the first one is refused."""

from __future__ import annotations

import copy
import threading
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_harmony import CapacityError, HarmonyStrategy
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from support.same_training import Net, Reports, compare, train_harmony, train_plain

# The capacity of virtual devices.
pytestmark = pytest.mark.cpu

WIDTH, VOCABULARY, LENGTH, NUM_STEPS, BATCH_SIZE = 64, 512, 24, 3, 8


class Layered(nn.Module):
    """Blocks that all work on what an embedding makes of tokens, and a head as large as that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Attentive(Layered):
    """Blocks whose work takes far more than they hand on."""

    def block(self) -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)


class Convolutional(nn.Module):
    """Layers with buffers. The first ones hand on more than the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        channels = [1, 16, 32, 64, 64]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1, stride=2), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in pairwise(channels)
        )
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = (tokens[:, None] * tokens[:, :, None] % 7)[:, None].float()
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), tokens[:, 0])


MODELS = [Layered, Attentive, Convolutional]


def first_step_bytes(module: pl.LightningModule, samples: Tensor, number: int, options: dict[str, Any]) -> int:
    """The most that the first step takes on a device."""
    reports = Reports()
    strategy = HarmonyStrategy(device_memory="2MiB", num_microbatches=number, profile_cache=False)
    train_harmony(
        copy.deepcopy(module),
        samples,
        strategy,
        len(samples),
        with_gradients=False,
        more_callbacks=[reports],
        **options,
    )
    return max(reports.reports[0].peak_device_bytes)


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore:.*normalize with the statistics of microbatches")
@pytest.mark.parametrize("over", [0.005, 0.02, 0.05, 0.1, 0.2], ids="{:.1%} over".format)
@pytest.mark.parametrize("clips", [False, True], ids=["just in time", "clipped"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("model", MODELS)
def test_later_steps_fit_where_the_first_one_did(
    model: type[nn.Module], precision: str, number: int, devices: int, clips: bool, over: float
) -> None:
    """They failed in their backward, when weights had changed: microbatches that take turns keep what they carry from layer
    to layer, the head's sum of gradients stayed while the loss was differentiated, and so did the input of a kept graph.
    """
    samples = torch.randint(0, VOCABULARY, (NUM_STEPS * BATCH_SIZE, LENGTH), generator=torch.Generator().manual_seed(1))
    module = Net(model(), lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    clipping = {"gradient_clip_val": 0.5} if clips else {}
    common = {"precision": precision, **clipping}
    options: dict[str, Any] = {"devices": devices, **common}
    # The module itself keeps the loss of each step.
    capacity = int(first_step_bytes(module, samples[:BATCH_SIZE], number, options) * (1 + over))
    plain = train_plain(copy.deepcopy(module), samples, number, BATCH_SIZE, **common)
    strategy = HarmonyStrategy(device_memory=capacity, num_microbatches=number, profile_cache=False)
    harmony = train_harmony(copy.deepcopy(module), samples, strategy, BATCH_SIZE, with_gradients=False, **options)
    compare(plain, harmony)


def test_what_layers_take_under_autocast_is_known_from_one_microbatch_too() -> None:
    """Weights were let be narrow behind the only one, and what had been measured was forgotten: the plan kept all graphs."""
    samples = torch.randint(0, VOCABULARY, (NUM_STEPS * BATCH_SIZE, LENGTH), generator=torch.Generator().manual_seed(1))
    module = Net(Attentive(), lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    strategy = HarmonyStrategy(device_memory="1500KiB", num_microbatches=1, profile_cache=False)
    harmony = train_harmony(module, samples, strategy, BATCH_SIZE, with_gradients=False, precision="bf16-mixed")
    assert strategy.plan is not None
    assert strategy.plan.predicted is not None
    (peak,) = harmony.reports[-1].peak_device_bytes
    (predicted,) = strategy.plan.predicted.peak_bytes
    assert 0.6 * predicted < peak <= predicted


class WithLogits(Layered):
    """A head that hands on far more than it takes; losses are made of wider numbers, as transformers do."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class WithSeveralResults(WithLogits):
    """Its head hands on two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = TwoHeads()  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        results = self.head(self.norm(x))
        losses = [F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()) for logits in results.values()]
        return torch.stack(losses).sum()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, VOCABULARY // 2), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"one": torch.cat([self.one(x)] * 2, -1), "other": self.other(x)}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("model", [WithLogits, WithSeveralResults])
def test_gradients_of_large_results_wait_for_their_turn(
    model: type[nn.Module], precision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a microbatch did not come back through the head at once, those of all microbatches were there, and no plan counted
    them: turns ran out of memory three times, and each microbatch had all layers swapped in from then on.
    """
    samples = torch.randint(0, VOCABULARY, (3 * 16, LENGTH), generator=torch.Generator().manual_seed(1))
    module = Net(model(), lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    least = first_step_bytes(module, samples[:16], 8, {"devices": 1, "precision": precision})
    plain = train_plain(copy.deepcopy(module), samples, 8, 16, precision=precision)
    is_fused = set()
    for over in (1.05, 1.15, 1.3):
        strategy = HarmonyStrategy(device_memory=int(least * over), num_microbatches=8, profile_cache=False)
        with caplog.at_level("INFO"):
            harmony = train_harmony(
                copy.deepcopy(module), samples, strategy, 16, with_gradients=False, precision=precision
            )
        compare(plain, harmony)
        assert strategy.plan is not None
        is_fused.add(len(strategy.plan.fused) > 0)
    assert "do not fit together" not in caplog.text
    assert False in is_fused


def test_less_than_the_first_step_takes_is_refused_in_it() -> None:
    samples = torch.randint(0, VOCABULARY, (BATCH_SIZE, LENGTH), generator=torch.Generator().manual_seed(1))
    module = Net(Attentive())
    before = copy.deepcopy(module.state_dict())
    strategy = HarmonyStrategy(device_memory="500KiB", num_microbatches=4, profile_cache=False)
    with pytest.raises(CapacityError, match="exceeds the capacity"):
        train_harmony(module, samples, strategy, BATCH_SIZE, with_gradients=False)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class RunsOut(Layered):
    """The first steps in which its microbatches take turns run out of memory, as where a GPU's memory lies in pieces.

    Args:
        times: how many of them.
        error: what tells of it.
    """

    def __init__(self, times: int, error: Exception) -> None:
        super().__init__()
        self.left, self.error = times, error

    def forward(self, tokens: Tensor) -> Tensor:
        if threading.current_thread().name.startswith("harmony-lane") and self.left:
            self.left -= 1
            raise self.error
        return super().forward(tokens)


# Where cuBLAS finds no memory for a thread's handle, microbatches ended to take turns as if their code spoke against it.
NO_HANDLE = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize(
    ("times", "error"),
    [(1, torch.OutOfMemoryError()), (2, torch.OutOfMemoryError()), (1, NO_HANDLE)],
    ids=["once", "twice", "in a library"],
)
def test_turns_that_run_out_of_memory_are_planned_with_less_and_taken_again(
    times: int, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They ended for good, and each microbatch had all layers swapped in."""
    left = iter([700 * 1024])

    def shrink(device: VirtualDevice) -> bool:
        device.capacity_bytes = next(left, None) or device.capacity_bytes
        return times == 1

    monkeypatch.setattr(VirtualDevice, "note_shortage", shrink)
    tokens = torch.randint(VOCABULARY, (4 * BATCH_SIZE, LENGTH), generator=torch.Generator().manual_seed(0))
    plain = train_plain(Net(Layered()), tokens, 4, BATCH_SIZE)
    strategy = HarmonyStrategy(device_memory=720 * 1024, num_microbatches=4)
    with caplog.at_level("INFO"):
        harmony = train_harmony(Net(RunsOut(times, error)), tokens, strategy, BATCH_SIZE, with_gradients=False)
    compare(plain, harmony)
    assert ("one after the other" in caplog.text) == (times == 2)
    assert strategy.profile is not None
    assert strategy.profile.machine.capacity_bytes == 700 * 1024

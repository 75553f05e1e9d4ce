"""What swapping costs on a CPU device: the hand-over of a lane, and a whole step beside plain Lightning.

pytest benchmarks/test_overhead.py --benchmark-enable --benchmark-only -W ignore --benchmark-columns=median,min,max,rounds
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from offload.clock import Clock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.model.decompose import Layer
from lightning_harmony.engine.step.assembly import assemble
from lightning_harmony.engine.step.turns import Microbatch
from lightning_harmony.engine.updates.update import StepUpdate

NUM_LAYERS = 100
NUM_MICROBATCHES = 4


class Nothing(nn.Module):
    """A layer with a parameter that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1024))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Little(Nothing):
    """A layer that does little, so that a backward comes to it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[0]


class Step:
    """A step through layers of a kind; after the first, each layer is a pack, or all are one.

    What these do by themselves, their recompute included, is the same for both.
    """

    def __init__(self, kind: type[Nothing], *, packs: bool) -> None:
        self._model = nn.ModuleList(kind() for _ in range(NUM_LAYERS))
        layers = [Layer(str(number), module) for number, module in enumerate(self._model)]
        self._executor = assemble(self._model, layers, VirtualDevice(28 * 1024 if packs else None))
        self._x = torch.zeros(1)
        self.seconds(NUM_MICROBATCHES)
        assert len(self._executor.plan.packs) == (NUM_LAYERS if packs else 1)

    def _run_layers(self) -> Tensor:
        x = self._x
        for layer in self._model:
            x = layer(x)
        return x.sum()

    def seconds(self, num_microbatches: int) -> tuple[float, float]:
        """Run a step; what its forward and its backward take."""
        microbatches = [Microbatch(self._run_layers, Fraction(1), number) for number in range(num_microbatches)]
        start = time.perf_counter()
        self._executor.forward(microbatches, num_elements=0, predicted_gradient=None)
        between = time.perf_counter()
        self._executor.backward(torch.ones(()), StepUpdate())
        end = time.perf_counter()
        for parameter in self._model.parameters():
            parameter.grad = None
        return between - start, end - between

    def close(self) -> None:
        self._executor.close()


@pytest.mark.parametrize("kind", [Nothing, Little], ids=["forward", "forward and backward"])
def test_handing_a_lane_over_at_a_layer_boundary(benchmark: Any, kind: type[Nothing]) -> None:
    """What a further lane costs where each layer is a pack, and what it costs where all are one: there it parks once."""
    apart, together = Step(kind, packs=True), Step(kind, packs=False)
    seconds: dict[tuple[Step, int], list[float]] = {}

    def all_four() -> None:
        for step in (apart, together):
            for num_microbatches in (1, NUM_MICROBATCHES):
                forward, backward = step.seconds(num_microbatches)
                taken = forward if kind is Nothing else forward + backward
                seconds.setdefault((step, num_microbatches), []).append(taken)

    benchmark.pedantic(all_four, rounds=20, iterations=1, warmup_rounds=2)
    # A change of lanes takes tens of microseconds: the fastest of many runs is the one that nothing else disturbed.
    for name, pick in (("median", statistics.median), ("fastest", min)):
        of = {key: pick(values) for key, values in seconds.items()}
        further = {step: of[step, NUM_MICROBATCHES] - of[step, 1] for step in (apart, together)}
        num_handovers = NUM_LAYERS * (NUM_MICROBATCHES - 1)
        handover = (further[apart] - further[together]) / num_handovers
        benchmark.extra_info[f"{name}: microseconds per hand-over"] = round(1e6 * handover, 1)
        benchmark.extra_info[f"{name}: microseconds per intercepted call"] = round(
            1e6 * further[together] / num_handovers, 1
        )
    apart.close()
    together.close()


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, hidden // 64, 64).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(pl.LightningModule):
    """Recomputes each block if asked to."""

    def __init__(self, *, recompute: bool, hidden: int, num_blocks: int = 6, vocabulary: int = 512) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(num_blocks))
        self.head = nn.Linear(hidden, vocabulary)
        self.seconds: list[float] = []
        self._start = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Tokens(Dataset[Tensor]):
    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 512, (65,), generator=torch.Generator().manual_seed(index))


def _train(strategy: Any, hidden: int, *, num_batches: int, recompute: bool) -> list[float]:
    torch.manual_seed(0)
    # What fits before have left in reference cycles would count as this one's memory.
    gc.collect()
    clock, num_steps = Clock(num_batches), 6 if hidden < 1024 else 5
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=num_steps,
        accumulate_grad_batches=num_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(Tokens(16 * num_steps), batch_size=16 // num_batches, collate_fn=clock)
    trainer.fit(GPT(recompute=recompute, hidden=hidden), data)
    return clock.seconds()[2:]


@pytest.fixture
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """With how many threads torch computes: all that it would, or fewer, which leaves cores to copies and updates."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param or before)
    yield
    torch.set_num_threads(before)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_threads", [None, 1], ids=["all threads", "one thread"], indirect=True)
@pytest.mark.parametrize(("hidden", "device_memory"), [(512, None), (512, "96MiB"), (1024, "256MiB")])
@pytest.mark.usefixtures("num_threads")
def test_a_step_beside_plain_lightning_with_recompute(benchmark: Any, hidden: int, device_memory: str | None) -> None:
    """The ratio of medians, both ways in turn in one run. Capacities are a third and a fifth of the training state.

    A step takes seconds: run one row at a time, as with ``-k "beside and 512-None-one"``.
    """
    plain: list[float] = []
    harmony: list[float] = []

    def both() -> None:
        plain.extend(_train("auto", hidden, num_batches=NUM_MICROBATCHES, recompute=True))
        strategy = HarmonyStrategy(device_memory, NUM_MICROBATCHES, profile_cache=False)
        harmony.extend(_train(strategy, hidden, num_batches=1, recompute=False))

    benchmark.pedantic(both, rounds=2, iterations=1)
    benchmark.extra_info["plain seconds a step"] = round(statistics.median(plain), 4)
    benchmark.extra_info["harmony seconds a step"] = round(statistics.median(harmony), 4)
    benchmark.extra_info["ratio"] = round(statistics.median(harmony) / statistics.median(plain), 3)

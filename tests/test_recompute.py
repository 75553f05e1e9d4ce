"""A layer's call runs again in the backward: it must find what it found, and what it does to Python's side is done once."""

from __future__ import annotations

import copy
import random
from array import array
from itertools import product
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchmetrics import CatMetric, Metric, SumMetric

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from lightning_harmony.engine.lanes.rng import stream_seed
from support import nets
from support.same_training import SEED, Net, assert_same_training, placed, room, root, trainer_for
from support.sampling import combined
from support.stateful import Blocks, CountsInATensor, GivesAMask, Measures, samples

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")

NUM_MICROBATCHES = 2


class EvaluatedThenTrained(Blocks):
    """Without dropout in the forward, though the modules are in training when the backward comes."""

    def __init__(self) -> None:
        super().__init__(lambda: nets.Block(dropout=0.3))

    def run(self, x: Tensor) -> Tensor:
        self.blocks.eval()
        x = super().run(x)
        self.blocks.train()
        return x


class Counts(nets.Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * (self.calls % 3))


ARRAYS: dict[str, Any] = {
    "NumPy": lambda: np.zeros(1),
    "NumPy, in a dict": lambda: {0: np.zeros(2, np.int64)}[0],
    "bytes": lambda: bytearray(1),
    "Python": lambda: array("d", [0.0]),
    "scalar": lambda: np.array(0),
}


class CountsInAnArray(nets.Block):
    """Which Python does not see change."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.calls = {"of": (ARRAYS[kind](),)}

    def forward(self, x: Tensor) -> Tensor:
        (calls,) = self.calls["of"]
        where: Any = () if getattr(calls, "shape", None) == () else 0
        calls[where] += 1
        return super().forward(x) * (1 + 0.1 * (float(calls[where]) % 3))


@pytest.mark.parametrize(("kind", "num_microbatches"), combined(product(ARRAYS, [1, 4]), [()]))
def test_what_a_layer_counts_in_an_array_counts_once(kind: str, num_microbatches: int) -> None:
    """Recomputes counted on: other weights, without a word."""
    assert_same_training(
        Net(Blocks(lambda: CountsInAnArray(kind))),
        samples(),
        num_microbatches=num_microbatches,
        device_memory=room("40KiB"),
    )


class BeginsOnce(nets.Block):
    """Statistics of the first call, as an ActNorm has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(nets.WIDTH))
        self.has_begun = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_begun:
            self.shift = x.detach().mean(0)
            self.has_begun = True
        return super().forward(x - self.shift)


class Collects(nets.Block):
    """What was collected changes what is computed next."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.by_name: dict[str, list[int]] = {"calls": []}

    def forward(self, x: Tensor) -> Tensor:
        self.norms.append(float(x.detach().norm()))
        self.by_name["calls"].append(len(self.norms))
        return super().forward(x) * (1 + 0.01 * len(self.norms)) / (1 + 0.01 * sum(self.norms[-3:]))


class TorchGenerator(nets.Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.generator.manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand(x.shape[-1], generator=self.generator).to(x.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchGenerator:
        block = type(self)()
        block.load_state_dict(self.state_dict())
        return block


class OtherGenerators(nets.Block):
    def __init__(self) -> None:
        super().__init__()
        self.generators = random.Random(5), np.random.default_rng(5), np.random.RandomState(5)

    def forward(self, x: Tensor) -> Tensor:
        python, numpy, legacy = self.generators
        return super().forward(x * (python.random() + float(numpy.random()) + legacy.rand()) / 2)


class AppendsToItsArgument(nets.Block):
    def forward(self, x: Tensor, outputs: list[Tensor]) -> Tensor:
        x = super().forward(x)
        outputs.append(x)
        return x


class Lists(Blocks):
    """Blocks that are handed a list for what they compute, as encoders of a U-Net are."""

    def __init__(self) -> None:
        super().__init__(AppendsToItsArgument)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        outputs = [x]
        for block in self.blocks:
            x = block(x, outputs)
        assert outputs[0] is batch[0]
        assert outputs[-1] is x
        assert len(outputs) == 5
        return F.mse_loss(torch.stack(outputs[1:]).mean(0), y)


class TakesFromItsArgument(nets.Block):
    def forward(self, x: Tensor, *, kept: dict[str, list[Tensor]], names: list[str]) -> Tensor:
        skip = kept[names.pop()].pop()
        x = super().forward(x + skip)
        kept.setdefault("late", []).append(x)
        return x


class Dicts(Blocks):
    def __init__(self) -> None:
        super().__init__(TakesFromItsArgument)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        kept, names = {"a": [x * 2, x * 3], "b": [x * 4, x * 5]}, ["a", "b", "b", "a"]
        for block in self.blocks:
            x = block(x, kept=kept, names=names)
        assert (kept["a"], kept["b"], names) == ([], [], [])
        return F.mse_loss(sum(kept["late"]), y)


class Slices(Blocks):
    """What a square layer is given has gaps in memory, and as many rows as columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.project = (nn.Linear(nets.WIDTH, nets.WIDTH) for _ in range(2))

    def run(self, x: Tensor) -> Tensor:
        x = self.first(x)
        rows = x.unsqueeze(1).repeat(1, nets.WIDTH // len(x) + 1, 1)
        return super().run(x + self.project(rows[:, 1:]).mean(1))


class CallsItself(nets.Block):
    def forward(self, x: Tensor, *, again: bool = True) -> Tensor:
        return super().forward(self(x, again=False) if again else x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(nets.WIDTH, 3 * nets.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 1, 4, 3 * nets.WIDTH // 4).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v).flatten(1)


class ChoosesKernels(Blocks):
    """Around the layers, for a part of the step, and by the block."""

    def __init__(self) -> None:
        super().__init__(Attention)
        self.seen: list[tuple[bool, bool]] = []
        for block in self.blocks:
            block.register_forward_pre_hook(self._look)

    def _look(self, *_: Any) -> None:
        self.seen.append((torch.backends.cuda.math_sdp_enabled(), torch.backends.cudnn.deterministic))

    def run(self, x: Tensor) -> Tensor:
        # On a GPU, the other one has no kernel for 32 bits.
        fused = SDPBackend.EFFICIENT_ATTENTION if x.is_cuda else SDPBackend.FLASH_ATTENTION
        for number, block in enumerate(self.blocks):
            kernel = SDPBackend.MATH if number % 2 else fused
            with sdpa_kernel(kernel), torch.backends.cudnn.flags(enabled=True, deterministic=number == 2):
                x = block(x)
        return x


@pytest.mark.parametrize(("devices", "memory"), [(1, None), (1, "24KiB"), (2, "24KiB")])
def test_a_recompute_uses_the_kernels_that_a_step_chooses_for_a_while(devices: int, memory: Any) -> None:
    """The flags are the process's: microbatches that take turns would leave each other theirs, and the process, too."""
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    torch.manual_seed(0)
    module = Net(ChoosesKernels())
    assert_same_training(module, samples(), num_microbatches=2, batch_size=4, devices=devices, device_memory=memory)
    strategy = HarmonyStrategy(num_microbatches=2, device_memory=memory, loss_reduction="mean")
    pl.Trainer(strategy=strategy, **_options(3, devices)).fit(
        module, torch.utils.data.DataLoader(samples(), batch_size=4)
    )
    assert set(module.net.seen) == {(False, False), (True, False), (False, True)}
    assert before == (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())


BLOCKS = [Counts, BeginsOnce, Collects, CountsInATensor, Measures, TorchGenerator, OtherGenerators]


@pytest.mark.parametrize(("block", "devices", "memory"), combined(BLOCKS, [(2, "44KiB"), (1, None), (1, "44KiB")]))
def test_a_recompute_finds_what_a_layer_keeps_in_python(block: type[nn.Module], devices: int, memory: Any) -> None:
    torch.manual_seed(0)
    net = Net(Blocks(block))
    assert_same_training(
        net,
        samples(),
        num_microbatches=2,
        batch_size=4,
        devices=devices,
        device_memory=memory,
    )


@pytest.mark.parametrize(
    ("net", "devices", "memory"),
    combined([EvaluatedThenTrained, Lists, Dicts], [(1, None), (1, "44KiB"), (2, "44KiB")]),
)
def test_a_recompute_finds_what_a_layer_is_given(net: type[nn.Module], devices: int, memory: Any) -> None:
    torch.manual_seed(0)
    # Tensors with two readers each.
    tolerance = 0.0 if net is EvaluatedThenTrained else 1e-5
    assert_same_training(
        Net(net()),
        samples(),
        num_microbatches=2,
        batch_size=4,
        devices=devices,
        device_memory=memory,
        tolerance=tolerance,
    )


GIVEN: dict[str, Any] = {"slices": Slices, "an object": GivesAMask, "calls itself": lambda: Blocks(CallsItself)}


@pytest.mark.parametrize(
    ("name", "smallest", "devices", "memory"),
    combined(product(GIVEN, [64, 16 * 1024]), [(1, None), (1, "44KiB"), (2, "44KiB")]),
)
def test_a_recompute_finds_what_a_layer_is_given_however_it_is_called(
    name: str, smallest: int, devices: int, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice too small for the stash came to the second run of a call without gaps.

    That run made another graph, whose tensors were taken for those of the first: LLaVA got wrong gradients.
    """
    monkeypatch.setattr("lightning_harmony.engine.memory.stash.SMALLEST_BYTES", smallest)
    torch.manual_seed(0)
    assert_same_training(
        Net(GIVEN[name]()),
        samples(),
        num_microbatches=2,
        batch_size=4,
        devices=devices,
        device_memory=memory,
    )


@pytest.mark.parametrize("memory", [None, "44KiB"])
def test_what_a_layer_counts_and_collects_is_counted_once(memory: Any) -> None:
    module = Net(Blocks(Collects))
    strategy = HarmonyStrategy(num_microbatches=2, device_memory=memory, loss_reduction="mean")
    pl.Trainer(strategy=strategy, **_options(3)).fit(module, torch.utils.data.DataLoader(samples(), batch_size=4))
    for block in module.net.blocks:
        assert len(block.norms) == 6
        assert block.by_name == {"calls": [1, 2, 3, 4, 5, 6]}


def _options(num_steps: int, devices: int = 1) -> dict[str, Any]:
    return {
        **placed({"devices": devices}),
        "max_steps": num_steps,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


class DrawsFromNumPy(nets.Block):
    """Normal numbers come in pairs, the second of which NumPy keeps."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + 0.1 * np.random.randn()))


class SeedNumPy(pl.Callback):
    """Gives plain training NumPy's streams that harmony gives its microbatches."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.accumulate_grad_batches > 1:
            step, microbatch = divmod(trainer.fit_loop.epoch_loop.total_batch_idx, NUM_MICROBATCHES)
            seed = stream_seed(SEED, step, microbatch)
            np.random.seed([seed % 2**32, seed // 2**32])


@pytest.mark.parametrize(("devices", "memory"), [(1, None), (1, "44KiB"), (2, "44KiB")])
def test_a_recompute_draws_from_numpy_what_the_layer_drew(devices: int, memory: Any) -> None:
    torch.manual_seed(0)
    module, trained = Net(Blocks(DrawsFromNumPy)), []
    for strategy, num_batches in (
        ("auto", NUM_MICROBATCHES),
        (HarmonyStrategy(num_microbatches=NUM_MICROBATCHES, device_memory=memory, loss_reduction="mean"), 1),
    ):
        each = copy.deepcopy(module)
        torch.manual_seed(SEED)
        options = {**_options(3, devices if num_batches == 1 else 1), "callbacks": [SeedNumPy()]}
        trainer = pl.Trainer(strategy=strategy, accumulate_grad_batches=num_batches, **options)
        trainer.fit(each, torch.utils.data.DataLoader(samples(), batch_size=4 // num_batches))
        trained.append(each.state_dict())
    for name, tensor in trained[0].items():
        assert torch.equal(tensor, trained[1][name]), name


class ChangesALargeTensor(nets.Block):
    def __init__(self) -> None:
        super().__init__()
        self.history = [torch.zeros(1024, nets.WIDTH, device=root())]

    def forward(self, x: Tensor) -> Tensor:
        self.history[0][: len(x)] += x.detach()
        return super().forward(x) + self.history[0].mean()


class Vmapped(Blocks):
    def run(self, x: Tensor) -> Tensor:
        return torch.vmap(super().run)(x)


class ReadsWhatNeedsGradients(nets.Block):
    """From its second step on."""

    calls = 0
    context: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x if self.calls <= NUM_MICROBATCHES else x + self.context)


class GivesByAttribute(Blocks):
    def __init__(self) -> None:
        super().__init__(ReadsWhatNeedsGradients)
        self.make = nn.ModuleList(nn.Linear(nets.WIDTH, nets.WIDTH) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for make, block in zip(self.make, self.blocks, strict=True):
            block.context = make(x)
            x = block(x)
        return x


class ReadsAnObject(ReadsWhatNeedsGradients):
    def forward(self, x: Tensor, context: Any) -> Tensor:  # type: ignore[override]
        self.context = context.tensor
        x = super().forward(x)
        del self.context
        return x


class GivesInAnObject(GivesByAttribute):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReadsAnObject() for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for make, block in zip(self.make, self.blocks, strict=True):
            x = block(x, SimpleNamespace(tensor=make(x)))
        return x


@pytest.mark.parametrize(
    ("net", "memory", "message"),
    [
        (lambda: Blocks(ChangesALargeTensor), "1MiB", "'history' of a layer was changed in place .*register_buffer"),
        (Vmapped, None, r"within a transformation of torch.func .*HarmonyStrategy\(layers=\.\.\.\)"),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_what_would_go_wrong_is_refused(net: Any, memory: Any, message: str, devices: int) -> None:
    strategy = HarmonyStrategy(num_microbatches=2, loss_reduction="mean", device_memory=memory)
    trainer = pl.Trainer(strategy=strategy, **_options(3, devices))
    with pytest.raises(UnsupportedModelError, match=message):
        trainer.fit(Net(net()), torch.utils.data.DataLoader(samples(), batch_size=4))


@pytest.mark.parametrize(("devices", "memory"), [(1, None), (1, "60KiB"), (2, None), (2, "60KiB")])
@pytest.mark.parametrize("net", [GivesByAttribute, GivesInAnObject])
def test_a_tensor_that_comes_by_an_attribute_or_in_an_object_keeps_its_gradient(
    net: type[nn.Module], devices: int, memory: Any
) -> None:
    torch.manual_seed(0)
    assert_same_training(
        Net(net()),
        samples(),
        num_microbatches=2,
        batch_size=4,
        devices=devices,
        device_memory=memory,
    )


class SharesNorm(Blocks):
    """A norm that all blocks have, with statistics in which the order of calls makes no difference."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(nets.WIDTH, momentum=None)
        for block in self.blocks:
            block.norm = norm


@pytest.mark.parametrize(("devices", "parallel"), [(1, "pipeline"), (2, "pipeline"), (2, "data")])
@pytest.mark.parametrize("device_memory", [None, "40KiB"])
def test_layers_that_share_a_norm_keep_each_other_s_statistics_to_rounding_as_sums_have_another_order(
    device_memory: str | None, parallel: str, devices: int
) -> None:
    """Each pack had statistics of its own, and what one of them wrote to the host, the next one overwrote."""
    # Statistics of two rows make much of a rounded sum: by some weights a thousand times as much.
    torch.manual_seed(0)
    module = Net(SharesNorm())
    assert_same_training(
        module,
        samples(),
        layers={nets.Block},
        device_memory=room(device_memory),
        num_microbatches=NUM_MICROBATCHES,
        batch_size=4,
        tolerance=1e-4,
        parallel=parallel,
        devices=devices,
    )


class Quantized(nn.Module):
    """Adds to a loss that begins as a buffer which it differentiates, as vector quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(nets.WIDTH, nets.WIDTH)
        self.register_buffer("zero", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        loss = self.zero
        if self.training:
            loss.requires_grad_()
        return x, loss + (x.detach().round() - x).pow(2).mean()


class Quantizing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Quantized() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for block in self.blocks:
            x, loss = block(x)
            losses.append(loss)
        return x.pow(2).mean() + sum(losses)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_buffer_that_a_layer_differentiates_is_no_lost_weight(devices: int) -> None:
    torch.manual_seed(0)
    assert_same_training(Net(Quantizing()), torch.randn(24, nets.WIDTH), devices=devices, tolerance=1e-6)


class UpdatesMetrics(nets.Block):
    """Updates metrics of the module that calls it."""

    def __init__(self, metrics: list[Metric]) -> None:
        super().__init__()
        self.metrics = metrics

    def forward(self, x: Tensor) -> Tensor:
        for metric in self.metrics:
            metric.update(x.detach().mean())
        y: Tensor = super().forward(x)
        return y


class WithMetrics(nn.Module):
    def __init__(self, from_step: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.total, self.all = SumMetric(), CatMetric()
        self.blocks = nn.Sequential(*[UpdatesMetrics([]) for _ in range(3)])
        self.from_step, self.step = from_step, 0

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        for block in self.blocks:
            block.metrics = [self.total, self.all] if self.step >= self.from_step else []  # type: ignore[assignment]
        return F.mse_loss(self.blocks(batch[0]), batch[1])


def train_with_metrics(net: WithMetrics, strategy: Any, batch_size: int, accumulated: int) -> WithMetrics:
    def count(trainer: Any, *args: Any) -> None:
        net.step = trainer.global_step

    callback = pl.callbacks.LambdaCallback(on_train_batch_end=count)
    trainer = trainer_for(strategy, 3, [callback], accumulate_grad_batches=accumulated)
    trainer.fit(Net(net), torch.utils.data.DataLoader(samples(), batch_size=batch_size))
    return net


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("memory", [None, "44KiB"])
def test_a_metric_of_no_layer_that_a_layer_updates_counts_each_call_once(memory: Any, num_microbatches: int) -> None:
    """The recompute updated it once more."""
    plain = train_with_metrics(WithMetrics(), "auto", 4 // num_microbatches, num_microbatches)
    strategy = HarmonyStrategy(device_memory=room(memory), num_microbatches=num_microbatches)
    harmony = train_with_metrics(WithMetrics(), strategy, 4, 1)
    assert len(harmony.all.value) == len(plain.all.value) == 9 * num_microbatches  # type: ignore[arg-type]
    torch.testing.assert_close(harmony.total.compute().cpu(), plain.total.compute().cpu())


@pytest.mark.cpu
def test_a_metric_that_a_layer_first_updates_in_a_later_step_is_refused() -> None:
    strategy = HarmonyStrategy(device_memory=room("44KiB"), num_microbatches=4)
    with pytest.raises(UnsupportedModelError, match="a metric is updated by a layer's code for the first time"):
        train_with_metrics(WithMetrics(from_step=1), strategy, 4, 1)

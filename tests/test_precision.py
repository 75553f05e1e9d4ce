"""Each precision trains as plain Lightning does in it, and "bf16-compute" as a bfloat16 copy with float32 masters does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_harmony import HarmonyPrecision, HarmonyStrategy
from support import nets
from support.half_precision import Scales, train_reference
from support.same_training import (
    Net,
    assert_within,
    compare,
    root,
    train_harmony,
    train_plain,
    trainer_for,
)
from support.sampling import combined

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")

# Those that Trainer(precision=...) names are Lightning's own, except on the CPU "16-mixed", which it replaces.
PLAIN: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    "64-true": DoublePrecision,
    "bf16-true": lambda: HalfPrecision("bf16-true"),
    "16-true": lambda: HalfPrecision("16-true"),
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed", root().type),
    "16-mixed": lambda: MixedPrecision("16-mixed", root().type, scaler(2.0**10)),
}


def scaler(init_scale: float, growth_interval: int = 2) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(root().type, init_scale=init_scale, growth_interval=growth_interval)


def build(net: Callable[[], nn.Module], optimizer: Any = None) -> Net:
    torch.manual_seed(0)
    return Net(net(), optimizer)


@pytest.mark.parametrize("precision", PLAIN)
def test_each_precision_trains_bit_for_bit_as_plain_lightning_in_it(precision: Any) -> None:
    module = build(lambda: nets.Language(dropout=0.3))
    plain = train_plain(copy.deepcopy(module), nets.tokens(), 4, 8, plugins=PLAIN[precision]())
    named = HarmonyPrecision(precision)
    if precision == "16-mixed":
        named.scaler = scaler(2.0**10)
    for plugin, with_gradients in ((PLAIN[precision](), True), (named, False)):
        strategy = HarmonyStrategy(device_memory="96KiB", num_microbatches=4)
        options = {"with_gradients": with_gradients, "plugins": plugin}
        compare(plain, train_harmony(copy.deepcopy(module), nets.tokens(), strategy, 8, **options))


@pytest.mark.parametrize("precision", PLAIN)
def test_harmonys_precision_is_also_lightnings_of_that_name(precision: Any) -> None:
    plugin = HarmonyPrecision(precision)
    assert isinstance(plugin, HarmonyPrecision)
    assert isinstance(plugin, type(PLAIN[precision]()))
    assert plugin.precision == precision
    assert copy.deepcopy(plugin).precision == precision


def scales_of(module: Net, strategy: Any, num_batches: int, batch_size: int) -> Scales:
    """Train ten steps from a scale that float16 can't hold."""
    scales = Scales(num_batches)
    plugin = MixedPrecision("16-mixed", root().type, scaler(2.0**20))
    options = {"plugins": plugin, "accumulate_grad_batches": num_batches}
    trainer = trainer_for(strategy, -1, [scales], max_epochs=1, **options)
    trainer.fit(copy.deepcopy(module), DataLoader(nets.tokens(80), batch_size=batch_size))
    return scales


def test_steps_with_infinite_gradients_are_skipped_as_plain_lightning_skips_them() -> None:
    module = build(nets.Language)
    plain = scales_of(module, "auto", 4, 2)
    harmony = scales_of(module, HarmonyStrategy(num_microbatches=4, device_memory="96KiB"), 1, 8)
    skipped = [torch.equal(before, after) for before, after in zip(harmony.weights, harmony.weights[1:], strict=False)]
    assert any(skipped)
    assert not all(skipped)
    assert harmony.scales == plain.scales
    assert all(torch.equal(a, b) for a, b in zip(harmony.weights, plain.weights, strict=True))


@pytest.mark.parametrize("writer", ["auto", "harmony"])
def test_the_scale_of_a_checkpoint_is_found_by_either_strategy(writer: str, tmp_path: Path) -> None:
    def trainer(strategy: str, steps: int, growth_interval: int) -> pl.Trainer:
        plugin: Any = HarmonyPrecision("16-mixed") if strategy == "harmony" else PLAIN["16-mixed"]()
        plugin.scaler = scaler(2.0, growth_interval)
        if strategy == "harmony":
            strategy = HarmonyStrategy(num_microbatches=1)
        return trainer_for(strategy, steps, [], plugins=plugin)

    module, loader = build(nets.Language), DataLoader(nets.tokens(8), batch_size=2)
    first = trainer(writer, 2, 1)
    first.fit(module, loader)
    first.save_checkpoint(tmp_path / "checkpoint")
    other = trainer("harmony" if writer == "auto" else "auto", 3, 100)
    other.fit(module, loader, ckpt_path=tmp_path / "checkpoint")
    assert other.scaler is not None
    assert other.scaler.get_scale() == 16.0


# ---- bf16-compute --------------------------------------------------------------------------------------------------------


class Floats(nn.Module):
    """Layers that take the batch's float32 numbers, one tensor twice, and have a buffer; glue that computes in float32."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(nets.WIDTH, 2, batch_first=True)
            self.register_buffer("scale", torch.tensor(0.3))

        def forward(self, query: Tensor, key: Tensor, *, value: Tensor) -> Tensor:
            # Self-attention takes another way than attention to an equal tensor.
            assert query is key
            assert self.scale.dtype is torch.float32
            return self.inner(query, key, value)[0] * self.scale

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Floats.Attention() for _ in range(3))
        self.shift = nn.Parameter(torch.randn(nets.WIDTH))

    def forward(self, batch: Tensor) -> Tensor:
        x = batch
        for block in self.blocks:
            x = x + block(x, x, value=torch.tanh(x))
            assert x.dtype is torch.float32
        return (x - batch * self.shift).square().mean()


COMPUTE_NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "dropout": (lambda: nets.Language(dropout=0.3), nets.tokens),
    "frozen": (nets.Frozen, nets.tokens),
    "rich": (nets.Rich, nets.tokens),
    "own-parameters": (nets.OwnParameters, nets.tokens),
    "returned-parameter": (nets.ReturnedParameter, nets.tokens),
    "skipped": (nets.RandomlySkipped, nets.tokens),
    "floats": (Floats, lambda: torch.randn(24, 5, nets.WIDTH, generator=torch.Generator().manual_seed(1))),
}


@pytest.mark.parametrize(("net", "with_gradients"), combined(COMPUTE_NETS, [(True,), (False,)]))
def test_bf16_compute_is_a_bfloat16_copy_with_float32_masters(net: str, with_gradients: bool) -> None:
    make, samples = COMPUTE_NETS[net]
    module = build(make, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    assert_as_reference(module, samples(), "60KiB", ways=[with_gradients])


def assert_as_reference(
    module: Net,
    samples: Any,
    capacity: str | None,
    tolerance: float = 0.0,
    ways: Sequence[bool] = (True, False),
    **options: Any,
) -> None:
    """Compare with the reference, each time with or without a hook that reads gradients."""
    expected = train_reference(copy.deepcopy(module), samples, 4, 8, **options)
    for with_gradients in ways:
        strategy = HarmonyStrategy(device_memory=capacity, num_microbatches=4, **options)
        plugin = HarmonyPrecision("bf16-compute")
        harmony = train_harmony(
            copy.deepcopy(module), samples, strategy, 8, with_gradients=with_gradients, plugins=plugin
        )
        compare(expected, harmony, tolerance)
        if capacity is not None:
            assert_within(harmony.reports, capacity)


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_bf16_compute_runs_a_recurrent_layer_with_the_weights_that_it_refers_to() -> None:
    layers = {nn.LSTM, nn.Embedding, nn.Linear}
    assert_as_reference(build(nets.Recurrent), nets.tokens(), "256KiB", layers=layers)


@pytest.mark.parametrize("net", [nets.TiedByCode, nets.Repeated])
def test_gradients_with_several_sources_are_summed_in_float32_where_the_copy_sums_them_in_bfloat16(net: Any) -> None:
    assert_as_reference(build(net), nets.tokens(), None, tolerance=2e-2)


@pytest.mark.parametrize("net", [nets.OwnParameters, nets.Repeated])
def test_bf16_compute_does_not_depend_on_the_plan(net: Any) -> None:
    module = build(net)
    runs = [
        train_harmony(
            copy.deepcopy(module),
            nets.tokens(),
            HarmonyStrategy(num_microbatches=4, device_memory=capacity, update=update),
            8,
            with_gradients=False,
            plugins=HarmonyPrecision("bf16-compute"),
            devices=devices,
        )
        for capacity, update, devices in ((None, "deferred", 1), ("60KiB", "auto", 1), ("60KiB", "auto", 2))
    ]
    for other in runs[1:]:
        compare(runs[0], other)


class Looking(Net):
    """Looks at its parameters inside and outside of steps."""

    def __init__(self) -> None:
        super().__init__(nets.TiedByCode())
        self.inside: set[Any] = set()
        self.outside: set[Any] = set()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = next(self.parameters())
        self.inside |= {
            weight.dtype,
            weight.detach().dtype,
            weight[:2].dtype,
            (weight * 1.0).dtype,
            self.net.embed(batch).dtype,
        }
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.inside |= {parameter.dtype for parameter in self.parameters()}
        self.outputs.append(self.net(batch))

    def on_train_batch_end(self, *args: Any) -> None:
        self.outside |= {parameter.dtype for parameter in self.parameters()}
        self.outputs.append(self.net.blocks[0](torch.ones(2, nets.WIDTH, device=self.device)))


def test_code_sees_bfloat16_inside_of_steps_and_the_masters_outside() -> None:
    torch.manual_seed(0)
    module = Looking()
    loader = DataLoader(nets.tokens(8), batch_size=8)
    strategy = HarmonyStrategy(num_microbatches=2)
    trainer = trainer_for(strategy, 1, [], plugins=HarmonyPrecision("bf16-compute"))
    trainer.fit(module, loader, loader)
    assert module.inside == {torch.bfloat16}
    assert module.outside == {torch.float32}
    copied = copy.deepcopy(module.net).to(root(), torch.bfloat16)
    of_hook, of_validation = module.outputs[-2:]
    assert torch.equal(of_hook, copied.blocks[0](torch.ones(2, nets.WIDTH, dtype=torch.bfloat16, device=root())))
    assert torch.equal(of_validation, copied(nets.tokens(8).to(root())))


def test_a_checkpoint_of_bf16_compute_holds_float32_and_trains_on_in_any_precision(tmp_path: Path) -> None:
    module = build(nets.Language, torch.optim.AdamW)
    loader = DataLoader(nets.tokens(8), batch_size=4)
    trainer = trainer_for("harmony", 2, [], plugins=HarmonyPrecision("bf16-compute"))
    trainer.fit(module, loader)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    saved = torch.load(tmp_path / "checkpoint", weights_only=False)
    moments = [moment for state in saved["optimizer_states"][0]["state"].values() for moment in state.values()]
    assert {tensor.dtype for tensor in (*saved["state_dict"].values(), *moments)} == {torch.float32}
    for name, parameter in module.named_parameters():
        assert torch.equal(saved["state_dict"][name], parameter)
    plain = trainer_for("auto", 3, [])
    plain.fit(module, loader, ckpt_path=tmp_path / "checkpoint")
    assert plain.global_step == 3


class Manual(Net):
    """Steps its optimizer itself."""

    def __init__(self, net: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        super().__init__(net, optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_bf16_compute_trains_in_manual_optimization() -> None:
    module = build(nets.Language)
    expected = train_reference(copy.deepcopy(module), nets.tokens(), 1, 8)
    manual = Manual(copy.deepcopy(module.net))
    options = {"with_gradients": False, "plugins": HarmonyPrecision("bf16-compute")}
    compare(expected, train_harmony(manual, nets.tokens(), "harmony", 8, **options))


def test_an_optimizer_that_a_manual_step_calls_computes_under_autocast_as_in_plain_lightning() -> None:
    """Adafactor multiplies matrices."""

    def adafactor(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(parameters, lr=0.01)

    torch.manual_seed(0)
    module = Manual(nets.Language(), adafactor)
    expected = train_plain(copy.deepcopy(module), nets.tokens(), 1, 8, precision="bf16-mixed")
    strategy = HarmonyStrategy(num_microbatches=1)
    actual = train_harmony(module, nets.tokens(), strategy, 8, with_gradients=False, precision="bf16-mixed")
    compare(expected, actual)


@pytest.mark.cpu
def test_weights_come_narrow_in_the_first_step_only_for_microbatches_whose_forward_found_them_so() -> None:
    """Else each backward of the others had the weights in both types. No gradient is predicted with a foreign parameter."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(1))], lr=0.1)

    module = build(nets.Language, sgd)
    expected = train_plain(copy.deepcopy(module), nets.tokens(), 4, 8, precision="bf16-mixed")
    strategy = HarmonyStrategy(device_memory="40KiB", num_microbatches=4)
    actual = train_harmony(module, nets.tokens(), strategy, 8, with_gradients=False, precision="bf16-mixed")
    compare(expected, actual)


def test_gradients_of_bf16_compute_are_accumulated_over_batches_and_clipped() -> None:
    module = build(nets.Language)
    microbatches, batches = (
        train_harmony(
            copy.deepcopy(module),
            nets.tokens(),
            HarmonyStrategy(num_microbatches=num_microbatches),
            8 // accumulated,
            with_gradients=True,
            plugins=HarmonyPrecision("bf16-compute"),
            gradient_clip_val=0.1,
            accumulate_grad_batches=accumulated,
            max_epochs=1,
        )
        for num_microbatches, accumulated in ((4, 1), (1, 4))
    )
    assert len(batches.gradients) == 3
    compare(microbatches, batches)


@pytest.mark.cpu
def test_weights_take_half_the_memory() -> None:
    """And half of what crosses on the way is cast on the device."""
    module = build(nets.Language)
    peaks = []
    for plugin in (HarmonyPrecision("32-true"), HarmonyPrecision("bf16-compute")):
        strategy = HarmonyStrategy(num_microbatches=8)
        run = train_harmony(copy.deepcopy(module), nets.tokens(), strategy, 8, with_gradients=False, plugins=plugin)
        peaks.append(max(run.reports[-1].peak_device_bytes))
    assert peaks[1] < 0.75 * peaks[0]


# ---- refusals ------------------------------------------------------------------------------------------------------------


def test_bf16_compute_is_refused_with_another_strategy() -> None:
    trainer = trainer_for("auto", 1, [], plugins=HarmonyPrecision("bf16-compute"))
    with pytest.raises(
        ValueError, match=r"needs Trainer\(strategy='harmony'\).* SingleDeviceStrategy would train in float32"
    ):
        trainer.fit(build(nets.Language), DataLoader(nets.tokens(8), batch_size=4))


def test_bf16_compute_refuses_masters_that_are_no_float32() -> None:
    module = build(nets.Language)
    module.net.embed.requires_grad_(False)
    module.to(torch.bfloat16)
    trainer = trainer_for("harmony", 1, [], plugins=HarmonyPrecision("bf16-compute"))
    with pytest.raises(
        ValueError, match=r"'net\.blocks\.0\.norm\.weight' is torch.bfloat16: load the model in float32"
    ):
        trainer.fit(module, DataLoader(nets.tokens(8), batch_size=4))


def test_a_frozen_base_may_be_bfloat16_on_the_host_as_well() -> None:
    module = build(nets.Language)
    for block in module.net.blocks[:3]:
        block.requires_grad_(False).to(torch.bfloat16)
    assert_as_reference(module, nets.tokens(), "60KiB")


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"HarmonyPrecision\('fp8'\): one of '32-true', .*'bf16-compute' is needed"):
        HarmonyPrecision("fp8")


class Tangent(nets.Block):
    """Differentiates in forward mode, whose tangents that are zero have no memory."""

    def forward(self, x: Tensor) -> Tensor:
        y, tangent = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))
        return y + 0.1 * tangent


class Tangents(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Tangent() for _ in range(3)])

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = self.blocks(batch[0]).square().mean()
        return loss


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_layer_under_autocast_may_differentiate_in_forward_mode() -> None:
    module = build(Tangents)
    samples = TensorDataset(torch.randn(24, nets.WIDTH))
    plain = train_plain(copy.deepcopy(module), samples, 4, 8, precision="bf16-mixed")
    strategy = HarmonyStrategy(num_microbatches=4)
    compare(plain, train_harmony(module, samples, strategy, 8, with_gradients=True, precision="bf16-mixed"))

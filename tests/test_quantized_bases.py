"""Frozen weights of bitsandbytes and torchao, with adapters beside them, train as in plain Lightning.

They are made on the accelerator, as packages load them: `module.to` would leave behind what objects have of them.

Where a package is not installed, its tests are skipped: `pip install bitsandbytes torchao` (both run on the CPU).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from lightning_harmony.estimating.estimation import estimate
from lightning_harmony.plan.outlook.outlook import Outlook
from lightning_harmony.plan.values.machine import H200
from support import nets
from support.adapters import Adapted, Stack
from support.same_training import Net, assert_same_training, root, train_harmony, train_plain, trainer_for
from support.taking_turns import takes_turns

SIZE = 64
SAMPLES = torch.randn(16, SIZE, generator=torch.Generator().manual_seed(1))


def stack(base: Callable[[], nn.Module]) -> Stack:
    return Stack(*[Adapted(base(), SIZE) for _ in range(4)])


def four_bits() -> nn.Module:
    bnb = _imported("bitsandbytes")
    base = bnb.nn.Linear4bit(SIZE, SIZE, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    base.weight = bnb.nn.Params4bit(torch.randn(SIZE, SIZE) / SIZE, requires_grad=False, quant_type="nf4")
    return base.to(root())  # type: ignore[no-any-return]


def twice_quantized() -> nn.Module:
    bnb = _imported("bitsandbytes")
    base = bnb.nn.Linear4bit(SIZE, SIZE, compute_dtype=torch.float32, compress_statistics=True)
    return base.requires_grad_(False).to(root())  # type: ignore[no-any-return]


def eight_bits(*, bias: bool = True, threshold: float = 0.0) -> nn.Module:
    bnb = _imported("bitsandbytes")
    base = bnb.nn.Linear8bitLt(SIZE, SIZE, bias=bias, has_fp16_weights=False, threshold=threshold)
    return base.requires_grad_(False).to(root())  # type: ignore[no-any-return]


def eight_bits_with_outliers() -> nn.Module:
    return eight_bits(bias=False, threshold=1.5)


def not_yet_quantized() -> nn.Module:
    """The first move to a device quantizes it."""
    bnb = _imported("bitsandbytes")
    return bnb.nn.Linear8bitLt(SIZE, SIZE, has_fp16_weights=False).requires_grad_(False)  # type: ignore[no-any-return]


def of_torchao() -> nn.Module:
    quantization = _imported("torchao.quantization")
    base = nn.Linear(SIZE, SIZE).requires_grad_(False)
    quantization.quantize_(base, quantization.Int8WeightOnlyConfig())
    return base


def _imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


@pytest.fixture(params=[four_bits, twice_quantized, eight_bits, eight_bits_with_outliers, of_torchao])
def base(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    made: Callable[[], nn.Module] = request.param
    made()
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device_memory", [None, "80KiB"])
def test_adapters_beside_a_quantized_weight_train_with_equal_bits(
    base: Callable[[], nn.Module], device_memory: str | None
) -> None:
    assert_same_training(Net(stack(base)), SAMPLES, device_memory=device_memory)


@pytest.mark.filterwarnings("ignore")
def test_quantized_weights_are_swapped_in_packed(base: Callable[[], nn.Module]) -> None:
    def swapped_in_bytes(base: Callable[[], nn.Module]) -> int:
        strategy = HarmonyStrategy(device_memory="80KiB", num_microbatches=4)
        training = train_harmony(Net(stack(base)), SAMPLES, strategy, 8, with_gradients=False)
        return training.reports[-1].swapped_in_bytes["weights"]

    plain = swapped_in_bytes(lambda: nn.Linear(SIZE, SIZE, bias=False).requires_grad_(False))
    assert swapped_in_bytes(base) < 0.6 * plain


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore")
def test_estimates_count_quantized_weights_packed(base: Callable[[], nn.Module]) -> None:
    def estimated(base: Callable[[], nn.Module]) -> Outlook:
        machine = replace(H200, host_bytes=2**40, device_bytes=None, library_bytes=0)
        batch = torch.empty(8, SIZE, device="meta")
        return estimate(Net(stack(base)), batch, device_memory="80KiB", num_microbatches=4, machine=machine).outlook

    plain = estimated(lambda: nn.Linear(SIZE, SIZE, bias=False).requires_grad_(False))
    quantized = estimated(base)
    assert quantized.swapped_in_bytes["weights"] < 0.6 * plain.swapped_in_bytes["weights"]
    assert quantized.host.weight_bytes < 0.6 * plain.host.weight_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", [eight_bits, not_yet_quantized])
def test_weights_are_quantized_as_the_first_move_to_the_device_does_it(made: Callable[[], nn.Module]) -> None:
    made()
    assert_same_training(Net(stack(made)), SAMPLES, devices=2)


def use_the_function_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with the function that bitsandbytes trains with on a GPU, and evaluates with everywhere."""
    bnb = _imported("bitsandbytes")
    function = bnb.autograd._functions.MatMul8bitLt
    monkeypatch.setattr(bnb, "matmul", lambda a, b, bias, state: function.apply(a, b, None, bias, state))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("device_memory", [None, "80KiB"])
@pytest.mark.parametrize("threshold", [0.0, 1.5])
def test_eight_bits_train_with_equal_bits_as_on_a_gpu(
    threshold: float, device_memory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_the_function_of_gpus(monkeypatch)
    assert_same_training(Net(stack(lambda: eight_bits(threshold=threshold))), SAMPLES, device_memory=device_memory)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("threshold", [0.0, 1.5])
def test_microbatches_take_turns_with_eight_bits(
    threshold: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_the_function_of_gpus(monkeypatch)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.stack = nn.Linear(nets.WIDTH, SIZE), stack(lambda: eight_bits(threshold=threshold))

        def forward(self, batch: Any) -> Tensor:
            return self.stack(self.first(batch[0]))  # type: ignore[no-any-return]

    assert takes_turns(First(), caplog) == (True, [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("threshold", [0.0, 1.5])
def test_eight_bits_are_evaluated_with_equal_bits(threshold: float) -> None:
    def made() -> nn.Module:
        return eight_bits(threshold=threshold)

    made()
    module = Net(stack(made))
    outputs = []
    for strategy in ("auto", HarmonyStrategy(device_memory="80KiB", num_microbatches=4)):
        each: Any = copy.deepcopy(module)
        each.predict_step = lambda batch, index, net=each.net: net.layers(batch)
        trainer = trainer_for(strategy, 2, [])
        for _ in range(2):
            predicted = trainer.predict(each, DataLoader(SAMPLES, batch_size=8))
        outputs.append(predicted)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(*outputs, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layers", [None, (nn.Linear,)])
def test_eight_bits_alone_in_a_layer_and_called_twice_train_with_equal_bits(layers: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.base, self.last = nn.Linear(SIZE, SIZE), eight_bits(), nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.base(torch.tanh(self.base(self.first(x))))).pow(2).mean()  # type: ignore[no-any-return]

    assert_same_training(Net(Twice()), SAMPLES, layers=layers)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_eight_bits_hold_their_scales_and_load_both_ways(tmp_path: Path) -> None:
    module = Net(stack(eight_bits))
    states = {}
    for name, make in (("plain", lambda: "auto"), ("swapped", lambda: HarmonyStrategy(num_microbatches=1))):
        trainer = trainer_for(make(), 1, [])
        trainer.fit(copy.deepcopy(module), DataLoader(SAMPLES, batch_size=8))
        trainer.save_checkpoint(tmp_path / name)
        states[name] = torch.load(tmp_path / name, weights_only=False)["state_dict"]
    assert states["plain"].keys() == states["swapped"].keys()
    assert any(name.endswith("SCB") for name in states["plain"])
    # Plain Lightning leaves scales on the accelerator.
    assert all(torch.equal(value.cpu(), states["swapped"][name].cpu()) for name, value in states["plain"].items())
    # On from there, each from the checkpoint of the other, and with weights of other values at first.
    after = []
    for name, make in (("swapped", lambda: "auto"), ("plain", lambda: HarmonyStrategy(num_microbatches=1))):
        fresh = Net(stack(eight_bits))
        trainer_for(make(), 2, []).fit(fresh, DataLoader(SAMPLES, batch_size=8), ckpt_path=tmp_path / name)
        after.append(fresh.state_dict())
    assert all(torch.equal(value.cpu(), after[1][name].cpu()) for name, value in after[0].items())
    assert any(not torch.equal(value.cpu(), states["plain"][name].cpu()) for name, value in after[0].items())


@pytest.mark.filterwarnings("ignore")
def test_a_bias_that_the_forward_casts_is_refused() -> None:
    def made() -> nn.Module:
        base = eight_bits()
        base.bias.data = base.bias.data.half()  # type: ignore[union-attr]
        return base

    made()
    with pytest.raises(UnsupportedModelError, match="changes the data of a parameter in its forward"):
        train_harmony(Net(stack(made)), SAMPLES, HarmonyStrategy(num_microbatches=4), 8, with_gradients=False)


@pytest.mark.filterwarnings("ignore")
def test_eight_bits_train_with_equal_bits_after_a_fit_of_plain_lightning() -> None:
    # On a GPU that fit brings the weight to the host, and leaves there what the layer computes with.
    module = Net(stack(eight_bits))
    train_plain(module, SAMPLES[:8], 1, 8)
    module.losses.clear()
    assert_same_training(module, SAMPLES, device_memory="80KiB")


@pytest.mark.in_memory
@pytest.mark.filterwarnings("ignore")
def test_eight_bits_that_were_swapped_are_evaluated_where_the_model_fits() -> None:
    module: Any = Net(stack(eight_bits))
    module.predict_step = lambda batch, *index: module.net.layers(batch)
    outputs = []
    for is_swapped in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if is_swapped:
                patch.setattr("lightning_harmony.strategy.fits", lambda lasting, device: False)
            trainer = trainer_for(HarmonyStrategy(num_microbatches=1), 1, [])
            outputs.append(trainer.predict(module, DataLoader(SAMPLES, batch_size=8)))
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(*outputs, strict=True))


@pytest.mark.in_memory
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", [eight_bits, of_torchao])
def test_quantized_bases_train_with_equal_bits_where_the_model_fits(made: Callable[[], nn.Module]) -> None:
    made()
    assert_same_training(Net(stack(made)), SAMPLES)

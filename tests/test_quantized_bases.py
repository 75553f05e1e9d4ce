"""Frozen weights of bitsandbytes and torchao, with adapters beside them, train as in plain Lightning.

Where a package is not installed, its tests are skipped: `pip install bitsandbytes torchao` (both run on the CPU).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from lightning_harmony.estimating.estimation import estimate
from lightning_harmony.plan.outlook.outlook import Outlook
from lightning_harmony.plan.values.machine import H200
from support.same_training import Net, assert_same_training, train_harmony

SIZE = 64
SAMPLES = torch.randn(16, SIZE, generator=torch.Generator().manual_seed(1))


class Adapted(nn.Module):
    """A frozen weight and a trained product of two small ones."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(SIZE, 4, bias=False), nn.Linear(4, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) + self.up(self.down(x))


class Stack(nn.Module):
    """Several of them, and the loss of what comes of that."""

    def __init__(self, base: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Adapted(base()) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()  # type: ignore[no-any-return]


def four_bits() -> nn.Module:
    bnb = _imported("bitsandbytes")
    base = bnb.nn.Linear4bit(SIZE, SIZE, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    base.weight = bnb.nn.Params4bit(torch.randn(SIZE, SIZE) / SIZE, requires_grad=False, quant_type="nf4")
    return base.to("cpu")  # type: ignore[no-any-return]


def twice_quantized() -> nn.Module:
    bnb = _imported("bitsandbytes")
    base = bnb.nn.Linear4bit(SIZE, SIZE, compute_dtype=torch.float32, compress_statistics=True)
    return base.requires_grad_(False).to("cpu")  # type: ignore[no-any-return]


def eight_bits() -> nn.Module:
    bnb = _imported("bitsandbytes")
    return bnb.nn.Linear8bitLt(SIZE, SIZE, has_fp16_weights=False).requires_grad_(False).to("cpu")  # type: ignore[no-any-return]


def of_torchao() -> nn.Module:
    quantization = _imported("torchao.quantization")
    base = nn.Linear(SIZE, SIZE).requires_grad_(False)
    quantization.quantize_(base, quantization.Int8WeightOnlyConfig())
    return base


def _imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


@pytest.fixture(params=[four_bits, twice_quantized, eight_bits, of_torchao])
def base(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    made: Callable[[], nn.Module] = request.param
    made()
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device_memory", [None, "80KiB"])
def test_adapters_beside_a_quantized_weight_train_with_equal_bits(
    base: Callable[[], nn.Module], device_memory: str | None
) -> None:
    assert_same_training(Net(Stack(base)), SAMPLES, device_memory=device_memory)


@pytest.mark.filterwarnings("ignore")
def test_quantized_weights_are_swapped_in_packed(base: Callable[[], nn.Module]) -> None:
    def swapped_in_bytes(base: Callable[[], nn.Module]) -> int:
        strategy = HarmonyStrategy(device_memory="80KiB", num_microbatches=4)
        training = train_harmony(Net(Stack(base)), SAMPLES, strategy, 8, with_gradients=False)
        return training.reports[-1].swapped_in_bytes["weights"]

    plain = swapped_in_bytes(lambda: nn.Linear(SIZE, SIZE, bias=False).requires_grad_(False))
    assert swapped_in_bytes(base) < 0.6 * plain


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore")
def test_estimates_count_quantized_weights_packed(base: Callable[[], nn.Module]) -> None:
    def estimated(base: Callable[[], nn.Module]) -> Outlook:
        machine = replace(H200, host_bytes=2**40, device_bytes=None, library_bytes=0)
        batch = torch.empty(8, SIZE, device="meta")
        return estimate(Net(Stack(base)), batch, device_memory="80KiB", num_microbatches=4, machine=machine).outlook

    plain = estimated(lambda: nn.Linear(SIZE, SIZE, bias=False).requires_grad_(False))
    quantized = estimated(base)
    assert quantized.swapped_in_bytes["weights"] < 0.6 * plain.swapped_in_bytes["weights"]
    assert quantized.host.weight_bytes < 0.6 * plain.host.weight_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("made", "cause"),
    [(eight_bits, "changes the data of a parameter in its forward")],
)
def test_others_are_refused_where_layers_are_swapped(made: Callable[[], nn.Module], cause: str) -> None:
    made()
    with pytest.raises(UnsupportedModelError, match=cause):
        train_harmony(Net(Stack(made)), SAMPLES, HarmonyStrategy(num_microbatches=4), 8, with_gradients=False)


@pytest.mark.in_memory
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", [eight_bits, of_torchao])
def test_quantized_bases_train_with_equal_bits_where_the_model_fits(made: Callable[[], nn.Module]) -> None:
    made()
    assert_same_training(Net(Stack(made)), SAMPLES)

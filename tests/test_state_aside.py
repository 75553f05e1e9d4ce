"""Evaluation beside a model in memory: where a batch needs the room of the optimizers' state, that waits on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.structures.parts import parts_of
from lightning_harmony.fit.state_aside import StateAside, move_optimizer_state
from support.composed import Packed
from support.same_training import SEED, placed

pytestmark = pytest.mark.in_memory
WIDTH, BATCH = 64, 4


def samples(number: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(number, WIDTH, generator=generator))


class Model(pl.LightningModule):
    """Validation runs on larger batches than training does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.at_end: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # No mean over parts of a batch.
        self.log("spread", self.layers(batch[0]).std())

    def on_validation_end(self) -> None:
        state = self.trainer.optimizers[0].state_dict()["state"]
        self.at_end.append({number: each["exp_avg"].tolist() for number, each in state.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(module: Model, strategy: Any, validated: int, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        strategy=strategy,
        **placed({"max_epochs": 2, "logger": False, "enable_checkpointing": False, "val_check_interval": 2, **options}),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(SEED)
    trainer.fit(module, DataLoader(samples(4 * BATCH), BATCH), DataLoader(samples(2 * validated), validated))
    return trainer


def lasting_bytes(module: nn.Module) -> int:
    """Weights, gradients and the two moments of Adam."""
    return sum(4 * p.numel() * p.element_size() for p in module.parameters())


def assert_same(plain: pl.Trainer, harmony: pl.Trainer) -> None:
    assert plain.callback_metrics["spread"] == harmony.callback_metrics["spread"]
    assert plain.lightning_module.at_end == harmony.lightning_module.at_end
    for one, other in zip(plain.lightning_module.parameters(), harmony.lightning_module.parameters(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())
        states = [trainer.optimizers[0].state[p] for trainer, p in ((plain, one), (harmony, other))]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name].cpu(), states[1][name].cpu()) for name in states[0])


@pytest.mark.cpu
@pytest.mark.parametrize("sanity", [0, 1], ids=["after steps", "before any step"])
def test_a_larger_validation_batch_runs_whole_and_training_goes_on_in_memory(
    sanity: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers used to be swapped from then on, in training, too."""
    module, validated = Model(), 64 * BATCH
    options = {"num_sanity_val_steps": sanity}
    plain = fit(copy.deepcopy(module), "auto", validated, **options)
    strategy = HarmonyStrategy(device_memory=lasting_bytes(module) + 80 * 1024)
    with caplog.at_level("INFO"):
        harmony = fit(copy.deepcopy(module), strategy, validated, **options)
    assert strategy.plan is None
    assert caplog.text.count("waits in host memory") == 1
    assert "in validation_step" in caplog.text
    assert_same(plain, harmony)
    # The fit has ended with a validation. What steps now finds the state beside the parameters.
    assert not harmony.optimizers[0]._optimizer_step_pre_hooks


@pytest.mark.cpu
def test_a_batch_that_has_no_room_without_the_state_either_has_layers_swapped() -> None:
    module, validated = Model(), 100 * BATCH
    plain = fit(copy.deepcopy(module), "auto", validated, num_sanity_val_steps=0)
    strategy = HarmonyStrategy(device_memory=lasting_bytes(module) + 80 * 1024)
    harmony = fit(copy.deepcopy(module), strategy, validated, num_sanity_val_steps=0)
    assert strategy.plan is not None
    assert_same(plain, harmony)


def test_state_that_is_composed_of_tensors_moves_with_all_of_them() -> None:
    """As states of 8 bits are."""
    parameter = nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    state = Packed.of(torch.ones(4, 4))
    optimizer.state[parameter]["momentum_buffer"] = state
    move_optimizer_state([optimizer], torch.device("meta"))
    assert optimizer.state[parameter]["momentum_buffer"] is state
    assert {state.device.type, *(part.device.type for part in parts_of(state))} == {"meta"}


class _Trainer:
    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)


def _stepped(make: Callable[[Any], torch.optim.Optimizer], device: str) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.linspace(0, 1, 300, device=device))
    optimizer = make([parameter])
    for _ in range(2):
        step(parameter, optimizer)
    return parameter, optimizer


def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    parameter.grad = parameter.detach() * 2 + 1
    optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("brings_back", [True, False], ids=["brought back", "stepped meanwhile"])
@pytest.mark.parametrize(
    "make",
    [torch.optim.Adam, lambda p: torch.optim.Adam(p, fused=True)],
    ids=["Adam", "fused"],
)
def test_state_leaves_the_gpu_and_comes_back_where_it_was(make: Any, brings_back: bool) -> None:
    (other, plain), (parameter, optimizer) = _stepped(make, "cuda"), _stepped(make, "cuda")
    state = optimizer.state[parameter]
    held, devices = dict(state), {name: value.device for name, value in state.items()}
    aside = StateAside(_Trainer(optimizer))
    with torch.inference_mode():
        assert aside.leave()
        assert not aside.leave()
    assert all(value.device.type == "cpu" for value in state.values())
    if brings_back:
        aside.come_back()
        assert {name: value.device for name, value in state.items()} == devices
    step(parameter, optimizer)
    step(other, plain)
    assert not aside.is_aside
    assert all(state[name] is value for name, value in held.items())
    assert torch.equal(parameter, other)
    assert all(torch.equal(value, plain.state[other][name]) for name, value in state.items())


@pytest.mark.gpu
def test_state_in_memory_of_others_stays() -> None:
    parameter, optimizer = _stepped(torch.optim.Adam, "cuda")
    flat = torch.zeros(600, device="cuda")
    optimizer.state[parameter]["exp_avg"] = flat[:300]
    aside = StateAside(_Trainer(optimizer))
    assert aside.leave()
    assert optimizer.state[parameter]["exp_avg"].is_cuda
    assert not optimizer.state[parameter]["exp_avg_sq"].is_cuda
    aside.come_back()

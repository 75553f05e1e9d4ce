"""Several fits at once, each in a thread of its own, as studies of hyperparameters run them: none notices the others."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from lightning_harmony.engine.glue.functions import functions_as_operations
from support import nets
from support.same_training import Net, trainer_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]


class Double(torch.autograd.Function):
    """A function between layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Chain(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(nets.WIDTH, nets.WIDTH) for _ in range(6)])
        self.scale = nn.Parameter(torch.randn(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Double.apply(layer(x), self.scale).tanh()
        return x.pow(2).mean()


def fit(module: pl.LightningModule, strategy: Any, steps: int = 4) -> pl.LightningModule:
    data = torch.linspace(-1, 1, 8 * steps * nets.WIDTH).reshape(-1, nets.WIDTH)
    trainer_for(strategy, steps, []).fit(module, DataLoader(data, 8))
    return module


def strategy(**arguments: Any) -> Any:
    return HarmonyStrategy(device_memory="24KiB", num_microbatches=4, profile_cache=False, **arguments)


def run_together(*jobs: Callable[[], Any]) -> list[Any]:
    """What each job returned or raised, all having begun at once, each in a thread of its own."""
    results: list[Any] = [None] * len(jobs)
    begin = threading.Barrier(len(jobs))

    def run(number: int) -> None:
        begin.wait()
        try:
            results[number] = jobs[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


@pytest.mark.parametrize("update", ["auto", "deferred"])
def test_three_fits_in_threads_train_as_each_does_alone(update: Any) -> None:
    # Whichever ended its step first took from torch what the others' steps had put there.
    modules = [Net(Chain(seed)) for seed in range(3)]
    alone = [fit(copy.deepcopy(module), strategy(update=update)).state_dict() for module in modules]
    together = run_together(*(lambda module=module: fit(module, strategy(update=update)) for module in modules))
    for expected, module in zip(alone, together, strict=True):
        assert isinstance(module, pl.LightningModule), module
        assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())


def test_a_fit_that_fails_in_a_thread_leaves_another_one_alone() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise ArithmeticError
            return super().training_step(batch, batch_idx)

    module = Net(Chain(0))
    expected = fit(copy.deepcopy(module), strategy()).state_dict()
    failed, trained = run_together(lambda: fit(Fails(Chain(1)), strategy()), lambda: fit(module, strategy()))
    assert isinstance(failed, ArithmeticError)
    assert all(torch.equal(value, expected[name]) for name, value in trained.state_dict().items())


def test_plain_lightning_trains_beside_a_fit_in_another_thread() -> None:
    plain, swapped = Net(Chain(0)), Net(Chain(1))
    expected = fit(copy.deepcopy(plain), "auto").state_dict()
    trained, other = run_together(lambda: fit(plain, "auto"), lambda: fit(swapped, strategy()))
    assert isinstance(other, Net), other
    assert all(torch.equal(value, expected[name]) for name, value in trained.state_dict().items())


def test_an_autograd_function_of_another_thread_runs_as_torch_runs_it() -> None:
    def use() -> Tensor:
        x, weight = torch.ones(2, 3, requires_grad=True), torch.arange(3.0, requires_grad=True)
        Double.apply(x, weight).sum().backward()
        assert weight.grad is not None
        return weight.grad

    with functions_as_operations():
        (found,) = run_together(use)
    assert found.tolist() == [2.0, 2.0, 2.0]


def test_the_last_step_to_end_gives_autograd_functions_their_apply_back() -> None:
    bottom = torch.autograd.function._SingleLevelFunction
    first, second = functions_as_operations(), functions_as_operations()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "apply" in vars(bottom)
    second.__exit__(None, None, None)
    assert "apply" not in vars(bottom)


class InThreads(nn.Module):
    """Calls its layers in threads of its own."""

    def __init__(self, start: Callable[[Callable[[], Any]], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nets.Block() for _ in range(6)])
        object.__setattr__(self, "start", start)

    def forward(self, batch: Any) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = self.called(layer, x)
        return x.pow(2).mean()

    def called(self, layer: nn.Module, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        self.start(lambda: found.append(layer(x)))
        return found[0]


def in_a_pool(call: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1, "own") as pool:
        pool.submit(call).result()


def in_a_thread(call: Callable[[], Any]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="own")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("start", [in_a_pool, in_a_thread])
def test_layers_in_threads_of_a_step_are_refused_by_their_cause(start: Any, num_microbatches: int) -> None:
    """The error spoke of parameters that were replaced, as pruning does."""
    data = torch.utils.data.TensorDataset(torch.randn(8, nets.WIDTH))
    given = HarmonyStrategy(device_memory="24KiB", num_microbatches=num_microbatches, profile_cache=False)
    with pytest.raises(
        UnsupportedModelError, match=r"^layer 'net\.layers\.0' is called in the thread 'own.*' while a step"
    ):
        trainer_for(given, 1, []).fit(Net(InThreads(start)), DataLoader(data, 8))

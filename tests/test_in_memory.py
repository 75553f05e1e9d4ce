"""A model that fits is not swapped: it trains as in plain Lightning, and goes over to swapping if a batch does not fit."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import itertools
import re
import threading
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_harmony import CapacityError, HarmonyMonitor, HarmonyStrategy
from support.lightning_fits import leave_half
from support.same_training import SEED, Net, SeedMicrobatches, placed

pytestmark = [
    pytest.mark.in_memory,
    pytest.mark.filterwarnings("ignore:.*normalize with the statistics of microbatches"),
]
WIDTH, BATCH, STEPS = 32, 8, 3
# Validation after the fit would count, too.
NO_CHECK: dict[str, Any] = {"num_sanity_val_steps": 0, "limit_val_batches": 0}


def samples(number: int = BATCH * STEPS, width: int = WIDTH) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(number, width, generator=generator), torch.randn(number, 1, generator=generator))


class Model(pl.LightningModule):
    """Layers, and a mean squared error."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *copy.deepcopy(more)) for _ in range(3))
        )
        self.head = nn.Linear(WIDTH, 1)
        self.calls: list[tuple[int, str]] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return ((self.head(self.blocks(x)) - y) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls.append((len(batch[0]), threading.current_thread().name))
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    module: pl.LightningModule, strategy: Any, data: Dataset[Any] | DataLoader[Any], batch_size: int, **options: Any
) -> pl.Trainer:
    trainer = pl.Trainer(
        strategy=strategy,
        **placed({"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(SEED)
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size)
    trainer.fit(module, loader, DataLoader(samples(BATCH), BATCH) if isinstance(module, Model) else None)
    return trainer


def tensors(trainer: pl.Trainer) -> list[Tensor]:
    """Weights, buffers and optimizer state."""
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    found = [*trainer.lightning_module.state_dict().values(), *(v for state in states for v in state.values())]
    return [value.detach().cpu() for value in found if isinstance(value, Tensor)]


def assert_equal(one: pl.Trainer, other: pl.Trainer) -> None:
    assert len(tensors(one)) == len(tensors(other)) > 0
    assert all(map(torch.equal, tensors(one), tensors(other)))


def trained_both_ways(
    module: pl.LightningModule, num_microbatches: int | None, data: Any = None, **options: Any
) -> tuple[pl.Trainer, pl.Trainer]:
    """By plain Lightning with as many microbatches, and by harmony."""
    number, data = num_microbatches or 1, data or samples()
    accumulated = options.pop("accumulate_grad_batches", 1)
    plain = fit(
        copy.deepcopy(module),
        "auto",
        data,
        BATCH // number,
        accumulate_grad_batches=number * accumulated,
        callbacks=[SeedMicrobatches(number)],
        **options,
    )
    strategy = HarmonyStrategy(num_microbatches=num_microbatches)
    harmony = fit(copy.deepcopy(module), strategy, data, BATCH, accumulate_grad_batches=accumulated, **options)
    assert strategy.plan is None
    assert strategy.step_report is not None
    assert strategy.step_report.update == "in-memory"
    assert_equal(plain, harmony)
    return plain, harmony


@pytest.mark.parametrize("num_microbatches", [None, 1, 2, 4])
def test_a_model_that_fits_trains_as_in_plain_lightning(num_microbatches: int | None) -> None:
    plain, harmony = trained_both_ways(Model(), num_microbatches)
    sizes = {size for size, _ in harmony.lightning_module.calls}
    assert sizes == {BATCH // (num_microbatches or 1)}
    assert torch.equal(plain.callback_metrics["validation"], harmony.callback_metrics["validation"])


def test_by_default_a_batch_runs_whole_and_logs_what_plain_lightning_logs() -> None:
    plain, harmony = trained_both_ways(Model(), None)
    assert plain.callback_metrics.keys() == harmony.callback_metrics.keys()
    assert all(torch.equal(value, harmony.callback_metrics[name]) for name, value in plain.callback_metrics.items())


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.01},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"detect_anomaly": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_lightnings_options_give_the_same_bits(num_microbatches: int, options: dict[str, Any]) -> None:
    trained_both_ways(Model(), num_microbatches, **options)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_dropout_and_batch_statistics_give_the_same_bits(num_microbatches: int) -> None:
    trained_both_ways(Model(nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)), num_microbatches)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        lambda p: torch.optim.LBFGS(p, max_iter=3),
        torch.optim.Adafactor,
    ],
    ids=["sgd", "adam-foreach", "adamw-fused", "lbfgs", "adafactor"],
)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_optimizers_step_as_the_user_wrote_them(num_microbatches: int, optimizer: Callable[[Any], Any]) -> None:
    class Optimized(Model):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters())

    if num_microbatches > 1 and isinstance(Optimized().configure_optimizers(), torch.optim.LBFGS):
        pytest.skip("plain Lightning gives LBFGS one microbatch a call")
    trained_both_ways(Optimized(), num_microbatches)


# ---- what earlier microbatches must not change -------------------------------------------------------------------------


class NumberOnTheModule(Model):
    """Mixup's lambda: set before the layers, read behind them."""

    def loss(self, batch: Any) -> Tensor:
        self.weight = float(batch[1].mean())
        return self.weight * super().loss(batch)


class LambdaInADict(Model):
    """A function in a dict that the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[str, Any] = {}

    def loss(self, batch: Any) -> Tensor:
        scale = float(batch[1].abs().sum())
        self.functions["scale"] = lambda value: scale * value
        return self.functions["scale"](super().loss(batch))


class HelperObject(Model):
    """A plain object that the module holds, changed before the layers and read behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = type("Schedule", (), {"value": 0.0})()

    def loss(self, batch: Any) -> Tensor:
        self.schedule.value = 0.9 * self.schedule.value + float(batch[0].mean())
        return super().loss(batch) * (1 + self.schedule.value)


class HookInTheFirstStep(Model):
    """A hook that registers itself, and scales what the head gives."""

    def loss(self, batch: Any) -> Tensor:
        if not self.calls[1:]:
            self.head.register_forward_hook(lambda module, args, output: output * 1.5)
        return super().loss(batch)


class ReadsGradientsInTheStep(Model):
    """The norm of what has been accumulated so far scales the loss."""

    def loss(self, batch: Any) -> Tensor:
        gradient = self.head.weight.grad
        return super().loss(batch) * (1.0 if gradient is None else 1 + float(gradient.norm()))


@pytest.mark.parametrize(
    "kind", [NumberOnTheModule, LambdaInADict, HelperObject, HookInTheFirstStep, ReadsGradientsInTheStep]
)
def test_what_a_step_keeps_between_layers_is_its_own(kind: type[Model]) -> None:
    trained_both_ways(kind(), 4)


class SparseGradients(Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH, sparse=True)

    def loss(self, batch: Any) -> Tensor:
        index = batch[0][:, :3].abs().long()
        return ((self.head(self.table(index).mean(1)) - batch[1]) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ChangesWeightsInTheStep(Model):
    """Weight norm by hand: refused while layers are swapped, ordinary where they are not."""

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.norm())
        return super().loss(batch)


@pytest.mark.parametrize("kind", [SparseGradients, ChangesWeightsInTheStep])
def test_what_swapping_refuses_trains_where_the_model_fits(kind: type[Model]) -> None:
    trained_both_ways(kind(), 2)


class OverriddenBackward(Model):
    """Its gradient cannot be predicted: the graphs of all microbatches wait for it."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.5).backward()


class HookBetweenPasses(Model):
    def on_before_backward(self, loss: Tensor) -> None:
        self.between = [None if p.grad is None else p.grad.clone() for p in self.parameters()]


class ChangesItsRows(HookBetweenPasses):
    """Torch counted a change of any microbatch's rows as one of all, and refused the backward of the first."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x.mul_(2)
        return super().loss((x, y))


@pytest.mark.parametrize("kind", [OverriddenBackward, HookBetweenPasses, ChangesItsRows])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_code_between_forward_and_backward_keeps_its_place(kind: type[Model], num_microbatches: int) -> None:
    trained_both_ways(kind(), num_microbatches)


class KeepsHalfOfItsGradients(Model):
    """Its optimizer has a `zero_grad` of its own, as one that a wrapper has replaced."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        leave_half(optimizer, self)
        return optimizer


def test_an_optimizer_with_a_zero_grad_of_its_own_has_the_gradients_that_this_leaves() -> None:
    trained_both_ways(KeepsHalfOfItsGradients(), 4)


def test_manual_optimization_is_plain_lightnings() -> None:
    class Manual(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    trained_both_ways(Manual(), None)


def test_the_step_runs_in_the_callers_thread_with_its_event_loop() -> None:
    class Asynchronous(Model):
        def loss(self, batch: Any) -> Tensor:
            async def forward() -> Tensor:
                return super(Asynchronous, self).loss(batch)

            return asyncio.run(forward())

    _, harmony = trained_both_ways(Asynchronous(), 2)
    assert {name for _, name in harmony.lightning_module.calls} == {threading.main_thread().name}


def test_frozen_parameters_and_a_loss_without_gradients_train_as_in_plain_lightning() -> None:
    class Partly(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.requires_grad_(False)

    trained_both_ways(Partly(), 2)


def test_outputs_of_microbatches_are_those_of_the_batch() -> None:
    class Returns(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch), "rows": batch[0][:, 0].clone()}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert torch.equal(outputs["rows"].cpu(), batch[0][:, 0].cpu())

    trained_both_ways(Returns(), 1)
    fit(Returns(), HarmonyStrategy(num_microbatches=4), samples(), BATCH)


# ---- capacities --------------------------------------------------------------------------------------------------------


def lasting_bytes(module: pl.LightningModule) -> int:
    """Weights, gradients and AdamW's two moments."""
    return 4 * sum(p.numel() * p.element_size() for p in module.parameters())


@pytest.mark.cpu
def test_a_capacity_with_room_for_the_batch_leaves_the_model_in_memory() -> None:
    strategy = HarmonyStrategy(device_memory=lasting_bytes(Model()) + 256 * 1024, num_microbatches=2)
    harmony = fit(Model(), strategy, samples(), BATCH)
    assert strategy.plan is None
    assert strategy.step_report is not None
    assert strategy.step_report.peak_device_bytes[0] <= lasting_bytes(harmony.lightning_module) + 256 * 1024


class TakesItsScale(nn.Linear):
    """Its first call takes what its weight carries, as in layers of eight bits of bitsandbytes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.scale = torch.full((WIDTH,), 0.5)  # type: ignore[assignment]
        self.taken: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TakesItsScale:
        copied = memo[id(self)] = TakesItsScale()
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if weight.scale is not None:
            self.taken, weight.scale = weight.scale, None
        assert self.taken is not None
        return super().forward(x) * self.taken.to(x.device)


@pytest.mark.cpu
def test_a_model_that_turns_out_too_large_while_it_is_moved_is_swapped() -> None:
    """Some layers of bitsandbytes have their weights twice on the device for as long as they move."""

    class Grows(Model):
        has_moved = False

        def to(self, *args: Any, **kwargs: Any) -> Any:
            if not self.has_moved:
                self.has_moved = True
                raise torch.OutOfMemoryError
            return super().to(*args, **kwargs)

    grows, module = Grows(), Model()
    grows.load_state_dict(module.state_dict())
    plain = fit(module, "auto", samples(), BATCH)
    strategy = HarmonyStrategy(num_microbatches=1)
    harmony = fit(grows, strategy, samples(), BATCH)
    assert strategy.plan is not None
    assert_equal(plain, harmony)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "more",
    [(), (nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)), (TakesItsScale(),)],
    ids=["plain", "with-state", "with-state-of-a-weight"],
)
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.01}, {"num_sanity_val_steps": 0}], ids=str)
def test_a_first_batch_that_does_not_fit_is_undone_and_layers_are_swapped(
    more: tuple[nn.Module, ...], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    module = Model(*more)
    plain = fit(
        copy.deepcopy(module),
        "auto",
        samples(),
        BATCH // 2,
        accumulate_grad_batches=2,
        callbacks=[SeedMicrobatches(2)],
        **options,
    )
    strategy = HarmonyStrategy(device_memory=lasting_bytes(module) + 1024, num_microbatches=2)
    with caplog.at_level("INFO"):
        harmony = fit(copy.deepcopy(module), strategy, samples(), BATCH, **options)
    assert strategy.plan is not None
    assert "layers are swapped from now on" in caplog.text
    assert_equal(plain, harmony)


@pytest.mark.cpu
def test_statistics_of_a_batch_that_does_not_fit_are_no_others() -> None:
    """The second batch was refused, as if other code had them: it was what had swapped the first one."""
    module = Model(nn.BatchNorm1d(WIDTH))
    plain = fit(copy.deepcopy(module), "auto", samples(), BATCH, **NO_CHECK)
    strategy = HarmonyStrategy(device_memory=lasting_bytes(module) + 1024, num_microbatches=1)
    harmony = fit(module, strategy, samples(), BATCH, **NO_CHECK)
    assert strategy.plan is not None
    assert_equal(plain, harmony)


class Roomy(Model):
    """Takes far more room for each sample than for its weights."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return ((self.head(torch.tanh(self.blocks(x).repeat(1, 32)).view(len(x), 32, WIDTH).mean(1)) - y) ** 2).mean()


@pytest.mark.cpu
@pytest.mark.parametrize(("room", "number"), [(72, 2), (40, 4)])
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.01}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_batch_runs_in_as_many_microbatches_as_fit_beside_the_model(
    room: int, number: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Layers were swapped, and computed twice, where half a batch would have fitted."""
    module = Roomy(nn.BatchNorm1d(WIDTH))
    memory = lasting_bytes(module) + room * 1024
    strategy = HarmonyStrategy(device_memory=memory)
    with caplog.at_level("INFO"):
        found = fit(copy.deepcopy(module), strategy, samples(), BATCH, **NO_CHECK, **options)
    assert strategy.plan is None
    assert strategy.step_report is not None
    assert strategy.step_report.num_microbatches == number
    said = [message for message in caplog.messages if "as it does not fit in fewer" in message]
    assert [f"num_microbatches={number})" in message for message in said] == [True]
    asked = HarmonyStrategy(device_memory=memory, num_microbatches=number)
    expected = fit(module, asked, samples(), BATCH, **NO_CHECK, **options)
    assert_equal(found, expected)
    assert found.callback_metrics == expected.callback_metrics


@pytest.mark.cpu
def test_a_larger_batch_that_comes_later_is_split_in_memory() -> None:
    strategy = HarmonyStrategy(device_memory=lasting_bytes(Model()) + 72 * 1024)
    module, sizes = Roomy(), (4, 8, 4)
    batches = [list(range(size)) for size in sizes]
    fit(module, strategy, DataLoader(samples(), batch_sampler=batches), BATCH, **NO_CHECK)
    assert strategy.plan is None
    # The one that did not fit is among them.
    assert module.calls[0][0] == 4
    assert [size for size, _ in module.calls[-4:]] == [4, 4, 2, 2]


@pytest.mark.cpu
def test_where_not_even_a_sample_fits_beside_the_model_layers_are_swapped() -> None:
    strategy = HarmonyStrategy(device_memory=lasting_bytes(Model()) + 1024)
    module = Roomy()
    found = fit(copy.deepcopy(module), strategy, samples(), BATCH, **NO_CHECK)
    assert strategy.plan is not None
    assert strategy.step_report is not None
    number = strategy.step_report.num_microbatches
    asked = HarmonyStrategy(device_memory=lasting_bytes(Model()) + 1024, num_microbatches=number)
    assert_equal(found, fit(module, asked, samples(), BATCH, **NO_CHECK))


class OnAGraph(Model):
    """Has the edges of a graph in a sparse buffer, which each step weighs anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(WIDTH).to_sparse(), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        if self.training:
            self.edges.mul_(1.1)
        return super().loss((torch.sparse.mm(self.edges, x.t()).t(), y))


@pytest.mark.cpu
def test_a_model_with_a_sparse_buffer_is_swapped_where_a_batch_does_not_fit() -> None:
    """To look whether the buffer had changed, or lies in the memory of a weight, ended the fit."""
    module, seeds = OnAGraph(), [SeedMicrobatches(2)]
    plain = fit(copy.deepcopy(module), "auto", samples(), BATCH // 2, accumulate_grad_batches=2, callbacks=seeds)
    strategy = HarmonyStrategy(device_memory=lasting_bytes(Model()) + 1024, num_microbatches=2)
    harmony = fit(module, strategy, samples(), BATCH)
    assert strategy.plan is not None
    assert_equal(plain, harmony)


class OnAClass(Model):
    steps = 0

    def loss(self, batch: Any) -> Tensor:
        OnAClass.steps += 1
        return super().loss(batch) * OnAClass.steps


_schedule = {"steps": 0}


class InAGlobal(Model):
    def loss(self, batch: Any) -> Tensor:
        _schedule["steps"] += 1
        return super().loss(batch) * _schedule["steps"]


def counted(function: Callable[[int], float]) -> Callable[[], float]:
    number = 0

    def count() -> float:
        nonlocal number
        number += 1
        return function(number)

    return count


class InAClosure(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = counted(lambda number: 1.0 / number)

    def loss(self, batch: Any) -> Tensor:
        return self.scale() * super().loss(batch)


class ByAnIterator(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.cycle([1.0, 0.5, 0.25])

    def loss(self, batch: Any) -> Tensor:
        return next(self.scales) * super().loss(batch)


class ByAGenerator(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [(1.0 / number for number in itertools.count(1))]

    def loss(self, batch: Any) -> Tensor:
        return next(self.scales[0]) * super().loss(batch)


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [OnAClass, InAGlobal, InAClosure, ByAnIterator, ByAGenerator])
def test_what_python_holds_is_what_it_was_when_a_batch_did_not_fit(kind: type[Model]) -> None:
    """The step that was undone had counted, and the one that ran in its place counted again: other weights."""

    def begun() -> Model:
        torch.manual_seed(SEED)
        OnAClass.steps = _schedule["steps"] = 0
        return kind()

    plain = fit(
        begun(), "auto", samples(), BATCH // 2, accumulate_grad_batches=2, callbacks=[SeedMicrobatches(2)], **NO_CHECK
    )
    strategy = HarmonyStrategy(device_memory=lasting_bytes(Model()) + 1024, num_microbatches=2)
    module = begun()
    scales = getattr(module, "scales", None)
    harmony = fit(module, strategy, samples(), BATCH, **NO_CHECK)
    assert strategy.plan is not None
    assert_equal(plain, harmony)
    assert getattr(module, "scales", None) is scales


class OutsideOfARequest:
    """As the proxies of web frameworks, which raise where nobody has asked for a page."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of a request")


_requests: list[Any] = [OutsideOfARequest()]


class NamesAProxy(Model):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(_requests)


@pytest.mark.cpu
def test_a_step_that_may_be_undone_asks_proxies_nothing() -> None:
    strategy = HarmonyStrategy(device_memory=lasting_bytes(Model()) + 1024, num_microbatches=2)
    fit(NamesAProxy(), strategy, samples(), BATCH)
    assert strategy.plan is not None


@pytest.mark.cpu
def test_what_an_undone_step_has_left_for_good_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Hashed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.seen = hashlib.sha256()

        def loss(self, batch: Any) -> Tensor:
            self.seen.update(b"a step")
            return super().loss(batch)

    strategy = HarmonyStrategy(device_memory=lasting_bytes(Model()) + 1024, num_microbatches=2)
    with caplog.at_level("INFO"):
        fit(Hashed(), strategy, samples(), BATCH, **NO_CHECK)
    assert strategy.plan is not None
    assert re.search("HASH.* stays as that step has left it.*layers are swapped from now on", caplog.text)


@pytest.mark.cpu
def test_a_larger_batch_in_mid_fit_goes_over_to_swapping_with_the_optimizers_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loader() -> DataLoader[Any]:
        small, large = samples(2 * BATCH), samples(16 * BATCH)
        rows = [*range(BATCH), *range(BATCH, 2 * BATCH)]
        batches = [rows[:BATCH], rows[BATCH:], list(range(2 * BATCH, 18 * BATCH)), rows[:BATCH]]
        return DataLoader(torch.utils.data.ConcatDataset([small, large]), batch_sampler=batches)

    module = Model()
    plain = fit(copy.deepcopy(module), "auto", loader(), BATCH)
    strategy = HarmonyStrategy(device_memory=lasting_bytes(module) + 44 * 1024, num_microbatches=1)
    with caplog.at_level("INFO"):
        harmony = fit(copy.deepcopy(module), strategy, loader(), BATCH)
    assert strategy.plan is not None
    assert_equal(plain, harmony)


@pytest.mark.cpu
def test_a_model_that_does_not_fit_is_swapped_from_the_start() -> None:
    module = Model()
    strategy = HarmonyStrategy(device_memory=lasting_bytes(module) // 2, num_microbatches=2)
    plain = fit(copy.deepcopy(module), "auto", samples(), BATCH // 2, accumulate_grad_batches=2)
    harmony = fit(copy.deepcopy(module), strategy, samples(), BATCH)
    assert strategy.plan is not None
    assert_equal(plain, harmony)


@pytest.mark.cpu
def test_a_step_that_cannot_be_undone_is_refused_with_the_way_out() -> None:
    class Manual(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

    strategy = HarmonyStrategy(device_memory=lasting_bytes(Model()) + 1024)
    with pytest.raises(CapacityError, match=r"HarmonyStrategy\(device_memory="):
        fit(Manual(), strategy, samples(), BATCH, num_sanity_val_steps=0)


@pytest.mark.cpu
def test_a_step_that_changes_parameters_and_does_not_fit_is_refused() -> None:
    """It used to run again, and to change them twice."""

    class Shrinking(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            for parameter in self.parameters():
                parameter.data.mul_(0.9)
            return self.loss(batch)

    strategy = HarmonyStrategy(device_memory=lasting_bytes(Model()) + 1024)
    with pytest.raises(
        CapacityError, match=r"cannot be undone, as it changes parameter .*HarmonyStrategy\(device_memory="
    ):
        fit(Shrinking(), strategy, samples(), BATCH, num_sanity_val_steps=0)


@pytest.mark.cpu
def test_evaluation_goes_over_to_swapping_where_a_batch_does_not_fit() -> None:
    module = Model()
    weights = lasting_bytes(module) // 4
    outputs: list[Any] = []
    for memory in (None, weights + 1024):
        strategy = HarmonyStrategy(device_memory=memory)
        trainer = pl.Trainer(
            strategy=strategy, **placed({"logger": False}), enable_progress_bar=False, enable_model_summary=False
        )
        outputs.append(trainer.validate(module, DataLoader(samples(), BATCH), verbose=False))
        assert (strategy.plan is None) == (memory is None)
    assert outputs[0] == outputs[1]


# ---- what stands around it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategies", [("auto", "harmony"), ("harmony", "auto")], ids=" then ".join)
def test_checkpoints_go_both_ways(strategies: tuple[str, str], tmp_path: Any) -> None:
    whole = fit(Model(), "auto", samples(), BATCH, max_epochs=2)
    torch.manual_seed(0)
    first = fit(Model(), strategies[0], samples(), BATCH, max_epochs=1)
    first.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(5)
    module = Model()
    trainer = pl.Trainer(
        strategy=strategies[1],
        **placed({"max_epochs": 2, "logger": False, "enable_checkpointing": False}),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module, DataLoader(samples(), BATCH), DataLoader(samples(BATCH), BATCH), ckpt_path=tmp_path / "half.ckpt"
    )
    torch.manual_seed(0)
    assert len(tensors(trainer)) == len(tensors(whole))


def test_the_optimizer_steps_after_the_fit_as_after_plain_lightnings() -> None:
    results: list[Tensor] = []
    for strategy in ("auto", "harmony"):
        torch.manual_seed(0)
        trainer = fit(Model(), strategy, samples(), BATCH)
        module = trainer.lightning_module
        optimizer = module.optimizers().optimizer
        optimizer.zero_grad()
        module.loss(samples()[:4]).backward()
        optimizer.step()
        results.append(module.head.weight.detach().cpu().clone())
    assert results[0].shape == results[1].shape


def test_a_monitor_says_that_there_is_nothing_to_record(tmp_path: Any) -> None:
    with pytest.warns(UserWarning, match="records nothing: the model fits"):
        fit(Model(), "harmony", samples(), BATCH, callbacks=[HarmonyMonitor(trace_step=1, dirpath=tmp_path)])


def test_a_net_of_one_parameter_without_submodules_trains() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, batch: Any) -> Tensor:
            return ((batch[0] * self.weight).sum(1, keepdim=True) - batch[1]).square().mean()

    trained_both_ways(Net(Scale()), 2)


def test_layers_of_a_model_that_fits_are_compiled_for_the_fit_alone() -> None:
    module, compiled = Model(), []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            compiled.append(module.blocks[0][0]._compiled_call_impl is not None)

    strategy = HarmonyStrategy(compile_layers={"backend": "eager"}, layers={nn.Linear})
    fit(module, strategy, samples(), BATCH, callbacks=[Look()])
    assert strategy.plan is None
    assert compiled == [True] * STEPS
    assert module.blocks[0][0]._compiled_call_impl is None


class Outputs(pl.Callback):
    """Keeps the loss of each batch, which Lightning divides by the number of batches of a step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"] * trainer.accumulate_grad_batches)


def test_where_no_backward_follows_the_loss_of_a_batch_is_that_of_all_its_microbatches() -> None:
    """The last epoch of stochastic weight averaging takes statistics, if there is BatchNorm."""

    class Returned(Model):
        losses: list[Tensor]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.losses.append(loss.detach())
            return {"loss": loss}

    outputs, module = Outputs(), Returned(nn.BatchNorm1d(WIDTH))
    averaging = pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)
    module.losses = []
    strategy = HarmonyStrategy(num_microbatches=2)
    fit(module, strategy, samples(), BATCH, max_epochs=2, callbacks=[averaging, outputs], **NO_CHECK)
    losses = torch.stack(module.losses).view(-1, 2)
    assert len(losses) == 3 * STEPS
    torch.testing.assert_close(torch.stack(outputs.losses), losses.mean(dim=1))

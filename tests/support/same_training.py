"""The comparison that everything rests on: a module trained by plain Lightning and by harmony, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, StepReport
from lightning_harmony.engine.lanes.rng import stream_seed
from lightning_harmony.engine.structures.parts import is_composed, parts_of
from lightning_harmony.plan.values.memory_size import parse_bytes

SEED = 7
Update = Literal["after the backward", "just in time"]

# Where harmony trains, and on how many devices, where a test doesn't say: `pytest --accelerator=gpu --devices=2`.
accelerator = "cpu"
default_devices = 1
# When harmony updates, where a test doesn't say.
default_updates: tuple[Update, ...] = get_args(Update)


def root() -> torch.device:
    """Where a module's own code computes."""
    return torch.device("cuda", 0) if accelerator == "gpu" else torch.device("cpu")


def placed(options: Mapping[str, Any]) -> dict[str, Any]:
    """A Trainer's options with where it trains, which they may tell; skips the test where there are too few GPUs."""
    where = {"accelerator": accelerator, "devices": 1, **options}
    if where["accelerator"] == "gpu" and where["devices"] > torch.cuda.device_count():
        pytest.skip(f"needs {where['devices']} GPUs")
    return where


def room(memory: Any) -> Any:
    """A capacity with room for what libraries take on a GPU, for what needs a plan that fits."""
    if isinstance(memory, list):
        return [room(each) for each in memory]
    return memory if memory is None or accelerator == "cpu" else parse_bytes(memory) + 64 * 1024 * 1024


def assert_within(reports: Iterable[StepReport], memory: str | int) -> None:
    """Steps kept to a capacity. On a GPU, what libraries take exceeds those that make these small networks swap."""
    if accelerator == "cpu":
        assert all(max(report.peak_device_bytes) <= parse_bytes(memory) for report in reports)


class Net(pl.LightningModule):
    """A LightningModule around a network whose forward returns the loss of a batch."""

    def __init__(self, net: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        super().__init__()
        self.net = net
        self.make_optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


class Between(pl.Callback):
    """Has a hook between the forwards of a batch and its backwards."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        return


class Gradients(pl.Callback):
    """Keeps every step's gradients. Its hook reads them all, so harmony updates after the backward."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor | None]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.steps.append(
            {name: None if p.grad is None else p.grad.detach().cpu().clone() for name, p in module.named_parameters()}
        )


class SeedMicrobatches(pl.Callback):
    """Gives plain training the random streams that harmony gives its microbatches."""

    def __init__(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self._num_microbatches > 1:
            step, microbatch = divmod(trainer.fit_loop.epoch_loop.total_batch_idx, self._num_microbatches)
            seed = stream_seed(SEED, step, microbatch)
            torch.manual_seed(seed)
            random.seed(seed)


@dataclass
class Training:
    """What a training left behind."""

    losses: list[Tensor]
    state: dict[str, Tensor]
    optimizer: list[Tensor]
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)


class Reports(pl.Callback):
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.reports.append(trainer.strategy.step_report)


def trainer_for(strategy: Any, steps: int, callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    return pl.Trainer(
        strategy=strategy,
        **placed(options),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )


def train_plain(
    module: pl.LightningModule,
    samples: Any,
    num_microbatches: int,
    batch_size: int,
    *,
    more_callbacks: Sequence[pl.Callback] = (),
    accumulate_grad_batches: int = 1,
    **o: Any,
) -> Training:
    """Train with plain Lightning, one microbatch a batch."""
    gradients = Gradients()
    steps = len(samples) // batch_size // accumulate_grad_batches
    callbacks: list[pl.Callback] = [gradients, SeedMicrobatches(num_microbatches), *more_callbacks]
    num_accumulated = num_microbatches * accumulate_grad_batches
    trainer = trainer_for("auto", steps, callbacks, accumulate_grad_batches=num_accumulated, **o)
    _fit(trainer, module, DataLoader(samples, batch_size=batch_size // num_microbatches))
    return _result(trainer, module, gradients.steps)


def train_harmony(
    module: pl.LightningModule,
    samples: Any,
    strategy: Any,
    batch_size: int,
    *,
    with_gradients: bool,
    more_callbacks: Sequence[pl.Callback] = (),
    **o: Any,
) -> Training:
    """Train with harmony."""
    gradients, reports = Gradients(), Reports()
    callbacks: list[pl.Callback] = [reports, *([gradients] if with_gradients else []), *more_callbacks]
    steps = len(samples) // batch_size // o.get("accumulate_grad_batches", 1)
    trainer = trainer_for(strategy, steps, callbacks, **o)
    _fit(trainer, module, DataLoader(samples, batch_size=batch_size))
    result = _result(trainer, module, gradients.steps)
    result.reports = reports.reports
    return result


def _fit(trainer: pl.Trainer, module: pl.LightningModule, loader: DataLoader[Any]) -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    trainer.fit(module, loader)


def _result(trainer: pl.Trainer, module: pl.LightningModule, gradients: list[dict[str, Tensor | None]]) -> Training:
    states = [state for optimizer in trainer.optimizers for state in optimizer.state_dict()["state"].values()]
    tensors = [value.cpu() for state in states for value in state.values() if isinstance(value, Tensor)]
    state = {name: value.detach().cpu().clone() for name, value in parts_by_name(module.state_dict()).items()}
    return Training([loss.cpu() for loss in getattr(module, "losses", [])], state, tensors, gradients)


def parts_by_name(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names, and the parts of composed ones by theirs and their class: those classes may compare nothing."""
    plain = {name: value for name, value in state.items() if not is_composed(value)}
    composed = {name: value for name, value in state.items() if is_composed(value)}
    return plain | {
        f"{name}, part {number} of {type(value).__name__}": part
        for name, value in composed.items()
        for number, part in enumerate(parts_of(value))
    }


def assert_same_training(
    module: pl.LightningModule,
    samples: Any,
    *,
    device_memory: str | int | None = None,
    num_microbatches: int = 4,
    batch_size: int = 8,
    layers: Any = None,
    tolerance: float = 0.0,
    devices: int | None = None,
    parallel: Any = "pipeline",
    updates: Sequence[Update] | None = None,
    make_callbacks: Callable[[], Sequence[pl.Callback]] = tuple,
    **options: Any,
) -> list[StepReport]:
    """Train copies of a module by plain Lightning and by harmony, and compare all that training leaves behind.

    Args:
        module: what to train.
        samples: a map-style dataset.
        device_memory: the capacity.
        num_microbatches: lanes.
        batch_size: samples a step.
        layers: as for HarmonyStrategy.
        tolerance: 0 asks for equal bits; else the largest difference relative to the largest element of a tensor.
        devices: how many harmony has.
        parallel: as for HarmonyStrategy.
        updates: when harmony updates; it trains once in each way. Gradients are compared, too, where all are there. None: in
            both, and where a test has many cases in one of them, in turns.
        make_callbacks: makes those that each Trainer has beside.
        options: of both Trainers.

    Returns:
        The reports of the last run.
    """
    plain = train_plain(
        copy.deepcopy(module), samples, num_microbatches, batch_size, more_callbacks=make_callbacks(), **options
    )
    reports: list[StepReport] = []
    for update in default_updates if updates is None else updates:
        strategy = HarmonyStrategy(
            device_memory=device_memory, num_microbatches=num_microbatches, layers=layers, parallel=parallel
        )
        harmony = train_harmony(
            copy.deepcopy(module),
            samples,
            strategy,
            batch_size,
            with_gradients=update == "after the backward",
            more_callbacks=make_callbacks(),
            **{"devices": devices or default_devices, **options},
        )
        reports = harmony.reports
        compare(plain, harmony, tolerance)
        if device_memory is not None:
            assert_within(reports, device_memory)
    return reports


def compare(plain: Training, other: Training, tolerance: float = 0.0) -> None:
    """Compare losses, gradients where both have them, parameters, buffers and optimizer state."""
    assert len(plain.losses) == len(other.losses)
    for number, (a, b) in enumerate(zip(plain.losses, other.losses, strict=True)):
        assert_close(f"loss {number}", a, b, tolerance)
    for step, (left, right) in enumerate(zip(plain.gradients, other.gradients, strict=False)):
        for name in left:
            assert_close(f"gradient of {name} in step {step}", left[name], right[name], tolerance)
    assert plain.state.keys() == other.state.keys()
    for name, value in plain.state.items():
        assert_close(name, value, other.state[name], tolerance)
    assert len(plain.optimizer) == len(other.optimizer)
    for number, (a, b) in enumerate(zip(plain.optimizer, other.optimizer, strict=True)):
        assert_close(f"optimizer state {number}", a, b, tolerance)


def assert_close(name: str, a: Tensor | None, b: Tensor | None, tolerance: float) -> None:
    assert (a is None) == (b is None), f"{name}: {a is None=}, {b is None=}"
    if a is None or b is None:
        return
    assert a.shape == b.shape, name
    assert a.dtype == b.dtype, name
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if tolerance == 0.0 or not a.is_floating_point() or not a.numel():
        # Gradients that overflow in half precision are no numbers at the same places.
        same = torch.equal(a, b) or (torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()))
        assert same, f"{name} differs by {(a.double() - b.double()).nan_to_num().abs().max()}"
    else:
        assert torch.isfinite(b).all(), name
        assert (a.double() - b.double()).abs().max() <= tolerance * max(1.0, a.double().abs().max()), name

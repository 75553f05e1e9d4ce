"""A step that fails: what is saved then is of one step, and buffers stay as they were before the first one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import CapacityError, HarmonyStrategy
from support.nets import WIDTH
from support.same_training import Net, trainer_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:.*was called without a model. The last model of the previous"),
    pytest.mark.filterwarnings("ignore:.*is set, but there is no last checkpoint available"),
    pytest.mark.filterwarnings("ignore:.*normalize with the statistics of microbatches"),
]


class Fails(torch.autograd.Function):
    """Raises in a backward, when those of the layers behind it are over."""

    # Asked in the backward alone: what a step sets there, microbatches that take turns would find.
    error: Callable[[], BaseException | None] = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        error = Fails.error()
        if error is not None:
            raise error
        return gradient


class First(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Fails.apply(super().forward(x))


class Model(Net):
    """Fails in a step of a given number."""

    def __init__(self, step: int, error: BaseException) -> None:
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)]
        super().__init__(nn.Sequential(First(WIDTH, WIDTH), *layers), lambda p: torch.optim.AdamW(p, lr=1e-2))
        self.step, self.error = step, error
        Fails.error = staticmethod(lambda: self.error if self.trainer.global_step == self.step else None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).pow(2).mean()


def trainer_with(strategy: Any, *callbacks: Any, **options: Any) -> pl.Trainer:
    saves = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks)
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=6, callbacks=list(callbacks), logger=False,
        enable_checkpointing=saves, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def fit(module: pl.LightningModule, strategy: Any, *callbacks: Any, expected: Any) -> pl.Trainer:
    torch.manual_seed(2)
    trainer = trainer_with(strategy, *callbacks, accumulate_grad_batches=4 if strategy == "auto" else 1)
    with pytest.raises(expected):
        trainer.fit(module, DataLoader(torch.randn(96, WIDTH), 4 if strategy == "auto" else 16))
    return trainer


def harmony(**arguments: Any) -> Any:
    return HarmonyStrategy(device_memory="48KiB", num_microbatches=4, profile_cache=False, **arguments)


def steps_in(checkpoint: dict[str, Any]) -> set[int]:
    """Of which steps the state of the parameters is, as Adam counts them."""
    return {int(state["step"]) for state in checkpoint["optimizer_states"][0]["state"].values()}


@pytest.mark.parametrize("update", ["auto", "just-in-time", "deferred"])
@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("kind", ["on exception", "model checkpoint", "own"])
def test_what_a_callback_saves_while_a_backward_unwinds_is_of_one_step(
    kind: str, error: BaseException, update: Any, tmp_path: Path
) -> None:
    # Twelve parameters were those of step 4, and two of step 3.
    class Saves(pl.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(self.path)

    saved = []
    for strategy in ("auto", harmony(update=update)):
        folder = tmp_path / str(strategy == "auto")
        Saves.path = folder / "own.ckpt"  # type: ignore[attr-defined]
        callbacks = {
            "on exception": OnExceptionCheckpoint(folder),
            "model checkpoint": ModelCheckpoint(folder, save_on_exception=True, every_n_train_steps=100),
            "own": Saves(),
        }
        expected = SystemExit if isinstance(error, KeyboardInterrupt) else type(error)
        fit(Model(3, error), strategy, callbacks[kind], expected=expected)
        (path,) = folder.glob("*.ckpt")
        saved.append(torch.load(path, weights_only=True))
    plain, swapped = saved
    assert plain["global_step"] == swapped["global_step"] == 3
    assert steps_in(plain) == steps_in(swapped) == {3}
    for name, value in plain["state_dict"].items():
        assert torch.equal(value, swapped["state_dict"][name]), name


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_checkpoint_of_a_torn_state_is_refused_after_the_fit(weights_only: bool, tmp_path: Path) -> None:
    trainer = fit(Model(3, MemoryError()), harmony(), expected=MemoryError)
    with pytest.raises(RuntimeError, match=r"when \d+ of 14 parameters had been updated.*update='deferred'"):
        trainer.save_checkpoint(tmp_path / "torn.ckpt", weights_only=weights_only)
    assert list(tmp_path.iterdir()) == []


def test_after_a_refusal_another_fit_from_a_checkpoint_may_be_saved(tmp_path: Path) -> None:
    first = trainer_for(harmony(), 3, [])
    module = Model(-1, MemoryError())
    succeeds = Fails.error
    data = DataLoader(torch.randn(96, WIDTH), 16)
    first.fit(module, data)
    first.save_checkpoint(tmp_path / "whole.ckpt")
    trainer = fit(Model(3, MemoryError()), harmony(), expected=MemoryError)
    Fails.error = succeeds
    trainer.fit(module, data, ckpt_path=tmp_path / "whole.ckpt", weights_only=True)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    assert steps_in(torch.load(tmp_path / "again.ckpt", weights_only=True)) == {6}


@pytest.mark.parametrize(("step", "update"), [(0, "auto"), (3, "deferred")])
def test_a_step_that_fails_before_any_update_may_be_saved_after_the_fit(step: int, update: Any, tmp_path: Path) -> None:
    trainer = fit(Model(step, MemoryError()), harmony(update=update), expected=MemoryError)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    assert steps_in(torch.load(tmp_path / "whole.ckpt", weights_only=True)) == ({step} if step else set())


def test_a_callback_that_saves_nothing_on_exceptions_leaves_the_update_just_in_time(tmp_path: Path) -> None:
    trainer = trainer_with(harmony(), ModelCheckpoint(tmp_path))
    trainer.fit(Model(-1, MemoryError()), DataLoader(torch.randn(96, WIDTH), 16))
    assert trainer.strategy.step_report.update == "just-in-time"


# --- Buffers.


class Counting(nn.Module):
    """A buffer that is written to, one that is replaced, and one that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.replaced = self.replaced + 1
        return self.linear(x)


class Expanding(nn.Module):
    """Buffers whose elements are one place in memory: one that stays, and one that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.ones(1).expand(WIDTH))
        self.register_buffer("replaced", torch.ones(1).expand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.kept * self.replaced
        self.replaced = y.detach().mean().view(1).expand(WIDTH)
        return y


class Weighing(nn.Module):
    """A sparse buffer that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(WIDTH).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        self.edges.mul_(1.5)
        return torch.sparse.mm(self.edges, x.t()).t()


class Large(nn.Sequential):
    """Has no room beside anything."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 40 * WIDTH), nn.ReLU(), nn.Linear(40 * WIDTH, WIDTH))


@pytest.mark.parametrize("kind", ["refused", "forward", "backward"])
@pytest.mark.parametrize(
    "make",
    [lambda: nn.BatchNorm1d(WIDTH), Counting, Expanding, Weighing],
    ids=["batch norm", "counting", "expanding", "sparse"],
)
def test_a_first_step_that_fails_leaves_buffers_as_they_were(make: Any, kind: str) -> None:
    class First(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            y = self.net(batch)
            if kind == "forward":
                raise MemoryError
            return Fails.apply(y).pow(2).mean()

    Fails.error = staticmethod(lambda: MemoryError() if kind == "backward" else None)
    layers = [nn.Linear(WIDTH, WIDTH), make(), *[nn.Linear(WIDTH, WIDTH) for _ in range(4)]]
    module = First(nn.Sequential(*layers, *([nn.Linear(WIDTH, 400)] if kind == "refused" else [])))
    objects = dict(module.named_buffers())
    start = {name: value.clone() for name, value in module.state_dict().items()}
    memory = "28KiB" if kind == "refused" else "1MiB"
    strategy = HarmonyStrategy(device_memory=memory, num_microbatches=4, profile_cache=False)
    expected = CapacityError if kind == "refused" else MemoryError
    fit(module, strategy, expected=expected)
    assert all(torch.equal(value.to_dense(), start[name].to_dense()) for name, value in module.state_dict().items())
    assert all(value is objects[name] for name, value in module.named_buffers())


def test_a_later_step_that_fails_leaves_statistics_as_plain_lightning_does() -> None:
    module = Model(2, MemoryError())
    module.net[2] = nn.BatchNorm1d(WIDTH)
    fit(module, harmony(), expected=MemoryError)
    assert module.net[2].num_batches_tracked == 3 * 4

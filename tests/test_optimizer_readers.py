"""A step that reads optimizer state finds that of the last step, however it comes there; no watch undoes an update."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.engine.model.attributes import LONGEST
from lightning_harmony.errors import UnsupportedModelError
from support.lightning_fits import (
    BATCH_SIZE,
    FIT_MARKS,
    NUM_MICROBATCHES,
    ROOM_FOR_WHOLE_BATCH,
    Model,
    adamw,
    assert_equal,
    assert_same,
    harmony,
    loader,
    trainer_for,
)
from support.postponing import BOTH_WAYS

pytestmark = FIT_MARKS
WHOLE = {"num_microbatches": 1, "device_memory": ROOM_FOR_WHOLE_BATCH}
THE_OPTIMIZER: list[Any] = []


def told_by(states: Any) -> float:
    """What the state of an optimizer holds, in one number."""
    states = states.values() if isinstance(states, dict) else states
    moments = [state["exp_avg"] if isinstance(state, dict) else state for state in states]
    return float(sum(moment.double().abs().sum() for moment in moments))


class Reads(Model):
    """Reads optimizer state in its training_step.

    Args:
        hold: keeps what leads to the optimizer, and returns what reads its state then.
    """

    def __init__(self, hold: Callable[[Model, Any], Callable[[], Any]]) -> None:
        super().__init__()
        self.hold, self.seen = hold, list[float]()

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        self.read = self.hold(self, optimizer)
        return optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(told_by(self.read()))
        return super().training_step(batch, batch_idx) * (1 + self.seen[-1])


def through_attribute(module: Any, optimizer: Any) -> Any:
    module.kept = optimizer
    return lambda: module.kept.state


def through_scheduler(module: Any, optimizer: Any) -> Any:
    module.kept = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return lambda: module.kept.optimizer.state


def through_closure(module: Any, optimizer: Any) -> Any:
    return lambda: optimizer.state


def through_partial(module: Any, optimizer: Any) -> Any:
    return functools.partial(getattr, optimizer, "state")


def through_weak_reference(module: Any, optimizer: Any) -> Any:
    module.kept = (weakref.ref(optimizer),)
    return lambda: module.kept[0]().state


def through_object(module: Any, optimizer: Any) -> Any:
    class Kept:
        def __init__(self) -> None:
            self.inner = {"optimizer": optimizer}

    module.kept = Kept()
    return lambda: module.kept.inner["optimizer"].state


def through_global(module: Any, optimizer: Any) -> Any:
    THE_OPTIMIZER[:] = [optimizer]
    return lambda: THE_OPTIMIZER[0].state


def through_state(module: Any, optimizer: Any) -> Any:
    module.kept = optimizer.state
    return lambda: module.kept


def through_optimizers(module: Any, optimizer: Any) -> Any:
    return lambda: module.optimizers().state


def through_unwrapped_optimizers(module: Any, optimizer: Any) -> Any:
    return lambda: module.optimizers(use_pl_optimizer=False).state


def through_trainer(module: Any, optimizer: Any) -> Any:
    return lambda: module.trainer.optimizers[0].state


HOLDS = {name: hold for name, hold in globals().items() if name.startswith("through_")}


@BOTH_WAYS
@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
@pytest.mark.usefixtures("postponed")
def test_a_step_reads_the_state_after_the_last_step(hold: Any, options: dict[str, Any]) -> None:
    runs = [trainer_for(strategy, max_epochs=2, **options) for strategy in ("auto", harmony(**WHOLE))]
    for run in runs:
        run.fit(Reads(hold), loader())
    assert_same(*runs)
    assert_equal(*(run.lightning_module.seen for run in runs))


def fits(make: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """The trainers of a model, by plain Lightning with a microbatch a batch, and by harmony."""
    plain = trainer_for("auto", accumulate_grad_batches=NUM_MICROBATCHES, **options)
    plain.fit(make(), loader(BATCH_SIZE // NUM_MICROBATCHES))
    swapped = trainer_for(harmony(), **options)
    swapped.fit(make(), loader())
    return plain, swapped


class Monitors(Model):
    """From the end of its first epoch on, something leads to tensors of its optimizer's state."""

    def __init__(self, keep: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.keep = keep

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.keep(self, self.trainer.optimizers[0])


def keep_moments(module: Any, optimizer: Any) -> None:
    module.moments = [state["exp_avg"] for state in optimizer.state.values()]


def keep_views(module: Any, optimizer: Any) -> None:
    module.views = tuple(
        state["exp_avg"].detach().view(-1)[1:] for state in optimizer.state.values() if state["exp_avg"].ndim
    )


def keep_arrays(module: Any, optimizer: Any) -> None:
    module.arrays = [
        state["exp_avg_sq"].cpu().numpy()[-1:] for state in optimizer.state.values() if state["exp_avg"].ndim
    ]


def keep_one_state(module: Any, optimizer: Any) -> None:
    module.state_of_head = optimizer.state[module.net.head.weight]


def keep_in_a_layer(module: Any, optimizer: Any) -> None:
    module.net.head.moment = optimizer.state[module.net.head.weight]["exp_avg"]


def keep_views_in_a_long_list(module: Any, optimizer: Any) -> None:
    moments = [state["exp_avg"].view(-1) for state in optimizer.state.values()]
    module.kept = [moments[number % len(moments)] for number in range(LONGEST + 1)]


def rewind(module: Any, optimizer: Any) -> None:
    module.best = deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(module.best)


KEEPS = {f.__name__: f for f in (keep_moments, keep_views, keep_arrays, keep_one_state, keep_in_a_layer, rewind)}


@BOTH_WAYS
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
@pytest.mark.usefixtures("postponed")
def test_state_that_an_attribute_shares_is_changed_by_updates_alone(keep: Any, options: dict[str, Any]) -> None:
    runs = fits(lambda: Monitors(keep), max_epochs=3, **options)
    assert_same(*runs)
    assert_equal(*(run.optimizers[0].state_dict()["state"] for run in runs))


class ReadsWhatItKeeps(Monitors):
    """Reads in its step what it keeps since the end of its first epoch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        told = told_by(getattr(self, "kept", [])[:4])
        return super().training_step(batch, batch_idx) * (1 + told)


@BOTH_WAYS
@pytest.mark.usefixtures("postponed")
def test_a_step_reads_the_state_after_the_last_step_in_a_list_that_is_data(options: dict[str, Any]) -> None:
    """The first entries of a long list tell what the others are."""
    assert_same(*fits(lambda: ReadsWhatItKeeps(keep_views_in_a_long_list), max_epochs=3, **options))


def steps_of(optimizer: Any) -> float:
    """How many steps the parameters have made, without any memory of the device."""
    return sum(0.01 * state["step"].item() for state in optimizer.state.values())


class ReadsInLayer(nn.Module):
    """A layer whose code reads the state of an optimizer, also when it runs again in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.holds = inner, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x * (1 + sum(steps_of(optimizer) for optimizer in self.holds)))
        return result


class InLayer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0] = ReadsInLayer(self.net.blocks[0])

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        self.net.blocks[0].holds.append(optimizer)
        return optimizer


def test_a_recompute_reads_the_state_that_its_forward_read() -> None:
    runs = fits(InLayer, max_epochs=2)
    assert_same(*runs)
    assert runs[1].strategy.step_report.update == "deferred"


class AsksInLayer(ReadsInLayer):
    """A layer whose code asks a trainer for optimizers."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x * (1 + sum(steps_of(trainer.optimizers[0]) for trainer in self.holds)))
        return result


class AskingInLayer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[0] = AsksInLayer(self.net.blocks[0])

    def on_fit_start(self) -> None:
        self.net.blocks[0].holds.append(self.trainer)


def test_a_recompute_that_asks_for_optimizers_defers_updates() -> None:
    runs = fits(AskingInLayer, max_epochs=2)
    assert_same(*runs)
    assert runs[1].strategy.step_report.update == "deferred"


class AsksInBackward(Model):
    """From some step on, a hook of a tensor asks for optimizers when its gradient is known."""

    def __init__(self, first_step: int) -> None:
        super().__init__()
        self.first_step = first_step

    def forward(self, batch: Tensor) -> Tensor:
        x = self.net.embed(batch)
        if self.global_step >= self.first_step and x.requires_grad:
            x.register_hook(lambda gradient: gradient * (1 + told_by(self.trainer.optimizers[0].state)))
        return self.net.logits(self.net.body(x)) * self.scale


def test_a_hook_in_the_backward_that_asks_for_optimizers_defers_updates() -> None:
    runs = fits(lambda: AsksInBackward(0), max_epochs=2)
    assert_same(*runs)
    assert runs[1].strategy.step_report.update == "deferred"


def test_a_backward_that_asks_for_optimizers_while_they_are_updated_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"in the backward asks for the optimizers .* use .*deferred"):
        trainer_for(harmony(), max_epochs=2).fit(AsksInBackward(2), loader())


class ByState(torch.optim.lr_scheduler.LRScheduler):
    """The learning rate falls as moments grow."""

    def get_lr(self) -> Any:
        return [base / (1 + told_by(self.optimizer.state)) for base in self.base_lrs]


def by_class(module: Any, optimizer: Any) -> Any:
    return ByState(optimizer)


def by_function(module: Any, optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + told_by(optimizer.state)))


def by_trainer(module: Any, optimizer: Any) -> Any:
    def factor(step: int) -> float:
        return 1 / (1 + told_by(module.optimizers().state)) if step else 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def by_one_of_several(module: Any, optimizer: Any) -> Any:
    first = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, by_function(module, optimizer)], [2])


class Scheduled(Model):
    def __init__(self, make_scheduler: Any) -> None:
        super().__init__()
        self.make_scheduler = make_scheduler

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        scheduler = {"scheduler": self.make_scheduler(self, optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


@BOTH_WAYS
@pytest.mark.parametrize("make_scheduler", [by_class, by_function, by_trainer, by_one_of_several])
@pytest.mark.usefixtures("postponed")
def test_a_scheduler_reads_the_state_after_the_last_step(make_scheduler: Any, options: dict[str, Any]) -> None:
    runs = [trainer_for(strategy, max_epochs=2, **options) for strategy in ("auto", harmony(**WHOLE))]
    for run in runs:
        run.fit(Scheduled(make_scheduler), loader())
    assert_same(*runs)


class Logs(Model):
    """Logs the learning rate, as many do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        self.log("last", self.lr_schedulers().get_last_lr()[0])
        return loss


@BOTH_WAYS
def test_a_learning_rate_that_is_logged_behind_the_layers_keeps_the_overlap(
    options: dict[str, Any], postponed: list[bool]
) -> None:
    def schedule(parameters: Any) -> Any:
        optimizer = adamw(parameters)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    runs = [trainer_for(strategy, max_epochs=2, **options) for strategy in ("auto", harmony(**WHOLE))]
    for run in runs:
        run.fit(Logs(schedule), loader())
    assert_same(*runs)
    assert any(postponed)


def test_what_ends_the_overlap_in_a_later_epoch_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        trainer_for(harmony(), max_epochs=4).fit(Monitors(keep_moments), loader())
    said = [record.getMessage() for record in caplog.records if "no overlap" in record.getMessage()]
    assert len(said) == 1
    assert said[0].endswith("state of the optimizer is held in 'moments'")

"""Optimizer state that stays on devices between updates: trainings are those of plain Lightning, and who looks finds it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.engine.updates.device_step import make_step
from support import nets
from support.device_updates import OPTIMIZERS, build, plan_by_hand
from support.same_training import Net, Training, _fit, _result, compare, root, trainer_for
from support.same_training import train_plain as _train_plain
from support.sampling import combined

STEPS = 5
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")


class Seen(pl.Callback):
    """Keeps what each step has sent to the host, and what has stayed on devices behind it."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.stays: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.sent.append(trainer.strategy.step_report.swapped_out_bytes["optimizer"])
        engine = trainer.strategy._swapped.engine
        engine.updater.postponed.finish_parameters()
        self.stays.append(sum(engine.updater.kept_bytes()))


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices compute with processors of their own, as GPUs do."""
    monkeypatch.setattr(VirtualDevice, "computes_apart", True)


def samples(steps: int = STEPS) -> Any:
    return nets.tokens(8 * steps)


def train(module: Net, *callbacks: pl.Callback, devices: int = 1, **options: Any) -> tuple[Training, Seen]:
    """Train by a plan that has all optimizer state stay."""
    plan, seen = plan_by_hand(devices), Seen()
    updated = frozenset[int]() if "gradient_clip_val" in options else plan.device_updated
    plan = replace(plan, state_on_device=frozenset(plan.visits), device_updated=updated)
    strategy = HarmonyStrategy(
        device_memory="400KiB" if torch.device("cpu") == root() else "1GiB",
        num_microbatches=4,
        plan=plan,
        profile_cache=False,
    )
    module = copy.deepcopy(module)
    trainer = trainer_for(strategy, STEPS, [seen, *callbacks], devices=devices, **options)
    _fit(trainer, module, DataLoader(samples(), batch_size=8))
    return _result(trainer, module, []), seen


def train_plain(module: Net, *callbacks: pl.Callback, **options: Any) -> Training:
    return _train_plain(copy.deepcopy(module), samples(), 4, 8, more_callbacks=callbacks, **options)


def state_bytes(training: Training) -> int:
    return sum(value.nbytes for value in training.optimizer if value.dim() > 0)


@pytest.mark.parametrize(
    ("optimizer", "devices", "options"),
    combined([*OPTIMIZERS], [(1, {}), (1, {"gradient_clip_val": 0.5}), (2, {}), (2, {"gradient_clip_val": 0.5})]),
)
def test_state_that_stays_is_that_of_plain_lightning(optimizer: str, devices: int, options: Any) -> None:
    module = build(optimizer)
    training, seen = train(module, devices=devices, **options)
    compare(train_plain(module, **options), training)
    # The second step brings it, and the later ones send weights alone.
    assert seen.stays[2:-1] == [state_bytes(training)] * (STEPS - 3)
    weights = sum(parameter.nbytes for parameter in module.parameters())
    if not options:
        assert all(sent <= weights + 64 * STEPS for sent in seen.sent[2:-1])


class Asks(pl.Callback):
    """Looks at optimizer state in one hook, from the third step on."""

    def __init__(self, hook: str, look: Callable[[Any], list[Tensor]]) -> None:
        self.found: list[Tensor] = []
        self._look = look
        setattr(self, hook, self._hook)

    def _hook(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step >= 3:
            self.found += self._look(trainer)


def tensors_of(optimizer: Any) -> list[Tensor]:
    # Numbers that count updates are on the host in plain Lightning, too.
    states = optimizer.state.values()
    return [value.clone().cpu() for state in states for value in state.values() if value.dim() > 0]


HOOKS = ["on_train_batch_end", "on_train_batch_start", "on_before_zero_grad", "on_train_epoch_end", "on_train_end"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("way", ["optimizers", "state_dict"])
def test_who_asks_for_optimizers_finds_the_state_behind_the_last_step(hook: str, way: str) -> None:
    def look(trainer: Any) -> list[Tensor]:
        if way == "optimizers":
            return tensors_of(trainer.optimizers[0])
        states = trainer.optimizers[0].state_dict()["state"].values()
        return [value.clone().cpu() for state in states for value in state.values() if value.dim() > 0]

    module, here, there = build(), Asks(hook, look), Asks(hook, look)
    training, seen = train(module, here)
    compare(train_plain(module, Every(4, there)), training)
    # That hook is given the optimizer.
    assert (max(seen.stays) > 0) == (hook != "on_before_zero_grad")
    assert len(here.found) == len(there.found) > 0
    assert all(map(torch.equal, here.found, there.found))


class Every(pl.Callback):
    """Has a callback run for each step of plain Lightning, where that has a batch for each microbatch."""

    def __init__(self, number: int, callback: pl.Callback) -> None:
        for name in (name for name in dir(callback) if name.startswith("on_")):
            hook = getattr(callback, name)
            if getattr(hook, "__func__", hook) is not getattr(pl.Callback, name):
                setattr(self, name, self._at(number, hook, name))

    def _at(self, number: int, hook: Callable[..., None], name: str) -> Callable[..., None]:
        calls = [0]

        def run(trainer: Any, *args: Any) -> None:
            calls[0] += 1
            at = {"on_train_batch_start": 1, "on_train_batch_end": 0}.get(name)
            if at is None or calls[0] % number == at:
                hook(trainer, *args)

        return run


OPTIMIZER: list[Any] = []


class Holds(pl.Callback):
    """Has an optimizer from before, and looks at its state without asking for it."""

    def __init__(self, way: str) -> None:
        self.found: list[Tensor] = []
        self._way = way

    def on_train_start(self, trainer: Any, module: Any) -> None:
        OPTIMIZER[:] = []
        if self._way == "attribute":
            self.held = trainer.optimizers[0]
        elif self._way == "variable":
            OPTIMIZER.append(trainer.optimizers[0])
        elif self._way == "its dict":
            self.state = trainer.optimizers[0].state
        else:
            module.held = {"optimizer": trainer.optimizers[0]}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step < 3:
            return
        if self._way == "its dict":
            values = [value for state in self.state.values() for value in state.values()]
            self.found += [value.clone().cpu() for value in values if value.dim() > 0]
        else:
            ways = {"attribute": lambda: self.held, "variable": lambda: OPTIMIZER[0]}
            self.found += tensors_of(ways.get(self._way, lambda: module.held["optimizer"])())


@pytest.mark.parametrize("way", ["attribute", "variable", "its dict", "module"])
def test_state_that_somebody_holds_does_not_stay(way: str) -> None:
    """Whoever has an optimizer since the start of the fit need not ask for it."""
    module, here, there = build(), Holds(way), Holds(way)
    training, seen = train(module, here)
    compare(train_plain(module, Every(4, there)), training)
    assert max(seen.stays) == 0
    assert len(here.found) == len(there.found) > 0
    assert all(map(torch.equal, here.found, there.found))


class IsGiven(pl.Callback):
    """Looks at the state of an optimizer that a hook is given, at once or when the batch is over."""

    def __init__(self, *, keeps: bool) -> None:
        self.found: list[Tensor] = []
        self._keeps = keeps
        self._optimizer: Any = None

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self._keeps:
            self._optimizer = optimizer if trainer.global_step >= 3 else None
        elif trainer.global_step >= 3:
            self.found += tensors_of(optimizer)

    def on_train_batch_end(self, *args: Any) -> None:
        if self._optimizer is not None:
            self.found += tensors_of(self._optimizer)


@pytest.mark.parametrize("keeps", [False, True])
def test_state_does_not_stay_where_a_hook_uses_the_optimizer_that_it_is_given(keeps: bool) -> None:
    module, here, there = build(), IsGiven(keeps=keeps), IsGiven(keeps=keeps)
    training, seen = train(module, here)
    compare(train_plain(module, Every(4, there)), training)
    assert max(seen.stays) == 0
    assert len(here.found) == len(there.found) > 0
    assert all(map(torch.equal, here.found, there.found))


class Scheduled(Net):
    """Has a scheduler, of some class and for some interval."""

    kind: Any = torch.optim.lr_scheduler.LambdaLR
    interval = "step"

    def __init__(self) -> None:
        super().__init__(nets.Language(), OPTIMIZERS["AdamW"])
        self.found: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = self.kind(optimizer, lambda epoch: 0.9**epoch)
        scheduler.found = self.found
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class StepsOptimizer(Scheduled):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        self.found += tensors_of(optimizer)


class StepsScheduler(Scheduled):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.found += tensors_of(scheduler.optimizer)
        scheduler.step()


class Reads(torch.optim.lr_scheduler.LambdaLR):
    """Looks at optimizer state when an epoch ends."""

    found: list[Tensor]

    def step(self, epoch: Any = None) -> None:
        if hasattr(self, "found"):
            self.found += tensors_of(self.optimizer)
        super().step(epoch)


class ReadsAtTheEnd(Scheduled):
    kind, interval = Reads, "epoch"


@pytest.mark.parametrize("kind", [StepsOptimizer, StepsScheduler, ReadsAtTheEnd])
def test_code_that_steps_finds_the_state_behind_the_last_update(kind: type[Scheduled]) -> None:
    torch.manual_seed(0)
    module = kind()
    ours, theirs = copy.deepcopy(module), copy.deepcopy(module)
    seen, plan = Seen(), plan_by_hand()
    plan = replace(plan, state_on_device=frozenset(plan.visits))
    memory = "400KiB" if root().type == "cpu" else "1GiB"
    strategy = HarmonyStrategy(device_memory=memory, num_microbatches=4, plan=plan, profile_cache=False)
    trainer = trainer_for(strategy, STEPS, [seen])
    _fit(trainer, ours, DataLoader(samples(), batch_size=8))
    plain = _train_plain(theirs, samples(), 4, 8)
    compare(plain, _result(trainer, ours, []))
    assert (max(seen.stays) > 0) == (kind is ReadsAtTheEnd)
    assert len(ours.found) == len(theirs.found) > 0
    assert all(map(torch.equal, ours.found, theirs.found))


class Plugin(Precision):
    """Looks at optimizer state and parameters behind each step."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        result = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        self.found += [*tensors_of(optimizer), *(parameter.detach().cpu().clone() for parameter in model.parameters())]
        return result


def test_a_plugin_that_steps_finds_what_its_step_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(*args: Any) -> None:
        time.sleep(0.02)
        make_step(*args)

    monkeypatch.setattr("lightning_harmony.engine.updates.update_stage.make_step", slowly)
    module, here, there = build(), Plugin(), Plugin()
    memory = "400KiB" if root().type == "cpu" else "1GiB"
    strategy = HarmonyStrategy(device_memory=memory, num_microbatches=4, plan=plan_by_hand(), profile_cache=False)
    # No callback looks at anything.
    trainer, ours = trainer_for(strategy, STEPS, [], plugins=[here]), copy.deepcopy(module)
    _fit(trainer, ours, DataLoader(samples(), batch_size=8))
    compare(train_plain(module, plugins=[there]), _result(trainer, ours, []))
    assert len(here.found) == len(there.found) > 0
    assert all(map(torch.equal, here.found, there.found))


class Gives(Net):
    """Leaves its optimizer with the Trainer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.trainer.left = optimizer = super().configure_optimizers()  # type: ignore[attr-defined]
        return optimizer


class Late(pl.Callback):
    """Looks in later steps at state that it has from a checkpoint, or at that of the optimizer that the Trainer has."""

    def __init__(self, path: Path | None) -> None:
        self.found: list[Tensor] = []
        self._path, self._states = path, []

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        states = checkpoint["optimizer_states"][0]["state"].values()
        self._states = [value for state in states for value in state.values() if value.dim() > 0]

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self._path is None:
            self.found += tensors_of(trainer.left)
            return
        self.found += [value.clone().cpu() for value in self._states]
        if trainer.global_step == 2:
            trainer.save_checkpoint(self._path)


@pytest.mark.parametrize("way", ["checkpoint", "trainer"])
def test_state_that_is_kept_for_later_does_not_stay(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "some.ckpt" if way == "checkpoint" else None
    module, here, there = Gives(nets.Language(), OPTIMIZERS["AdamW"]), Late(path), Late(path)
    training, _ = train(module, here)
    compare(train_plain(module, Every(4, there)), training)
    assert len(here.found) == len(there.found) > 0
    assert all(map(torch.equal, here.found, there.found))


class IsGivenIt(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rate = optimizer.param_groups[0]["lr"]


def test_hooks_that_are_given_an_optimizer_find_its_state() -> None:
    module = build()
    training, seen = train(module, IsGivenIt())
    compare(train_plain(module), training)
    assert max(seen.stays) == 0


class Exchanges(pl.Callback):
    """Trains on with another optimizer, whose state is smaller."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)]


def test_an_optimizer_that_takes_the_place_of_another_has_state_of_its_own() -> None:
    module = build()
    training, seen = train(module, Exchanges())
    compare(train_plain(module, Every(4, Exchanges())), training)
    assert seen.stays[2] > 0


class AsksOnce(pl.Callback):
    """Asks for the optimizer, and keeps it where nobody looks; then the model gets another layer, and all is set up anew."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            self.held = repeat(trainer.optimizers[0])
        elif trainer.global_step == 3:
            module.another = torch.nn.Linear(2, 2).to(module.device)
        elif trainer.global_step > 3:
            self.found += tensors_of(next(self.held))


def test_who_has_asked_for_an_optimizer_finds_its_state_behind_another_set_up() -> None:
    module, here, there = build(), AsksOnce(), AsksOnce()
    strategy = HarmonyStrategy(
        device_memory="160KiB" if root().type == "cpu" else "1GiB", num_microbatches=4, profile_cache=False
    )
    ours, data = copy.deepcopy(module), samples(12)
    trainer = trainer_for(strategy, 12, [here])
    _fit(trainer, ours, DataLoader(data, batch_size=8))
    _train_plain(copy.deepcopy(module), data, 4, 8, more_callbacks=[Every(4, there)])
    assert len(here.found) == len(there.found) > 0
    assert all(map(torch.equal, here.found, there.found))


class Loads(pl.Callback):
    """Loads other optimizer state in the middle of a fit."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            optimizer = trainer.optimizers[0]
            saved = copy.deepcopy(optimizer.state_dict())
            for state in saved["state"].values():
                state["exp_avg"] = state["exp_avg"] * 0.5
            optimizer.load_state_dict(saved)


def test_state_that_is_loaded_in_the_fit_is_trained_with() -> None:
    module = build()
    training, _ = train(module, Loads())
    compare(train_plain(module, Every(4, Loads())), training)


class Saves(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step in (3, 5):
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def test_checkpoints_have_the_state_that_stays_on_devices(tmp_path: Path) -> None:
    module, (ours, theirs) = build(), (tmp_path / "ours", tmp_path / "theirs")
    _, seen = train(module, Saves(ours))
    assert max(seen.stays) > 0
    train_plain(module, Every(4, Saves(theirs)))
    for name in ("3.ckpt", "5.ckpt"):
        one, other = (torch.load(each / name, weights_only=False, map_location="cpu") for each in (ours, theirs))
        torch.testing.assert_close(one["optimizer_states"], other["optimizer_states"], rtol=0, atol=0)
        torch.testing.assert_close(one["state_dict"], other["state_dict"], rtol=0, atol=0)


class Evaluated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", self.training_step(batch, batch_idx))


def test_evaluations_have_all_memory() -> None:
    torch.manual_seed(0)
    module = Evaluated(nets.Language(), OPTIMIZERS["AdamW"])
    held: list[int] = []

    class Looks(pl.Callback):
        def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
            held.append(sum(trainer.strategy._swapped.engine.updater.kept_bytes()))

    plan = plan_by_hand()
    plan = replace(plan, state_on_device=frozenset(plan.visits))
    memory = "400KiB" if root().type == "cpu" else "1GiB"
    strategy = HarmonyStrategy(device_memory=memory, num_microbatches=4, plan=plan, profile_cache=False)
    seen, ours = Seen(), copy.deepcopy(module)
    trainer = trainer_for(strategy, STEPS, [seen, Looks()], val_check_interval=3, num_sanity_val_steps=0)
    torch.manual_seed(7)
    trainer.fit(ours, DataLoader(samples(), batch_size=8), DataLoader(samples(1), batch_size=8))
    assert max(seen.stays) > 0
    assert held
    assert not any(held)

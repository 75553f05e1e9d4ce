"""Signals in the middle of a step: the state that a handler saves is whole."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_harmony.fit.signals import HeldSignals
from support import nets
from support.lightning_fits import (
    BATCH_SIZE,
    NUM_MICROBATCHES,
    QUIET_MARKS,
    Model,
    assert_equal,
    harmony,
    loader,
    trainer_for,
    values,
)
from support.sampling import combined

pytestmark = QUIET_MARKS


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    # What a shell runs in the background ignores Ctrl-C.
    at_start = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in signal.Signals}
    yield
    left = {number: signal.getsignal(number) for number in signal.Signals}
    for number, handler in before.items():
        if handler != left[number]:
            signal.signal(number, handler)
    signal.signal(signal.SIGINT, at_start)
    assert left == before


@pytest.fixture
def handled() -> Iterator[Any]:
    """Sets handlers for the time of a test."""
    before: dict[int, Any] = {}

    def handle(number: int, handler: Any) -> None:
        before.setdefault(number, signal.getsignal(number))
        signal.signal(number, handler)

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


class SignalledBlock(nets.Block):
    """Sends a signal in the backward of a step, when the packs behind it may have been updated."""

    number, at, calls = signal.SIGUSR1, -1, 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self.send)
        return y

    def send(self, gradient: Tensor) -> None:
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), self.number)


class Signalled(Model):
    def __init__(self, number: int = signal.SIGUSR1, at: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net.blocks[1] = SignalledBlock()
        self.net.blocks[1].number, self.net.blocks[1].at = number, at


class States(pl.Callback):
    """What the module is before every batch, by the number of steps that were made."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen[trainer.global_step] = values(module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.seen[trainer.global_step] = values(module)


@pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("update", ["just-in-time", "deferred"])
def test_a_job_that_is_queued_again_by_its_scheduler_saves_the_state_after_a_whole_step(
    update: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    for name, value in {"JOB_ID": "7", "LOCALID": "0", "PROCID": "0", "NODEID": "0", "NTASKS": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(
        "lightning.pytorch.trainer.connectors.signal_connector.call", lambda *a, **k: called.append(a) or 0
    )
    states = States()
    options = {"plugins": [SLURMEnvironment()], "callbacks": [states], "default_root_dir": tmp_path, "max_epochs": 2}
    monkeypatch.setattr(SLURMEnvironment, "validate_settings", lambda *args: None)
    # The second step, in its backward.
    trainer_for(harmony(update=update), **options).fit(Signalled(), loader())
    (path,) = tmp_path.glob("hpc_ckpt_*.ckpt")
    saved = torch.load(path, weights_only=True)
    assert called != []
    assert saved["global_step"] == 2
    assert_equal(dict(saved["state_dict"]), states.seen[2])
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"] == 2
    # And the job goes on from there when it is started again.
    again = trainer_for(harmony(update=update), **options)
    again.fit(Signalled(at=-1), loader())
    assert again.global_step == 6
    assert_equal(values(again.lightning_module), states.seen[6])


@pytest.mark.parametrize("at", [1, 6])
def test_after_sigterm_the_step_is_finished_and_the_fit_ends_as_in_plain_lightning(at: int) -> None:
    ends = []
    for kind, each in (("plain", 1), ("harmony", 4)):
        module = Signalled(signal.SIGTERM, (at + 3) // 4 if kind == "plain" else at)
        strategy = "auto" if kind == "plain" else harmony(num_microbatches=each)
        trainer = trainer_for(strategy, max_epochs=2)
        with pytest.raises(BaseException) as raised:  # noqa: PT011
            trainer.fit(module, loader())
        ends.append((type(raised.value).__name__, trainer.global_step, trainer.state.status))
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("harmony")]
    assert ends[0] == ends[1]
    assert ends[0][:2] == ("SIGTERMException", (at + 3) // 4)


@pytest.mark.parametrize(
    ("name", "update"),
    combined(["SIGTERM", "SIGALRM", "SIGXCPU", "SIGCONT", "SIGINT"], [("just-in-time",), ("deferred",)]),
)
def test_a_handler_of_any_signal_saves_the_state_after_a_whole_step(
    name: str, update: Any, handled: Any, tmp_path: Any
) -> None:
    # All but three were delivered within the step, where a checkpoint is refused.
    number = getattr(signal, name)
    states = States()
    trainer = trainer_for(harmony(update=update), callbacks=[states], max_epochs=2)
    handled(number, lambda *_: trainer.save_checkpoint(tmp_path / "now.ckpt"))
    # Lightning ends the fit after SIGTERM.
    with pytest.raises(SIGTERMException) if name == "SIGTERM" else nullcontext():
        trainer.fit(Signalled(number), loader())
    saved = torch.load(tmp_path / "now.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"] == 2
    states.on_train_end(trainer, trainer.lightning_module)
    assert_equal(dict(saved["state_dict"]), states.seen[2])


def test_a_timeout_whose_handler_raises_ends_the_fit_after_the_step(handled: Any) -> None:
    def time_out(*_: Any) -> None:
        raise TimeoutError("too late")

    handled(signal.SIGALRM, time_out)
    trainer = trainer_for(harmony(), max_epochs=2)
    with pytest.raises(TimeoutError, match="too late"):
        trainer.fit(Signalled(signal.SIGALRM), loader())
    assert trainer.global_step == 2
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("harmony")]


def test_a_signal_in_a_step_that_fails_is_delivered_when_the_module_is_an_ordinary_one_again(
    handled: Any, tmp_path: Any
) -> None:
    class Fails(Signalled):
        def on_after_backward(self) -> None:
            if self.net.blocks[1].calls >= self.net.blocks[1].at:
                raise ArithmeticError

    handled(signal.SIGXCPU, lambda *_: trainer.save_checkpoint(tmp_path / "now.ckpt"))
    trainer = trainer_for(harmony(), max_epochs=2)
    with pytest.raises(ArithmeticError):
        trainer.fit(Fails(signal.SIGXCPU), loader())
    saved = torch.load(tmp_path / "now.ckpt", weights_only=True)
    assert_equal(dict(saved["state_dict"]), values(trainer.lightning_module))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("harmony")]


def test_a_signal_in_a_validation_is_delivered_after_its_batch(handled: Any) -> None:
    heard: list[bool] = []
    handled(signal.SIGALRM, lambda *_: heard.append(trainer.strategy._swapped.engine.step.is_driven))
    trainer = trainer_for(harmony())

    class Validates(Model):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            signal.raise_signal(signal.SIGALRM)
            super().training_step(batch, batch_idx)

    trainer.validate(Validates(), loader(), verbose=False)
    assert heard == [False] * len(loader())


def test_a_checkpoint_in_the_middle_of_a_step_is_refused(tmp_path: Any) -> None:
    class Saves(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.trainer.save_checkpoint(tmp_path / "now.ckpt")
            return loss

    with pytest.raises(RuntimeError, match=r"in the middle of a step.*on_train_batch_end"):
        trainer_for(harmony()).fit(Saves(), loader())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hook", ["on_before_backward", "on_train_batch_end"])
def test_a_checkpoint_in_a_hook_holds_the_state_of_then(hook: str, tmp_path: Any) -> None:
    class Saves(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

    def save(self: Any, trainer: Any, module: Any, *args: Any) -> None:
        trainer.save_checkpoint(tmp_path / "now.ckpt")
        self.seen.append(torch.load(tmp_path / "now.ckpt", weights_only=True)["state_dict"])
        assert_equal(dict(self.seen[-1]), values(module))

    setattr(Saves, hook, save)
    runs = []
    for strategy, batch in (("auto", BATCH_SIZE // NUM_MICROBATCHES), (harmony(), BATCH_SIZE)):
        callback = Saves()
        trainer = trainer_for(strategy, callbacks=[callback], accumulate_grad_batches=BATCH_SIZE // batch)
        trainer.fit(Model(), loader(batch))
        runs.append(callback.seen)
    plain = runs[0][:: len(runs[0]) // len(runs[1])] if hook.startswith("on_before") else runs[0][-len(runs[1]) :]
    assert_equal(list(map(dict, runs[1]))[-1], dict(plain[-1]))


# --- Alone.


def test_ctrl_c_is_heard_at_once() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    held = HeldSignals()
    held.hold()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    # As Lightning does when it shuts down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    held.release()
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_that_python_passes_over_is_delivered_when_the_step_ends() -> None:
    # Of those at random moments of clipped fits, some were lost.
    class Key:
        """Something that a weak reference may refer to."""

    held, key = HeldSignals(), Key()
    reference = weakref.ref(key, lambda _: signal.raise_signal(signal.SIGINT))
    held.hold()
    del key
    assert reference() is None
    with pytest.raises(KeyboardInterrupt):
        held.release()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_the_step_itself_has_set_stays(handled: Any) -> None:
    handled(signal.SIGALRM, lambda *_: None)
    held = HeldSignals()
    held.hold()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    held.release()
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN


def test_each_signal_is_delivered_though_a_handler_raises(handled: Any) -> None:
    heard: list[int] = []

    def raising(number: int, frame: Any) -> None:
        heard.append(number)
        raise TimeoutError

    handled(signal.SIGALRM, raising)
    handled(signal.SIGUSR2, lambda number, frame: heard.append(number))
    held = HeldSignals()
    held.hold()
    signal.raise_signal(signal.SIGALRM)
    signal.raise_signal(signal.SIGUSR2)
    with pytest.raises(TimeoutError):
        held.release()
    assert heard == [signal.SIGALRM, signal.SIGUSR2]


def test_only_handled_signals_are_held_and_each_is_delivered_once() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
    held = HeldSignals()
    held.hold()
    held.hold()
    for _ in range(2):
        signal.raise_signal(signal.SIGUSR1)
    assert heard == []
    assert signal.getsignal(signal.SIGUSR2) == before[signal.SIGUSR2]
    held.release()
    held.release()
    assert heard == [signal.SIGUSR1]
    assert {number: signal.getsignal(number) for number in before} == before
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_within_a_held_step_an_evaluation_does_not_release() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    held = HeldSignals()
    held.hold()
    with held.held():
        signal.raise_signal(signal.SIGUSR1)
    assert heard == []
    held.release()
    with held.held():
        signal.raise_signal(signal.SIGUSR1)
    assert len(heard) == 2
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_thread_that_is_not_the_main_one_trains_without_holding_signals() -> None:
    held, errors = HeldSignals(), []

    def run() -> None:
        try:
            held.hold()
            held.release()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []

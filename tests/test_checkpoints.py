"""Checkpoints: written in the background, loaded safely, resumed on other machines, and whole after a kill."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO, XLACheckpointIO
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy
from support import nets, same_training
from support.forks import Forks, forking
from support.lightning_fits import (
    BATCH_SIZE,
    NUM_MICROBATCHES,
    QUIET_MARKS,
    Model,
    adamw,
    assert_equal,
    assert_same,
    harmony,
    loader,
    trainer_for,
    values,
)

pytestmark = [
    *QUIET_MARKS,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before the epoch ended"),
]


def every_step(path: Path) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=path, filename="{step}", every_n_train_steps=1, save_top_k=-1)


# --- How they are written and read.


def test_checkpoints_that_are_written_in_the_background_hold_the_state_of_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = threading.Event()
    save = TorchCheckpointIO.save_checkpoint

    def save_late(*args: Any, **kwargs: Any) -> None:
        assert trained.wait(60)
        save(*args, **kwargs)

    class Finished(pl.Callback):
        def on_train_epoch_end(self, *args: Any) -> None:
            trained.set()

    found = []
    for kind, strategy in (("plain", "auto"), ("harmony", harmony())):
        batch = BATCH_SIZE // (NUM_MICROBATCHES if kind == "plain" else 1)
        if kind == "harmony":
            monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", save_late)
        trainer = trainer_for(
            strategy,
            plugins=[AsyncCheckpointIO()] if kind == "harmony" else None,
            enable_checkpointing=True,
            callbacks=[every_step(tmp_path / kind), Finished()],
            accumulate_grad_batches=BATCH_SIZE // batch,
        )
        trainer.fit(Model(), loader(batch))
        found.append({path.name: torch.load(path, weights_only=True) for path in (tmp_path / kind).iterdir()})
    plain, swapped = found
    assert plain.keys() == swapped.keys() == {"step=1.ckpt", "step=2.ckpt", "step=3.ckpt"}
    for name, each in plain.items():
        assert_equal(dict(swapped[name]["state_dict"]), dict(each["state_dict"]))
        assert_equal(swapped[name]["optimizer_states"][0]["state"], each["optimizer_states"][0]["state"])


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_checkpoint_is_loaded_by_every_loop_whether_it_may_hold_weights_only(
    weights_only: bool, tmp_path: Path
) -> None:
    first = trainer_for(harmony(), enable_checkpointing=True, callbacks=[every_step(tmp_path)])
    first.fit(Model(), loader())
    path = tmp_path / "step=3.ckpt"
    expected = trainer_for("auto").validate(first.lightning_module, loader(), verbose=False)
    for loop in ("validate", "test", "predict", "fit"):
        module = Model()
        torch.nn.init.zeros_(module.net.head.weight)
        trainer = trainer_for(harmony(), max_epochs=1 if loop == "fit" else None)
        found = getattr(trainer, loop)(module, loader(), ckpt_path=path, weights_only=weights_only)
        assert_equal(values(module), values(first.lightning_module))
        assert loop != "validate" or found == expected
    # So do those of the LightningModule itself.
    assert_equal(values(Model.load_from_checkpoint(path, weights_only=weights_only)), values(first.lightning_module))


def test_a_fit_goes_on_from_a_checkpoint_without_the_state_of_an_optimizer(tmp_path: Path) -> None:
    """Plain Lightning passes over what is not there."""
    first = trainer_for(harmony())
    first.fit(Model(adamw), loader())
    first.save_checkpoint(tmp_path / "whole.ckpt")
    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=False)
    checkpoint["optimizer_states"] = []
    torch.save(checkpoint, tmp_path / "without.ckpt")
    plain = trainer_for("auto", accumulate_grad_batches=NUM_MICROBATCHES, max_epochs=2)
    swapped = trainer_for(harmony(), max_epochs=2)
    for trainer, size in ((plain, BATCH_SIZE // NUM_MICROBATCHES), (swapped, BATCH_SIZE)):
        trainer.fit(Model(adamw), loader(size), ckpt_path=tmp_path / "without.ckpt", weights_only=False)
    assert plain.global_step == swapped.global_step == 2 * first.global_step
    assert_same(plain, swapped)


def test_folders_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step=1.ckpt"
    path.mkdir()
    with pytest.raises(ValueError, match=r"step=1\.ckpt is a directory, .*convert_zero_checkpoint_to_fp32_state_dict"):
        trainer_for(harmony()).fit(Model(), loader(), ckpt_path=path)


@pytest.mark.parametrize("wrapped", [False, True])
def test_plugins_that_write_sharded_checkpoints_are_refused(wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.fabric.plugins.io.xla._XLA_AVAILABLE", True)
    plugin = XLACheckpointIO()
    with pytest.raises(ValueError, match=r"XLACheckpointIO .*TorchCheckpointIO"):
        trainer_for(harmony(), plugins=[AsyncCheckpointIO(plugin) if wrapped else plugin])


# --- Resumed.


class Resumable(DataLoader[Any]):
    """Tells which batch comes next, and goes on from there: without that, Lightning begins the epoch's data again."""

    number = start = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        self.number = start
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.number = (number + 1) % len(self)
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["number"]


class Noisy(Model):
    """Draws in every layer of every microbatch."""

    def __init__(self) -> None:
        super().__init__(adamw)
        torch.manual_seed(0)
        self.net = nets.Language(dropout=0.3)


def test_a_fit_goes_on_from_any_step_with_other_devices_another_capacity_plan_and_update(tmp_path: Path) -> None:
    def fit(strategy: Any, step: int | None = None, devices: int = 1) -> Any:
        pl.seed_everything(7)
        # Where the caller's random stream is does not matter.
        torch.rand(step or 1)
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [every_step(tmp_path)]}
        trainer = trainer_for(strategy, max_epochs=2, devices=devices, **options)
        path = None if step is None else tmp_path / f"step={step}.ckpt"
        trainer.fit(Noisy(), Resumable(nets.tokens(3 * BATCH_SIZE), batch_size=BATCH_SIZE), ckpt_path=path)
        return trainer

    whole = fit(harmony())
    others: list[dict[str, Any]] = [
        {"device_memory": "56KiB", "update": "deferred"},
        {"device_memory": None, "layers": {torch.nn.Linear, torch.nn.LayerNorm}},
        {"device_memory": "72KiB", "num_microbatches": None, "microbatch_size": 2},
    ]
    for step, arguments in zip((2, 3, 4), others, strict=True):
        assert_same(whole, fit(harmony(**arguments), step, devices=step - 1))


# --- Killed. Each run is a process of its own.


def train(path: str, kill_at: str, step: int) -> dict[str, Any]:
    """Go on from the last checkpoint, and be killed."""
    pl.seed_everything(7)
    module = Noisy()
    checkpoint = ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max")
    checkpoint.save_last = True
    trainer = trainer_for(
        HarmonyStrategy(device_memory="64KiB", num_microbatches=4),
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[checkpoint],
    )
    if kill_at == "step":
        module.net.blocks[2].register_forward_hook(lambda *args: kill() if trainer.global_step == step else None)
    if kill_at == "save":
        from fsspec.implementations.local import LocalFileOpener

        write = LocalFileOpener.write

        def write_half(self: Any, content: Any) -> Any:
            if trainer.global_step < step:
                return write(self, content)
            write(self, content[: len(content) // 2])
            self.f.flush()
            return kill()

        LocalFileOpener.write = write_half
    last = Path(path) / "last.ckpt"
    trainer.fit(module, Resumable(nets.tokens(24), batch_size=8), ckpt_path=last if last.exists() else None)
    return {"state": values(module), "optimizer": trainer.optimizers[0].state_dict()["state"]}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(forks: Forks, path: Path, kill_at: str, step: int) -> None:
    ended = forks.run(f"""
import warnings, torch, test_checkpoints
from support import same_training
warnings.simplefilter("ignore")
# Sums of other numbers of threads differ by their order.
torch.set_num_threads({torch.get_num_threads()})
torch.use_deterministic_algorithms({torch.are_deterministic_algorithms_enabled()}, warn_only=True)
same_training.accelerator = {same_training.accelerator!r}
test_checkpoints.train({str(path)!r}, {kill_at!r}, {step})
""")
    assert ended.exit_code == -signal.SIGKILL, ended.said


@pytest.mark.nightly
def test_killed_in_a_save_and_in_a_step_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    killed.mkdir()
    environment = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "TMPDIR": str(killed)}
    with forking("import test_checkpoints", environment) as forks:
        for kill_at, step, expected in (
            ("save", 3, {"step=1.ckpt", "step=2.ckpt"}),
            ("step", 5, {"step=4.ckpt", "step=5.ckpt"}),
        ):
            run_until_killed(forks, killed, kill_at, step)
            found = {path.name: torch.load(path, weights_only=True) for path in killed.glob("*.ckpt")}
            assert found.keys() == {*expected, "last.ckpt"}
            last = max(each["global_step"] for each in found.values())
            assert found["last.ckpt"]["global_step"] == last
    assert_equal(train(str(killed), "", 0), train(str(undisturbed), "", 0))

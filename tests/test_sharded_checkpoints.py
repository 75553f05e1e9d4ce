"""Sharded checkpoints: folders laid out as Lightning's FSDPStrategy does, which every fit reads."""

from __future__ import annotations

import errno
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_harmony import HarmonyStrategy
from lightning_harmony.fit import sharded
from support.lightning_fits import (
    BATCH_SIZE,
    FIT_MARKS,
    NUM_MICROBATCHES,
    Model,
    adamw,
    assert_equal,
    assert_same,
    fit_harmony,
    harmony,
    loader,
    trainer_for,
    values,
)

pytestmark = [
    *FIT_MARKS,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def in_shards(**arguments: Any) -> Any:
    return harmony(state_dict_type="sharded", **arguments)


def consolidated(folder: Path) -> Any:
    """The checkpoint of one file that Lightning's tool makes."""
    file = folder.with_name(f"{folder.name}.one")
    given, sys.argv = sys.argv, ["consolidate", str(folder), "--output_file", str(file)]
    try:
        runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
    finally:
        sys.argv = given
    return file


def by_number(state: dict[str, Any]) -> dict[int, Any]:
    """The state of an optimizer, whatever its checkpoint calls the parameters."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    return {number: state["state"][key] for number, key in enumerate(keys) if key in state["state"]}


class Noted(nn.Module):
    def get_extra_state(self) -> Any:
        return {1: "one", "none": {}}

    def set_extra_state(self, state: Any) -> None:
        self.found = state


class Mixed(Model):
    """Has state of many kinds: tensors without elements, buffers, and what is no tensor."""

    def __init__(self, make_optimizer: Any = adamw) -> None:
        super().__init__(make_optimizer)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.empty = nn.Parameter(torch.zeros(0, 3))


# --- Written and read.


def test_a_fit_goes_on_from_shards_as_from_one_file(tmp_path: Path) -> None:
    for name, strategy in (("shards", in_shards()), ("file", harmony())):
        module = Mixed()
        module.noted = Noted()
        trainer = fit_harmony(module, strategy)
        trainer.save_checkpoint(tmp_path / name)
    assert (tmp_path / "shards").is_dir()
    assert not (tmp_path / "file").is_dir()
    trainers = []
    for name in ("shards", "file"):
        module, trainer, note = Mixed(), trainer_for(harmony(), max_epochs=2), Noted()
        module.noted = note
        trainer.fit(module, loader(), ckpt_path=tmp_path / name, weights_only=False)
        assert note.found == {1: "one", "none": {}}
        trainers.append(trainer)
        del module.noted
    assert_same(*trainers)
    assert_equal(*(trainer.optimizers[0].state_dict()["param_groups"] for trainer in trainers))


@pytest.mark.in_memory
def test_shards_hold_all_that_one_file_holds(tmp_path: Path) -> None:
    found = []
    for name, kind in (("shards", "sharded"), ("file", "full")):
        trainer = fit_harmony(Mixed(), HarmonyStrategy(state_dict_type=kind, profile_cache=False))
        trainer.save_checkpoint(tmp_path / name)
        found.append(
            torch.load(consolidated(tmp_path / name) if kind == "sharded" else tmp_path / name, weights_only=False)
        )
    shards, file = found
    assert shards.keys() == file.keys()
    assert_equal(dict(shards.pop("state_dict")), dict(file.pop("state_dict")))
    (ours,), (plain,) = shards.pop("optimizer_states"), file.pop("optimizer_states")
    assert ours["param_groups"][0]["params"][:2] == ["scale", "empty"]
    assert_equal(by_number(ours), by_number(plain))
    del shards["loops"], file["loops"]
    assert shards == file


def test_plain_lightning_goes_on_from_what_its_tool_makes_of_shards(tmp_path: Path) -> None:
    first = fit_harmony(Model(), in_shards())
    first.save_checkpoint(tmp_path / "shards")
    first.save_checkpoint(tmp_path / "shards")
    file = consolidated(tmp_path / "shards")
    plain = trainer_for("auto", accumulate_grad_batches=NUM_MICROBATCHES, max_epochs=2)
    plain.fit(Model(), loader(BATCH_SIZE // NUM_MICROBATCHES), ckpt_path=file, weights_only=False)
    swapped = trainer_for(harmony(), max_epochs=2)
    swapped.fit(Model(), loader(), ckpt_path=tmp_path / "shards")
    assert plain.global_step == swapped.global_step == 2 * first.global_step
    assert_same(plain, swapped)
    dcp_to_torch_save(tmp_path / "shards", tmp_path / "torch.pt")
    assert torch.load(tmp_path / "torch.pt", weights_only=False).keys() == {"model", "optimizer_0"}


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: None], ids=["stateless", "none"])
def test_there_may_be_no_state_of_optimizers(make: Any, tmp_path: Path) -> None:
    class Some(Model):
        def training_step(self, *args: Any) -> Any:
            return super().training_step(*args) if self.optimizers() else None

    first = fit_harmony(Some(make), in_shards())
    first.save_checkpoint(tmp_path / "shards")
    again = trainer_for(harmony(), max_epochs=2)
    again.fit(Some(make), loader(), ckpt_path=tmp_path / "shards")
    assert again.current_epoch == 2
    states = torch.load(consolidated(tmp_path / "shards"), weights_only=False)["optimizer_states"]
    assert [state.get("state", {}) for state in states] == [{}] * len(first.optimizers)


def test_evaluation_and_weights_alone(tmp_path: Path) -> None:
    first = fit_harmony(Model(), in_shards())
    first.save_checkpoint(tmp_path / "weights", weights_only=True)
    expected = trainer_for("auto").validate(first.lightning_module, loader(), verbose=False)
    module = Model()
    found = trainer_for(harmony()).validate(module, loader(), ckpt_path=tmp_path / "weights", verbose=False)
    assert found == expected
    assert_equal(values(module), values(first.lightning_module))
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        trainer_for(harmony()).fit(Model(), loader(), ckpt_path=tmp_path / "weights")


def test_a_folder_of_lightnings_own_strategies_is_read(tmp_path: Path) -> None:
    """They save each setting of an optimizer by itself; FSDP calls weights a model, and ModelParallel a state_dict."""
    first = fit_harmony(Model())
    checkpoint = first._checkpoint_connector.dump_checkpoint()
    (state,) = checkpoint.pop("optimizer_states")
    names = [name for name, _ in first.lightning_module.named_parameters()]
    named = {"state": {names[key]: each for key, each in state["state"].items()}}
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in state["param_groups"]]
    weights = checkpoint.pop("state_dict")
    for key in ("model", "state_dict"):
        with pytest.warns(UserWarning, match=r"torch\.distributed is"):
            dcp.save({key: weights, "optimizer_0": {**named, "param_groups": groups}}, checkpoint_id=tmp_path / key)
        torch.save(checkpoint, tmp_path / key / "meta.pt")
        again = trainer_for(harmony())
        again.fit(Model(), loader(), ckpt_path=tmp_path / key)
        assert_same(again, first)


def test_weights_are_read_into_the_module_where_all_of_them_fit(tmp_path: Path) -> None:
    fit_harmony(Model(), in_shards()).save_checkpoint(tmp_path / "shards")
    module = Model()
    read = sharded.Shards(tmp_path / "shards").weights(module)
    assert all(read[name].data_ptr() == value.data_ptr() for name, value in module.state_dict().items())
    module.more = nn.Linear(1, 1)
    before = values(module)
    with pytest.raises(RuntimeError, match=r"Missing key.*more"):
        trainer_for(harmony()).fit(module, loader(), ckpt_path=tmp_path / "shards")
    assert_equal(values(module), before)


def test_what_is_written_is_not_copied_first() -> None:
    """A tensor that is a part of a larger one is copied to be written, and stays until all has been."""

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            (optimizer,) = trainer.optimizers
            states = trainer.strategy.optimizer_state(optimizer)["state"].values()
            weights = trainer.strategy.lightning_module_state_dict().values()
            tensors: list[Tensor] = [*weights, *(each for state in states for each in state.values())]
            self.parts = [each for each in tensors if each.untyped_storage().nbytes() != each.nbytes]

    look = Look()
    fit_harmony(Model(), in_shards(), callbacks=[look])
    assert not look.parts


def test_state_lies_in_memory_as_the_parameter_does(tmp_path: Path) -> None:
    """Kernels that update go through both in the order of memory."""
    net = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2, 4, 4)).sum().backward()
    optimizer.step()
    checkpoint = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    written = sharded.take_values(checkpoint, net, [optimizer], is_first=True, all_agree=bool)
    sharded.write(written, tmp_path / "shards", None)
    torch.save(checkpoint, tmp_path / "shards" / sharded.META)
    (saved,) = sharded.Shards(tmp_path / "shards").optimizers()
    for folder in (None, tmp_path):
        found = saved.read(list(net.parameters()), (), folder)["state"][0]["exp_avg"]
        assert found.stride() == net.weight.stride() != found.contiguous().stride()
        assert torch.equal(found, optimizer.state[net.weight]["exp_avg"])


def test_state_that_lives_on_disk_is_read_to_there(tmp_path: Path) -> None:
    fit_harmony(Model(), in_shards()).save_checkpoint(tmp_path / "shards")
    (saved,) = sharded.Shards(tmp_path / "shards").optimizers()
    parameters = list(Model().parameters())
    in_memory, on_disk = (saved.read(parameters, (), folder) for folder in (None, tmp_path))
    assert_equal(on_disk["state"], in_memory["state"])
    assert os.listdir(tmp_path) == ["shards"]
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(mapped) >= len(on_disk["state"])
    some = saved.read(parameters, {0}, None)
    assert list(some["state"]) == [number for number in in_memory["state"] if number]


# --- Whole at any time.


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    trainer = fit_harmony(Model(), in_shards())
    trainer.save_checkpoint(path)
    before = sorted((each.name, each.read_bytes()) for each in path.iterdir())

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner, name in ((os, "fsync"), (torch, "save"), (os, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(OSError, match="No space left"):
                trainer.save_checkpoint(path)
        assert sorted((each.name, each.read_bytes()) for each in path.iterdir()) == before
        assert os.listdir(tmp_path) == ["last.ckpt"]
    # What a process that was killed has left is no part of what is saved then.
    (tmp_path / "last.ckpt.partial").mkdir()
    (tmp_path / "last.ckpt.partial" / "__7_0.distcp").touch()
    trainer.save_checkpoint(path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert sorted(each.name for each in path.iterdir()) == [".metadata", "__0_0.distcp", "meta.pt"]


@pytest.mark.parametrize("is_link", [False, True])
def test_one_kind_of_checkpoint_takes_the_place_of_the_other(
    is_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    trainer = fit_harmony(Model(), in_shards())
    trainer.save_checkpoint(tmp_path / "other" if is_link else path)
    if is_link:
        path.symlink_to("other")
    of_files = fit_harmony(Model())
    with monkeypatch.context() as patch:
        patch.setattr("lightning.fabric.plugins.io.torch_io._atomic_save", None)
        with pytest.raises(TypeError):
            of_files.save_checkpoint(path)
    assert sharded.is_sharded(path)
    of_files.save_checkpoint(path)
    assert path.is_file()
    trainer.save_checkpoint(path)
    assert sharded.is_sharded(path)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", *["other"] * is_link]


# --- Callbacks.


@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint_keeps_and_removes_folders(save_last: Any, tmp_path: Path) -> None:
    keep = ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=1, monitor="step", mode="max", save_top_k=2, save_last=save_last
    )
    fit_harmony(Model(), in_shards(), callbacks=[keep], enable_checkpointing=True)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert all(sharded.is_sharded(each) for each in tmp_path.iterdir())
    again = trainer_for(harmony(), max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    again.fit(Model(), loader(), ckpt_path="last")
    assert again.global_step == 6
    assert all(each.is_file() for each in tmp_path.iterdir() if each.name == "step=6.ckpt")


# --- Refused.


def test_what_cannot_be_sharded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"state_dict_type='shards'\): one of 'full', 'sharded' is needed"):
        harmony(state_dict_type="shards")
    with pytest.raises(ValueError, match="AsyncCheckpointIO would not be used"):
        trainer_for(in_shards(), plugins=[AsyncCheckpointIO()])
    trainer = fit_harmony(Model(), in_shards())
    with pytest.raises(TypeError, match="storage_options"):
        trainer.save_checkpoint(tmp_path / "a", storage_options={})
    with pytest.raises(ValueError, match=r"s3://bucket/a: .*a file system that all machines have mounted"):
        trainer.save_checkpoint("s3://bucket/a")


def test_while_an_exception_unwinds_the_first_of_several_nodes_writes_one_file(tmp_path: Path) -> None:
    """The others may not come to write their parts."""
    trainer = fit_harmony(Model(), in_shards())
    checkpoint = trainer._checkpoint_connector.dump_checkpoint()
    trainer.strategy.num_nodes, trainer.state.status = 2, TrainerStatus.INTERRUPTED
    trainer.strategy.save_checkpoint(checkpoint, tmp_path / "last.ckpt")
    assert "optimizer_states" in torch.load(tmp_path / "last.ckpt", weights_only=False)


def test_a_file_is_one_for_each_process(tmp_path: Path) -> None:
    fit_harmony(Model(), in_shards()).save_checkpoint(tmp_path / "a")
    stored = FileSystemReader(tmp_path / "a").read_metadata().storage_data
    assert {each.relative_path for each in stored.values()} == {"__0_0.distcp"}

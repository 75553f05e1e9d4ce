"""Optimizer state that the host has no room for lives on disk: the same bits, and nothing of it is left behind."""

from __future__ import annotations

import copy
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader

from lightning_harmony import CapacityError, HarmonyStrategy
from lightning_harmony.engine.model.disk_store import BLOCK, DiskStore
from lightning_harmony.engine.updates.disk_home import NUM_BUFFERS
from lightning_harmony.plan.values.host_need import num_on_disk
from support.same_training import Net, Training, _fit, _result, compare, train_plain, trainer_for
from support.sampling import combined
from support.small_host import (
    BATCH_SIZE,
    BUDGET,
    COPIES,
    DISK_MARKS,
    INNER,
    NUM_BLOCKS,
    NUM_STEPS,
    OF_WEIGHTS,
    OPTIMIZERS,
    SAMPLES,
    WIDTH,
    After,
    Blocks,
    Host,
    Keeps,
    build,
    cut_short,
    fails,
    plain,
    train,
)

pytestmark = DISK_MARKS


# Each optimizer with both shares, and with an update just in time and one after the backward.
@pytest.mark.parametrize(
    ("share", "optimizer", "clips"),
    combined([*product([0.5], OPTIMIZERS), *product([1.0], reversed(OPTIMIZERS)), (0.0, "AdamW")], [(False,), (True,)]),
)
def test_no_bit_depends_on_how_much_lives_on_disk(
    share: float, optimizer: str, clips: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {"gradient_clip_val": 0.05} if clips else {}
    host = Host(share, monkeypatch, tmp_path, COPIES.get(optimizer, 2))
    result = train(build(optimizer), host, **options)
    compare(plain(optimizer, **options), result)
    of_state = sum(value.nbytes for value in result.optimizer if value.nbytes >= BLOCK)
    assert host.used_bytes == pytest.approx(share * of_state, rel=0.1)
    assert any(report.disk_written_bytes and report.disk_read_bytes for report in host.reports) == (share > 0)
    assert list(tmp_path.iterdir()) == []


class Grows(pl.Callback):
    """Gives the model another parameter in a fit, so that harmony sets itself up anew, and a step later the host less room.

    Args:
        host: which; None for plain Lightning.
    """

    def __init__(self, host: Host | None = None) -> None:
        self.host, self.room = host, 0 if host is None else host.room
        if host is not None:
            host.room = 10 * OF_WEIGHTS

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == 2 and not hasattr(module, "more"):
            module.register_parameter("more", torch.nn.Parameter(torch.ones(3)))
        if trainer.global_step == 3 and self.host is not None:
            self.host.room = self.room


def test_state_makes_way_behind_a_new_set_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of it stayed on the host from then on."""
    host = Host(0.5, monkeypatch, tmp_path)
    result = train(build(), host, Grows(host))
    compare(plain("AdamW", Grows()), result)
    of_state = sum(value.nbytes for value in result.optimizer if value.nbytes >= BLOCK)
    assert host.used_bytes == pytest.approx(0.5 * of_state, rel=0.1)


def test_no_more_lives_on_disk_than_the_host_has_no_room_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = Host(0.5, monkeypatch, tmp_path)
    monkeypatch.setattr(f"{BUDGET}.num_on_disk", num_on_disk)
    # All of the state, all gradients, the stash, and the buffers.
    stash = NUM_BLOCKS * (WIDTH + INNER) * 4 * BATCH_SIZE
    excess = 3 * OF_WEIGHTS + stash + NUM_BUFFERS * (800 << 10) // 32 - host.room
    compare(plain("AdamW"), train(build(), host))
    # A layer more at most, each time that is decided.
    assert excess - stash < host.used_bytes < excess + 2 * (2 * OF_WEIGHTS // (2 * NUM_BLOCKS))
    assert max(report.host_bytes for report in host.reports) - OF_WEIGHTS <= host.room


def test_state_makes_way_for_the_stash_of_microbatches_that_take_turns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The stash is known when the first step has run."""
    samples = torch.randn(NUM_STEPS * 64, WIDTH, generator=torch.Generator().manual_seed(3))

    def fit(folder: Path | None) -> tuple[Host, Training]:
        host, module = Host(0.5, monkeypatch, folder, device_memory="1000KiB"), build()
        monkeypatch.setattr(f"{BUDGET}.num_on_disk", num_on_disk)
        host.room = int(2.75 * OF_WEIGHTS)
        trainer = trainer_for(host.strategy, NUM_STEPS, [host])
        _fit(trainer, module, DataLoader(samples, batch_size=64))
        return host, _result(trainer, module, [])

    with pytest.raises(CapacityError, match="gradients and the stash may take"):
        fit(None)
    with caplog.at_level("INFO"):
        host, result = fit(tmp_path)
    assert host.used_bytes
    assert not [record.message for record in caplog.records if "one after the other" in record.message]
    compare(train_plain(build(), samples, 2, 64), result)


class Looks(pl.Callback):
    """Reads optimizer state when a step has been made, and changes it."""

    def __init__(self) -> None:
        self.seen: dict[int, list[Tensor]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step in self.seen:
            # Plain training accumulates.
            return
        values = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.seen[trainer.global_step] = [value.clone() for value in values]
        if trainer.global_step == 2:
            for value in values:
                value.mul_(0.5)


@pytest.mark.parametrize("is_direct", [True, False], ids=["past the page cache", "through it"])
def test_state_is_current_for_who_reads_it_and_changes_of_it_count(
    is_direct: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not is_direct:
        monkeypatch.setattr(DiskStore, "_open_direct", lambda store: store._file.fileno())
    ours, theirs = Looks(), Looks()
    result = train(build("SGD with momentum"), Host(1.0, monkeypatch, tmp_path, 1), ours)
    compare(plain("SGD with momentum", theirs), result)
    for step in range(1, NUM_STEPS + 1):
        assert len(ours.seen[step]) == 2 * 2 * NUM_BLOCKS
        assert all(map(torch.equal, ours.seen[step], theirs.seen[step]))


@pytest.mark.parametrize(
    ("share", "kind"),
    [((1.0, 0.0), "full"), ((0.0, 1.0), "full"), ((0.5, 1.0), "full"), ((0.5, 1.0), "sharded")],
    ids=["from", "to", "more", "in shards"],
)
def test_a_fit_goes_on_from_a_checkpoint_whatever_lives_on_disk(
    share: tuple[float, float], kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Lightning would have all of it in memory.
    for name in ("_atomic_save", "pl_load"):
        monkeypatch.setattr(f"lightning.fabric.plugins.io.torch_io.{name}", None)
    (disk := tmp_path / "disk").mkdir()
    path, module = tmp_path / "some.ckpt", build()
    # A loader begins anew: all batches are the same.
    samples = SAMPLES[:BATCH_SIZE].repeat(NUM_STEPS, 1)
    host = Host(share[0], monkeypatch, disk, state_dict_type=kind)
    whole = train(module, host, Keeps(path, 2), samples=samples)
    compare(train_plain(build(), samples, 2, BATCH_SIZE), whole)
    # Each tensor is saved with its own bytes, and no others.
    of_tensors = sum(p.nbytes for p in module.parameters()) * 3
    of_files = sum(each.stat().st_size for each in ([path] if path.is_file() else path.iterdir()))
    # Of shards, each tensor is a file of torch's within the file.
    assert of_tensors <= of_files < (1.1 if kind == "full" else 1.5) * of_tensors
    resumed, host = build(), Host(share[1], monkeypatch, disk)
    trainer = trainer_for(host.strategy, NUM_STEPS, [host])
    torch.manual_seed(0)
    trainer.fit(resumed, DataLoader(samples, batch_size=BATCH_SIZE), ckpt_path=path)
    assert bool(host.used_bytes) == bool(share[1])
    result = _result(trainer, resumed, [])
    compare(Training(whole.losses[-2 * 3 :], whole.state, whole.optimizer), result)


def test_a_checkpoint_that_fails_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    path = tmp_path / "checkpoints" / "some.ckpt"

    class Again(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            before = path.read_bytes()

            def full(checkpoint: Any, file: Path) -> None:
                Path(file).write_bytes(b"a part")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            with monkeypatch.context() as patch:
                patch.setattr(torch, "save", full)
                with pytest.raises(OSError, match="No space left"):
                    trainer.save_checkpoint(path)
            assert path.read_bytes() == before

    train(build(), Host(1.0, monkeypatch, disk), Keeps(path, 2), Again())
    assert list(path.parent.iterdir()) == [path]


def test_the_file_has_no_name_while_it_is_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the system makes no file without a name, it is gone as soon as it is there."""
    monkeypatch.setattr("tempfile._O_TMPFILE_WORKS", False)
    found: list[Path] = []

    class Lists(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            found.extend(tmp_path.iterdir())

    host = Host(1.0, monkeypatch, tmp_path)
    train(build(), host, Lists())
    assert host.used_bytes
    assert found == list(tmp_path.iterdir()) == []


KILLED = """
import sys, pytest
sys.path.insert(0, {tests!r})
from pathlib import Path
import lightning.pytorch as pl
from support.small_host import OF_WEIGHTS, Host, build, train

class Waits(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 2:
            assert host.disk.used_bytes and host.disk.weights
            print("two steps", flush=True)
            sys.stdin.readline()

with pytest.MonkeyPatch.context() as patch:
    host = Host(1.0, patch, Path({folder!r}))
    host.room = OF_WEIGHTS
    train(build(), host, Waits())
"""


@pytest.mark.nightly
def test_nothing_is_left_of_a_fit_that_was_killed(tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    code = KILLED.format(tests=str(Path(__file__).parent), folder=str(disk))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as fit:
        assert fit.stdout is not None
        assert any("two steps" in line for line in fit.stdout)
        files = [Path(f"/proc/{fit.pid}/fd/{name}") for name in os.listdir(f"/proc/{fit.pid}/fd")]
        assert any(str(disk) in os.readlink(file) for file in files)
        fit.send_signal(signal.SIGKILL)
        assert fit.wait() == -signal.SIGKILL
    assert list(disk.iterdir()) == []


def test_a_full_disk_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reserve = os.posix_fallocate

    def refuse(file: int, start: int, num_bytes: int) -> None:
        if num_bytes > BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    module, host = build(), Host(1.0, monkeypatch, tmp_path)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(
        CapacityError,
        match=r"offload_dir='.*'\): 2.* MiB of optimizer state, weights or gradients do not fit .*No space left",
    ):
        train(module, host)
    assert module.losses == []
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("clips", [False, True], ids=["just in time", "after the backward"])
@pytest.mark.parametrize(
    ("name", "fail", "said"),
    [
        ("preadv", fails, r"could not be read \(EIO: Input/output error\)"),
        ("preadv", cut_short, r"could not be read \(EIO: the file has been cut off\)"),
        ("pwritev", fails, r"could not be written \(EIO: Input/output error\)"),
        ("pwritev", cut_short, r"could not be written \(EIO: nothing more was written\)"),
    ],
    ids=["read error", "short read", "write error", "short write"],
)
def test_a_disk_that_fails_ends_the_fit_with_the_cause(
    name: str, fail: Callable[..., int], said: str, clips: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (disk := tmp_path / "disk").mkdir()
    module, host, kept = build(), Host(1.0, monkeypatch, disk), tmp_path / "kept.ckpt"
    failing, keeps = After(monkeypatch, name, fail), Keeps(kept, 2)
    trainer = trainer_for(host.strategy, NUM_STEPS, [host, failing, keeps], gradient_clip_val=0.05 if clips else None)
    with pytest.raises(OSError, match=rf"offload_dir='{disk}'\): .* of optimizer state, weights or gradients {said}"):
        _fit(trainer, module, DataLoader(SAMPLES, batch_size=BATCH_SIZE))
    monkeypatch.undo()
    # The model is an ordinary one again, and what was saved before is whole; but what the disk has lost is not saved.
    assert module.net(SAMPLES[:1]).isfinite()
    assert all(value.isfinite().all() for value in torch.load(kept, weights_only=True)["state_dict"].values())
    with pytest.raises(RuntimeError, match=r"the update of parameters has failed .*no checkpoint is made of it"):
        trainer.save_checkpoint(tmp_path / "torn.ckpt")


def test_the_refusal_names_the_folder_where_it_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"offload_dir='/a/fast/disk'\) for 236.* KiB of it"):
        train(build(), Host(1.0, monkeypatch, None))
    # Gradients of the first step are all there before the first update, for which weights may make way.
    host = Host(1.0, monkeypatch, None)
    host.room = OF_WEIGHTS // 2
    with pytest.raises(CapacityError, match=r"offload_dir='/a/fast/disk'\) for .* of it"):
        train(build(), host)
    host = Host(1.0, monkeypatch, None)
    host.room = -OF_WEIGHTS
    with pytest.raises(CapacityError, match=r"host is .* short") as error:
        train(build(), host)
    assert "offload_dir" not in str(error.value)


def test_an_optimizer_that_steps_on_the_host_keeps_its_state_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Own(AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    module = Net(Blocks(), lambda parameters: Own(parameters, lr=0.01))
    host = Host(1.0, monkeypatch, tmp_path)
    with pytest.raises(CapacityError, match=r"host is .* short") as error:
        train(module, host)
    assert "offload_dir" not in str(error.value)


def test_the_summary_tells_what_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    host = Host(1.0, monkeypatch, tmp_path)
    train(build(), host, pl.callbacks.ModelSummary())
    text = capsys.readouterr().out
    assert text.count("Predicted time of a step") == 1
    said = rf"2.* MiB +Optimizer state in {tmp_path}: so much is read and written in each step, .* written a day"
    assert re.search(said, text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload_dir": "/no/such/folder"}, r"offload_dir='/no/such/folder'\): a folder is needed"),
        ({"offload_dir": "/tmp", "update_on": "host"}, "leave one of the two out"),
    ],
)
def test_a_folder_that_is_of_no_use_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HarmonyStrategy(**options)

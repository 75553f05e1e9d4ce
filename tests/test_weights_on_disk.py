"""Weights that are trained, and that the host has no room for, live on disk: the same bits, and nothing of them is left."""

from __future__ import annotations

import copy
import errno
import os
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import CapacityError, HarmonyStrategy
from lightning_harmony.engine.model.disk_store import BLOCK, DiskBuffers, DiskStore, folder_of
from lightning_harmony.plan.values.host_need import num_on_disk
from support.same_training import Net, Training, _fit, _result, compare, train_plain, trainer_for
from support.sampling import combined
from support.small_host import (
    BATCH_SIZE,
    BUDGET,
    COPIES,
    DISK_MARKS,
    NUM_BLOCKS,
    NUM_STEPS,
    OF_WEIGHTS,
    OPTIMIZERS,
    SAMPLES,
    After,
    Host,
    Keeps,
    build,
    cut_short,
    fails,
    plain,
    train,
)

pytestmark = DISK_MARKS
NUM_LAYERS = 2 * NUM_BLOCKS
# Of a layer, what takes whole blocks.
OF_LAYER = OF_WEIGHTS // NUM_LAYERS


def small_host(patch: pytest.MonkeyPatch, folder: Path | None, room: float = 1.0, **arguments: Any) -> Host:
    """A host with room for so many times the bytes of all weights beside them, which is not enough to train."""
    host = Host(1.0, patch, folder, **arguments)
    host.room = int(room * OF_WEIGHTS)
    return host


def on_disk(module: nn.Module) -> list[int]:
    """The layers whose weights live there."""
    names = [name for name, parameter in module.named_parameters() if folder_of(parameter) is not None]
    return sorted({int(name.split(".")[2]) for name in names})


@pytest.mark.parametrize(
    ("optimizer", "room", "precision", "clips", "num_devices"),
    combined(
        [*product(OPTIMIZERS, [1.0, 0.5])], [("32-true", False, 1), ("32-true", True, 2), ("bf16-mixed", False, 1)]
    ),
)
@pytest.mark.sampled
def test_no_bit_depends_on_which_weights_live_on_disk(
    optimizer: str,
    room: float,
    precision: Any,
    clips: bool,
    num_devices: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"precision": precision, "gradient_clip_val": 0.05 if clips else None}
    host = small_host(monkeypatch, tmp_path, room, copies=COPIES.get(optimizer, 2))
    module = build(optimizer)
    result = train(module, host, devices=num_devices, **options)
    assert len(on_disk(module)) == (5 if room == 1.0 else 8)
    written = sum(parameter.nbytes for parameter in module.parameters() if folder_of(parameter) is not None)
    assert all(report.disk_written_bytes == written + host.used_bytes for report in host.reports[2:])
    compare(plain(optimizer, **options), result)
    assert list(tmp_path.iterdir()) == []


def test_those_that_the_host_has_no_room_for_are_spread_over_the_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_memory = []

    class Asks(pl.Callback):
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            in_memory.append(trainer.strategy._swapped.engine.store.num_bytes)

    host, module = small_host(monkeypatch, tmp_path, 1.25), build()
    monkeypatch.setattr(f"{BUDGET}.num_on_disk", num_on_disk)
    compare(plain("AdamW"), train(module, host, Asks()))
    # Room for gradients, and a quarter of all for the rest: 5/16 of the weights.
    assert on_disk(module) == [1, 4, 7]
    assert in_memory[0] == pytest.approx(OF_WEIGHTS - 3 * OF_LAYER, rel=0.05)
    assert max(report.host_bytes for report in host.reports) <= host.room + OF_WEIGHTS


def test_with_room_for_gradients_all_are_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = build()
    train(module, small_host(monkeypatch, tmp_path, 1.7))
    assert on_disk(module) == []


@pytest.mark.parametrize("case", ["just in time", "clipped", "accumulated", "spread", "one after the other"])
@pytest.mark.sampled
def test_gradients_that_still_have_no_room_wait_there(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waiting, take = list[int](), DiskBuffers.take

    def waits(buffers: DiskBuffers, num_bytes: int) -> Tensor:
        waiting.append(int(host.strategy.lightning_module.trainer.global_step))
        return take(buffers, num_bytes)

    of_fit: dict[str, dict[str, Any]] = {
        "clipped": {"gradient_clip_val": 0.05},
        "accumulated": {"accumulate_grad_batches": 2},
        "spread": {"devices": 2},
    }
    options = of_fit.get(case, {})
    # With all weights on disk, there is room for less than half of the gradients.
    host, module = small_host(monkeypatch, tmp_path, -0.6), build()
    monkeypatch.setattr(f"{BUDGET}.room_on_host", lambda: max(host.room - host.taken(), 0))
    monkeypatch.setattr(DiskBuffers, "take", waits)
    if case == "one after the other":
        monkeypatch.setattr("lightning_harmony.microbatches.seen.Seen.conclude", lambda *_: "so that they do")
    result = train(module, host, **options)
    roomy, other = small_host(monkeypatch, tmp_path, 12.0), build()
    compare(train(other, roomy, **options), result)
    assert on_disk(module) == [*range(NUM_LAYERS)]
    assert on_disk(other) == []
    assert 0 in waiting
    assert (max(waiting) > 0) == (case in ("clipped", "accumulated", "one after the other"))
    assert list(tmp_path.iterdir()) == []


class Looks(pl.Callback):
    """Reads weights when a step has been made, and changes them in place, or has others in their place."""

    def __init__(self, *, replaces: bool) -> None:
        self.seen: dict[int, list[Tensor]] = {}
        self.replaces = replaces

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step in self.seen:
            # Plain training accumulates.
            return
        self.seen[trainer.global_step] = [parameter.detach().clone() for parameter in module.parameters()]
        if trainer.global_step == 2:
            for parameter in module.parameters():
                if self.replaces:
                    parameter.data = parameter.data * 0.5
                else:
                    parameter.data.mul_(0.5)


@pytest.mark.parametrize("replaces", [False, True], ids=["changed in place", "replaced"])
@pytest.mark.parametrize("is_direct", [True, False], ids=["past the page cache", "through it"])
def test_they_are_current_for_who_reads_them_and_changes_of_them_count(
    is_direct: bool, replaces: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not is_direct:
        monkeypatch.setattr(DiskStore, "_open_direct", lambda store: store._file.fileno())
    ours, theirs = Looks(replaces=replaces), Looks(replaces=replaces)
    module = build()
    result = train(module, small_host(monkeypatch, tmp_path, 0.3), ours)
    compare(plain("AdamW", theirs), result)
    for step in range(1, NUM_STEPS + 1):
        assert all(map(torch.equal, ours.seen[step], theirs.seen[step]))
    assert bool(on_disk(module)) != replaces


def test_a_fit_goes_on_from_a_checkpoint_wherever_they_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    path, module = tmp_path / "some.ckpt", build()
    samples = SAMPLES[:BATCH_SIZE].repeat(NUM_STEPS, 1)
    whole = train(module, small_host(monkeypatch, disk, 0.3), Keeps(path, 2), samples=samples)
    compare(train_plain(build(), samples, 2, BATCH_SIZE), whole)
    # Each tensor is saved with its own bytes, and no others.
    assert path.stat().st_size < 1.1 * 3 * OF_WEIGHTS
    resumed, host = build(), small_host(monkeypatch, disk, 1.0)
    trainer = trainer_for(host.strategy, NUM_STEPS, [host])
    torch.manual_seed(0)
    trainer.fit(resumed, DataLoader(samples, batch_size=BATCH_SIZE), ckpt_path=path)
    compare(Training(whole.losses[-2 * 3 :], whole.state, whole.optimizer), _result(trainer, resumed, []))


def test_a_model_is_trained_on_and_evaluated_where_a_fit_has_left_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Predicts(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch)  # type: ignore[no-any-return]

    def module() -> Predicts:
        return Predicts(build().net, OPTIMIZERS["AdamW"])

    def loader(size: int = BATCH_SIZE) -> Any:
        return DataLoader(SAMPLES, batch_size=size)  # type: ignore[arg-type]

    expected, ours = module(), module()
    for _ in range(2):
        _fit(trainer_for("auto", NUM_STEPS, [], accumulate_grad_batches=2), expected, loader(BATCH_SIZE // 2))
        # What is there is no memory that is free: all of it would come to the host.
        host = small_host(monkeypatch, tmp_path, 1.0)
        _fit(trainer_for(host.strategy, NUM_STEPS, [host]), ours, loader())
        assert all(map(torch.equal, expected.parameters(), ours.parameters()))
        assert on_disk(ours)
    before = on_disk(ours)
    monkeypatch.setattr(f"{BUDGET}.room_on_host", lambda: 0)
    strategy: Any = HarmonyStrategy(device_memory="800KiB", profile_cache=False)
    outputs = [trainer_for(each, 1, []).predict(one, loader()) for each, one in (("auto", expected), (strategy, ours))]
    assert all(map(torch.equal, *outputs))  # type: ignore[arg-type]
    assert on_disk(ours) == before


def test_weights_that_were_loaded_from_files_may_exceed_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.save(build().state_dict(), path := tmp_path / "weights.pt")
    (disk := tmp_path / "disk").mkdir()

    def loaded() -> Net:
        module = build()
        module.load_state_dict(torch.load(path, mmap=True), assign=True)
        return module

    with pytest.raises(CapacityError, match=r"short: .* of weights that are trained come .*offload_dir='/a/fast/disk'"):
        train(loaded(), small_host(monkeypatch, None, 0.9))
    module, host = loaded(), small_host(monkeypatch, disk, 0.9)
    # The room is that beside weights.
    monkeypatch.setattr(f"{BUDGET}.room_on_host", lambda: OF_WEIGHTS * 5 // 4)
    compare(plain("AdamW"), train(module, host))
    assert len(on_disk(module)) >= NUM_LAYERS - 2


class AsAWhole(torch.optim.AdamW):
    """An optimizer of one's own, which nobody divides."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class ByHand(Net):
    """Steps its optimizer itself."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


@pytest.mark.parametrize("kind", [Net, ByHand])
def test_who_steps_optimizers_as_a_whole_finds_them(
    kind: type[Net], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def module() -> Net:
        return kind(build().net, lambda parameters: AsAWhole(parameters, lr=0.01))

    number = 1 if kind is ByHand else 2
    # State and gradients have room.
    host, ours, expected = small_host(monkeypatch, tmp_path, 9.0, num_microbatches=number), module(), module()
    monkeypatch.setattr(f"{BUDGET}.spread_on_disk", lambda weights, excess: range(len(weights)))
    train(ours, host)
    loader: Any = DataLoader(SAMPLES, batch_size=BATCH_SIZE // number)  # type: ignore[arg-type]
    _fit(trainer_for("auto", NUM_STEPS, [], accumulate_grad_batches=number), expected, loader)
    assert on_disk(ours) == [*range(NUM_LAYERS)]
    assert all(map(torch.equal, ours.parameters(), expected.parameters()))


def test_a_full_disk_is_refused_before_any_moves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reserve = os.posix_fallocate

    def refuse(file: int, start: int, num_bytes: int) -> None:
        if num_bytes > BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, start, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    module, host = build(), small_host(monkeypatch, tmp_path)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(CapacityError, match=r"offload_dir='.*'\): 6.* KiB of .* gradients do not fit .*No space left"):
        train(module, host)
    assert module.losses == on_disk(module) == []
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.timeout(60)
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
@pytest.mark.parametrize("clips", [False, True], ids=["just in time", "after the backward"])
def test_a_disk_that_fails_ends_the_fit_with_the_cause(
    clips: bool, name: str, fail: Callable[..., int], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (disk := tmp_path / "disk").mkdir()
    # Without state, what fails are weights.
    module = Net(build().net, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    host, kept = small_host(monkeypatch, disk), tmp_path / "kept.ckpt"
    callbacks = [host, After(monkeypatch, name, fail), Keeps(kept, 2)]
    trainer = trainer_for(host.strategy, NUM_STEPS, callbacks, gradient_clip_val=0.05 if clips else None)
    with pytest.raises(OSError, match=rf"offload_dir='{disk}'\): .* of optimizer state, weights or gradients {said}"):
        _fit(trainer, module, DataLoader(SAMPLES, batch_size=BATCH_SIZE))  # type: ignore[arg-type]
    assert on_disk(module)
    monkeypatch.undo()
    # The model is an ordinary one again, and what was saved before is whole.
    assert module.net(SAMPLES[:1]).isfinite()
    assert all(value.isfinite().all() for value in torch.load(kept, weights_only=True)["state_dict"].values())
    if name == "pwritev":
        # Some of these have been lost.
        with pytest.raises(RuntimeError, match=r"the update of parameters has failed .*no checkpoint is made of it"):
            trainer.save_checkpoint(tmp_path / "torn.ckpt")


def test_the_summary_tells_what_is_read_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train(build(), small_host(monkeypatch, tmp_path), pl.callbacks.ModelSummary())
    text = capsys.readouterr().out
    assert re.search(r"\d KiB of weights in host memory and 652 KiB on disk", text)
    said = r"2.* MiB +Optimizer state and weights in .*: so much is read and written in each step; layers read 652 KiB of it"
    assert re.search(said, text)

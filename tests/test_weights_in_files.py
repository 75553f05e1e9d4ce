"""Weights that are not trained, and that the host has no room for, stay in the files that they were loaded from."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import CapacityError, HarmonyStrategy
from lightning_harmony.engine.model.mapped_files import files_of
from support.adapters import Adapted, Stack
from support.same_training import Net, compare, root, train_harmony, train_plain, trainer_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable"),
    pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what memory maps"),
]
WIDTH, NUM_LAYERS, BATCH_SIZE = 128, 6, 8
SAMPLES = torch.randn(4 * BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(1))
BASE_BYTES = NUM_LAYERS * WIDTH * (WIDTH + 1) * 4


def saved(folder: Path) -> Path:
    torch.manual_seed(0)
    path = folder / "base.pt"
    torch.save(Stack(*[Adapted(nn.Linear(WIDTH, WIDTH), WIDTH) for _ in range(NUM_LAYERS)]).state_dict(), path)
    return path


def loaded(path: Path, *, trains_base: bool = False) -> Stack:
    """A network whose frozen weights are those of the file, and lie in it."""
    torch.manual_seed(0)
    net = Stack(*[Adapted(nn.Linear(WIDTH, WIDTH), WIDTH) for _ in range(NUM_LAYERS)])
    state = torch.load(path, mmap=True)
    for name in [name for name, _ in net.named_parameters()]:
        if "base" in name:
            *owner, leaf = name.split(".")
            setattr(net.get_submodule(".".join(owner)), leaf, nn.Parameter(state[name], requires_grad=trains_base))
    assert len(files_of(net.parameters())) == 2 * NUM_LAYERS
    return net


def adapting(net: Stack) -> Net:
    return Net(net, lambda parameters: torch.optim.AdamW(parameters, lr=0.001))


def limit_host(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr("lightning_harmony.updating.host_budget.room_on_host", lambda: num_bytes)


def swapped() -> HarmonyStrategy:
    memory = {"cpu": "450KiB", "cuda": "1GiB"}[root().type]
    # On a GPU, a plan of one's own would be needed to swap so little: only what is said here matters there.
    return HarmonyStrategy(device_memory=memory, num_microbatches=2, profile_cache=False)


class Changes(pl.Callback):
    """Changes frozen weights between steps, in place: as averages of a teacher."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if (trainer.fit_loop.epoch_loop.total_batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    if "base.weight" in name:
                        parameter.mul_(0.9)


@pytest.mark.cpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("callbacks", [(), (Changes(),)], ids=["as they are", "changed between steps"])
@pytest.mark.parametrize("share", [0.0, 0.5], ids=["all", "half"])
def test_they_train_adapters_as_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, callbacks: tuple[pl.Callback, ...], precision: Any
) -> None:
    path = saved(tmp_path)
    options: dict[str, Any] = {"more_callbacks": callbacks, "precision": precision}
    plain = train_plain(adapting(loaded(path)), SAMPLES, 2, BATCH_SIZE, **options)
    limit_host(monkeypatch, 400_000 + int(share * BASE_BYTES))
    net = loaded(path)
    before = {name: parameter.data_ptr() for name, parameter in net.named_parameters()}
    harmony = train_harmony(adapting(net), SAMPLES, swapped(), BATCH_SIZE, with_gradients=False, **options)
    compare(plain, harmony)
    stayed = [name for name, parameter in net.named_parameters() if parameter.data_ptr() == before[name]]
    assert stayed
    assert all("base" in name for name in stayed)
    if share:
        # The first ones have come to the host.
        assert len(stayed) < 2 * NUM_LAYERS
        assert not any(name.startswith("layers.0.") for name in stayed)


@pytest.mark.cpu
def test_with_room_for_all_they_are_brought_to_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_host(monkeypatch, 1 << 30)
    net = loaded(saved(tmp_path))
    train_harmony(adapting(net), SAMPLES, swapped(), BATCH_SIZE, with_gradients=False)
    assert not files_of(net.parameters())


@pytest.mark.cpu
def test_a_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    limit_host(monkeypatch, 400_000)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        net = loaded(saved(tmp_path))
        train_harmony(adapting(net), SAMPLES, swapped(), BATCH_SIZE, with_gradients=False)
    (line,) = [message for message in caplog.messages if "stay in their files" in message]
    assert re.search(r"\d KiB of weights that are not trained", line)
    assert str(tmp_path) in line


@pytest.mark.cpu
def test_all_weights_stay_there_where_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)

    class Predicts(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch)  # type: ignore[no-any-return]

    def predicted(strategy: Any) -> tuple[Stack, list[Tensor]]:
        net = loaded(path, trains_base=True)
        loader = DataLoader(SAMPLES, batch_size=BATCH_SIZE)  # type: ignore[arg-type]
        outputs = trainer_for(strategy, 1, []).predict(Predicts(net), loader)
        assert outputs is not None
        return net, [output for output in outputs if isinstance(output, Tensor)]

    _, plain = predicted("auto")
    limit_host(monkeypatch, 0)
    net, harmony = predicted(HarmonyStrategy(device_memory="450KiB", profile_cache=False))
    assert len(files_of(net.parameters())) == 2 * NUM_LAYERS
    assert all(map(torch.equal, plain, harmony))


@pytest.mark.cpu
def test_weights_that_are_trained_need_room_before_any_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come to the host's memory with the first update at the latest: the system would end the process."""
    limit_host(monkeypatch, BASE_BYTES // 2)
    net = loaded(saved(tmp_path), trains_base=True)
    with pytest.raises(CapacityError, match=r"the host is .* short: .* of weights that are trained come to its memory"):
        train_harmony(adapting(net), SAMPLES, swapped(), BATCH_SIZE, with_gradients=False)
    assert len(files_of(net.parameters())) == 2 * NUM_LAYERS


@pytest.mark.cpu
def test_weights_that_are_unfrozen_later_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer writes stays in memory, and the file is as it was."""
    path = saved(tmp_path)

    class Unfreezes(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.net.layers[-1].base.requires_grad_(trainer.current_epoch > 0)

    def trained(strategy: Any, num_parts: int) -> Stack:
        net = loaded(path)
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            accumulate_grad_batches=num_parts,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Unfreezes()],
        )
        trainer.fit(adapting(net), DataLoader(SAMPLES, batch_size=BATCH_SIZE // num_parts))  # type: ignore[arg-type]
        return net

    content = path.read_bytes()
    plain = trained("auto", 2)
    limit_host(monkeypatch, 400_000)
    harmony = trained(swapped(), 1)
    for (name, one), other in zip(plain.named_parameters(), harmony.parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.isfinite().all()
    assert path.read_bytes() == content


@pytest.mark.gpu
def test_a_gpu_reads_them_beside_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_harmony.strategy.fits", lambda *_: False)
    path = saved(tmp_path)
    plain = train_plain(adapting(loaded(path)), SAMPLES, 2, BATCH_SIZE)
    limit_host(monkeypatch, 400_000)
    net = loaded(path)
    compare(plain, train_harmony(adapting(net), SAMPLES, swapped(), BATCH_SIZE, with_gradients=False))
    assert files_of(net.parameters())


@pytest.mark.cpu
def test_a_file_that_is_cut_off_meanwhile_ends_the_fit_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CutsOff(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                os.truncate(path, 4096)

    path = saved(tmp_path)
    limit_host(monkeypatch, 400_000)
    module = adapting(loaded(path))
    with pytest.raises(OSError, match=r"could not be read from the file that they lie in"):
        train_harmony(module, SAMPLES, swapped(), BATCH_SIZE, with_gradients=False, more_callbacks=[CutsOff()])
    # What was trained is the user's again.
    assert all(parameter.isfinite().all() for parameter in module.parameters() if parameter.requires_grad)

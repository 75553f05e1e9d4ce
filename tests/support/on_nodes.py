"""Trainings on one of several nodes, as a launcher starts them: `python on_nodes.py <folder> <case> ...`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import registry
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader, TensorDataset

import lightning_harmony.strategy as harmony
from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.nodes.exchange import Exchange
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate

WIDTH, BATCH, NODES, SECONDS = 16, 8, 2, 300
FITS = harmony.fits


class Net(pl.LightningModule):
    """Has layers, one of which some nodes do not use."""

    def __init__(self) -> None:
        super().__init__()
        # Each node begins with others.
        torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.seldom = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.losses: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs

    def loss(self, inputs: Tensor) -> Tensor:
        hidden = self(inputs)
        if self.global_rank == 0 or self.global_step % 2:
            hidden = hidden + self.seldom(hidden)
        loss: Tensor = self.head(hidden).square().mean()
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.loss(batch[0])
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val", self.head(self(batch[0])).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Normalized(Net):
    """Has statistics of batches, which each node has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(2, nn.BatchNorm1d(WIDTH))


class BufferedUnderWay(Normalized):
    """Weights of the third step are not sent before the fourth one has begun, which has taken buffers from the first node."""

    has_begun = threading.Event()
    spread = Exchange.spread

    def __init__(self) -> None:
        super().__init__()
        self.has_begun.set()
        Exchange.spread = self.spread_late  # type: ignore[method-assign]

    @staticmethod
    def spread_late(*args: Any) -> None:
        assert BufferedUnderWay.has_begun.wait(20)
        BufferedUnderWay.spread(*args)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.has_begun.set()
        loss = super().training_step(batch)
        # The first updates are waited for, as they are timed.
        if self.global_step == 2:
            self.has_begun.clear()
        return loss


class Gathered(Net):
    """Has each node know what layers give on the other one."""

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
            inputs = inputs + self.all_gather(inputs.detach()).mean(0)
        return inputs


class Early(Net):
    """Tells the other node of its step before it computes, which one of them does twice where its batch does not fit."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.log("step", float(self.global_step), sync_dist=True, on_step=True)
        return self.loss(batch[0])


class ByHand(Net):
    """Optimizes manually, with two optimizers."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch[0]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        body = [*self.layers.parameters(), *self.seldom.parameters()]
        return [torch.optim.SGD(body, lr=0.1), torch.optim.AdamW(self.head.parameters(), lr=0.01)]


class Watched(Net):
    """From the third step on, somebody watches the optimizer, which can no longer update some parameters by themselves."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == 2 and not hasattr(self, "num_steps"):
            self.num_steps = 0
            self.trainer.optimizers[0].register_step_post_hook(self.count)

    def count(self, *args: Any) -> None:
        self.num_steps += 1


class Seen(pl.Callback):
    """Keeps the gradients that a hook sees before each step."""

    def __init__(self) -> None:
        self.gradients: list[list[Tensor]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self.gradients.append(
            [torch.zeros(()) if p.grad is None else p.grad.cpu().clone() for p in module.parameters()]
        )


class Failing(Net):
    """Fails on the second node, before its backward."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        if self.global_rank == 1 and self.global_step == 1:
            raise ValueError("the second node fails")
        return self.loss(batch[0])


class FailingInBackward(Net):
    """Fails on one node, when others may wait for its gradients."""

    failing_node, dies = 1, False

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs = batch[0]
        for number, layer in enumerate(self.layers):
            inputs = layer(inputs)
            if number == 1 and self.global_rank == self.failing_node and self.global_step == 1:
                inputs.register_hook(self.fail)
        return self.head(inputs).square().mean()

    def fail(self, gradient: Tensor) -> None:
        if self.dies:
            os._exit(3)
        raise ValueError("a node fails in its backward")


class FirstFailingInBackward(FailingInBackward):
    """The node fails that tells others in which order gradients are averaged."""

    failing_node = 0


class GoingOn(FailingInBackward):
    """The error is handled, and the process stays."""


class DyingInBackward(FailingInBackward):
    """A process is gone at once."""

    dies = True


class FailingInUpdate(Net):
    """The second node fails when it updates what it owns, and others wait for its weights."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        if self.global_rank == 1 and self.global_step == 2:
            StreamedUpdate.update = self.fail  # type: ignore[assignment]
        return super().training_step(batch)

    def fail(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("a node fails in its update")


FAILING = {
    kind.__name__: kind
    for kind in (Failing, FailingInBackward, FirstFailingInBackward, FailingInUpdate, GoingOn, DyingInBackward)
}


@dataclass(frozen=True)
class Case:
    """What is trained on two nodes, with plain Lightning and with harmony."""

    kind: type[Net]
    # The nodes where a hook sees gradients.
    sees: Sequence[int] = ()
    accumulates: int = 1
    # Each epoch but the first one is a fit of its own, which goes on from a checkpoint.
    epochs: int = 1
    microbatches: int = 2
    # Of the first node, and of the second one; None where the model fits.
    memory: Sequence[str | None] = ("14KiB", "14KiB")
    ways: Sequence[str] = ("fits", "swapped")
    options: dict[str, Any] = field(default_factory=dict)


# Of three nodes, one of which has packs of other layers, and one none.
UNEVEN = Case(Net, memory=("14KiB", "20KiB", None), ways=("fits", "swapped", "swapped again"))
CASES = {
    "plain": Case(Net, ways=("fits", "swapped", "on two devices")),
    "uneven": Case(Net, memory=("14KiB", "20KiB")),
    "first in memory": Case(Net, memory=(None, "8KiB")),
    "clipped": Case(Net, options={"gradient_clip_val": 1e-4}),
    "seen": Case(Net, sees=(0, 1)),
    "seen by one": Case(Net, sees=(1,)),
    "watched": Case(Watched, ways=("swapped",)),
    "accumulated": Case(Net, accumulates=2),
    "resumed": Case(Net, epochs=2, ways=("fits", "swapped", "with a disk", "in shards")),
    "normalized": Case(Normalized, microbatches=1),
    "gathered": Case(Gathered, memory=("14KiB", None)),
    "early": Case(Early, microbatches=1, memory=(None, "23KiB")),
    "by_hand": Case(ByHand, microbatches=1, memory=("10KiB", "10KiB")),
    "half": Case(Net, memory=("8KiB", "8KiB"), options={"precision": "bf16-true"}),
    "narrow": Case(Net, options={"precision": "bf16-mixed"}),
}


def train(case: Case, way: str, folder: Path) -> dict[str, Any]:
    """Train; what came of it."""
    found = train_epoch(case, way, folder, 1)
    for number in range(2, case.epochs + 1):
        found = train_epoch(case, way, folder, number)
    return found


def train_epoch(case: Case, way: str, folder: Path, number_of_epoch: int) -> dict[str, Any]:
    """Train one epoch, from the checkpoint of the one before; what came of it."""
    harmony.fits = FITS
    is_plain, number = way == "ddp", case.microbatches
    strategy: Any = pl.strategies.DDPStrategy(find_unused_parameters=True)
    if not is_plain:
        memory = None if way == "fits" else case.memory[int(os.environ["RANK"])]
        if memory is not None and torch.cuda.is_available():
            # A GPU has no room for its libraries in so little.
            memory, harmony.fits = "1GiB", lambda *args: False
        # On GPUs, that a process has ended shows when this is over.
        timeout = timedelta(seconds=20 if issubclass(case.kind, DyingInBackward) else SECONDS)
        strategy = HarmonyStrategy(memory, number, profile_cache=False, timeout=timeout)
        if way == "with a disk":
            strategy = HarmonyStrategy(memory, number, profile_cache=False, offload_dir=folder)
        if way == "in shards":
            strategy = HarmonyStrategy(memory, number, profile_cache=False, state_dict_type="sharded")
    seen = Seen()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=2 if way == "on two devices" and not torch.cuda.is_available() else 1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_epochs=number_of_epoch,
        # Microbatches of harmony are batches of plain Lightning.
        accumulate_grad_batches=case.accumulates * (number if is_plain else 1),
        callbacks=[seen] if int(os.environ["RANK"]) in case.sees else [],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=1,
        **case.options,
    )
    module = case.kind()
    data = TensorDataset(torch.randn(4 * BATCH * trainer.num_nodes, WIDTH, generator=torch.Generator().manual_seed(3)))
    path = folder / f"{way}.ckpt"
    loaders = DataLoader(data, BATCH // (number if is_plain else 1)), DataLoader(data, BATCH)
    try:
        trainer.fit(module, *loaders, ckpt_path=path if number_of_epoch > 1 else None)
    except (OSError, RuntimeError):
        with suppress(RuntimeError):
            trainer.strategy.lightning_module_state_dict()
            print("a checkpoint would be made")
        raise
    trainer.save_checkpoint(path)
    rank = trainer.global_rank
    assert (trainer.world_size, trainer.node_rank, trainer.local_rank) == (trainer.num_nodes, rank, 0)
    report = getattr(trainer.strategy, "step_report", None)
    checkpoint = loaded(path)
    return {
        "weights": {name: value.cpu() for name, value in module.state_dict().items()},
        "optimizers": [state["state"] for state in checkpoint["optimizer_states"]],
        "checkpoint": checkpoint["state_dict"],
        "own": [list(optimizer.state_dict()["state"]) for optimizer in trainer.optimizers],
        "losses": module.losses,
        "logged": [float(trainer.callback_metrics.get(name, 0)) for name in ("loss_epoch", "val")],
        "gradients": seen.gradients[-1:],
        "is swapped": getattr(trainer.strategy, "plan", None) is not None,
        "update": None if report is None else report.update,
        "sent": 0 if report is None else report.node_sent_bytes,
    }


def loaded(path: Path) -> Any:
    """A checkpoint of one file, or one made of shards."""
    if path.is_file():
        return torch.load(path, map_location="cpu", weights_only=True)
    file = path.with_name(f"{path.name}.{os.environ['RANK']}")
    dcp_to_torch_save(path, file)
    checkpoint = torch.load(file, weights_only=True)
    (groups,) = checkpoint["optimizer_0"]["param_groups"]
    state = {groups["params"].index(name): each for name, each in checkpoint["optimizer_0"]["state"].items()}
    return {"state_dict": checkpoint["model"], "optimizer_states": [{"state": dict(sorted(state.items()))}]}


def fit(kind: str, folder: Path, epochs: int, start: str | None = None) -> pl.Trainer:
    """Train with checkpoints of a kind, which may go on from another fit's; the trainer."""
    strategy = HarmonyStrategy("14KiB", 2, profile_cache=False, state_dict_type=kind)  # type: ignore[arg-type]
    if torch.cuda.is_available():
        strategy, harmony.fits = HarmonyStrategy("1GiB", 2, profile_cache=False), lambda *args: False
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    data = TensorDataset(torch.randn(4 * BATCH * trainer.num_nodes, WIDTH, generator=torch.Generator().manual_seed(3)))
    trainer.fit(Net(), DataLoader(data, BATCH), ckpt_path=start and folder / start)
    return trainer


def save(folder: Path) -> None:
    """Save a checkpoint of each kind after the same training."""
    for kind in ("full", "sharded"):
        fit(kind, folder, 1).save_checkpoint(folder / f"{kind}.ckpt")


def resume(folder: Path) -> None:
    """Go on from each on another number of nodes, and save one file at once, and one after another epoch."""
    for kind, epochs in product(("full", "sharded"), (1, 2)):
        name = f"{kind}, {os.environ['WORLD_SIZE']}, {epochs}.ckpt"
        fit("full", folder, epochs, f"{kind}.ckpt").save_checkpoint(folder / name)


def fail_to_save(folder: Path) -> None:
    """Save a checkpoint, and once more, when the second node's disk is full."""
    trainer = fit("sharded", folder, 1)
    trainer.save_checkpoint(folder / "last.ckpt")
    if trainer.global_rank == 1:
        os.fsync = lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # type: ignore[assignment]
    trainer.save_checkpoint(folder / "last.ckpt")


SAVING = {"save": save, "resume": resume, "fail to save": fail_to_save}


def main(folder: Path, names: Sequence[str]) -> None:
    """Run some cases in all ways, and leave what came of them in the folder."""
    torch.set_num_threads(1)
    # As in tests of one node: each Trainer asks what is installed.
    registry.entry_points = cache(registry.entry_points)  # type: ignore[assignment]
    cases = (
        {name: Case(kind, memory=["14KiB"] * 3, ways=["swapped"]) for name, kind in FAILING.items()}
        | CASES
        | {"of three": UNEVEN, "under way": Case(BufferedUnderWay, microbatches=1, ways=("swapped",))}
    )
    found: dict[str, Any] = {}
    if names[0] in SAVING:
        SAVING[names[0]](folder)
        return
    # Cases that differ in capacities alone have these in common.
    in_common: dict[str, dict[str, Any]] = {}
    for name in names:
        case = cases[name]
        without_capacity = repr(replace(case, memory=(), ways=()))
        with suppress(ValueError) if case.kind is GoingOn else nullcontext():
            found[name] = {}
            for way in case.ways if name in FAILING else ("ddp", *case.ways):
                key = f"{without_capacity}, {way}"
                trained = in_common.get(key) or train(case, way, folder)
                found[name][way] = dict(trained)
                if way in ("ddp", "fits"):
                    in_common[key] = trained
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    if "GoingOn" in names:
        time.sleep(SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

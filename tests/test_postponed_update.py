"""A deferred update runs under the next forward: no bit differs, and whoever looks sees finished weights."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony.engine.measure.profile import Profiler
from lightning_harmony.engine.updates.postponed import PostponedUpdate
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from support.lightning_fits import (
    BATCH_SIZE,
    FIT_MARKS,
    NUM_MICROBATCHES,
    NUM_STEPS,
    Manual,
    Model,
    assert_equal,
    assert_same,
    harmony,
    loader,
    trainer_for,
    values,
)
from support.same_training import root
from support.sampling import combined

pytestmark = FIT_MARKS
CLIPS: dict[str, dict[str, Any]] = {
    "norm": {"gradient_clip_val": 0.02},
    "never reached": {"gradient_clip_val": 100.0},
    "value": {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
    "none": {},
}
CLIP = CLIPS["norm"]
# What makes an update go on when its step has ended: it is deferred and postponed, or it runs just in time and outlasts the
# step. In the first epoch, the first step of all changes nothing before it has succeeded, the second is timed, and the last
# of an epoch waits.
WAYS: dict[str, dict[str, Any]] = {"postponed": {**CLIP, "max_epochs": 1}, "outlasting": {"max_epochs": 2}}
BOTH_WAYS = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
# A microbatch as large as the batch needs more room.
WHOLE = "96KiB"
UNDER = "under the forward of the next batch"


def fit(kind: str, module: Any, *, accumulate: int = 1, strategy: Any = None, validate: bool = False, **o: Any) -> Any:
    """Train by plain Lightning, a microbatch a batch, or by harmony."""
    if kind == "plain":
        trainer = trainer_for("auto", accumulate_grad_batches=NUM_MICROBATCHES * accumulate, **o)
    else:
        trainer = trainer_for(strategy or harmony(), accumulate_grad_batches=accumulate, **o)
    train = loader(BATCH_SIZE // NUM_MICROBATCHES if kind == "plain" else BATCH_SIZE)
    trainer.fit(module, train, loader() if validate else None)
    return trainer


def in_groups(kind: Any, **options: Any) -> Callable[[Any], Any]:
    """An optimizer with a group for every second parameter, and a schedule that changes both at each step."""

    def make(parameters: Any) -> Any:
        ours = list(parameters)
        optimizer = kind([{"params": ours[::2], "lr": 0.05}, {"params": ours[1::2]}], lr=0.01, **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return make


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": in_groups(torch.optim.SGD),
    "momentum": in_groups(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "AdamW": in_groups(torch.optim.AdamW, amsgrad=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}


@pytest.mark.parametrize(
    ("clip", "optimizer"),
    [*(("norm", name) for name in OPTIMIZERS), ("never reached", "AdamW"), ("value", "SGD"), ("none", "momentum")],
)
def test_an_update_as_late_as_can_be_gives_equal_bits(clip: str, optimizer: str, postponed: list[bool]) -> None:
    plain = fit("plain", Model(OPTIMIZERS[optimizer]), max_epochs=2, **CLIPS[clip])
    swapped = fit(
        "harmony", Model(OPTIMIZERS[optimizer]), max_epochs=2, strategy=harmony(update="deferred"), **CLIPS[clip]
    )
    assert_same(plain, swapped)
    # The last update of an epoch does not wait for the next forward.
    assert postponed == [True] * (NUM_STEPS - 1) * 2


@pytest.mark.parametrize(("clip", "optimizer"), [*(("none", name) for name in OPTIMIZERS), ("value", "SGD")])
def test_an_update_that_outlasts_its_step_gives_equal_bits(clip: str, optimizer: str, postponed: list[bool]) -> None:
    plain, swapped = (
        fit(kind, Model(OPTIMIZERS[optimizer]), max_epochs=2, **CLIPS[clip]) for kind in ("plain", "harmony")
    )
    assert_same(plain, swapped)
    assert swapped.strategy.step_report.update == "just-in-time"
    assert postponed == [True] * (NUM_STEPS - 1)


class Foreign(Model):
    """A layer's weight is trained by no optimizer, and keeps a gradient that nobody zeroes."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p is not self.net.head.weight], lr=0.1, momentum=0.9)


def test_what_no_optimizer_has_is_left_alone(postponed: list[bool]) -> None:
    plain, swapped = (fit(kind, Foreign(), max_epochs=2) for kind in ("plain", "harmony"))
    assert_same(plain, swapped)
    assert any(postponed)


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_accumulation_over_batches_gives_equal_bits(clip: str, postponed: list[bool]) -> None:
    options = {"accumulate": 2, "max_epochs": 2, **CLIPS[clip]}
    plain, swapped = (fit(kind, Model(OPTIMIZERS["AdamW"]), **options) for kind in ("plain", "harmony"))
    assert_same(plain, swapped)
    assert any(postponed)
    assert plain.global_step == swapped.global_step


def test_clipping_by_value_alone_needs_no_deferring() -> None:
    plain, swapped = (fit(kind, Model(), **CLIPS["value"]) for kind in ("plain", "harmony"))
    assert_same(plain, swapped)
    assert swapped.strategy.step_report.update == "just-in-time"


class Tied(Model):
    """Its first and its last layer share a weight, and one layer is never called."""

    def __init__(self) -> None:
        super().__init__(OPTIMIZERS["momentum"])
        self.net.head.weight = self.net.embed.weight
        self.net.unused = nn.Linear(3, 3)


@BOTH_WAYS
def test_a_shared_parameter_is_updated_once(options: dict[str, Any], postponed: list[bool]) -> None:
    runs = [
        fit("harmony", Tied(), strategy=strategy, callbacks=callbacks, **options)
        for strategy, callbacks in ((harmony(), []), (harmony(), [Looks(["on_train_batch_end"])]))
    ]
    assert_same(*runs)
    assert any(postponed)


@pytest.mark.parametrize(("way", "parallel"), combined(WAYS, [("pipeline",), ("data",)]))
def test_several_devices_wait_for_a_postponed_update(way: str, parallel: Any, postponed: list[bool]) -> None:
    runs = [
        fit(
            "harmony",
            Model(OPTIMIZERS["AdamW"]),
            strategy=harmony(parallel=parallel),
            devices=2,
            callbacks=looks,
            **WAYS[way],
        )
        for looks in ([], [Looks(["on_train_batch_end"])])
    ]
    assert_same(*runs)
    # Of the second run, none: somebody looks between its steps.
    assert postponed[: NUM_STEPS - 1] == [True] * (NUM_STEPS - 1)
    assert not any(postponed[NUM_STEPS - 1 :])


def test_several_batches_that_are_one_give_equal_bits(postponed: list[bool]) -> None:
    # So few that a microbatch a batch would repeat other samples.
    runs = []
    for strategy in ("auto", harmony(num_microbatches=1, device_memory=WHOLE)):
        runs.append(trainer_for(strategy, max_epochs=2, overfit_batches=2, **CLIP))
        runs[-1].fit(Model(), loader())
    assert_same(*runs)
    assert postponed != []


def test_manual_optimization_waits_for_its_updates(postponed: list[bool]) -> None:
    runs = [trainer_for("auto"), trainer_for(harmony(num_microbatches=1, device_memory=WHOLE))]
    for trainer in runs:
        trainer.fit(Manual(), loader())
    assert_same(*runs)
    assert not any(postponed)


def test_a_scaler_that_skips_steps_gives_equal_bits(postponed: list[bool]) -> None:
    def scaled() -> dict[str, Any]:
        # Of a scale that the first gradients exceed.
        scaler = torch.amp.GradScaler(root().type, init_scale=2.0**20, growth_interval=2)
        return {"plugins": [MixedPrecision("16-mixed", root().type, scaler)], **CLIP}

    runs = []
    for strategy in ("auto", harmony(num_microbatches=1, device_memory=WHOLE)):
        runs.append(trainer_for(strategy, max_epochs=2, **scaled()))
        runs[-1].fit(Model(), loader())
    assert_same(*runs)
    scales = [trainer.precision_plugin.scaler.get_scale() for trainer in runs]
    assert scales[0] == scales[1] < 2.0**20
    assert postponed != []


# --- Whoever looks.


class Looks(pl.Callback):
    """Keeps the weights that some hooks find."""

    def __init__(self, hooks: Sequence[str]) -> None:
        self.seen: list[tuple[str, dict[str, Tensor]]] = []
        for hook in hooks:
            setattr(self, hook, self._looking(hook))

    def _looking(self, hook: str) -> Callable[..., None]:
        def look(trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            self.seen.append((hook, values(module)))

        return look


class LooksBack(Model):
    """Keeps the weights that one of its own hooks finds."""

    def __init__(self, hook: str) -> None:
        super().__init__(OPTIMIZERS["AdamW"])
        self.seen: list[tuple[str, dict[str, Tensor]]] = []
        inherited = getattr(self, hook)

        def look(*args: Any, **kwargs: Any) -> Any:
            self.seen.append((hook, values(self)))
            return inherited(*args, **kwargs)

        object.__setattr__(self, hook, look)


BETWEEN = ["on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_optimizer_step"]
AROUND = [
    "on_train_epoch_end", "on_validation_start", "on_validation_epoch_end", "on_validation_end", "on_train_end",
    "on_save_checkpoint", "teardown",
]  # fmt: skip


def assert_same_sights(make: Callable[[], Any], of: Callable[[Any], Any], **options: Any) -> list[str]:
    """What is seen is the same when each batch is whole; the names of the hooks that saw it."""
    sights = []
    for strategy in ("auto", harmony(num_microbatches=1, device_memory=WHOLE)):
        module, callbacks = make()
        trainer = trainer_for(strategy, callbacks=callbacks, **options | {"max_epochs": 2})
        trainer.fit(module, loader(), loader())
        sights.append(of(trainer))
    assert [hook for hook, _ in sights[0]] == [hook for hook, _ in sights[1]]
    for (hook, expected), (_, found) in zip(*sights, strict=True):
        for name, value in expected.items():
            assert torch.equal(value.cpu(), found[name].cpu()), (hook, name)
    return [hook for hook, _ in sights[0]]


@BOTH_WAYS
@pytest.mark.parametrize("hooks", [*([hook] for hook in BETWEEN), AROUND], ids=lambda hooks: hooks[0])
def test_callbacks_see_finished_weights(hooks: list[str], options: dict[str, Any], postponed: list[bool]) -> None:
    seen = assert_same_sights(lambda: (Model(), [Looks(hooks)]), lambda trainer: trainer.callbacks[0].seen, **options)
    assert set(seen) >= set(hooks) - {"on_save_checkpoint"}
    # An update that nobody looks at before is hidden all the same.
    assert any(postponed) == (hooks[0] not in ("on_train_batch_start", "on_train_batch_end"))


@pytest.mark.parametrize(
    ("hook", "way"),
    combined(
        [
            "on_train_batch_start",
            "on_train_batch_end",
            "on_before_zero_grad",
            "optimizer_step",
            "lr_scheduler_step",
            "transfer_batch_to_device",
            "on_validation_model_eval",
        ],
        [("postponed",), ("outlasting",)],
    ),
)
@pytest.mark.usefixtures("postponed")
def test_the_module_sees_finished_weights(hook: str, way: str) -> None:
    options = WAYS[way]
    seen = assert_same_sights(lambda: (LooksBack(hook), []), lambda trainer: trainer.lightning_module.seen, **options)
    assert seen != []


class OfTheModel(torch.utils.data.Dataset[Tensor]):
    """Keeps the weights that it finds whenever it makes a sample."""

    def __init__(self, module: Any) -> None:
        self.samples = loader().dataset
        self.holds = {"module": [module]}
        self.seen: list[tuple[str, dict[str, Tensor]]] = []

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Tensor:
        self.seen.append((str(index), values(self.holds["module"][0])))
        sample: Tensor = self.samples[index]
        return sample


class InAPool(OfTheModel):
    """Looks in another thread."""

    def __getitem__(self, index: int) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().__getitem__, index).result()


class Logs(DummyLogger):
    """Looks in another thread when it is given something."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.seen = module, []

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            self.seen.append(("logged", pool.submit(values, self.module).result()))


@BOTH_WAYS
def test_loggers_that_hold_the_model_see_finished_weights(options: dict[str, Any], postponed: list[bool]) -> None:
    sights = []
    for strategy in ("auto", harmony(num_microbatches=1, device_memory=WHOLE)):
        module = Model()
        logger = Logs(module)
        trainer_for(strategy, log_every_n_steps=1, **options | {"logger": logger}).fit(module, loader())
        sights.append(logger.seen)
    for (_, expected), (_, found) in zip(*sights, strict=True):
        assert_equal(expected, found)
    assert not any(postponed)


class Apart(Model):
    """Trains a parameter that is none of the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = {"last": nn.Parameter(torch.ones(1))}

    def forward(self, batch: Tensor) -> Tensor:
        logits: Tensor = super().forward(batch)
        return logits * self.factors["last"].to(logits.device)

    def configure_optimizers(self) -> Any:
        # With the factor on the host, torch chooses this by itself on a GPU.
        return torch.optim.AdamW([*self.parameters(), *self.factors.values()], lr=0.01, foreach=False)


@BOTH_WAYS
def test_a_parameter_that_is_not_the_modules_is_updated_in_time(options: dict[str, Any], postponed: list[bool]) -> None:
    runs = []
    for strategy in ("auto", harmony(num_microbatches=1, device_memory=WHOLE)):
        runs.append(trainer_for(strategy, **options))
        runs[-1].fit(Apart(), loader())
    assert_same(*runs)
    assert_equal(*(run.lightning_module.factors for run in runs))
    assert not any(postponed)


@BOTH_WAYS
@pytest.mark.parametrize("kind", [OfTheModel, InAPool])
def test_data_that_hold_the_model_see_finished_weights(
    kind: Any, options: dict[str, Any], postponed: list[bool]
) -> None:
    sights = []
    for strategy in ("auto", harmony(num_microbatches=1, device_memory=WHOLE)):
        data = kind(Model())
        trainer_for(strategy, **options).fit(data.holds["module"][0], DataLoader(data, batch_size=BATCH_SIZE))
        sights.append(data.seen)
    for (index, expected), (_, found) in zip(*sights, strict=True):
        for name, value in expected.items():
            assert torch.equal(value.cpu(), found[name].cpu()), (index, name)
    assert not any(postponed)


class Seldom(Looks):
    """Looks behind the second step of each epoch."""

    def __init__(self) -> None:
        super().__init__([])

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if args[-1] == 1:
            self.seen.append((str(trainer.global_step), values(module)))


class HasViews(Looks):
    """Has had tensors in the memory of parameters since the fit began."""

    def __init__(self) -> None:
        super().__init__([])

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.views = {name: value.detach().view(-1) for name, value in module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen.append((str(trainer.global_step), {name: view.clone() for name, view in self.views.items()}))


class HasTensorsOfArrays(HasViews):
    """Has had tensors there that share no storage with them."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.views = {name: torch.from_numpy(value.detach().numpy()) for name, value in module.named_parameters()}


class HasStorages(HasViews):
    """Has had the memory of parameters itself."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.storages = {name: value.untyped_storage() for name, value in module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        found = {name: torch.tensor(list(storage)) for name, storage in self.storages.items()}
        self.seen.append((str(trainer.global_step), found))


class TakesStorages(HasStorages):
    """Takes it in a hook."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.storages = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if not self.storages:
            super().on_fit_start(trainer, module)
        super().on_train_batch_end(trainer, module, *args)


class HasArrays(HasViews):
    """Has had arrays there."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.views = {name: value.detach().cpu().numpy() for name, value in module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        found = {name: torch.from_numpy(view.copy()) for name, view in self.views.items()}
        self.seen.append((str(trainer.global_step), found))


class TakesArrays(HasArrays):
    """Takes them in a hook."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        pass

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 1:
            super().on_fit_start(trainer, module)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step > 1:
            super().on_train_batch_end(trainer, module, *args)


class InAThread(Looks):
    """Has another thread look."""

    def __init__(self) -> None:
        super().__init__([])
        self.executor = ThreadPoolExecutor(1)

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen.append((str(trainer.global_step), self.executor.submit(values, module).result()))


class HasOptimizer(Looks):
    """Has had the optimizer since the fit began."""

    def __init__(self) -> None:
        super().__init__([])

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.optimizer = trainer.optimizers[0]

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for state in self.optimizer.state.values():
            self.seen.append((str(trainer.global_step), {name: value.clone() for name, value in state.items()}))


@BOTH_WAYS
@pytest.mark.parametrize(
    "kind",
    [Seldom, HasViews, HasTensorsOfArrays, HasStorages, TakesStorages, HasArrays, TakesArrays, InAThread, HasOptimizer],
)
def test_by_whatever_way_it_is_looked(kind: Any, options: dict[str, Any], postponed: list[bool]) -> None:
    if kind in (HasTensorsOfArrays, HasStorages, TakesStorages, HasArrays, TakesArrays) and root().type == "cuda":
        pytest.skip("plain Lightning has parameters elsewhere")

    def model() -> Model:
        return Model(OPTIMIZERS["AdamW"])

    seen = assert_same_sights(lambda: (model(), [kind()]), lambda trainer: trainer.callbacks[0].seen, **options)
    assert seen
    assert any(postponed) == (kind is Seldom)


def test_an_error_in_a_step_finds_updates_done(postponed: list[bool]) -> None:
    """What a hook saw that hears of an error was in the middle of the update of the step before."""

    class FailsAtOnce(Model):
        def on_before_zero_grad(self, *args: Any) -> None:
            if self.trainer.global_step == 2:
                raise Boom

    sights = []
    for strategy in ("auto", harmony(num_microbatches=1, device_memory=WHOLE)):
        looks = Looks(["on_exception"])
        with pytest.raises(Boom):
            trainer_for(strategy, callbacks=[looks], max_epochs=2, **CLIP).fit(FailsAtOnce(), loader())
        sights.append(looks.seen)
    ((_, expected),), ((_, found),) = sights
    assert_equal(expected, found)
    assert postponed


@BOTH_WAYS
def test_validation_within_an_epoch_sees_finished_weights(options: dict[str, Any], postponed: list[bool]) -> None:
    hooks = ["on_validation_start", "on_validation_batch_start"]
    seen = assert_same_sights(
        lambda: (Model(), [Looks(hooks)]), lambda trainer: trainer.callbacks[0].seen, val_check_interval=2, **options
    )
    assert len(seen) > 4
    assert any(postponed)


@BOTH_WAYS
def test_checkpoints_are_saved_after_the_update(options: dict[str, Any], tmp_path: Path, postponed: list[bool]) -> None:
    saved = []
    for kind in ("plain", "harmony"):
        # Who saves behind each step has each update end there.
        saver = ModelCheckpoint(tmp_path / kind, "{step}", every_n_train_steps=2, save_top_k=-1)
        fit(kind, Model(OPTIMIZERS["AdamW"]), callbacks=[saver], enable_checkpointing=True, **options)
        paths = sorted((tmp_path / kind).iterdir())
        saved.append({path.name: torch.load(path, weights_only=False) for path in paths})
    assert len(saved[0]) == NUM_STEPS * options["max_epochs"] // 2
    assert saved[0].keys() == saved[1].keys()
    for name, expected in saved[0].items():
        assert_equal(dict(expected["state_dict"]), dict(saved[1][name]["state_dict"]))
        assert_equal(expected["optimizer_states"], saved[1][name]["optimizer_states"])
        assert_equal(expected["lr_schedulers"], saved[1][name]["lr_schedulers"])
    assert postponed


@BOTH_WAYS
def test_lightnings_own_bars_and_monitors_do_not_hold_it_up(
    options: dict[str, Any], tmp_path: Path, postponed: list[bool]
) -> None:
    shown = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "enable_progress_bar": True}
    fit(
        "harmony",
        Model(OPTIMIZERS["AdamW"]),
        callbacks=[LearningRateMonitor("step"), Timer({"hours": 1})],
        **shown,
        **options,
    )
    assert len(postponed) == NUM_STEPS - 1


class ReadsState(Model):
    """Reads the state of its optimizer in the training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append([{**state} for state in self.trainer.optimizers[0].state_dict()["state"].values()])
        self.seen[-1] = [{name: value.clone() for name, value in state.items()} for state in self.seen[-1]]
        return super().training_step(batch, batch_idx)


@BOTH_WAYS
def test_the_optimizers_state_is_complete_for_who_asks_for_it(options: dict[str, Any], postponed: list[bool]) -> None:
    runs = []
    for strategy in ("auto", harmony(num_microbatches=1, device_memory=None)):
        runs.append(trainer_for(strategy, **options))
        runs[-1].fit(ReadsState(), loader())
    assert_equal(*(run.lightning_module.seen for run in runs))
    assert postponed != []


# --- What goes wrong.


class Boom(Exception):
    pass


class Fails(Model):
    """Goes wrong in a forward, after some steps."""

    def __init__(self, action: Callable[[], None], num_steps: int) -> None:
        super().__init__(OPTIMIZERS["AdamW"])
        self.action, self.num_steps = action, num_steps

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.global_step == self.num_steps:
            self.net.embed(batch)
            self.action()
        return super().training_step(batch, batch_idx)


def explode() -> None:
    raise Boom


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def default_sigint() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@BOTH_WAYS
@pytest.mark.parametrize(("action", "raised"), [(explode, Boom), (interrupt, SystemExit)])
@pytest.mark.usefixtures("default_sigint")
def test_an_update_that_was_asked_for_is_not_lost(
    action: Callable[[], None], raised: type[BaseException], options: dict[str, Any], postponed: list[bool]
) -> None:
    num_steps = 2 if "gradient_clip_val" in options else NUM_STEPS + 2
    plain = fit("plain", Model(OPTIMIZERS["AdamW"]), max_steps=num_steps, **options)
    module = Fails(action, num_steps)
    trainer = trainer_for(harmony(), **options)
    with pytest.raises(raised):
        trainer.fit(module, loader())
    assert len(postponed) == 2
    assert_equal(values(plain.lightning_module), values(module))
    expected, found = (run.optimizers[0].state_dict()["state"] for run in (plain, trainer))
    assert_equal(expected, found)


def test_an_update_is_not_lost_when_the_data_fails(postponed: list[bool]) -> None:
    def batches() -> Iterator[Tensor]:
        yield from list(loader())[:2]
        raise Boom

    class Stream(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return batches()

    plain = fit("plain", Model(), max_steps=1, **CLIP)
    module = Model()
    trainer = trainer_for(harmony(), **CLIP)
    with pytest.raises(Boom):
        trainer.fit(module, DataLoader(Stream(), batch_size=None))
    assert len(postponed) == 1
    assert_equal(values(plain.lightning_module), values(module))


# Of the just-in-time shares, those of the second step are waited for: one of the fourth fails.
@pytest.mark.parametrize(("options", "faulty"), [(CLIP, 2), ({"max_epochs": 2}, 10)], ids=["postponed", "outlasting"])
def test_an_error_of_the_update_surfaces_once(
    options: dict[str, Any], faulty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = StreamedUpdate.update
    number = iter(range(100))

    def fails_once(*args: Any, **options: Any) -> None:
        if next(number) == faulty:
            explode()
        update(*args, **options)

    monkeypatch.setattr(StreamedUpdate, "update", fails_once)
    module = Model()
    with pytest.raises(Boom):
        fit("harmony", module, **options)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("harmony")]
    fit("harmony", module, **options)


# --- What the report says.


class Reports(Model):
    def __init__(self) -> None:
        super().__init__()
        self.reports: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if (report := self.trainer.strategy.step_report) is not None and report not in self.reports:
            self.reports.append(report)
        return super().training_step(batch, batch_idx)


def test_the_report_tells_what_was_hidden_and_what_was_not() -> None:
    module = Reports()
    trainer = fit("harmony", module, **CLIP)
    first, second, last = *module.reports, trainer.strategy.step_report
    assert UNDER in first.update_reason
    assert UNDER in second.update_reason
    assert "as the epoch ends" in last.update_reason
    # Of what the step before asked for.
    assert first.update_hidden == 0.0
    assert 0.0 <= second.update_hidden <= 1.0
    looking = fit("harmony", Model(), callbacks=[Looks(["on_train_batch_end"])], **CLIP).strategy.step_report
    assert "as Looks.look looks at parameters" in looking.update_reason


def test_an_update_that_all_wait_for_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    start = PostponedUpdate.start

    def start_and_finish(self: PostponedUpdate, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self.finish()

    update = StreamedUpdate.update

    def slowly(self: StreamedUpdate, *args: Any, **options: Any) -> None:
        update(self, *args, **options)
        time.sleep(0.02)

    monkeypatch.setattr(PostponedUpdate, "start", start_and_finish)
    monkeypatch.setattr(StreamedUpdate, "update", slowly)
    assert fit("harmony", Model(), **CLIP).strategy.step_report.update_hidden < 0.5


def test_what_an_update_takes_is_no_part_of_what_a_copy_is_seen_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is measured once more, now that weights are narrow, goes on beside the update of the first one.

    Its swap-ins waited for that while they were timed, and a bus was taken to be several times slower than it is.
    """
    timed: list[bool] = []
    swapping_in = Profiler.swapping_in
    make = PostponedUpdate.__init__
    updates: list[PostponedUpdate] = []
    monkeypatch.setattr(PostponedUpdate, "__init__", lambda self, *args: (updates.append(self), make(self, *args))[1])

    def watched(self: Profiler, layer: Any, device: Any) -> Any:
        timed.append(updates[-1].is_under_way(layer.parameters))
        return swapping_in(self, layer, device)

    monkeypatch.setattr(Profiler, "swapping_in", watched)
    update = StreamedUpdate.update
    monkeypatch.setattr(StreamedUpdate, "update", lambda *a, **o: (time.sleep(0.01), update(*a, **o))[1])
    trainer_for(harmony(), **CLIP, precision="bf16-mixed", max_steps=4).fit(Model(), loader())
    assert timed
    assert not any(timed)

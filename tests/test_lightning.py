"""Lightning's own features work as they do without the strategy."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, StepReport
from lightning_harmony.engine.memory.agenda import Place
from lightning_harmony.engine.memory.residents import Residents
from lightning_harmony.setup.lightning_tree import classes_of
from support import nets, same_training
from support.lightning_fits import (
    BATCH_SIZE,
    CAPACITY,
    NUM_MICROBATCHES,
    NUM_STEPS,
    QUIET_MARKS,
    Images,
    Manual,
    Model,
    adamw,
    assert_equal,
    assert_same,
    fit_harmony,
    fit_plain,
    harmony,
    loader,
    plainly,
    trainer_for,
    values,
)
from support.same_training import Net

pytestmark = QUIET_MARKS
# Each tree, and where what it takes is imported from.
SOURCES = {"lightning.pytorch": "lightning_harmony", "pytorch_lightning": "lightning_harmony.pytorch_lightning"}


# --- How it is asked for.


def model_of(package: Any) -> Any:
    """The model as a LightningModule of another tree."""

    class OfTree(package.LightningModule):
        forward, loss, training_step = Model.forward, Model.loss, Model.training_step
        validation_step, test_step, predict_step = Model.validation_step, Model.test_step, Model.predict_step
        configure_optimizers = Model.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            like = Model()
            self.net, self.scale, self.make_optimizer = like.net, like.scale, adamw

    return OfTree()


@pytest.mark.parametrize("tree", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("by_name", [True, False], ids=["name", "instance"])
def test_the_strategy_trains_in_both_trees_as_one_process_with_one_device(tree: str, by_name: bool) -> None:
    package = import_module(tree)
    swapped = model_of(package)
    strategy = "harmony" if by_name else classes_of(tree).HarmonyStrategy(CAPACITY, NUM_MICROBATCHES)
    trainer = trainer_for(strategy, tree=package)
    trainer.fit(swapped, loader())
    assert isinstance(trainer.strategy, classes_of(tree).HarmonyStrategy)
    assert (trainer.num_devices, trainer.world_size, trainer.global_rank) == (1, 1, 0)
    assert trainer.is_global_zero
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    assert swapped.all_gather(torch.ones(2)).tolist() == [1.0, 1.0]
    # By name, nothing is said of microbatches: a batch runs whole.
    assert trainer.strategy.step_report.num_microbatches == (1 if by_name else NUM_MICROBATCHES)
    plain = fit_harmony(Model(), "auto") if by_name else plainly()
    assert_equal(values(plain.lightning_module), values(swapped))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_the_old_tree_clips_averages_validates_saves_resumes_tests_and_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, ours = import_module("pytorch_lightning"), import_module("lightning_harmony.pytorch_lightning")
    found = []
    for kind in ("plain", "harmony"):
        number = NUM_MICROBATCHES if kind == "plain" else 1
        batches = loader(BATCH_SIZE // number)
        options: dict[str, Any] = {"tree": package, "gradient_clip_val": 0.05, "enable_checkpointing": True}
        for epochs in (1, 2):
            saver = package.callbacks.ModelCheckpoint(tmp_path / kind, "{epoch}", save_top_k=-1)
            average = package.callbacks.EMAWeightAveraging(decay=0.5)
            strategy = "auto" if kind == "plain" else ours.HarmonyStrategy(CAPACITY, NUM_MICROBATCHES)
            trainer = trainer_for(
                strategy, max_epochs=epochs, callbacks=[saver, average], accumulate_grad_batches=number, **options
            )
            path = tmp_path / kind / "epoch=0.ckpt" if epochs == 2 else None
            trainer.fit(model_of(package), batches, loader(), ckpt_path=path)
        module = trainer.lightning_module
        metrics = dict(trainer.callback_metrics)["val_loss"], *trainer.test(module, loader(), verbose=False)
        found.append((values(module), metrics, trainer.predict(module, loader())))
    assert_equal(found[1], found[0])
    monkeypatch.setenv("MASTER_PORT", "29500")
    nodes = trainer_for("harmony", tree=package, num_nodes=2)
    assert (nodes.world_size, nodes.global_rank, nodes.num_nodes) == (2, 0, 2)


@pytest.mark.parametrize(("tree", "source"), SOURCES.items())
def test_the_command_line_builds_the_strategy_from_a_config(
    tree: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.setattr("sys.argv", ["train.py"])
    config = tmp_path / "config.yaml"
    config.write_text(
        """
trainer:
  accelerator: ACCELERATOR
  devices: 1
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: SOURCE.HarmonyStrategy
    init_args:
      device_memory: 64KiB
      microbatch_size: 2
      layers: [support.nets.Block]
      update: deferred
      loss_reduction: mean
""".replace("ACCELERATOR", same_training.accelerator).replace("SOURCE", source)
    )
    cli = import_module(f"{tree}.cli").LightningCLI(
        type(model_of(import_module(tree))),
        args=["--config", str(config)],
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
    )
    assert isinstance(cli.trainer.strategy, classes_of(tree).HarmonyStrategy)
    # As it would be saved.
    module, _, name = cli.config.trainer.strategy.class_path.rpartition(".")
    assert getattr(import_module(module), name) is classes_of(tree).HarmonyStrategy
    cli.trainer.fit(cli.model, loader())
    report = cli.trainer.strategy.step_report
    assert (report.num_microbatches, report.update) == (NUM_MICROBATCHES, "deferred")
    same_training.assert_within([report], "64KiB")
    assert_same(plainly(), cli.trainer)


@pytest.mark.parametrize("name", ["HarmonyStrategy", "HarmonyPrecision", "HarmonyMonitor"])
@pytest.mark.parametrize(("tree", "source"), SOURCES.items())
def test_the_classes_for_a_tree_are_found_where_they_say(tree: str, source: str, name: str) -> None:
    cls = getattr(classes_of(tree), name)
    assert cls.__doc__
    assert next(iter(inspect.signature(cls.__init__).parameters)) == "self"
    assert getattr(import_module(source), cls.__name__) is cls
    assert getattr(import_module(cls.__module__), cls.__name__) is cls
    assert pickle.loads(pickle.dumps(cls)) is cls


# --- What is seen between hooks.


class Watch(pl.Callback):
    """Keeps what the parameters are at every batch."""

    def __init__(self, device: str = "cpu", every: int = 1) -> None:
        self.device, self.every = device, every
        self.parameters: list[nn.Parameter] = []
        self.seen: list[dict[str, Tensor]] = []

    def look(self, module: Any) -> None:
        found = list(module.parameters())
        self.parameters = self.parameters or found
        assert all(a is b for a, b in zip(self.parameters, found, strict=True)), "other objects"
        assert {(type(p), p.device.type) for p in found} == {(nn.Parameter, self.device)}
        self.seen.append(values(module))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.every == 0:
            self.look(module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.every == self.every - 1:
            self.look(module)


@pytest.mark.parametrize("update", ["just-in-time", "deferred"])
@pytest.mark.devices(1, 2)
def test_between_hooks_parameters_are_the_users_own_on_the_host_and_current(update: str) -> None:
    plain, swapped = Watch(same_training.root().type, NUM_MICROBATCHES), Watch()
    fit_plain(Model(), callbacks=[plain])
    module = Model()
    own = list(module.parameters())
    trainer = fit_harmony(module, harmony(update=update), callbacks=[swapped])
    assert trainer.strategy.step_report.update == update
    assert all(a is b for a, b in zip(own, swapped.parameters, strict=True))
    assert all(a is b for a, b in zip(own, module.parameters(), strict=True))
    assert_equal(plain.seen, swapped.seen)


class Gradients(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append({n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()})


def test_gradients_are_final_before_the_optimizer_steps() -> None:
    plain, swapped = Gradients(), Gradients()
    fit_plain(Model(), callbacks=[plain])
    fit_harmony(Model(), callbacks=[swapped])
    assert len(swapped.seen) == NUM_STEPS
    assert_equal(plain.seen, swapped.seen)


def test_hooks_are_called_in_lightnings_order_once_a_batch() -> None:
    class Order(pl.Callback):
        def __init__(self) -> None:
            self.calls: list[str] = []

    def note(name: str) -> Any:
        return lambda self, *args, **kwargs: self.calls.append(name)

    names = [
        "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
        "on_before_optimizer_step", "on_train_batch_end",
    ]  # fmt: skip
    for name in names:
        setattr(Order, name, note(name))
    plain, swapped = Order(), Order()
    trainer_for("auto", callbacks=[plain]).fit(Model(), loader())
    fit_harmony(Model(), callbacks=[swapped])
    assert swapped.calls == plain.calls
    assert set(swapped.calls) == set(names)


# --- Checkpoints.


def save(path: Path, fit: Callable[..., Any], module: Any, **options: Any) -> Path:
    """Train one epoch; return the checkpoint."""
    callback = ModelCheckpoint(dirpath=path, filename="first", save_last=False)
    fit(module, enable_checkpointing=True, callbacks=[callback], **options)
    return Path(callback.best_model_path)


def resume_plain(path: Path) -> Any:
    trainer = trainer_for("auto", max_epochs=2, accumulate_grad_batches=NUM_MICROBATCHES)
    trainer.fit(Model(), loader(BATCH_SIZE // NUM_MICROBATCHES), ckpt_path=path)
    return trainer


def resume_harmony(path: Path, update: str) -> Any:
    trainer = trainer_for(harmony(update=update), max_epochs=2)
    trainer.fit(Model(), loader(), ckpt_path=path)
    return trainer


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
@pytest.mark.parametrize("update", ["just-in-time", "deferred"])
@pytest.mark.devices(1, 2)
def test_checkpoints_go_both_ways_between_harmony_and_plain_lightning(update: str, tmp_path: Path) -> None:
    whole = fit_plain(Model(), max_epochs=2)
    by_harmony = save(tmp_path / "harmony", fit_harmony, Model(), strategy=harmony(update=update))
    by_plain = save(tmp_path / "plain", fit_plain, Model())
    ours, theirs = (torch.load(path, weights_only=True) for path in (by_harmony, by_plain))
    assert ours.keys() == theirs.keys()
    assert_equal(dict(ours["state_dict"]), dict(theirs["state_dict"]))
    assert_equal(ours["optimizer_states"][0]["state"], theirs["optimizer_states"][0]["state"])
    assert_same(whole, resume_plain(by_harmony))
    assert_same(whole, resume_harmony(by_plain, update))
    assert_same(whole, resume_harmony(by_harmony, update))
    # No checkpoint drags the arena along with each parameter.
    assert by_harmony.stat().st_size < 1.2 * by_plain.stat().st_size


# --- Other loops.


@pytest.mark.devices(1, 2)
def test_validation_test_and_prediction_give_what_plain_lightning_gives() -> None:
    module = Model()
    plain, swapped = trainer_for("auto"), trainer_for(harmony())
    for loop in ("validate", "test"):
        expected, found = (getattr(t, loop)(module, loader(), verbose=False) for t in (plain, swapped))
        assert found == expected
    assert_equal(plain.predict(module, loader()), swapped.predict(module, loader()))
    # What inference mode leaves behind must not break a fit.
    assert_same(plainly(), fit_harmony(module))


def test_only_the_first_of_equal_evaluation_batches_is_measured_and_the_next_packs_are_fetched_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone: list[int] = []
    fetched: list[int] = []
    evict_all_but, prefetch = Residents.evict_all_but, Residents.prefetch

    def counted_evict_all_but(self: Residents, pack: Any) -> None:
        alone.append(pack.index)
        evict_all_but(self, pack)

    def counted_prefetch(self: Residents, place: Place, reserved_bytes: int) -> bool:
        fetched.append(place.pack.index)
        return prefetch(self, place, reserved_bytes)

    monkeypatch.setattr(Residents, "evict_all_but", counted_evict_all_but)
    monkeypatch.setattr(Residents, "prefetch", counted_prefetch)
    batches = len(loader())
    trainer_for(harmony(device_memory="64KiB")).validate(Model(), loader(), verbose=False)
    assert batches > 1
    assert len(alone) == len(set(alone))
    assert len(fetched) == (batches - 1) * len(alone)


def test_the_plan_follows_from_the_first_step_and_can_be_kept_after_the_fit() -> None:
    seen: list[str] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            seen.append(str(trainer.strategy.plan))

    strategy = harmony(device_memory="56KiB")
    assert strategy.plan is None
    trainer_for(strategy, callbacks=[Look()], max_epochs=1).fit(Model(), loader())
    # Made at the end of the first step. A later one may be planned anew, where updates turn out to be faster.
    assert "[" in seen[0]
    assert str(strategy.plan) == seen[-1]


@pytest.mark.parametrize(("num_microbatches", "num_warnings"), [(1, 0), (2, 1)])
def test_batch_statistics_of_microbatches_are_named_once(num_microbatches: int, num_warnings: int) -> None:
    module = Net(nets.Convolutions())
    strategy = HarmonyStrategy(num_microbatches=num_microbatches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_for(strategy).fit(module, DataLoader(nets.images(8), batch_size=4))
    found = [str(warning.message) for warning in caught if "statistics of microbatches" in str(warning.message)]
    assert len(found) == num_warnings
    assert all("num_microbatches=1" in message and "net." in message for message in found)


@pytest.mark.devices(1, 2)
def test_validation_of_a_model_with_buffers_gives_what_plain_lightning_gives() -> None:
    images = DataLoader(nets.images(8), batch_size=4)
    plain, swapped = (trainer_for(s).validate(Images(), images, verbose=False) for s in ("auto", harmony()))
    assert swapped == plain


def test_validation_within_a_fit_gives_what_plain_lightning_gives() -> None:
    plain = trainer_for("auto", accumulate_grad_batches=NUM_MICROBATCHES, max_epochs=2)
    plain.fit(Model(), loader(BATCH_SIZE // NUM_MICROBATCHES), loader())
    swapped = trainer_for(harmony(), max_epochs=2, val_check_interval=1)
    swapped.fit(Model(), loader(), loader())
    assert_same(plain, swapped)
    assert_equal(plain.callback_metrics["val_loss"], swapped.callback_metrics["val_loss"])


@pytest.mark.devices(1, 2)
def test_logged_values_are_those_of_the_whole_batch() -> None:
    whole = trainer_for("auto")
    whole.fit(Model(), loader())
    swapped = fit_harmony(Model())
    assert swapped.callback_metrics.keys() == whole.callback_metrics.keys()
    torch.testing.assert_close(dict(swapped.callback_metrics), dict(whole.callback_metrics), rtol=1e-4, atol=1e-6)
    assert swapped.callback_metrics["num_samples"] == NUM_STEPS * BATCH_SIZE


def test_a_short_last_batch_has_fewer_microbatches_than_were_asked_for() -> None:
    """It used to be refused, at the end of the first epoch."""
    short = DataLoader(nets.tokens(BATCH_SIZE + 3), batch_size=BATCH_SIZE)
    trainers = []
    for options in ({"num_microbatches": BATCH_SIZE}, {"microbatch_size": 1}):
        trainers.append(trainer_for(HarmonyStrategy(device_memory=CAPACITY, **options)))
        trainers[-1].fit(Model(), short)
        assert trainers[-1].strategy.step_report.num_microbatches == 3
    assert_same(*trainers)


class Normalized(Model):
    """Normalizes with the statistics of the batch, which a single sample does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(nets.VOCABULARY)

    def loss(self, batch: Tensor) -> Tensor:
        return self.norm(self(batch).mean(1)).sigmoid().mean()


@pytest.mark.filterwarnings("ignore:.*normalize with the statistics of microbatches")
@pytest.mark.parametrize(
    "arguments", [{"num_microbatches": 4}, {"num_microbatches": None, "microbatch_size": 1}], ids=str
)
def test_microbatches_that_are_too_small_for_batch_norm_are_named_with_the_way_out(arguments: dict[str, Any]) -> None:
    """Whoever asked for them used to be told by torch of a size that is nowhere in the code."""
    with pytest.raises(
        ValueError, match=r"batch of 4 samples .* 4 microbatches.*'norm'.*num_microbatches=.*drop_last"
    ) as e:
        trainer_for(harmony(**arguments)).fit(Normalized(), loader(4))
    assert "more than 1 value per channel" in str(e.value.__cause__)
    trainer = trainer_for(harmony(num_microbatches=2))
    trainer.fit(Normalized(), loader(4))
    assert trainer.global_step > 1


# --- Ways to optimize.


@pytest.mark.parametrize("memory", [None, "96KiB"], ids=["all", "some"])
def test_manual_optimization_gives_equal_bits(memory: str | None) -> None:
    plain, swapped = Manual(), Manual()
    whole = trainer_for("auto")
    whole.fit(plain, loader())
    trainer = fit_harmony(swapped, harmony(device_memory=memory))
    assert_same(whole, trainer)
    assert_equal(plain.norms, swapped.norms)
    report = trainer.strategy.step_report
    assert (report.num_microbatches, report.update) == (1, "deferred")
    # Each call brings its layers anew: between two, the user may have changed the weights.
    raw = raw_bytes(swapped)
    assert report.swapped_in_bytes["weights"] >= 2 * raw
    assert report.swapped_out_bytes["gradients"] >= raw


class WithoutOptimizer(Model):
    def configure_optimizers(self) -> None:
        """Nothing is trained, as where somebody looks at a model."""


@pytest.mark.filterwarnings("ignore:.*will run with no optimizer")
def test_a_module_without_optimizer_runs_and_is_saved(tmp_path: Path) -> None:
    module = WithoutOptimizer()
    before = values(module)
    trainer = fit_harmony(module)
    assert_equal(before, values(module))
    trainer.save_checkpoint(tmp_path / "module.ckpt")


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.devices(1, 2)
def test_clipped_gradients_give_equal_bits(algorithm: str) -> None:
    clip = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}
    plain = fit_plain(Model(), **clip)
    assert_same(plain, fit_harmony(Model(), **clip))
    with pytest.raises(AssertionError):
        assert_same(plain, plainly())


@pytest.mark.devices(1, 2)
def test_accumulation_over_batches_gives_equal_bits() -> None:
    plain = fit_plain(Model(), accumulate=2, max_epochs=2)
    assert_same(plain, fit_harmony(Model(), accumulate_grad_batches=2, max_epochs=2))
    assert plain.global_step == 2 * -(-NUM_STEPS // 2)


def with_schedule(parameters: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("update", ["just-in-time", "deferred"])
@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*before")
def test_a_schedule_that_steps_with_the_batch_gives_equal_bits(update: str) -> None:
    plain = fit_plain(Model(with_schedule))
    swapped = fit_harmony(Model(with_schedule), harmony(update=update))
    assert_same(plain, swapped)
    assert swapped.optimizers[0].param_groups[0]["lr"] == 0.5 / (1 + NUM_STEPS)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo asks.
def test_a_compiled_module_is_not_refused() -> None:
    class Unscaled(Model):
        """Has no parameter outside of layers: on a GPU, compiled code that uses one is refused."""

        def forward(self, batch: Tensor) -> Tensor:
            return self.net.logits(self.net.body(self.net.embed(batch)))

    compiled = torch.compile(Unscaled(), backend="eager")
    trainer = trainer_for(harmony())
    trainer.fit(compiled, loader())
    assert_same(fit_plain(Unscaled()), trainer)


class Preparing(Model):
    has_prepared = False

    def prepare_data(self) -> None:
        self.has_prepared = True


@pytest.mark.parametrize("variables", [{"LOCAL_RANK": "1"}, {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "job"}])
def test_data_is_prepared_whatever_a_cluster_says_of_the_process(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not, in silence, or ended with a KeyError."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    module = Preparing()
    trainer = fit_harmony(module)
    assert module.has_prepared
    assert (trainer.local_rank, trainer.node_rank, trainer.is_global_zero) == (0, 0, True)


def test_a_plugin_for_slurm_is_taken_outside_of_a_job() -> None:
    """As for what it does when signals come. The Trainer was asked how many tasks the job has, and ended with a KeyError."""
    assert_same(plainly(), fit_harmony(Model(), plugins=[SLURMEnvironment(auto_requeue=False)]))


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_the_model_may_be_traced_between_steps() -> None:
    """As TensorBoardLogger(log_graph=True) does when a fit begins. Weights are the module's own then."""

    class Tracing(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            tokens = nets.tokens(2)[:, :-1]
            traced = torch.jit.trace(module, (tokens,), check_trace=False)
            assert torch.equal(traced(tokens), module(tokens))

    assert_same(plainly(), fit_harmony(Model(), callbacks=[Tracing()]))


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_copy_of_a_layer_may_be_scripted_between_steps() -> None:
    """As a callback does that exports each epoch. For the layer itself there was no more than a missing `__globals__`."""

    class Exporting(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            layer, rows = module.net.blocks[0], torch.ones(1, nets.WIDTH)
            with pytest.raises(AttributeError, match=r"'net.blocks.0' .*copy.deepcopy\(module\)"):
                torch.jit.script(layer)
            assert torch.equal(torch.jit.script(copy.deepcopy(layer))(rows), layer(rows))

    assert_same(plainly(), fit_harmony(Model(), callbacks=[Exporting()]))


class CopiesItself(nn.Module):
    """Has its attributes copied and pickled by its own code, as modules of torch.fx do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        memo[id(self)] = copied = _with_attributes({})
        copied.__dict__ = copy.deepcopy(vars(self), memo)
        return copied

    def __reduce__(self) -> Any:
        return _with_attributes, (vars(self),)


def _with_attributes(attributes: dict[str, Any]) -> CopiesItself:
    made = CopiesItself.__new__(CopiesItself)
    made.__dict__ = attributes
    return made


def _doubled(self: CopiesItself, x: Tensor) -> Tensor:
    return 2 * CopiesItself.forward(self, x)


@pytest.mark.cpu
@pytest.mark.parametrize("is_patched", [False, True])
def test_a_layer_may_be_copied_and_pickled_by_its_own_code(is_patched: bool) -> None:
    """The copies have a forward that computes with their weights, and not that of the layer.

    Where the layer was given a forward, copies had that of the class.
    """

    def model() -> Model:
        module = Model()
        layer = module.net.blocks[0] = CopiesItself(module.net.blocks[0])
        if is_patched:
            layer.forward = MethodType(_doubled, layer)  # type: ignore[method-assign]
        return module

    class Copying(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            layer, rows = module.net.blocks[0], torch.ones(1, nets.WIDTH)
            assert "forward" in vars(layer)
            for copied in (copy.deepcopy(layer), *(() if is_patched else [pickle.loads(pickle.dumps(layer))])):
                assert torch.equal(copied(rows), layer(rows))
                for parameter in copied.parameters():
                    parameter.data.mul_(2)
                assert not torch.equal(copied(rows), layer(rows))

    fit_harmony(model(), callbacks=[Copying()])


# --- The module afterwards, and again.


class Snapshot(Model):
    """Copies itself in the step, as for a teacher. It used to fail."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        teacher = copy.deepcopy(self.net).requires_grad_(False)
        assert all(type(parameter) is nn.Parameter for parameter in teacher.parameters())
        return super().training_step(batch, batch_idx) + teacher(batch)


@pytest.mark.devices(1, 2)
def test_a_step_may_copy_what_is_swapped() -> None:
    # Modules refer to themselves: copies are there until the garbage collector comes.
    assert_same(fit_plain(Snapshot()), fit_harmony(Snapshot(), harmony(device_memory="1MiB")))


@pytest.mark.parametrize("tree", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-compute"])
def test_a_trainer_can_be_pickled(tree: str, precision: Any) -> None:
    """Of the two strategies of this name, pickle found that of `lightning`, and the precisions not at all."""
    strategy = classes_of(tree).HarmonyStrategy(device_memory=CAPACITY)
    plugin = classes_of(tree).HarmonyPrecision(precision)
    trainer = import_module(tree).Trainer(strategy=strategy, plugins=[plugin], accelerator="cpu", logger=False)
    found = pickle.loads(pickle.dumps(trainer)).strategy
    assert type(found) is type(strategy)
    assert (type(found.precision_plugin), found.precision_plugin.precision) == (type(plugin), precision)
    assert copy.deepcopy(found.precision_plugin).compute_dtype is plugin.compute_dtype


def test_a_trainer_can_be_pickled_and_copied_after_a_fit() -> None:
    # Lightning's optimizers around the user's cannot, and its own strategies leave them out.
    trainer = fit_harmony(Model())
    for found in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
        assert found.strategy.step_report == trainer.strategy.step_report
        assert found.global_step == trainer.global_step
        assert_equal(values(found.lightning_module), values(trainer.lightning_module))


def test_the_module_can_be_copied_and_pickled_during_and_after_a_fit() -> None:
    copies: list[Any] = []

    class Copy(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            copies.append((copy.deepcopy(module.net), pickle.loads(pickle.dumps(module.net)), values(module.net)))

    module = Model()
    fit_harmony(module, callbacks=[Copy()])
    batch = nets.tokens()
    for deep, pickled, expected in copies:
        for each in (deep, pickled):
            assert_equal(values(each), expected)
            each(batch).backward()
    module.trainer = None
    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_equal(values(each), values(module))
        assert_equal(each.net(batch), module.net(batch))


def test_fits_follow_each_other_with_the_same_module_and_trainer() -> None:
    plain = fit_plain(Model(), max_epochs=2)
    trainer = fit_harmony(Model())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, loader())
    assert trainer.global_step == 2 * NUM_STEPS
    assert trainer.global_step == plain.global_step
    # A fit makes new optimizers: momentum starts again.
    fresh, module = Model(), Model()
    for _ in range(2):
        fit_plain(fresh)
        fit_harmony(module)
    assert_equal(values(fresh), values(module))


@pytest.mark.devices(1, 2)
def test_the_modules_forward_works_in_hooks_and_trains_nothing_by_itself() -> None:
    class Generate(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
                with torch.no_grad():
                    self.seen.append(module(nets.tokens(2).to(module.device)))

    plain, swapped = Generate(), Generate()
    assert_same(fit_plain(Model(), callbacks=[plain]), fit_harmony(Model(), callbacks=[swapped]))
    assert len(swapped.seen) == 1
    assert_equal(plain.seen, swapped.seen)


# --- The report.


def padded_bytes(module: nn.Module) -> int:
    return sum(-(-p.numel() * p.element_size() // 512) * 512 for p in module.parameters())


def raw_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@pytest.mark.cpu
@pytest.mark.parametrize("num_microbatches", [2, BATCH_SIZE])
def test_weights_come_once_a_phase_and_gradients_go_once_whatever_the_number_of_microbatches(
    num_microbatches: int,
) -> None:
    module = Model()
    roomy, tight = (
        fit_harmony(
            module, harmony(num_microbatches=num_microbatches, device_memory=memory), devices=1
        ).strategy.step_report
        for memory in (None, "56KiB")
    )
    raw, padded = raw_bytes(module), padded_bytes(module)
    assert raw <= roomy.swapped_in_bytes["weights"] <= padded
    # The packs behind which the loss lies come once.
    assert 1.2 * raw <= tight.swapped_in_bytes["weights"] <= 2 * padded
    for report in (roomy, tight):
        assert raw <= report.swapped_out_bytes["gradients"] <= padded
        assert report.swapped_in_bytes["gradients"] == 0
        assert report.swapped_out_bytes["weights"] == 0
        assert report.num_microbatches == num_microbatches
        assert report.transferred_bytes == 0
        # Weights and the two moments of AdamW.
        assert report.host_bytes >= 3 * raw
    assert tight.num_packs > roomy.num_packs
    same_training.assert_within([tight], "56KiB")
    assert len(tight.peak_device_bytes) == 1


def test_what_is_stashed_is_brought_back() -> None:
    strategy = HarmonyStrategy(device_memory=CAPACITY, num_microbatches=NUM_MICROBATCHES)
    report = fit_harmony(Model(), strategy).strategy.step_report
    assert report.swapped_out_bytes["stash"] > 0
    assert report.swapped_in_bytes["stash"] > 0


def test_the_report_is_frozen_and_there_is_none_before_the_first_step() -> None:
    strategy = harmony()
    assert strategy.step_report is None
    fit_harmony(Model(), strategy)
    assert isinstance(strategy.step_report, StepReport)
    assert strategy.step_report.seconds > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.step_report.seconds = 0.0


class OnAfterBackward(pl.Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        pass


class OwnStep(Model):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)


class OwnSGD(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("module", "options", "arguments", "words"),
    [
        (Model, {}, {"update": "deferred"}, 'update="deferred"'),
        (Model, {"gradient_clip_val": 1.0}, {}, "gradient_clip_val=1.0"),
        (Model, {"accumulate_grad_batches": 2}, {}, "accumulate_grad_batches=2"),
        (Model, {"callbacks": [Gradients()]}, {}, "callback Gradients has on_before_optimizer_step"),
        (Model, {"callbacks": [OnAfterBackward()]}, {}, "callback OnAfterBackward has on_after_backward"),
        (OwnStep, {}, {}, "OwnStep.optimizer_step is overridden"),
        (lambda: Model(lbfgs), {}, {}, "LBFGS"),
        (lambda: Model(lbfgs), {}, {"update": "just-in-time"}, "LBFGS.step needs a closure"),
        (lambda: Model(lambda parameters: OwnSGD(parameters, lr=0.1)), {}, {}, "OwnSGD is not known"),
        (Model, {"gradient_clip_val": 1.0}, {"update": "just-in-time"}, "gradient_clip_val=1.0"),
    ],
    ids=[
        "asked",
        "clip",
        "accumulate",
        "step-hook",
        "backward-hook",
        "optimizer-step",
        "lbfgs",
        "closure",
        "own",
        "insisted",
    ],
)
def test_the_report_names_why_the_update_is_deferred(
    module: Callable[[], Any], options: dict[str, Any], arguments: dict[str, Any], words: str
) -> None:
    report = fit_harmony(module(), harmony(**arguments), **options).strategy.step_report
    assert report.update == "deferred"
    assert words in report.update_reason


def test_the_update_is_just_in_time_where_nothing_speaks_against_it_or_the_user_insists() -> None:
    assert fit_harmony(Model()).strategy.step_report.update == "just-in-time"
    insisted = fit_harmony(Model(lambda p: OwnSGD(p, lr=0.1)), harmony(update="just-in-time"))
    assert insisted.strategy.step_report.update == "just-in-time"
    assert "OwnSGD" in insisted.strategy.step_report.update_reason
    assert_same(fit_plain(Model(lambda p: OwnSGD(p, lr=0.1))), insisted)


@pytest.mark.devices(1, 2)
def test_a_closure_that_lbfgs_calls_several_times_gives_what_plain_lightning_gives() -> None:
    plain = trainer_for("auto")
    plain.fit(Model(lbfgs), loader())
    swapped = fit_harmony(Model(lbfgs), harmony(num_microbatches=1, device_memory="96KiB"))
    assert_same(plain, swapped)


# --- After a fit, copies within one, and modules without parameters.


@pytest.mark.devices(1, 2)
def test_after_a_fit_the_modules_optimizer_steps_as_in_plain_lightning() -> None:
    def step_by_hand(trainer: Any) -> Any:
        module = trainer.lightning_module
        module.automatic_optimization = False
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.net(nets.tokens()))
        optimizer.step()
        return trainer

    assert_same(step_by_hand(fit_plain(Model())), step_by_hand(fit_harmony(Model())))


@pytest.mark.devices(1, 2)
def test_after_a_fit_its_loops_run_as_in_plain_lightning() -> None:
    def run_loop(trainer: Any, batch: Tensor) -> Any:
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        trainer.accumulate_grad_batches = 1
        optimization.run(trainer.optimizers[0], 0, {"batch": batch, "batch_idx": 0})
        trainer.strategy.validation_step(batch, 0)
        return trainer

    class Validates(Model):
        def log(self, *args: Any, **kwargs: Any) -> None:
            """Outside of loops there is nobody to log to."""

        def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch)

    batch = nets.tokens()
    assert_same(run_loop(fit_plain(Validates()), batch), run_loop(fit_harmony(Validates()), batch))


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"])
@pytest.mark.devices(1, 2)
def test_a_trainer_and_its_callbacks_can_be_copied_in_a_fit(hook: str) -> None:
    class Copies(pl.Callback):
        def __init__(self) -> None:
            self.copies: list[Any] = []
            setattr(self, hook, self._copy)

        def _copy(self, trainer: Any, module: Any, *args: Any) -> None:
            if not self.copies:
                self.copies.append(None)
                self.copies[:] = [copy.deepcopy(trainer), copy.deepcopy(trainer.callbacks)]

    runs = []
    for strategy in ("auto", harmony(num_microbatches=1)):
        trainer = trainer_for(strategy, callbacks=[Copies()])
        trainer.fit(Model(), loader())
        copied, _ = trainer.callbacks[0].copies
        state = values(copied.lightning_module)
        assert copied.strategy is not strategy
        # The copy trains by itself.
        copied.fit_loop.epoch_progress.reset()
        copied.fit(copied.lightning_module, loader())
        runs.append((trainer, state, copied))
    assert_equal(runs[0][1], runs[1][1])
    assert_same(runs[0][0], runs[1][0])
    assert_same(runs[0][2], runs[1][2])


class WithoutParameters(pl.LightningModule):
    """What there is to train comes from the batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = batch.float().requires_grad_().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("size", batch.float().mean())

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch + 1

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.devices(1, 2)
@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None")
@pytest.mark.in_memory
def test_a_module_without_parameters_runs_as_in_plain_lightning() -> None:
    found = []
    for strategy in ("auto", harmony(num_microbatches=1)):
        trainer, module = trainer_for(strategy), WithoutParameters()
        trainer.fit(module, loader(), loader())
        logged = {name: value.clone() for name, value in trainer.callback_metrics.items()}
        validated = trainer.validate(module, loader(), verbose=False), trainer.test(module, loader(), verbose=False)
        found.append((trainer.global_step, logged, validated, trainer.predict(module, loader())))
    assert found[0][:3] == found[1][:3]
    assert all(map(torch.equal, found[0][3], found[1][3]))

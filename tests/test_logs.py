from functools import partial
from importlib import import_module

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, Metric, MetricCollection, MinMetric, SumMetric

from lightning_harmony.microbatches.logs import MicrobatchLogs
from lightning_harmony.setup.lightning_tree import classes_of
from support import nets, same_training
from support.lightning_fits import (
    BATCH_SIZE,
    CAPACITY,
    NUM_MICROBATCHES,
    NUM_STEPS,
    Manual,
    Model,
    fit_plain,
    harmony,
    loader,
    trainer_for,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*the value needs to be floating to be reduced"),
    # Lightning makes a leaf specification in a way that torch has deprecated.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]
TREES = ["lightning.pytorch", "pytorch_lightning"]
BOTH = {"on_step": True, "on_epoch": True}


# --- In training: a step in microbatches logs what a step over the whole batch logs.


def log_values(module, x, error):
    """Everything whose value over the batch follows from its values over the microbatches."""
    positive = x[:, 0] > 0
    module.log("default", error.mean())
    module.log("both", error.mean(), prog_bar=True, **BOTH)
    module.log("epoch_only", error.mean(), on_step=False, on_epoch=True, prog_bar=True)
    module.log("not_to_logger", error.mean(), logger=False, **BOTH)
    module.log("average", error.mean(), reduce_fx="avg", **BOTH)
    module.log("sum", error.sum(), reduce_fx=torch.sum, **BOTH)
    module.log("num_positive", positive.sum(), reduce_fx="SUM", **BOTH)
    module.log("any_positive", positive.any(), reduce_fx=max, **BOTH)
    module.log("max", error.max(), reduce_fx=torch.max, **BOTH)
    module.log("min", error.min(), reduce_fx="min", **BOTH)
    module.log("num_samples", float(len(x)), reduce_fx=sum, **BOTH)
    module.log("number", 3, **BOTH)
    # On a microbatch without positives this is 0/0, with a batch size of 0.
    module.log("of_positive", error[positive].mean(), batch_size=int(positive.sum()), **BOTH)
    for scale in (1, 2):
        module.log("twice", scale * error.mean(), **BOTH)
        module.log("twice_sum", scale * error.sum(), reduce_fx="sum", **BOTH)
    module.log_dict({"a": error.mean(), "b": error.mean() + 1}, **BOTH)


def log_metrics(module, prediction, error):
    module.mean_metric(error.detach(), weight=torch.ones_like(error))
    module.log("mean_metric", module.mean_metric, prog_bar=True, **BOTH)
    module.squared_error(prediction, torch.zeros_like(prediction))
    module.log("squared_error", module.squared_error, **BOTH)
    module.log("squared_error_epoch_only", module.squared_error, on_step=False, on_epoch=True)
    module.only_updated.update(error.detach())
    module.log("only_updated", module.only_updated, on_step=False, on_epoch=True)
    module.extremes(error.detach())
    module.log_dict(module.extremes, **BOTH)


def make_module(pl):
    class Regression(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(4, 1)
            self.mean_metric, self.squared_error, self.only_updated = MeanMetric(), MeanSquaredError(), MeanMetric()
            self.extremes = MetricCollection([MaxMetric(), MinMetric(), SumMetric()])

        def step(self, batch):
            x, y = batch
            prediction = self.linear(x)[:, 0]
            error = (prediction - y).square()
            log_values(self, x, error)
            log_metrics(self, prediction, error)
            return error.mean()

        def training_step(self, batch, batch_idx):
            return self.step(batch)

        def validation_step(self, batch, batch_idx):
            x, y = batch
            self.log("val_error", (self.linear(x)[:, 0] - y).square().mean(), prog_bar=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Regression()


def make_strategy(pl, num_microbatches):
    class Microbatches(pl.strategies.SingleDeviceStrategy):
        def in_microbatches(self, step, batch, *args):
            microbatches = list(zip(*(tensor.tensor_split(num_microbatches) for tensor in batch), strict=True))
            sizes = [len(x) for x, _ in microbatches]
            logs = MicrobatchLogs(self.lightning_module.trainer._results, sizes)
            outputs = {}
            with logs:
                for microbatch in reversed(range(num_microbatches)):  # any order will do
                    logs.microbatch = microbatch
                    outputs[microbatch] = step(microbatches[microbatch], *args)
            return sizes, outputs

        def training_step(self, *args):
            sizes, losses = self.in_microbatches(super().training_step, *args)
            return sum(loss * sizes[microbatch] / sum(sizes) for microbatch, loss in losses.items())

        def validation_step(self, *args):
            self.in_microbatches(super().validation_step, *args)

    return Microbatches("cpu")


def logged_by_training(pl, tmp_path, **strategy):
    """Train, and return what the trainer shows after each batch, each epoch and at the end."""
    shown = []

    class Observer(pl.Callback):
        def show(self, trainer, *args):
            shown.append((trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics))
            shown[-1] = [dict(metrics) for metrics in shown[-1]]

        on_train_batch_end = on_train_epoch_end = on_validation_end = on_fit_end = show

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(22, 4, generator=generator)
    x[3:6, 0] = -1  # one whole microbatch
    loader = DataLoader(TensorDataset(x, torch.randn(22, generator=generator)), batch_size=8)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=pl.loggers.CSVLogger(tmp_path),
        callbacks=[Observer()],
        log_every_n_steps=1,
        num_sanity_val_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **strategy,
    )
    trainer.fit(make_module(pl), loader, loader)
    return shown


@pytest.mark.parametrize("tree", TREES)
def test_training_in_microbatches_shows_what_training_on_the_whole_batch_shows(tree, tmp_path):
    pl = import_module(tree)
    expected = logged_by_training(pl, tmp_path)
    got = logged_by_training(pl, tmp_path, strategy=make_strategy(pl, num_microbatches=3))
    assert len(got) == len(expected)
    assert {"both_step", "twice_epoch", "mean_metric_step", "MaxMetric_epoch", "val_error"} <= expected[-1][1].keys()
    for got_metrics, expected_metrics in zip(got, expected, strict=True):
        assert [list(metrics) for metrics in got_metrics] == [list(metrics) for metrics in expected_metrics]
        torch.testing.assert_close(got_metrics, expected_metrics)


# --- Call by call, against Lightning's own collection.


@pytest.fixture(params=TREES)
def results(request):
    connector = import_module(f"{request.param}.trainer.connectors.logger_connector.result")
    return connector._ResultCollection(training=True)


def log_in_microbatches(results, calls, sizes):
    """Make calls of (microbatch, name, value, options) through `MicrobatchLogs`."""
    logs = MicrobatchLogs(results, sizes)
    with logs:
        for microbatch, name, value, options in calls:
            logs.microbatch = microbatch
            results.log("training_step", name, torch.as_tensor(value), **BOTH, **options)


def values(results, on_step):
    return {name: value.item() for name, value in results.metrics(on_step)["log"].items()}


def test_interleaved_calls_are_sorted_by_microbatch(results):
    calls = [(1, "b", 5.0, {}), (0, "a", 1.0, {}), (1, "a", 2.0, {}), (0, "b", 4.0, {}), (0, "a", 10.0, {})]
    log_in_microbatches(results, [*calls, (1, "a", 20.0, {})], sizes=[1, 1])
    assert list(results) == ["training_step.a", "training_step.b"]
    assert values(results, on_step=True) == {"a_step": 15.0, "b_step": 4.5}
    assert values(results, on_step=False) == {"a_epoch": (1.5 + 15.0) / 2, "b_epoch": 4.5}


def test_means_are_weighted_by_microbatch_size(results):
    log_in_microbatches(results, [(0, "a", 1.0, {}), (1, "a", 4.0, {})], sizes=[2, 1])
    log_in_microbatches(results, [(0, "a", 5.0, {}), (1, "a", 5.0, {})], sizes=[3, 3])
    assert values(results, on_step=True) == {"a_step": 5.0}
    assert values(results, on_step=False) == {"a_epoch": (3 * 2.0 + 6 * 5.0) / 9}


def test_a_key_of_some_microbatches_counts_as_one_of_the_whole_batch(results):
    log_in_microbatches(results, [(1, "a", 2.0, {}), (2, "a", 5.0, {})], sizes=[3, 2, 1])
    assert values(results, on_step=True) == {"a_step": 3.0}
    assert results["training_step.a"].cumulated_batch_size == 6


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_given_batch_size_is_the_weight(results, as_tensor):
    sizes = [torch.tensor(size) if as_tensor else size for size in (3, 1)]
    calls = [(0, "a", 1.0, {"batch_size": sizes[0]}), (1, "a", 5.0, {"batch_size": sizes[1]})]
    log_in_microbatches(results, calls, sizes=[50, 50])
    assert values(results, on_step=True) == {"a_step": 2.0}
    assert results["training_step.a"].cumulated_batch_size == 4


def test_values_with_a_batch_size_of_zero_count_only_among_themselves(results):
    none = {"batch_size": 0}
    log_in_microbatches(results, [(0, "a", float("nan"), none), (1, "a", 5.0, {"batch_size": 2})], sizes=[2, 2])
    log_in_microbatches(results, [(0, "a", 1.0, none), (1, "a", 3.0, none)], sizes=[2, 2])
    assert values(results, on_step=True) == {"a_step": 2.0}
    assert values(results, on_step=False) == {"a_epoch": 5.0}


@pytest.mark.parametrize(
    ("reduce_fx", "values_logged", "merged"),
    [
        ("mean", torch.tensor([200, 100], dtype=torch.uint8), 150.0),
        ("sum", torch.tensor([200, 100], dtype=torch.uint8), 300.0),
        ("sum", torch.tensor([True, True]), 2.0),
        ("mean", torch.tensor([True, False]), 0.5),
        ("max", torch.tensor([True, False]), 1.0),
        ("min", torch.tensor([7, 3]), 3.0),
        ("sum", torch.tensor([256.0, 1.0], dtype=torch.bfloat16), 257.0),
        ("mean", torch.tensor([6e4, 6e4], dtype=torch.float16), torch.tensor(6e4, dtype=torch.float16).item()),
        ("mean", torch.tensor([1.0, 1.0 + 2**-40], dtype=torch.float64), 1.0 + 2**-41),
    ],
    ids=str,
)
def test_narrow_types_neither_overflow_nor_round(results, reduce_fx, values_logged, merged):
    calls = [(microbatch, "a", value, {"reduce_fx": reduce_fx}) for microbatch, value in enumerate(values_logged)]
    log_in_microbatches(results, calls, sizes=[4, 4])
    assert values(results, on_step=True) == {"a_step": merged}


def test_values_stay_on_their_device_and_are_never_read():
    class Recorder:
        def log(self, fx, name, value, **options):
            logged.append((value, options["batch_size"]))

    logged = []
    # A meta tensor cannot be read: asking for its number raises.
    for reduce_fx in ("mean", "sum", "max", "min"):
        calls = [(microbatch, "a", torch.ones((), device="meta"), {"reduce_fx": reduce_fx}) for microbatch in (0, 1)]
        log_in_microbatches(Recorder(), calls, sizes=[1, 2])
    assert [(value.device.type, value.ndim, batch_size) for value, batch_size in logged] == [("meta", 0, 3)] * 4


def test_no_graph_is_kept(results):
    calls = [(0, "a", torch.ones((), requires_grad=True) * 2, {"enable_graph": True})]
    log_in_microbatches(results, calls, sizes=[1])
    assert not results["training_step.a"].value.requires_grad


def test_a_metric_without_a_value_for_the_step_gets_none(results):
    metric = SumMetric()
    with MicrobatchLogs(results, [1, 1]) as logs:
        for logs.microbatch in (0, 1):
            metric.update(1.0)
            results.log("training_step", "a", metric, on_step=True, metric_attribute="metric")
    assert values(results, on_step=True) == {}
    assert values(results, on_step=False) == {"a_epoch": 2.0}


def test_a_metric_that_one_microbatch_updates_shows_that_value(results):
    metric = MeanMetric()
    with MicrobatchLogs(results, [1, 1]) as logs:
        metric(3.0)
        results.log("training_step", "a", metric, on_step=True, metric_attribute="metric")
        logs.microbatch = 1
    assert values(results, on_step=True) == {"a_step": 3.0}


def test_a_metric_that_is_no_mean_over_samples_has_the_mean_of_microbatches_in_a_step_and_is_exact_in_the_epoch(
    results,
):
    metric = MeanSquaredError(squared=False)
    with MicrobatchLogs(results, [1, 1]) as logs:
        for logs.microbatch, error in enumerate((1.0, 7.0)):
            metric(torch.tensor([error]), torch.zeros(1))
            results.log("training_step", "a", metric, **BOTH, metric_attribute="metric")
    assert values(results, on_step=True) == {"a_step": 4.0}
    assert values(results, on_step=False) == {"a_epoch": 5.0}


def test_a_metric_whose_values_cannot_be_merged_is_left_to_lightning(results):
    class Pair(Metric):
        full_state_update = False

        def update(self): ...

        def compute(self):
            return {"a": torch.ones(())}

    metric = Pair()
    with MicrobatchLogs(results, [1, 1]) as logs:
        for logs.microbatch in (0, 1):
            metric()
            results.log("training_step", "a", metric, on_step=True, metric_attribute="metric")
    with pytest.raises(ValueError, match="must be a tensor"):
        results.metrics(on_step=True)


def test_different_arguments_for_one_key_raise_as_in_lightning(results):
    calls = [(0, "a", 1.0, {}), (1, "a", 1.0, {"prog_bar": True})]
    with pytest.raises(Exception, match="twice in `training_step` with different arguments"):
        log_in_microbatches(results, calls, sizes=[1, 1])
    assert "log" not in vars(results)


@pytest.mark.parametrize("reduce_fx", ["median", torch.median, lambda values: values[0]])
def test_an_unknown_reduction_raises_as_in_lightning(results, reduce_fx):
    calls = [(microbatch, "a", 1.0, {"reduce_fx": reduce_fx}) for microbatch in (0, 1)]
    with pytest.raises(Exception, match=r"Only `self.log.*are supported"):
        log_in_microbatches(results, calls, sizes=[1, 1])


def test_after_an_error_nothing_is_logged(results):
    def fail():
        results.log("training_step", "a", torch.ones(()))
        raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"), MicrobatchLogs(results, [1, 1]):
        fail()
    assert not results
    results.log("training_step", "a", torch.ones(()))
    assert list(results) == ["training_step.a"]


def test_a_microbatch_reads_what_it_has_logged_itself(results):
    metric = MeanMetric()
    results.log("training_step", "earlier", torch.tensor(7.0), **BOTH)
    with MicrobatchLogs(results, [1, 1]) as logs:
        for microbatch, value in enumerate((1.0, 3.0)):
            logs.microbatch = microbatch
            metric(value)
            results.log("training_step", "a", torch.tensor(value), **BOTH)
            results.log("training_step", "metric", metric, **BOTH)
        for microbatch, value in enumerate((1.0, 3.0)):
            logs.microbatch = microbatch
            assert values(results, on_step=True) == {"earlier_step": 7.0, "a_step": value, "metric_step": value}
    assert values(results, on_step=True) == {"earlier_step": 7.0, "a_step": 2.0, "metric_step": 2.0}


def test_without_a_collection_there_is_nothing_to_do():
    with MicrobatchLogs(None, [1, 1]) as logs:
        logs.microbatch = 1


# --- Under the strategy itself.


class ObserverOfAll:
    """Logs from a callback, and keeps what is shown."""

    def __init__(self):
        self.shown = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.log("from_callback", float(batch_idx), sync_dist=True, **BOTH)
        self.log("own", outputs["loss"], prog_bar=True, sync_dist=True)
        self.shown.append(dict(trainer.progress_bar_metrics))

    def on_train_epoch_end(self, trainer, module):
        self.log("at_end", float(trainer.current_epoch), sync_dist=True)

    def on_train_end(self, trainer, module):
        self.shown.append(dict(trainer.callback_metrics))


class Reading(Model):
    """Looks at its metrics in the step that has logged them, and behind it."""

    def __init__(self):
        super().__init__()
        self.in_steps, self.behind_steps = [], []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        shown = [self.trainer.callback_metrics, self.trainer.logged_metrics]
        self.in_steps.append((loss.item(), *(metrics["loss_step"].item() for metrics in shown), *map(sorted, shown)))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.behind_steps.append(self.trainer.callback_metrics["loss_step"].item())


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_a_step_reads_the_metrics_that_it_has_logged():
    """A step found none of its metrics in the first batch, and those of the batch before in all others."""
    plain, split = Reading(), Reading()
    fit_plain(plain)
    trainer_for(harmony()).fit(split, loader())
    assert all(loss == shown == to_logger for loss, shown, to_logger, *_ in split.in_steps)
    assert sorted(split.in_steps) == sorted(plain.in_steps)
    whole = torch.tensor(plain.behind_steps).unflatten(0, (-1, NUM_MICROBATCHES)).mean(1)
    torch.testing.assert_close(torch.tensor(split.behind_steps), whole)


@pytest.mark.filterwarnings("ignore:.*microbatches' losses")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.devices(1, 2)
def test_harmony_shows_what_training_on_the_whole_batch_shows(tree, tmp_path):
    pl = import_module(tree)
    observer = type("Observer", (ObserverOfAll, pl.Callback), {})
    shown = []
    generator = torch.Generator().manual_seed(1)
    # The last batch is ragged, and so are the microbatches of each.
    data = TensorDataset(torch.randn(21, 4, generator=generator), torch.randn(21, generator=generator))
    for strategy in ("auto", classes_of(tree).HarmonyStrategy(num_microbatches=3)):
        callback = observer()
        trainer = pl.Trainer(
            strategy=strategy,
            devices=1 if strategy == "auto" else same_training.default_devices,
            max_epochs=2,
            accelerator="cpu",
            logger=pl.loggers.CSVLogger(tmp_path),
            callbacks=[callback],
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(make_module(pl), DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
        shown.append(callback.shown)
    expected, got = shown
    assert {
        "both_step",
        "mean_metric_epoch",
        "MaxMetric_step",
        "val_error",
        "from_callback_epoch",
        "own",
        "at_end",
    } <= (expected[-1].keys())
    assert [list(metrics) for metrics in got] == [list(metrics) for metrics in expected]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


class Talks(nets.Block):
    """Has its module log what it computes, as it computes it."""

    def forward(self, x):
        x = super().forward(x)
        log = self.listener[0].log
        log("count", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)
        log("largest", x.detach().max(), reduce_fx="max", on_step=True, on_epoch=True)
        log("mean", x.detach().mean())
        return x


def make_talking(kind):
    torch.manual_seed(0)
    module = kind()
    module.net.blocks[1] = Talks()
    module.net.blocks[1].listener = [module]
    return module


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("kind", [Model, Manual])
@pytest.mark.parametrize("memory", [CAPACITY, None], ids=["some", "all"])
@pytest.mark.devices(1, 2)
def test_what_a_layer_logs_is_logged_once(kind, memory):
    """The recompute in the backward logged it again, apart, and that was what was shown."""
    manual, shown = kind is Manual, []
    for strategy in ("auto", harmony(device_memory=memory, num_microbatches=1 if manual else NUM_MICROBATCHES)):
        is_plain = strategy == "auto" and not manual
        size = BATCH_SIZE // NUM_MICROBATCHES if is_plain else BATCH_SIZE
        trainer = trainer_for(strategy, accumulate_grad_batches=NUM_MICROBATCHES if is_plain else 1)
        trainer.fit(make_talking(kind), loader(size))
        shown.append(trainer.callback_metrics)
    plain, swapped = shown
    names = ("count", "largest_epoch") if not manual else ("count", "largest_epoch", "largest_step", "mean")
    assert {name: plain[name] for name in names} == {name: swapped[name] for name in names}
    assert plain["count"] == NUM_STEPS * (1 if manual else NUM_MICROBATCHES)


class Logs(nets.Block):
    """Has been given a way to log, as nested modules are."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def forward(self, x):
        x = super().forward(x)
        self.log("count", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)
        return x


def by_log_dict(module):
    return lambda name, value, **options: module.log_dict({name: value}, **options)


def by_trainer(module):
    def log(*args, **options):
        module.trainer.lightning_module.log(*args, **options)

    return log


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("num_microbatches", [1, NUM_MICROBATCHES])
@pytest.mark.parametrize(
    "way",
    [lambda module: module.log, lambda module: partial(module.log, prog_bar=True), by_log_dict, by_trainer],
    ids=["bound method", "partial", "log_dict", "trainer"],
)
def test_what_a_layer_logs_is_logged_once_by_whatever_way(way, num_microbatches):
    """Only the module's attribute `log` was replaced while a layer was recomputed: a bound method logged again."""
    counts = []
    for strategy, more in (
        ("auto", {"accumulate_grad_batches": num_microbatches}),
        (harmony(device_memory=CAPACITY, num_microbatches=num_microbatches), {}),
    ):
        torch.manual_seed(0)
        module = Model()
        module.net.blocks[1] = Logs(way(module))
        trainer = trainer_for(strategy, **more)
        trainer.fit(module, loader(BATCH_SIZE // num_microbatches if strategy == "auto" else BATCH_SIZE))
        counts.append(trainer.callback_metrics["count"].item())
        assert "log" not in vars(trainer.fit_loop.epoch_loop._results)
    assert counts[0] == counts[1] == NUM_STEPS * num_microbatches

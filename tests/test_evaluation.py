"""Validation, test and prediction: a batch runs whole where it fits, else in microbatches; its output is one either way."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from queue import Queue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_harmony.engine.devices.virtual_device import VirtualDevice
from lightning_harmony.errors import CapacityError
from support import nets
from support.evaluating import BATCH_SIZE, NUM_BATCHES, TIGHT, Evaluated, batches
from support.lightning_fits import Model, assert_equal, assert_same, harmony, trainer_for, values
from support.same_training import assert_within

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*exceeds the device's memory in .*is run again in"),
]


class Outputs(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.seen.append(outputs)

    on_test_batch_end = on_validation_batch_end


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("loop", "inference_mode", "devices"),
    [("validate", True, 1), ("test", False, 1), ("validate", True, 2), ("test", False, 2)],
)
def test_a_batch_that_is_too_large_logs_and_returns_what_the_whole_would(
    loop: str, inference_mode: bool, devices: int
) -> None:
    results = []
    for strategy, number in (("auto", 1), (harmony(**TIGHT), devices)):
        module, outputs = Evaluated(), Outputs()
        trainer = trainer_for(strategy, callbacks=[outputs], inference_mode=inference_mode, devices=number)
        (metrics,) = getattr(trainer, loop)(module, batches(rest=5), verbose=False)
        results.append((metrics, outputs.seen, module.lengths))
    (expected, expected_outputs, whole), (found, found_outputs, lengths) = results
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_outputs, expected_outputs, rtol=1e-5, atol=1e-6)
    assert found["num_samples"] == NUM_BATCHES * BATCH_SIZE + 5
    # The last one fits as it is.
    assert whole == [64, 64, 64, 5]
    assert lengths == [8] * 24 + [5]


class Looks(Model):
    """Notes what weights may take of the device."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        (device,) = self.trainer.strategy._swapped.engine.devices
        self.limits.append(device.lasting_limit_bytes)
        return self(batch)


@pytest.mark.cpu
def test_weights_that_come_ahead_leave_what_a_batch_takes_the_memory_that_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU's memory went from the one to the other and back with each layer."""
    monkeypatch.setattr(VirtualDevice, "pools_apart", True)
    module = Looks()
    module.net, module.limits = nets.Language(num_blocks=8), []
    trainer_for(harmony(device_memory="56KiB")).predict(module, DataLoader(nets.tokens(24), batch_size=8))
    first, *others = module.limits
    assert first is None
    assert len(set(others)) == 1
    assert 8 << 10 < others[0] < 48 << 10


@pytest.mark.cpu
def test_weights_that_an_evaluation_has_passed_make_way_at_once() -> None:
    """They filled the memory, and what came, in their place, found it in pieces: a GPU's allocator began anew each time."""
    module, seen = Model(), list[int]()
    module.net = nets.Language(num_blocks=12)
    trainer = trainer_for(harmony(device_memory="300KiB"))

    def look(*args: Any) -> None:
        (residents,) = trainer.strategy._swapped.engine._placement.residents
        seen.append(sum(pack.residency is not None for pack in residents.packs))

    for block in module.net.blocks:
        block.register_forward_pre_hook(look)
    trainer.predict(module, DataLoader(nets.tokens(16), batch_size=8))
    # The first batch is measured, layer by layer. Then two packs come beside the one that runs.
    assert seen == [1] * 12 + [3] * 12


@pytest.mark.devices(1, 2)
def test_a_model_that_is_larger_than_the_memory_validates_tests_and_predicts_as_in_plain_lightning() -> None:
    module = Model()
    module.net = nets.Language(num_blocks=16)
    # Two devices together are too small as well.
    assert sum(p.numel() * p.element_size() for p in module.parameters()) > 2 * 56 * 1024
    data = DataLoader(nets.tokens(24), batch_size=8)
    plain, swapped = trainer_for("auto"), trainer_for(harmony(device_memory="56KiB"))
    for loop in ("validate", "test"):
        assert_equal(*(getattr(trainer, loop)(module, data, verbose=False) for trainer in (plain, swapped)))
    assert_equal(plain.predict(module, data), swapped.predict(module, data))


@pytest.mark.devices(1, 2)
def test_a_prediction_that_differentiates_its_input_is_that_of_plain_lightning() -> None:
    """Layers are run again for it where Lightning keeps no results: saliency maps, forces as gradients of energies."""

    class Salient(Model):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = self.net.embed(batch).detach().requires_grad_()
            with torch.enable_grad():
                y = x
                for block in self.net.blocks:
                    y = block(y)
                return torch.autograd.grad(y.square().sum(), x)[0]

    module = Salient()
    module.net = nets.Language(num_blocks=16)
    data = DataLoader(nets.tokens(24), batch_size=8)
    strategies = ("auto", harmony(device_memory="56KiB"))
    assert_equal(*(trainer_for(strategy, inference_mode=False).predict(module, data) for strategy in strategies))


CALLS: list[int] = []


class Notes(nets.Block):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(len(CALLS))
        return super().forward(x) * (1 + 0.01 * len(CALLS))


class LooksAround(Model):
    """Differentiates its input wherever a user may look at a model, and not in a step alone."""

    def __init__(self, *, is_manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not is_manual
        self.net.blocks = torch.nn.ModuleList(Notes() for _ in range(4))
        self.slopes: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def look(self, *args: Any) -> None:
        with torch.enable_grad():
            x = torch.ones(2, nets.WIDTH, device=self.device, requires_grad=True)
            self.slopes += torch.autograd.grad(self.net.body(x).square().sum(), x)

    on_train_start = on_train_batch_end = on_validation_epoch_end = look

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.look()


@pytest.mark.parametrize("is_manual", [False, True])
def test_what_layers_count_counts_once_where_a_backward_runs_them_again_outside_of_training_steps(
    is_manual: bool,
) -> None:
    """In hooks, unless a training step of automatic optimization was before, and in evaluations, it counted twice."""
    modules, calls = [], []
    data = DataLoader(nets.tokens(16), batch_size=8)
    for strategy in ("auto", harmony(num_microbatches=1, device_memory="80KiB")):
        CALLS.clear()
        module = LooksAround(is_manual=is_manual)
        trainer_for(strategy, inference_mode=False, max_epochs=2).fit(module, data, data)
        modules.append(module)
        calls.append(len(CALLS))
    assert calls[0] == calls[1]
    assert_equal(*(module.slopes for module in modules))


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: Any = None

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, number: int, loader: int
    ) -> None:
        self.batches.append((prediction, list(indices), batch, number, loader))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch = predictions, indices


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("memory", [TIGHT, {"device_memory": "1MiB"}], ids=["split", "whole"])
def test_a_prediction_writer_sees_one_output_for_each_batch(memory: Any, devices: int) -> None:
    writers = []
    for strategy, number in (("auto", 1), (harmony(**memory), devices)):
        module, writer = Evaluated(), Writer()
        returned = trainer_for(strategy, callbacks=[writer], devices=number).predict(module, batches(rest=5))
        writers.append((writer.batches, writer.epoch, returned))
    tolerance = 1e-5 if memory is TIGHT else 0.0
    torch.testing.assert_close(writers[1], writers[0], rtol=tolerance, atol=tolerance)
    assert len(writers[1][0]) == NUM_BATCHES + 1


@pytest.mark.cpu
def test_what_a_failed_attempt_left_is_taken_back_and_there_is_only_one() -> None:
    class Eager(Evaluated):
        """Logs, counts and draws before it runs the network."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
            attempts.put(len(batch))
            self.seen += len(batch)
            self.mean.update(float(len(batch)))
            self.log("early", float(len(batch)), reduce_fx="sum")
            torch.rand(())
            return self.evaluate(batch)

    class Random(Callback):
        def on_validation_batch_start(self, *args: Any) -> None:
            self.state = torch.get_rng_state()

        def on_validation_batch_end(self, *args: Any) -> None:
            assert_equal(torch.get_rng_state(), self.state)

    # What other threads may change, too, is not taken back.
    attempts: Queue[int] = Queue()
    module = Eager()
    (metrics,) = trainer_for(harmony(**TIGHT), callbacks=[Random()]).validate(module, batches(), verbose=False)
    assert [attempts.get() for _ in range(attempts.qsize())] == [64] + [8] * 24
    assert module.lengths == [8] * 24
    assert metrics["early"] == metrics["num_samples"] == module.seen == NUM_BATCHES * BATCH_SIZE


@pytest.mark.cpu
def test_the_split_of_a_batch_is_said_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_for(harmony(**TIGHT)).validate(Evaluated(), batches(), verbose=False)
        trainer_for(harmony(device_memory="1MiB")).validate(Evaluated(), batches(), verbose=False)
    found = [str(warning.message) for warning in caught if "run again" in str(warning.message)]
    assert len(found) == 1
    assert "64 samples" in found[0]
    assert "8 microbatches" in found[0]


def test_what_a_split_prediction_draws_does_not_depend_on_the_capacity() -> None:
    class Noisy(Evaluated):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
            x = self.net.embed(batch)
            for block in self.net.blocks:
                x = block(x + torch.rand_like(x))
            return x

    found = []
    for memory in ("160KiB", "176KiB", "160KiB"):
        torch.manual_seed(3)
        module = Noisy()
        torch.manual_seed(3)
        found.append(trainer_for(harmony(device_memory=memory, num_microbatches=8)).predict(module, batches()))
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])
    # Every batch and microbatch draws its own.
    rows = torch.cat(found[0])
    assert len(rows.unique(dim=0)) == len(rows)


@pytest.mark.cpu
def test_an_evaluation_that_other_nodes_have_heard_of_does_not_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did, and what the nodes exchange next would have been of different steps."""
    monkeypatch.setattr("lightning_harmony.microbatches.snapshot.num_collectives", count().__next__)
    with pytest.raises(CapacityError):
        trainer_for(harmony(**TIGHT)).validate(Evaluated(), batches(), verbose=False)


@pytest.mark.cpu
@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_a_step_that_takes_no_number_of_its_batch_is_split_and_each_batch_draws_its_own(loop: str) -> None:
    """The number was taken for granted: an evaluation that had to be split failed."""

    class Numberless(Evaluated):
        def validation_step(self, batch: Tensor) -> Tensor:
            self.drawn.append(torch.rand(len(batch), device=batch.device))
            return self(batch[:, :-1])

        test_step = predict_step = validation_step

    module = Numberless()
    module.drawn = []
    getattr(trainer_for(harmony(**TIGHT)), loop)(module, batches(), **({} if loop == "predict" else {"verbose": False}))
    assert list(map(len, module.drawn)) == [8] * 24
    assert len(torch.cat(module.drawn).unique()) == NUM_BATCHES * BATCH_SIZE


@dataclass
class Prediction:
    logits: Tensor
    norm: Tensor


UNSPLIT: dict[str, Callable[[Tensor], Any]] = {
    "scalar": lambda logits: logits.mean(),
    "number": lambda logits: {"rows": len(logits), "norm": float(logits.norm())},
    "dataclass": lambda logits: Prediction(logits, logits.norm()),
    "object": lambda logits: object(),
    "other-rows": lambda logits: logits[: len(logits) // 2],
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", UNSPLIT)
@pytest.mark.parametrize("fits", [False, True])
def test_a_prediction_that_cannot_be_merged_needs_room_for_the_whole_batch(name: str, fits: bool) -> None:
    class Unsplit(Model):
        def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
            return UNSPLIT[name](self(batch[:, :-1]))

    trainer = trainer_for(harmony(**(TIGHT | ({"device_memory": "1MiB"} if fits else {}))))
    if fits:
        assert len(trainer.predict(Unsplit(), batches())) == NUM_BATCHES
    else:
        with pytest.raises(CapacityError, match=r"64 samples exceeds .* in predict_step, and cannot be split"):
            trainer.predict(Unsplit(), batches())


@pytest.mark.cpu
@pytest.mark.parametrize("arguments", [{"num_microbatches": 1}, {"num_microbatches": None, "microbatch_size": 64}])
def test_a_batch_that_may_not_be_split_must_fit(arguments: Any) -> None:
    with pytest.raises(CapacityError, match="HarmonyStrategy"):
        trainer_for(harmony(**(TIGHT | arguments))).validate(Evaluated(), batches(), verbose=False)


@pytest.mark.nightly
def test_a_fit_with_a_validation_that_is_split_trains_as_one_without_and_after_any_evaluation() -> None:
    train = DataLoader(nets.tokens(48), batch_size=16)

    def fit(module: Any, *validation: Any) -> Any:
        trainer = trainer_for(harmony(**TIGHT), max_epochs=2)
        trainer.fit(module, train, *validation)
        return trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = fit(Evaluated())
    within = fit(Evaluated(), batches())
    assert_same(alone, within)
    used = Evaluated()
    trainer_for(harmony(**TIGHT)).predict(used, batches())
    assert_equal(values(used), values(Evaluated()))
    assert_same(alone, fit(used, batches()))
    assert_within([within.strategy.step_report], "160KiB")


def test_batches_of_several_loaders_are_split_each() -> None:
    class Two(Evaluated):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
            self.log("loss", self.loss(batch))

    results = [
        trainer_for(strategy).validate(Two(), [batches(), batches(rest=7)], verbose=False)
        for strategy in ("auto", harmony(**TIGHT))
    ]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


class Iterating(Model):
    def validation_step(self, dataloader_iter: Any) -> None:
        batch, _, _ = next(dataloader_iter)
        self.log("val_loss", self.loss(batch.to(self.device)), batch_size=len(batch))


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_an_iterator_over_batches_gives_what_it_gives_in_plain_lightning() -> None:
    loader = DataLoader(nets.tokens(), batch_size=8)
    plain, swapped = (trainer_for(s).validate(Iterating(), loader, verbose=False) for s in ("auto", harmony()))
    assert swapped == plain


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_an_iterator_over_batches_is_not_split() -> None:
    with pytest.raises(CapacityError):
        trainer_for(harmony(**TIGHT)).validate(Iterating(), batches(), verbose=False)


class Gathering(torch.nn.LSTM):
    """Leaves its weights in one memory, as `torch.nn.LSTM` does on GPUs where it finds them elsewhere: here in each call."""

    def forward(self, x: Tensor, hx: Any = None) -> Any:
        weights = list(self.parameters())
        memory = torch.cat([weight.detach().flatten() for weight in weights])
        with torch.no_grad():
            for weight, part in zip(weights, memory.split([weight.numel() for weight in weights]), strict=True):
                weight.set_(part.view_as(weight))
        return super().forward(x, hx)


class Recurrent(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Gathering(nets.WIDTH, nets.WIDTH, batch_first=True) for _ in range(2))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        x = self.net.embed(batch)
        for layer in self.layers:
            x, _ = layer(x)
        return x


@pytest.mark.parametrize("inference_mode", [True, False])
def test_recurrent_layers_whose_weights_cudnn_gathers_predict(inference_mode: bool) -> None:
    # In inference mode that counted as a change of the weights in the forward, and each evaluation on a GPU was refused.
    torch.manual_seed(1)
    module, loader = Recurrent(), DataLoader(nets.tokens(64), batch_size=16)
    plain, ours = (
        trainer_for(strategy, inference_mode=inference_mode).predict(copy.deepcopy(module), loader)
        for strategy in ("auto", harmony(device_memory=None))
    )
    assert len(plain) == 4
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))


class Permuted(Model):
    """A weight's products with what lies in memory in another order, in a layer and between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own = torch.nn.Linear(4, 1), torch.nn.Parameter(torch.randn(1, 4))
        self.bias = torch.nn.Parameter(torch.randn(1))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        x = self.net.embed(batch)[:, :4].transpose(1, 2)
        without = F.linear(x, self.own.detach(), self.bias.detach())
        return torch.stack([self.layer(x), F.linear(x, self.own), F.linear(x, self.own, self.bias), without])


@pytest.mark.parametrize("inference_mode", [True, False])
def test_predictions_are_those_of_plain_lightning_bit_for_bit(inference_mode: bool) -> None:
    # In inference mode, what counts allocations was told of whole products, and ran them as for weights without gradients.
    torch.manual_seed(1)
    module, loader = Permuted(), DataLoader(nets.tokens(64), batch_size=16)
    plain, ours = (
        trainer_for(strategy, inference_mode=inference_mode).predict(copy.deepcopy(module), loader)
        for strategy in ("auto", harmony(num_microbatches=2))
    )
    assert len(plain) == 4
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))

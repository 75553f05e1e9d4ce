"""The same on a GPU, against plain Lightning on the GPU."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_harmony import HarmonyMonitor, HarmonyPrecision, HarmonyStrategy
from lightning_harmony.engine.devices.cuda_device import CudaDevice
from lightning_harmony.engine.devices.stream import CudaStream, OnCudaStream
from lightning_harmony.engine.model.disk_store import folder_of
from lightning_harmony.plan.drawing.recording import read_recording
from lightning_harmony.plan.values.task import Phase
from support import device_updates as updates
from support import nets
from support.cases import NETS, OPTIMIZERS, SUMMED_IN_ANOTHER_ORDER
from support.compilations import Compilations
from support.evaluating import TIGHT, Evaluated, batches
from support.half_precision import Scales, train_reference
from support.lightning_fits import harmony
from support.lightning_fits import trainer_for as quiet_trainer
from support.same_training import Gradients, Net, assert_close, compare, train_harmony, train_plain, trainer_for
from support.small_host import BUDGET, OF_WEIGHTS, Blocks
from support.small_host import SAMPLES as OF_BLOCKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    # The mask of one of the networks depends on the size of the batch.
    pytest.mark.filterwarnings("ignore:the loss of 2 samples:UserWarning"),
]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def build(net: str) -> Net:
    torch.manual_seed(0)
    return Net({**NETS, **SUMMED_IN_ANOTHER_ORDER}[net](), OPTIMIZERS["sgd"])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("net", ["plain", "frozen", "rich", "own-parameters", "dropout", "spectral-norm"])
def test_training_is_that_of_plain_lightning_on_the_gpu(net: str, precision: Any) -> None:
    module = build(net)
    options = {"accelerator": "gpu", "precision": precision}
    # One microbatch goes on with the caller's random stream, so that even dropout's masks are plain Lightning's.
    num_microbatches = 1 if net == "dropout" else 4
    plain = train_plain(copy.deepcopy(module), nets.tokens(), num_microbatches, 8, **options)
    strategy = HarmonyStrategy(num_microbatches=num_microbatches)
    harmony = train_harmony(copy.deepcopy(module), nets.tokens(), strategy, 8, with_gradients=True, **options)
    compare(plain, harmony)


@pytest.mark.parametrize("net", ["plain", "rich"])
def test_16_mixed_scales_and_skips_on_the_gpu_as_plain_lightning_does(net: str) -> None:
    module = build(net)
    init_scale = 2.0**14
    runs = []
    for strategy, num_batches in (("auto", 4), (HarmonyStrategy(num_microbatches=4, device_memory="64MiB"), 1)):
        plugin = MixedPrecision(
            "16-mixed", "cuda", torch.amp.GradScaler("cuda", init_scale=init_scale, growth_interval=1)
        )
        scales, gradients = Scales(num_batches), Gradients()
        trainer = trainer_for(
            strategy,
            -1,
            [scales, gradients],
            accelerator="gpu",
            plugins=plugin,
            accumulate_grad_batches=num_batches,
            max_epochs=1,
        )
        trainer.fit(copy.deepcopy(module), DataLoader(nets.tokens(96), batch_size=8 // num_batches))
        runs.append((scales, gradients))
    (plain, plain_gradients), (harmony, harmony_gradients) = runs
    assert trainer.scaler._scale.device.type == "cpu"
    for ours, theirs in zip(harmony_gradients.steps, plain_gradients.steps, strict=True):
        for name, gradient in theirs.items():
            assert_close(name, gradient, ours[name], 0.0)
    assert harmony.scales == plain.scales
    assert any(after < before for before, after in pairwise(plain.scales)), "no step was skipped"
    assert_close("weights", plain.weights[-1].cpu(), harmony.weights[-1].cpu(), 0.0)


@pytest.mark.parametrize("net", ["plain", "frozen", "rich", "own-parameters", "dropout"])
def test_bf16_compute_is_a_bfloat16_copy_on_the_gpu_with_float32_masters_on_the_host(net: str) -> None:
    module = build(net)
    expected = train_reference(copy.deepcopy(module), nets.tokens(), 4, 8, device="cuda")
    strategy = HarmonyStrategy(num_microbatches=4, device_memory="64MiB")
    options = {"accelerator": "gpu", "plugins": HarmonyPrecision("bf16-compute")}
    harmony = train_harmony(copy.deepcopy(module), nets.tokens(), strategy, 8, with_gradients=True, **options)
    compare(expected, harmony)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "16-true"])
def test_true_precisions_train_as_plain_lightning_on_the_gpu(precision: Any) -> None:
    module = build("plain")
    options = {"accelerator": "gpu", "precision": precision}
    plain = train_plain(copy.deepcopy(module), nets.tokens(), 4, 8, **options)
    strategy = HarmonyStrategy(num_microbatches=4, device_memory="64MiB")
    harmony = train_harmony(copy.deepcopy(module), nets.tokens(), strategy, 8, with_gradients=True, **options)
    compare(plain, harmony)


# Dynamo of torch 2.11 asks inputs for their gradients, and the compiler recommends another arithmetic.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:TensorFloat32")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("compiled_by", ["user", "strategy"])
def test_compiled_layers_have_the_gradients_of_plain_lightning_and_are_compiled_once(
    compiled_by: str, precision: Any
) -> None:
    torch._dynamo.reset()
    compiled, module = build("plain"), build("plain")
    for block in compiled.net.blocks:
        block.compile()
    if compiled_by == "user":
        for block in module.net.blocks:
            block.compile()
    else:
        compiled.net.embed.compile()
        compiled.net.head.compile()
    options = {"accelerator": "gpu", "precision": precision}
    plain = train_plain(compiled, nets.tokens(), 4, 8, **options)
    strategy = HarmonyStrategy(
        num_microbatches=4, device_memory="64MiB", compile_layers=compiled_by == "strategy", update="deferred"
    )
    compilations = Compilations()
    harmony = train_harmony(
        module, nets.tokens(), strategy, 8, with_gradients=True, more_callbacks=[compilations], **options
    )
    assert compilations.frames == [compilations.frames[0]] * 3
    compare(plain, harmony)


@pytest.mark.parametrize(
    "net", ["plain", "dropout", "skipped", "reordered", "tied", "tied-by-code", "used-twice", "regularized"]
)
def test_the_result_does_not_depend_on_the_capacity(net: str) -> None:
    module = build(net)
    runs = [
        train_harmony(
            copy.deepcopy(module),
            nets.tokens(),
            HarmonyStrategy(num_microbatches=4, device_memory=capacity, update=update),
            8,
            with_gradients=False,
            accelerator="gpu",
        )
        for capacity, update in ((None, "deferred"), ("64MiB", "auto"), ("150KiB", "auto"))
    ]
    for other in runs[1:]:
        compare(runs[0], other)


@pytest.mark.parametrize("stream", ["swap_in", "swap_out", "update"])
def test_slowing_a_stream_changes_no_bit(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_harmony.engine.devices import stream as streams

    module = build("dropout")

    def train() -> Any:
        strategy = HarmonyStrategy(num_microbatches=4, device_memory="150KiB")
        return train_harmony(copy.deepcopy(module), nets.tokens(), strategy, 8, with_gradients=False, accelerator="gpu")

    expected = train()
    if stream == "update":
        submit = streams.HostStream.submit
        monkeypatch.setattr(
            streams.HostStream,
            "submit",
            lambda s, work, *others, **named: submit(s, lambda: (time.sleep(0.01), work())[1], *others, **named),
        )
    else:
        original = streams.CudaStream.submit

        def slow(self: Any, work: Any, after: Any = ()) -> Any:
            return original(self, lambda: (torch.cuda._sleep(2_000_000), work())[1], after)

        monkeypatch.setattr(streams.CudaStream, "submit", slow)
    compare(expected, train())


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class Strays(nets.Language):
    """Between two layers with dropout, which may be of one pack, its glue draws random numbers on the first GPU."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.register_buffer("shift", torch.ones(nets.WIDTH))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + torch.nn.functional.dropout(self.shift, 0.5, self.training)
        return x


@needs_two
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "net",
    [
        *("plain", "dropout", "skipped", "reordered", "tied-by-code", "used-twice", "own-parameters", "regularized"),
        "strays",
    ],
)
def test_the_number_of_gpus_changes_no_bit(net: str, precision: Any) -> None:
    """Nor a dropout mask: a lane's random stream follows it from GPU to GPU."""
    torch.manual_seed(0)
    module = Net(Strays(), OPTIMIZERS["sgd"]) if net == "strays" else build(net)
    counts = [count for count in (1, 2, 4) if count <= torch.cuda.device_count()]
    runs = [
        train_harmony(
            copy.deepcopy(module),
            nets.tokens(),
            HarmonyStrategy(num_microbatches=4, device_memory="1MiB"),
            8,
            with_gradients=False,
            accelerator="gpu",
            precision=precision,
            devices=count,
        )
        for count in counts
    ]
    for run in runs:
        run.losses = [loss for at in range(0, 12, 4) for loss in sorted(run.losses[at : at + 4])]
    for run in runs[1:]:
        compare(runs[0], run)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.parametrize("reuse", ["visit", "none"])
@pytest.mark.parametrize(
    ("devices", "parallel"),
    [(1, "pipeline"), pytest.param(2, "pipeline", marks=needs_two), pytest.param(2, "data", marks=needs_two)],
)
def test_how_long_packs_stay_changes_no_bit(devices: int, parallel: Any, reuse: Any) -> None:
    """Sums of gradients that come and go are copied beside the computing that adds to them."""
    module = build("dropout")

    def train(**given: Any) -> tuple[Any, Any]:
        strategy = HarmonyStrategy(device_memory="150KiB", parallel=parallel, **given)
        options: Any = {"with_gradients": False, "accelerator": "gpu", "devices": devices}
        run = train_harmony(copy.deepcopy(module), nets.tokens(), strategy, 8, **options)
        run.losses = [loss for at in range(0, 12, 4) for loss in sorted(run.losses[at : at + 4])]
        return run, strategy.plan

    expected, plan = train(num_microbatches=4)
    less = {"first_fused": len(plan.visits), "kept": frozenset(), "lookahead": 0, "profile": None, "predicted": None}
    run, used = train(plan=replace(plan, reuse=reuse, **less))
    assert used.reuse == reuse
    compare(expected, run)


@needs_two
def test_microbatches_spread_over_gpus_are_reproducible_and_differ_by_rounding_only() -> None:
    module = build("dropout")

    def train(devices: int) -> Any:
        strategy = HarmonyStrategy(num_microbatches=4, parallel="data")
        return train_harmony(
            copy.deepcopy(module),
            nets.tokens(),
            strategy,
            8,
            with_gradients=False,
            accelerator="gpu",
            devices=devices,
        )

    def in_order(training: Any) -> Any:
        training.losses = [loss for at in range(0, 12, 4) for loss in sorted(training.losses[at : at + 4])]
        return training

    first = in_order(train(2))
    compare(first, in_order(train(2)))
    compare(in_order(train(1)), first, 1e-5)


def _after_a_while(work: Any) -> Any:
    def late(*args: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return work(*args, **options)

    return late


@pytest.mark.parametrize("clip", [0.01, 100.0, None])
def test_an_update_under_the_next_forward_changes_no_bit(clip: float | None) -> None:
    """Of three runs, the first finishes each update before the next batch, and the last updates slowly."""
    from lightning_harmony.engine.updates import postponed, streamed_update

    def finishing(ask: Any) -> Any:
        return lambda self, *args, **options: (ask(self, *args, **options), self.finish())[1]

    def train(name: str) -> Any:
        module = build("plain")
        strategy = HarmonyStrategy(num_microbatches=4, device_memory="150KiB")
        # The first two are timed before updates may outlast a step, and the last waits.
        trainer = trainer_for(strategy, 5, [], accelerator="gpu", gradient_clip_val=clip)
        with pytest.MonkeyPatch.context() as patch:
            update = streamed_update.StreamedUpdate.update
            for ask in ("start", "follow") if name == "at once" else ():
                patch.setattr(postponed.PostponedUpdate, ask, finishing(getattr(postponed.PostponedUpdate, ask)))
            if name == "slow":
                patch.setattr(streamed_update.StreamedUpdate, "update", _after_a_while(update))
            trainer.fit(module, DataLoader(nets.tokens(), batch_size=8))
        return module.state_dict()

    expected = train("at once")
    for name in ("as it comes", "slow"):
        assert all(torch.equal(value, expected[key]) for key, value in train(name).items()), name


class Stateful(Net):
    """Has a metric, and a tensor that only its own `to` moves."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(NETS["plain"]())
        self.metric, self.factor = MeanMetric(), torch.ones(())

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.factor = self.factor.to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        devices = {batch.device, self.device, self.factor.device, self.metric.device, next(self.parameters()).device}
        assert devices == {torch.device("cuda", 0)}
        loss = super().training_step(batch, batch_idx) * self.factor
        self.metric(loss.detach())
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        return loss


def test_state_that_only_to_moves_is_on_the_gpu_during_the_fit_and_on_the_host_after_it() -> None:
    module = Stateful()
    strategy = HarmonyStrategy(num_microbatches=2)
    train_harmony(module, nets.tokens(), strategy, 8, with_gradients=False, accelerator="gpu")
    assert {module.device.type, module.factor.device.type, module.metric.device.type} == {"cpu"}


@pytest.mark.filterwarnings("ignore:.*is run again in")
def test_an_evaluation_that_exceeds_the_capacity_gives_what_a_larger_one_does() -> None:
    found = []
    for memory in ("64MiB", TIGHT["device_memory"]):
        trainer = quiet_trainer(harmony(**(TIGHT | {"device_memory": memory})), accelerator="gpu")
        (metrics,) = trainer.validate(Evaluated(), batches(), verbose=False)
        predicted = trainer.predict(Evaluated(), batches())
        found.append((metrics, predicted))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_the_check_of_the_split_leaves_no_trace_on_the_gpu() -> None:
    found = []
    for reduction in (None, "mean"):
        strategy = HarmonyStrategy(num_microbatches=4, loss_reduction=reduction)
        module = build("dropout")
        found.append(train_harmony(module, nets.tokens(), strategy, 8, with_gradients=False, accelerator="gpu"))
        assert len(module.losses) == 12
    compare(*found)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=needs_two)])
@pytest.mark.parametrize("parallel", ["pipeline", "data"])
def test_a_step_is_recorded_by_the_clocks_of_the_gpus_and_changes_no_bit(
    parallel: Any, devices: int, tmp_path: Path
) -> None:
    found = []
    for callbacks in ([], [HarmonyMonitor(trace_step=2, dirpath=tmp_path)]):
        strategy = HarmonyStrategy(num_microbatches=4, device_memory="64MiB", parallel=parallel)
        trainer = trainer_for(strategy, -1, callbacks, accelerator="gpu", devices=devices, max_epochs=1)
        module = build("plain")
        trainer.fit(module, DataLoader(nets.tokens(), batch_size=8))
        found.append({name: value.cpu() for name, value in module.state_dict().items()})
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    recording, report = read_recording(tmp_path / "step-2.json"), trainer.strategy.step_report
    assert report is not None
    for device in recording.measured.devices:
        computed = [span for span in device.spans if span.stream == "compute"]
        assert {span.task.kind for span in computed} == set(Phase)
        # To the half microsecond that events are told apart by.
        assert all(before.end_seconds <= after.start_seconds + 1e-6 for before, after in pairwise(computed))
        assert 0 < device.compute_seconds <= recording.measured.seconds
        # With what earlier tests left, such as the work space of libraries.
        assert device.peak_bytes > 0
    for kind in ("weights", "gradients", "stash"):
        arrived = sum(device.swapped_in_bytes.get(kind, 0) for device in recording.measured.devices)
        left = sum(device.swapped_out_bytes.get(kind, 0) for device in recording.measured.devices)
        assert (arrived, left) == (report.swapped_in_bytes[kind], report.swapped_out_bytes[kind])
    transferred = sum(device.transferred_bytes for device in recording.measured.devices)
    assert transferred == report.transferred_bytes


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
def test_how_busy_a_gpu_is_lies_between_nothing_and_all(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(
        harmony(device_memory="64MiB"),
        accelerator="gpu",
        devices=1,
        callbacks=[HarmonyMonitor()],
        logger=logger,
        log_every_n_steps=1,
    )
    trainer.fit(build("plain"), DataLoader(nets.tokens(), batch_size=8))
    (busy,) = trainer.strategy.step_report.busy
    assert 0 < busy <= 1


def test_what_cublas_keeps_for_the_lanes_is_taken_before_the_first_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came when microbatches first took turns, on a card that a plan had filled: cuBLAS found no memory."""
    taken: list[tuple[str, int]] = []
    prepare = CudaDevice.prepare_thread

    def count(device: CudaDevice) -> None:
        before = device.allocated_bytes()
        prepare(device)
        taken.append((threading.current_thread().name, device.allocated_bytes() - before))

    monkeypatch.setattr(CudaDevice, "prepare_thread", count)
    strategy = harmony(device_memory="256KiB", num_microbatches=4)
    train_harmony(build("plain"), nets.tokens(), strategy, 8, with_gradients=False, accelerator="gpu")
    assert [name for name, _ in taken] == [f"harmony-lane-{number}" for number in range(4)]
    assert min(num_bytes for _, num_bytes in taken) > 0


def test_torchs_allocator_makes_way_for_what_cublas_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had all of a small card, most of it unused, and the fit ended."""
    given_back: list[None] = []
    multiply = Tensor.mm

    def fail_once(one: Tensor, other: Tensor) -> Tensor:
        if not given_back:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return multiply(one, other)

    monkeypatch.setattr(Tensor, "mm", fail_once)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(None))
    CudaDevice(torch.device("cuda", 0), None).prepare_thread()
    assert given_back == [None]


@pytest.mark.parametrize("gpu", [0, pytest.param(1, marks=needs_two)])
def test_who_works_on_a_stream_has_the_streams_that_were_current_afterwards(gpu: int) -> None:
    own = torch.cuda.Stream(0)
    there = torch.cuda.Stream(gpu)
    with torch.cuda.stream(own):
        before = [torch.cuda.current_stream(number) for number in range(torch.cuda.device_count())]
        with OnCudaStream(there):
            assert torch.cuda.current_device() == gpu
            assert torch.cuda.current_stream() == there
        assert torch.cuda.current_device() == 0
        assert [torch.cuda.current_stream(number) for number in range(torch.cuda.device_count())] == before


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("slowed", ["swap_in", "swap_out", None])
def test_packs_that_are_updated_where_their_gradients_are_have_the_bits_of_all_others(
    slowed: str | None, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = updates.build("AdamW", nets.Language(dropout=0.3))
    options = {"accelerator": "gpu", "precision": precision}
    # What libraries take counts, too.
    monkeypatch.setattr(updates, "CAPACITY", "1GiB")
    plan = updates.planned(module, **options)
    # There is room for all on a GPU.
    plan = replace(plan, first_fused=len(plan.visits) - 1, kept=frozenset(), joined=frozenset())
    plan = replace(plan, device_updated=frozenset(plan.visits))
    expected, _ = updates.train(module, replace(plan, device_updated=frozenset()), **options)
    if slowed is not None:
        _slow(slowed, monkeypatch)
    found, reports = updates.train(module, plan, **options)
    compare(expected, found)
    assert updates.stay(module, reports)


def _slow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each piece of work of a stream of the GPU wait."""
    original, opened = CudaStream.submit, list[CudaStream]()
    monkeypatch.setattr(CudaDevice, "__init__", _noting(CudaDevice.__init__, name, opened))

    def slow(self: Any, work: Any, after: Any = ()) -> Any:
        return original(self, lambda: (self in opened and torch.cuda._sleep(2_000_000), work())[1], after)

    monkeypatch.setattr(CudaStream, "submit", slow)


def _noting(make: Any, name: str, opened: list[Any]) -> Any:
    def noted(device: Any, *args: Any, **kwargs: Any) -> None:
        make(device, *args, **kwargs)
        opened.append(getattr(device, name))

    return noted


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weights_and_state_on_disk_have_the_bits_of_those_in_memory(
    optimizer: str, precision: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lightning_harmony.strategy.fits", lambda *_: False)
    monkeypatch.setattr(f"{BUDGET}.room_on_host", lambda: 3 * OF_WEIGHTS // 2)
    monkeypatch.setattr(f"{BUDGET}.num_on_disk", lambda states, excess: len(states))
    monkeypatch.setattr(f"{BUDGET}.spread_on_disk", lambda weights, excess: range(len(weights)))
    module = Net(Blocks(), OPTIMIZERS[optimizer])
    options: dict[str, Any] = {"accelerator": "gpu", "precision": precision}
    plain = train_plain(copy.deepcopy(module), OF_BLOCKS, 2, 8, **options)
    strategy = HarmonyStrategy("1GiB", 2, profile_cache=False, offload_dir=tmp_path)
    result = train_harmony(module, OF_BLOCKS, strategy, 8, with_gradients=False, **options)
    compare(plain, result)
    assert all(report.disk_read_bytes and report.disk_written_bytes for report in result.reports[2:])
    assert sum(folder_of(parameter) is not None for parameter in module.parameters()) > 8

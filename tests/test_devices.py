"""Several devices in one process: one logical device to the user, and the numbers of one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_harmony import CapacityError, HarmonyStrategy
from lightning_harmony.engine.devices import virtual_device
from lightning_harmony.engine.glue.one_device import OneDevice
from support import nets, same_training
from support.cases import NETS, OPTIMIZERS, SUMMED_IN_ANOTHER_ORDER
from support.same_training import (
    Net,
    Training,
    assert_same_training,
    assert_within,
    compare,
    room,
    train_harmony,
    train_plain,
    trainer_for,
)
from support.sampling import combined

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")


def build(net: Callable[[], nn.Module], optimizer: str = "sgd") -> Net:
    torch.manual_seed(0)
    return Net(net(), OPTIMIZERS[optimizer])


def train(module: Net, devices: int, samples: Any = None, **options: Any) -> Training:
    strategy = HarmonyStrategy(num_microbatches=4, **options)
    data = nets.tokens() if samples is None else samples
    return in_one_order(train_harmony(copy.deepcopy(module), data, strategy, 8, with_gradients=False, devices=devices))


def in_one_order(training: Training) -> Training:
    """Losses of a step by their size: where microbatches go other ways, they may end in another order."""
    training.losses = [loss for at in range(0, 12, 4) for loss in sorted(training.losses[at : at + 4])]
    return training


@pytest.mark.parametrize(("net", "devices"), combined([*NETS, "tied-by-code", "used-twice"], [(2,), (3,)]))
def test_the_number_of_devices_changes_no_bit(net: str, devices: int) -> None:
    module = build({**NETS, **SUMMED_IN_ANOTHER_ORDER}[net])
    # One device has the bits of plain Lightning, but where that sums in another order.
    one = (
        train_plain(copy.deepcopy(module), nets.tokens(), 4, 8)
        if net in NETS
        else train(module, 1, device_memory="96KiB")
    )
    several = train(module, devices, device_memory="96KiB")
    compare(in_one_order(one), several)
    assert_within(several.reports, "96KiB")
    assert all(len(report.peak_device_bytes) == devices for report in several.reports)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.nightly
def test_four_devices_train_as_plain_lightning_does(optimizer: str) -> None:
    module = build(lambda: nets.Language(num_blocks=6, dropout=0.2), optimizer)
    assert_same_training(module, nets.tokens(), device_memory="96KiB", devices=4)


def test_batch_norm_statistics_are_made_in_the_order_of_microbatches() -> None:
    assert_same_training(build(nets.Convolutions), nets.images(), device_memory="64KiB", devices=2)


class NormalizesInTheBackward(nets.Language):
    """Its layers normalize in a checkpoint, and so once more in the backward."""

    class Block(nets.Block):
        def __init__(self) -> None:
            super().__init__()
            self.statistics = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(checkpoint(self.statistics, x, use_reentrant=False))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))


def test_statistics_that_a_checkpoint_changes_in_the_backward_are_changed_on_any_device() -> None:
    """Those of a copy on another device were changed, and no version tells so."""
    assert_same_training(build(NormalizesInTheBackward), nets.tokens(), num_microbatches=1, devices=2)


@pytest.mark.parametrize("device_memory", ["96KiB", None])
def test_batch_norm_statistics_go_from_device_to_device(device_memory: str | None) -> None:
    """Each device has a copy of the statistics of its own: the last one's took the place of all others'."""
    module = build(nets.Convolutions)
    one = train(module, 1, nets.images(), device_memory=device_memory)
    several = train(module, 3, nets.images(), device_memory=device_memory, parallel="data")
    compare(one, several, 1e-5)


class NormalizesBetween(nn.Module):
    """Statistics without weights are in no layer: the code between layers changes them, wherever its input is."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 16), norm(), nn.ReLU(), nn.Linear(16, 16), norm(), nn.Linear(16, 16), norm()
        )

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch).square().mean()


class OfChannels(nn.InstanceNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(1, (4, 4))).flatten(1)


@pytest.mark.parametrize(
    "norm",
    [
        partial(nn.BatchNorm1d, 16, affine=False),
        partial(nn.BatchNorm1d, 16, affine=False, momentum=None),
        partial(OfChannels, 4, track_running_stats=True),
    ],
    ids=["of batches", "averaged", "of instances"],
)
def test_statistics_between_layers_are_changed_where_they_are(norm: Any) -> None:
    """No version tells of it: what a copy of theirs had become, on another device, was lost without a word."""
    torch.manual_seed(0)
    assert_same_training(Net(NormalizesBetween(norm)), torch.randn(32, 16), device_memory="16KiB", devices=2)


def test_without_a_limit_the_packs_still_go_round_the_devices() -> None:
    reports = assert_same_training(build(nets.Language), nets.tokens(), devices=2)
    assert all(min(report.peak_device_bytes) > 0 for report in reports)


@pytest.mark.cpu
def test_weights_and_gradients_cross_the_bus_once_however_many_devices_there_are() -> None:
    module = build(lambda: nets.Language(num_blocks=5))
    crossed = []
    for devices in (1, 2, 4):
        report = train(module, devices, device_memory="64KiB").reports[-1]
        crossed.append((report.swapped_in_bytes["weights"], report.swapped_out_bytes["gradients"]))
        assert (report.transferred_bytes > 0) == (devices > 1)
    assert crossed[0][1] == crossed[1][1] == crossed[2][1]
    # What stays from forward to backward is one pack for each device.
    assert crossed[0][0] >= crossed[1][0] >= crossed[2][0]


@pytest.mark.parametrize("net", ["plain", "dropout", "tied-by-code", "skipped", "frozen"])
def test_microbatches_spread_over_devices_differ_by_the_order_of_sums_only_and_always_equally(net: str) -> None:
    """Each device sums the gradients of its own microbatches: the sums of these have other roundings."""
    module = build({**NETS, **SUMMED_IN_ANOTHER_ORDER}[net])
    one = train(module, 1, device_memory="96KiB")
    first, again = (train(module, 2, device_memory="96KiB", parallel="data") for _ in range(2))
    compare(one, first, 1e-5)
    compare(first, again)
    report = first.reports[-1]
    assert report.transferred_bytes > 0
    if same_training.accelerator == "cpu":
        # On GPUs, what libraries take exceeds such a capacity: sums were seen to make way.
        assert report.swapped_out_bytes["gradients"] == one.reports[-1].swapped_out_bytes["gradients"]


@pytest.mark.parametrize("update", ["just-in-time", "deferred"])
def test_gradients_of_accumulated_batches_count_once_where_each_device_sums_its_own(update: Any) -> None:
    """Each device began its sum with those of the batches before."""
    module = build(nets.Language)
    one, several = (
        train_harmony(
            copy.deepcopy(module),
            nets.tokens(),
            HarmonyStrategy(num_microbatches=4, device_memory="96KiB", parallel="data", update=update),
            8,
            with_gradients=False,
            devices=devices,
            accumulate_grad_batches=3,
        )
        for devices in (1, 2)
    )
    assert several.reports[-1].transferred_bytes > 0
    compare(in_one_order(one), in_one_order(several), 1e-5)


@pytest.mark.cpu
def test_devices_may_have_unequal_capacities() -> None:
    module = build(nets.Language)
    several = train(module, 2, device_memory=["64KiB", "128KiB"])
    compare(train(module, 1), several)
    assert all(a <= 64 * 1024 and b <= 128 * 1024 for a, b in (report.peak_device_bytes for report in several.reports))


def test_a_capacity_for_each_device_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"device_memory=\.\.\.\) has 3 entries for 2 devices"):
        train(build(nets.Language), 2, device_memory=["64KiB"] * 3)
    with pytest.raises(ValueError, match=r"parallel='rows'"):
        HarmonyStrategy(parallel="rows")  # type: ignore[arg-type]


def test_the_user_sees_one_device() -> None:
    module = build(nets.Language)
    trainer = trainer_for(HarmonyStrategy(), 1, [], devices=3)
    assert (trainer.num_devices, trainer.world_size, trainer.device_ids) == (1, 1, [0])
    trainer.fit(module, DataLoader(nets.tokens(), batch_size=8))
    assert len(trainer.strategy.step_report.peak_device_bytes) == 3


def test_glue_that_mixes_devices_computes_as_on_one() -> None:
    """Forward, losses and gradients: a copy brings each use's gradient back in the order of one device."""
    module = build(nets.Mixing)
    one = train(module, 1)
    compare(one, train(module, 2))
    compare(one, train(module, 3, device_memory="256KiB"))


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("parallel", ["pipeline", "data"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_fails_on_one_device_ends_all_lanes_and_names_it(parallel: Any, error: type[BaseException]) -> None:
    module = build(nets.Language)
    block = nets.Explodes()
    module.net.blocks[2] = block
    # Not in a list: what a recompute adds there is taken back.
    calls: SimpleQueue[int] = SimpleQueue()

    def fault() -> None:
        calls.put(0)
        if calls.qsize() == 30:
            raise error("boom")

    block.fault = fault
    strategy = HarmonyStrategy(num_microbatches=4, parallel=parallel, device_memory="96KiB")
    trainer = trainer_for(strategy, 6, [], devices=2)
    with pytest.raises(BaseException, match="boom" if error is RuntimeError else None) as caught:
        trainer.fit(module, DataLoader(nets.tokens(48), batch_size=8))
    if error is RuntimeError:
        assert any("on device" in note for note in getattr(caught.value, "__notes__", ["on device"]))
    block.fault = None
    train(module, 2, parallel=parallel)


@pytest.mark.cpu
def test_a_pack_that_does_not_fit_is_named_with_its_device() -> None:
    with pytest.raises(Exception, match=r"on device \d exceeds the capacity of"):
        train(build(lambda: nets.Language(num_blocks=2)), 2, samples=nets.tokens(24, length=200), device_memory="64KiB")


class Evaluates(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.logits(self.net.body(self.net.embed(batch)))


def test_evaluation_runs_on_all_devices() -> None:
    torch.manual_seed(0)
    module = Evaluates(nets.Language())
    loader = DataLoader(nets.tokens(), batch_size=8)
    results = []
    for devices in (1, 2):
        trainer = trainer_for(HarmonyStrategy(device_memory="96KiB", num_microbatches=4), 3, [], devices=devices)
        mine = copy.deepcopy(module)
        trainer.fit(mine, loader, loader)
        value = trainer.callback_metrics["val"]
        results.append((value, torch.cat(trainer.predict(mine, loader))))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


class Manual(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nets.Language()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch))
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_manual_optimization_runs_on_the_first_device() -> None:
    states = []
    for devices in (1, 2):
        torch.manual_seed(0)
        module = Manual()
        trainer_for(HarmonyStrategy(), 3, [], devices=devices).fit(module, DataLoader(nets.tokens(), batch_size=8))
        states.append(module.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


class AsOnGpus(TorchDispatchMode):
    """Refuses operands of several devices, as torch does on GPUs; copies may be from one to another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        owners = {virtual_device._owners.get(tensor.untyped_storage()._cdata) for tensor in tensors} - {None}
        assert len(owners) < 2 or "copy" in str(func), f"{func} has operands on several devices"
        return func(*args, **(kwargs or {}))


class Shifted(nets.Block):
    """Reads a tensor beside its parameters."""

    offset: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with AsOnGpus():
            return super().forward(x + self.offset)


class ShiftedBlocks(nets.Language):
    def __init__(self, *, as_buffers: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shifted() for _ in range(4))
        offset = torch.full((nets.WIDTH,), 0.5)
        for block in self.blocks:
            if as_buffers:
                block.register_buffer("offset", offset.clone(), persistent=False)
            else:
                block.offset = offset

    def body(self, x: Tensor) -> Tensor:
        # What glue looks at first is on the root.
        return super().body(x + self.blocks[0].offset.detach())


class Predicting(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss


def predict(module: Net, devices: int, **options: Any) -> Any:
    trainer = trainer_for(HarmonyStrategy(**options), 1, [], devices=devices)
    return trainer.predict(Predicting(module.net), DataLoader(nets.tokens(), batch_size=8))


@pytest.mark.cpu
@pytest.mark.parametrize("as_buffers", [False, True])
def test_tensors_that_do_not_go_with_their_layers_are_used_where_they_are(as_buffers: bool) -> None:
    make = partial(ShiftedBlocks, as_buffers=as_buffers)
    compare(*(train(build(make), devices, layers={Shifted}) for devices in (1, 2)))
    one, two = (predict(build(make), devices, layers={Shifted}) for devices in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


FOUND: dict[str, Tensor] = {}


class Weighs(nets.Block):
    """Reads a tensor that is neither its own nor an argument."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * FOUND["weight"])


class FindsElsewhere(nets.Language):
    """Keeps a tensor where its layers find it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Weighs() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        FOUND["weight"] = x.detach().mean() + 1
        return super().body(x)


@pytest.mark.cpu
@pytest.mark.parametrize(("net", "finds"), [(FindsElsewhere, True), (nets.Language, False)])
def test_layers_have_tensors_brought_to_their_device_that_they_find_elsewhere(
    net: type[nets.Language], finds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two GPUs torch refused them. Layers whose first calls find none run without looking at each operation."""
    modes: list[OneDevice] = []
    begun: list[int] = []
    enter = OneDevice.__enter__

    def entered(mode: OneDevice) -> Any:
        modes.extend([] if mode._at is None else [mode])
        return enter(mode)

    monkeypatch.setattr(OneDevice, "__enter__", entered)
    monkeypatch.setattr(Net, "on_train_batch_start", lambda *_: begun.append(len(modes)), raising=False)
    module, samples = build(net), nets.tokens(40)
    several = train(module, 2, samples)
    # Their first calls are over after two steps.
    of_last_step = modes[begun[-1] :]
    compare(train(module, 1, samples), several)
    assert {mode._at for mode in modes if mode.has_found} == ({1} if finds else set())
    assert bool(of_last_step) is finds


class Slope(nn.Module):
    """A loss with the slope of what parameters between layers make of a layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(nets.WIDTH, nets.WIDTH)
        self.weights = nn.ParameterList([torch.rand(nets.WIDTH, n) / nets.WIDTH for n in (64, nets.WIDTH, 64)])

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.first(x).clone()
        for weight in self.weights:
            y = torch.tanh(y @ weight)[:, : nets.WIDTH]
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.pow(2).mean() + slope.pow(2).mean()


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_gradient_that_came_from_another_device_is_differentiated_again(devices: int) -> None:
    # The way back from device to device ended the graph of the gradient.
    samples = torch.randn(24, nets.WIDTH, generator=torch.Generator().manual_seed(0))
    assert_same_training(build(Slope), samples, layers=[nn.Linear], devices=devices, tolerance=1e-5)


class MakesALayer(nn.Module):
    """A module that is made within the step, whose initialization is called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(nets.WIDTH, nets.WIDTH), nn.Parameter(torch.randn(nets.WIDTH, nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        new = nn.Linear(nets.WIDTH, nets.WIDTH, bias=False, device=x.device)
        loss: Tensor = torch.func.functional_call(new, {"weight": self.weight}, (self.first(x),)).pow(2).mean()
        return loss


def test_a_layer_may_be_made_within_a_step() -> None:
    samples = torch.randn(24, nets.WIDTH, generator=torch.Generator().manual_seed(0))
    assert_same_training(build(MakesALayer), samples, layers=[nn.Linear], devices=2)


class Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(nets.WIDTH, nets.WIDTH)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        out: Tensor = nodes + torch.relu(self.linear(torch.sparse.mm(adjacency, nodes)))
        return out


class OfGraph(nn.Module):
    """Layers that are given a sparse matrix, of fixed values or of learned ones."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gate = kind, nn.Linear(1, 1)
        self.layers = nn.ModuleList(Convolves() for _ in range(4))
        self.register_buffer("edges", (torch.rand(8, 8) < 0.3).float())

    def adjacency(self) -> Tensor:
        if self.kind == "csr":
            return self.edges.to_sparse_csr()
        found = self.edges.to_sparse_coo().coalesce()
        if self.kind == "learned":
            values = self.gate(found.values()[:, None])[:, 0].sigmoid()
            found = torch.sparse_coo_tensor(found.indices(), values, found.shape, check_invariants=True).coalesce()
        return found

    def forward(self, nodes: Tensor) -> Tensor:
        adjacency = self.adjacency()
        for layer in self.layers:
            nodes = layer(nodes, adjacency)
        return nodes.square().mean()


@pytest.mark.devices(1, 2)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", ["coo", "csr", "learned"])
def test_sparse_matrices_go_to_layers_wherever_these_are(kind: str) -> None:
    """They have no strides that a copy or the stash could keep."""
    torch.manual_seed(0)
    assert_same_training(
        Net(OfGraph(kind)), torch.randn(24, nets.WIDTH), num_microbatches=1, device_memory=room("48KiB")
    )


@pytest.mark.cpu
def test_a_layer_whose_buffers_alone_exceed_the_capacity_is_refused_with_the_way_out() -> None:
    """It was said not to fit beside what glue keeps, which was nothing."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(nets.WIDTH, nets.WIDTH)
            self.register_buffer("table", torch.zeros(1000, nets.WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = (self.linear(x) + self.table[: len(x)]).square().mean()
            return out

    strategy = HarmonyStrategy(device_memory="60KiB")
    with pytest.raises(CapacityError, match=r"for its buffers and .* more than the device's 60 KiB: raise Harmony"):
        trainer_for(strategy, 1, []).fit(Net(nn.Sequential(Table())), DataLoader(torch.randn(8, nets.WIDTH), 8))

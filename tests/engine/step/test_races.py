"""What several GPUs do side by side is ordered where it must be: training on fake ones, with vector clocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from traceback import extract_stack
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_harmony import HarmonyStrategy
from lightning_harmony.engine.memory.sums import Sums
from lightning_harmony.engine.step.pack_preparation import PackPreparation
from lightning_harmony.engine.step.runtime import Runtime
from lightning_harmony.engine.updates.update_stage import Stage
from lightning_harmony.plan.values.plan import Plan
from support import nets
from support.cases import NETS, SUMMED_IN_ANOTHER_ORDER
from support.same_training import SEED, Gradients, Net, trainer_for
from support.sampling import combined
from support.spreading import spread_packs
from support.stateful import Blocks, CountsInATensor, GivesAMask, Measures, ReadsWhatLayersSet, SetsWhatLayersRead
from support.stateful import samples as pairs
from support.streams import Detector, FakeCudaDevice, detecting, on_root

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*"),
]

# One that comes first, one that comes last, and one between them.
NUM_MICROBATCHES = 3
BATCH_SIZE = 2 * NUM_MICROBATCHES

# All but those whose layers' hooks the detector would see on the streams of the engine's caller.
ALL: Mapping[str, Callable[[], nn.Module]] = {
    **{name: net for name, net in {**NETS, **SUMMED_IN_ANOTHER_ORDER}.items() if name != "hooked"},
    "skip-connections": nets.SkipConnections,
    "regularized": nets.Regularized,
    "remembering": nets.Remembering,
}
# Those in which most goes from device to device, and most makes gradients of one parameter.
MOST_ENTANGLED = ("skip-connections", "own-parameters", "used-twice", "regularized")


# Layers with tensors in attributes, of which those of other devices' layers are on another one.
OF_OTHER_DEVICES: Mapping[str, Callable[[], nn.Module]] = {
    "set-by-glue": SetsWhatLayersRead,
    "set-by-layers": ReadsWhatLayersSet,
    "counted": partial(Blocks, CountsInATensor),
    "measured": partial(Blocks, Measures),
    "in-objects": GivesAMask,
}


class Transforms(nets.Language):
    """Transforms between the layers find parameters and constants that are on another device than what they go over."""

    def __init__(self) -> None:
        super().__init__()
        self.mixings = nn.ParameterList([torch.randn(nets.WIDTH, nets.WIDTH) / nets.WIDTH for _ in range(4)])

    def body(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        for block, mixing in zip(self.blocks[1:], self.mixings, strict=False):
            x = block(x)
            x = x + torch.vmap(lambda row, mixing=mixing: torch.tanh(row @ mixing) * (first[0] + mixing[0]))(x)
            x = x + torch.vmap(lambda column, x=x: x @ column, out_dims=-1)(mixing.clone())
        return x


class Seeing(nets.Block):
    """A block that computes by a tensor that is set on what it takes."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(x * x.scale)


class SetsOnActivations(nets.Language):
    """What is set on an activation is on the device of the layer before, or on that of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Seeing() for _ in range(4))

    def body(self, x: Any) -> Tensor:
        for block in self.blocks:
            x.scale = x.detach().mean(-1, keepdim=True) + 1
            x = block(x)
        return x


class CheckpointedGlue(nets.Language):
    """The glue around layers runs again in the backward."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: y * block(y).sigmoid(), x, use_reentrant=False)
        return x


class ByHand(nets.Language):
    """Each block's parts have a backward of their own within that of the block."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = nets.ByHand.apply(x, block)
        return x


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return gradient * b, gradient * a


class OwnFunction(nets.Language):
    """A function of its own takes tensors of two devices, and returns the gradients of both from one."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + _Product.apply(x, torch.tanh(block(x)))
        return x


class Mixes(nets.Language):
    """Operations of all kinds take tensors of two devices, and one of them in two places."""

    def body(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        mask = first > 0
        chosen = torch.where(mask, second, first).clone()
        chosen[mask] = (second * first)[mask]
        chosen += torch.lerp(first, second, first.mean()).clamp(min=second.min())
        picked = second.gather(-1, first.argsort(-1)) + torch.cat((first, second), 1)[:, : first.shape[1]]
        attention = F.scaled_dot_product_attention(first, second, torch.stack((chosen, picked)).sum(0))
        return self.blocks[3](self.blocks[2](attention + torch.einsum("bld,bmd,bmd->bld", first, second, chosen)))


class Differentiates(nets.Language):
    """Its forward differentiates what one device made by what another one has, from a gradient that is on a third place."""

    def body(self, x: Tensor) -> Tensor:
        first = x.detach().requires_grad_()
        second = self.blocks[0](first)
        third = self.blocks[1](second)
        (slope,) = torch.autograd.grad([second, third], first, [torch.ones_like(first), torch.ones_like(second)])
        # With the glue of a checkpoint in it.
        y = x.detach().requires_grad_()
        checkpoint(lambda z: z * self.blocks[2](self.blocks[1](z)).sigmoid(), y, use_reentrant=False).sum().backward(
            inputs=[y]
        )
        assert y.grad is not None
        return super().body(x + slope + y.grad)


class Weighs(nn.Module):
    """A layer whose backward reads what the glue has made, and has no gradient for it that the glue would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nets.WIDTH))

    def forward(self, factors: Tensor) -> Tensor:
        return self.weight * factors


class WeighsShifted(Weighs):
    """Only its recompute reads what the glue has made."""

    def forward(self, factors: Tensor) -> Tensor:
        return super().forward(torch.relu(factors + 1))


class ReadsWhatGlueMade(nets.Language):
    """Behind the backward of each such layer, the next to compute is glue, whose memory is the lane's own."""

    def __init__(self, kind: type[Weighs]) -> None:
        super().__init__()
        self.weighing = nn.ModuleList(kind() for _ in self.blocks)

    def body(self, x: Tensor) -> Tensor:
        for block, weighs in zip(self.blocks, self.weighing, strict=True):
            x = torch.tanh(block(x))
            x = x + weighs(x.detach() * 0.5)
        return x


OF_THE_BACKWARD: Mapping[str, Callable[[], nn.Module]] = {
    "checkpointed-glue": CheckpointedGlue,
    "by-hand": ByHand,
    "own-function": OwnFunction,
    "mixes": Mixes,
    "differentiates": Differentiates,
    "reads-what-glue-made": partial(ReadsWhatGlueMade, Weighs),
    "reads-it-again": partial(ReadsWhatGlueMade, WeighsShifted),
}
# Transforms and layers that find tensors which nobody has given them as operands.
THAT_FIND_TENSORS: Mapping[str, Callable[[], nn.Module]] = {
    "transforms": Transforms,
    "set-on-activations": SetsOnActivations,
}


class OnGpu(Net):
    """Its batches are on the first GPU."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return on_root(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def on_fit_start(self) -> None:
        """What else is on a module that was moved to a GPU."""
        for module in self.modules():
            if isinstance(module, Metric):
                for name in module._defaults:
                    setattr(module, name, on_root(getattr(module, name)))
            if isinstance(module, CountsInATensor):
                module.seen = on_root(module.seen)


def find_races(
    monkeypatch: pytest.MonkeyPatch,
    net: str,
    devices: int = 2,
    *,
    left_out: tuple[str, ...] = (),
    callbacks: tuple[pl.Callback, ...] = (),
    validates: bool = False,
    steps: int = 3,
    trainer: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """Train a network for some steps; what was found."""
    torch.manual_seed(0)
    module = OnGpu({**ALL, **OF_OTHER_DEVICES, **OF_THE_BACKWARD, **THAT_FIND_TENSORS}[net]())
    samples: Any = pairs() * 2 if net in OF_OTHER_DEVICES else nets.tokens(BATCH_SIZE * steps)
    # So small that the stash takes what these networks pass on.
    monkeypatch.setattr("lightning_harmony.engine.memory.stash.SMALLEST_BYTES", 512)
    strategy = HarmonyStrategy(**{"num_microbatches": NUM_MICROBATCHES, **options})
    with detecting(monkeypatch, devices, left_out=left_out) as detector:
        torch.manual_seed(SEED)
        run = trainer_for(strategy, steps, list(callbacks), devices=devices, **(trainer or {}))
        loader = DataLoader(samples, batch_size=BATCH_SIZE)
        run.fit(module, loader, loader if validates else None)
        assert run.global_step == steps
    assert detector.num_operations > 100
    return [f"{race.what}:\n  {race.first}\n  {race.second}" for race in detector.races]


@pytest.mark.parametrize(("net", "device_memory", "parallel"), combined(ALL, [(None, "data"), ("22KiB", "pipeline")]))
def test_nothing_races(monkeypatch: pytest.MonkeyPatch, net: str, device_memory: str | None, parallel: Any) -> None:
    assert find_races(monkeypatch, net, device_memory=device_memory, parallel=parallel) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("net", "device_memory", "parallel"), combined(MOST_ENTANGLED, [(None, "pipeline"), ("22KiB", "data")])
)
def test_nothing_races_the_other_way(
    monkeypatch: pytest.MonkeyPatch, net: str, device_memory: str | None, parallel: Any
) -> None:
    assert find_races(monkeypatch, net, device_memory=device_memory, parallel=parallel) == []


@pytest.mark.nightly
@pytest.mark.parametrize(("net", "device_memory"), combined(OF_OTHER_DEVICES, [(None,), ("22KiB",)]))
def test_layers_reach_tensors_on_other_devices(monkeypatch: pytest.MonkeyPatch, net: str, device_memory: Any) -> None:
    """Such operations used to be refused by torch, operands of two GPUs in one."""
    assert find_races(monkeypatch, net, device_memory=device_memory) == []


@pytest.mark.nightly
@pytest.mark.parametrize(("net", "device_memory"), combined(THAT_FIND_TENSORS, [(None,), ("22KiB",)]))
def test_transforms_and_layers_find_tensors_on_other_devices(
    monkeypatch: pytest.MonkeyPatch, net: str, device_memory: Any
) -> None:
    # On two GPUs torch refused a parameter beside what torch.vmap goes over, and a tensor that is set on an activation.
    assert find_races(monkeypatch, net, device_memory=device_memory) == []


@pytest.mark.parametrize(("net", "device_memory"), combined(OF_THE_BACKWARD, [(None,), ("40KiB",)]))
def test_glue_in_the_backward_is_on_one_device(monkeypatch: pytest.MonkeyPatch, net: str, device_memory: Any) -> None:
    """It used to meet operands on two GPUs, which torch refuses."""
    assert find_races(monkeypatch, net, device_memory=device_memory, update="deferred") == []


class Writes(pl.Callback):
    """Changes weights on the host, as a restored average does."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._write)

    def _write(self, trainer: Any, module: Any, *args: Any) -> None:
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.is_floating_point():
                    tensor.mul_(0.99)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hook", "devices", "net"),
    combined(
        product(["on_train_batch_end", "on_validation_batch_end"], [2, 1]),
        [("own-parameters",), ("frozen",), ("rich",)],
    ),
)
def test_hooks_may_write_weights(monkeypatch: pytest.MonkeyPatch, hook: str, devices: int, net: str) -> None:
    """The last layers of a validation used to run with what a hook wrote behind it: copies were still to come."""
    options: Any = {"device_memory": "22KiB", "callbacks": (Writes(hook),), "validates": True}
    assert find_races(monkeypatch, net, devices, **options) == []


class ScalesTheLoss(pl.Callback):
    """The gradient of the loss is not the one that was predicted: sums are multiplied before they are handed over."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        loss.register_hook(lambda gradient: gradient * 2)


class ByHand(OnGpu):
    """Changes weights in the step itself, between calls of layers."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with torch.no_grad():
            self.net(batch)
        self.write()
        self.manual_backward(self.net(batch))
        optimizer.step()
        optimizer.zero_grad()
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        for parameter in self.parameters():
            parameter.mul_(0.99)


@pytest.mark.parametrize(("net", "devices"), combined(["frozen", "plain", "skip-connections"], [(2,), (1,)]))
def test_steps_that_optimize_by_hand_may_write_weights(monkeypatch: pytest.MonkeyPatch, net: str, devices: int) -> None:
    monkeypatch.setattr("test_races.OnGpu", ByHand)
    assert find_races(monkeypatch, net, devices, device_memory="22KiB") == []


@pytest.mark.nightly
@pytest.mark.parametrize("device_memory", [None, "22KiB"])
def test_nothing_races_on_more_devices(monkeypatch: pytest.MonkeyPatch, device_memory: str | None) -> None:
    assert find_races(monkeypatch, "regularized", 3, device_memory=device_memory) == []


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_nothing_races_in_few_microbatches(monkeypatch: pytest.MonkeyPatch, num_microbatches: int) -> None:
    assert find_races(monkeypatch, "own-parameters", num_microbatches=num_microbatches) == []


AFTER_THE_BACKWARD: Mapping[str, Callable[[], dict[str, Any]]] = {
    "deferred": lambda: {"update": "deferred"},
    "read": lambda: {"callbacks": (Gradients(),)},
    "accumulated": lambda: {"trainer": {"accumulate_grad_batches": 2, "max_epochs": 2}},
}


@pytest.mark.parametrize(("why", "net"), combined(AFTER_THE_BACKWARD, [("own-parameters",), ("dropout",)]))
def test_nothing_races_with_an_update_after_the_backward(monkeypatch: pytest.MonkeyPatch, why: str, net: str) -> None:
    assert find_races(monkeypatch, net, device_memory="22KiB", **AFTER_THE_BACKWARD[why]()) == []


@pytest.mark.nightly
@pytest.mark.parametrize("net", ["dropout", "own-parameters"])
def test_nothing_races_in_evaluation(monkeypatch: pytest.MonkeyPatch, net: str) -> None:
    assert find_races(monkeypatch, net, device_memory="22KiB", validates=True) == []


@pytest.mark.nightly
@pytest.mark.parametrize("device_memory", [None, "40KiB"])
def test_nothing_races_where_a_turn_of_the_forward_takes_several_packs(
    monkeypatch: pytest.MonkeyPatch, device_memory: str | None
) -> None:
    packs = (("net.embed",), *((f"net.blocks.{number}",) for number in range(4)), ("net.head",))
    shape = {"num_devices": 2, "parallel": "data", "num_microbatches": NUM_MICROBATCHES}
    plan = Plan(packs, tuple(range(6)), 5, joined=frozenset({1, 2, 4}), **shape)  # type: ignore[arg-type]
    options = {"parallel": "data", "plan": plan, "device_memory": device_memory}
    assert find_races(monkeypatch, "dropout", **options) == []


@pytest.mark.nightly
@pytest.mark.parametrize("state_stays", [False, True])
@pytest.mark.parametrize(("device_memory", "precision"), combined([None, "128KiB"], [("32-true",), ("bf16-mixed",)]))
def test_nothing_races_in_updates_on_devices(
    monkeypatch: pytest.MonkeyPatch, device_memory: str | None, precision: str, *, state_stays: bool
) -> None:
    left: list[int] = []
    leave = Sums.leave

    def watched(self: Sums, pack: Any) -> Any:
        left.append(pack.index)
        return leave(self, pack)

    monkeypatch.setattr(Sums, "leave", watched)
    packs = (("net.embed",), *((f"net.blocks.{number}",) for number in range(4)), ("net.head",))
    plan = Plan(
        packs, tuple(range(6)), 5, device_updated=frozenset(range(6)), num_devices=2, num_microbatches=NUM_MICROBATCHES
    )
    if state_stays:
        plan = replace(plan, state_on_device=frozenset(range(6)))
    options = {"plan": plan, "device_memory": device_memory, "trainer": {"precision": precision}, "steps": 6}
    assert find_races(monkeypatch, "dropout", **options) == []  # type: ignore[arg-type]
    assert set(left) == set(range(6))


@pytest.mark.nightly
@pytest.mark.parametrize(("device_memory", "num_devices"), combined([None, "40KiB"], [(1,), (2,)]))
def test_nothing_races_in_updates_that_go_on_under_the_next_forward(
    monkeypatch: pytest.MonkeyPatch, device_memory: str | None, num_devices: int
) -> None:
    launched = postpone_updates(monkeypatch)
    # On fake devices, who copies a number from one to the other cannot be seen.
    trainer = {"gradient_clip_val": 0.05 if num_devices == 1 else None}
    options = {"trainer": trainer, "steps": 6, "update": "deferred"}
    assert find_races(monkeypatch, "dropout", num_devices, device_memory=device_memory, **options) == []  # type: ignore[arg-type]
    assert launched


def test_a_piece_of_an_update_that_waits_for_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    postpone_updates(monkeypatch)
    options = {"trainer": {"gradient_clip_val": 0.05}, "steps": 4, "left_out": ("launch",)}
    races = find_races(monkeypatch, "plain", 1, **options)  # type: ignore[arg-type]
    assert any("update_stage.py" in race for race in races)


def postpone_updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on, fake devices make updates in small pieces, as late as can be; the parts of each piece."""
    launched: list[int] = []
    launch = Stage.launch

    def watched(self: Any, share: Any, piece: Any, *args: Any, **options: Any) -> None:
        launched.append(len(piece.parts))
        launch(self, share, piece, *args, **options)

    monkeypatch.setattr(Stage, "launch", watched)
    return launched


@pytest.mark.nightly
@pytest.mark.parametrize(("net", "device_memory", "which"), combined(ALL, [(None, "last"), ("22KiB", "all")]))
def test_nothing_races_where_packs_are_spread(
    monkeypatch: pytest.MonkeyPatch, net: str, device_memory: str | None, which: str
) -> None:
    made = spread_packs(monkeypatch, which)
    assert find_races(monkeypatch, net, 3 if which == "last" else 2, device_memory=device_memory) == []
    assert made
    assert all(plan.spread for plan in made)


@pytest.mark.nightly
@pytest.mark.parametrize("device_memory", [None, "22KiB"])
def test_what_is_gathered_is_ordered_with_all_that_is_done_to_sums(
    monkeypatch: pytest.MonkeyPatch, device_memory: str | None
) -> None:
    spread_packs(monkeypatch, "all")
    accumulated = {"accumulate_grad_batches": 2, "max_epochs": 2}
    assert find_races(monkeypatch, "dropout", device_memory=device_memory, trainer=accumulated) == []
    assert find_races(monkeypatch, "dropout", device_memory=device_memory, callbacks=(ScalesTheLoss(),)) == []


@pytest.mark.nightly
def test_gradients_cross_over_beside_all_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy runs on a stream of the device that they come from, and that waits for the stream of the sums."""
    spread_packs(monkeypatch, "last")
    on_compute: list[bool] = []
    copy_between = Detector._copy_between

    def noting(detector: Detector, target: Tensor, source: Tensor, name: str) -> None:
        block = detector.block(source)
        if block is not None and "gather" in {frame.name for frame in extract_stack()}:
            stream = detector.here.current_stream(block.pool.device)
            on_compute.append(stream is detector.default_stream(block.pool.device.number))
        copy_between(detector, target, source, name)

    monkeypatch.setattr(Detector, "_copy_between", noting)
    assert find_races(monkeypatch, "plain", 3) == []
    assert on_compute
    assert not any(on_compute)


@pytest.mark.parametrize("function", ["gather", "swap_out"])
def test_gradients_that_are_not_waited_for_are_found(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    spread_packs(monkeypatch, "last")
    races = find_races(monkeypatch, "plain", 3, left_out=(function,))
    assert any(function in race for race in races)


# Whether a missing wait is felt hangs on the plan, and that on what the machine measured: some network feels it.
SENSITIVE: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("skip-connections", {"device_memory": "22KiB"}),
    ("by-hand", {"update": "deferred"}),
    # In a backward, the autograd engine itself waits and tells the allocator where gradients come to layers.
    ("own-parameters", {"validates": True}),
    ("own-parameters", {"device_memory": "22KiB", "validates": True}),
    ("mixes", {"update": "deferred", "device_memory": "40KiB"}),
    ("regularized", {"device_memory": "22KiB", "validates": True}),
]


@pytest.mark.parametrize(
    "function",
    [
        "bring",
        "free",
        "swap_out",
        # What the nodes of a layer saved may be in memory of the stash.
        "_keep_until_computed",
    ],
)
def test_what_is_not_ordered_is_found(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """The detector detects: without the waits of a function, something races."""
    assert any(find_races(monkeypatch, net, left_out=(function,), **more) for net, more in SENSITIVE)


@pytest.mark.parametrize(
    ("net", "keeps"), [("reads-what-glue-made", True), ("reads-what-glue-made", False), ("reads-it-again", False)]
)
def test_memory_of_a_lane_is_not_used_again_while_nodes_of_a_layer_read_it(
    monkeypatch: pytest.MonkeyPatch, net: str, keeps: bool
) -> None:
    """Whether their graph is kept or made again: all of a lane's work is in one order."""
    # What layers take stays on the device.
    monkeypatch.setattr(PackPreparation, "keeps_graphs_in", lambda visits, task: True)
    if not keeps:
        monkeypatch.setattr(Runtime, "keep_graph", lambda runtime, layer, call: False)
    layers = (nets.Block, Weighs, WeighsShifted, nn.Embedding)
    options: Any = {"parallel": "data", "layers": lambda name, module: isinstance(module, layers)}
    assert find_races(monkeypatch, net, **options) == []


@pytest.mark.nightly
def test_gradients_that_come_from_another_device_are_ready_for_the_nodes_of_a_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = [{"device_memory": memory} for memory in (None, "22KiB")]
    assert [race for options in more for race in find_races(monkeypatch, "mixes", **options)] == []


class Shifts(nn.Module):
    """Saves nothing of what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(nets.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class ChangesWhatItPassedOn(nets.Language):
    """What a layer was called with is written over when that has gone to the layer's device."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ModuleList(Shifts() for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for shift in self.shifts:
            before = x * 0.5
            x = shift(before)
            if not self.training:
                before.zero_()
        return x


@pytest.mark.parametrize("waits", [True, False])
def test_what_has_been_sent_is_not_changed_before_it_is_there(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """It is sent beside what computes, where it comes from, which would write over it."""
    monkeypatch.setitem(ALL, "changes-what-it-passed-on", ChangesWhatItPassedOn)
    options: Any = {"layers": lambda name, module: isinstance(module, (Shifts, nn.Embedding, nn.Linear))}
    races = find_races(
        monkeypatch, "changes-what-it-passed-on", 2, left_out=() if waits else ("begin",), validates=True, **options
    )
    assert any("transfer.py" in race and "zero_" in race for race in races) == (not waits)


@pytest.mark.nightly
def test_glue_waits_for_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    races = find_races(monkeypatch, "own-parameters", left_out=("come",))
    assert any("swap.py" in race and "glue.py" in race for race in races)


@pytest.mark.nightly
@pytest.mark.parametrize(("net", "parallel"), combined(MOST_ENTANGLED, [("pipeline",), ("data",)]))
def test_nothing_races_where_everything_makes_way(monkeypatch: pytest.MonkeyPatch, net: str, parallel: Any) -> None:
    """Devices are always full: each visit starts with everything else on its way out."""
    monkeypatch.setattr(FakeCudaDevice, "room_for", lambda device, num_bytes: False)
    assert find_races(monkeypatch, net, device_memory="22KiB", parallel=parallel) == []


@pytest.mark.nightly
@pytest.mark.parametrize("net", MOST_ENTANGLED)
def test_nothing_races_where_sums_make_way_for_what_is_gathered(monkeypatch: pytest.MonkeyPatch, net: str) -> None:
    spread_packs(monkeypatch, "all")
    monkeypatch.setattr(FakeCudaDevice, "room_for", lambda device, num_bytes: False)
    assert find_races(monkeypatch, net, 3, device_memory="22KiB") == []

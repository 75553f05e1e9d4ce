"""Microbatches take turns, yet what a step keeps on modules between layer calls is what this microbatch has kept there."""

from __future__ import annotations

import contextvars
import warnings
from collections import deque
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_harmony import HarmonyStrategy
from lightning_harmony.held.places import Places
from lightning_harmony.held.walk import Other
from lightning_harmony.microbatches.lane_attributes import KnownChanges, LaneAttributes
from support import nets
from support.same_training import Net, assert_same_training, room, trainer_for
from support.sampling import combined
from support.stateful import ReadsWhatLayersSet, SetsWhatLayersRead, samples

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def block(self) -> nn.Module:
        return nets.Block()

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class SetsWhatGlueReads(Blocks):
    """Kept by the glue before the first layer, used after each."""

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        self.context = x.mean(0)
        for block in self.blocks:
            x = block(x) + self.context
        return F.mse_loss(x, y)


class Keep:
    """A hook that collects what layers return."""

    def __init__(self, features: Any, name: str) -> None:
        self.features = features
        self.name = name

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if isinstance(self.features, dict):
            self.features[self.name] = output.detach()
        else:
            self.features.append(output.detach())


class CollectsInADict(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.features: Any = self.empty()
        for number, block in enumerate(self.blocks):
            block.register_forward_hook(Keep(self.features, str(number)))

    def empty(self) -> Any:
        return {}

    def collected(self) -> list[Tensor]:
        return list(self.features.values())

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        self.features.clear()
        x = self.run(x)
        return F.mse_loss(x, y) * (1 + sum(feature.mean() for feature in self.collected()))


class CollectsInAList(CollectsInADict):
    def empty(self) -> Any:
        return []

    def collected(self) -> list[Tensor]:
        return list(self.features)


class CollectsInADeque(CollectsInADict):
    def empty(self) -> Any:
        return deque(maxlen=8)

    def collected(self) -> list[Tensor]:
        return list(self.features)


class CollectsDeepInADict(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.features: Any = {"all": {"outputs": []}}

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        outputs = self.features["all"]["outputs"]
        outputs.clear()
        for block in self.blocks:
            x = block(x)
            outputs.append(x.detach())
        return F.mse_loss(x, y) * (1 + sum(output.mean() for output in outputs))


class EvaluatesWithin(Blocks):
    """Switches dropout off for a part of the step."""

    def block(self) -> nn.Module:
        return nets.Block(dropout=0.3)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        self.eval()
        with torch.no_grad():
            target = self.run(x)
        self.train()
        return F.mse_loss(self.run(x), y + target)


KEEPING = [
    SetsWhatGlueReads,
    SetsWhatLayersRead,
    ReadsWhatLayersSet,
    CollectsInADict,
    CollectsInAList,
    CollectsInADeque,
    CollectsDeepInADict,
    EvaluatesWithin,
]


@pytest.mark.parametrize(("net", "devices", "memory"), combined(KEEPING, [(2, "44KiB"), (1, None), (1, "44KiB")]))
def test_what_a_microbatch_keeps_on_modules_is_its_own(net: type[nn.Module], devices: int, memory: Any) -> None:
    torch.manual_seed(0)
    assert_same_training(
        Net(net()),
        samples(),
        num_microbatches=2,
        batch_size=4,
        devices=devices,
        device_memory=memory,
    )


class Noting(nets.Block):
    """Leaves something in an object of its own, and reads it again."""

    def __init__(self, notes: Any = None) -> None:
        super().__init__()
        self.notes = SimpleNamespace(newest=None) if notes is None else notes

    def forward(self, x: Tensor) -> Tensor:
        self.notes.newest = x.detach().mean()
        return super().forward(x) * (1 + self.notes.newest)


class NotesInObjects(Blocks):
    def block(self) -> nn.Module:
        return Noting()

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.run(x), y)


class NotesInANewAttribute(NotesInObjects):
    def block(self) -> nn.Module:
        return Noting(SimpleNamespace())


class ReadsNotesOfLayers(NotesInObjects):
    """Between layers, behind the next one."""

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        blocks: Any = self.blocks
        for block, before in zip(blocks, (None, *blocks), strict=False):
            x = block(x) + (0 if before is None else before.notes.newest)
        return F.mse_loss(x, y)


class SharesNotes(NotesInObjects):
    """Each layer reads what the one before has left."""

    def __init__(self) -> None:
        self.notes = SimpleNamespace(newest=torch.ones(()))
        super().__init__()

    def block(self) -> nn.Module:
        return ReadingNotes(self.notes)

    def forward(self, batch: Any) -> Tensor:
        self.notes.newest = batch[0].mean()
        return super().forward(batch)


class ReadingNotes(Noting):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.notes.newest)


class CountsInObjects(NotesInObjects):
    def block(self) -> nn.Module:
        return Counting(SimpleNamespace(newest=None, calls=0))


class Counting(Noting):
    def forward(self, x: Tensor) -> Tensor:
        self.notes.calls += 1
        return super().forward(x)


NOTING = [NotesInObjects, NotesInANewAttribute, ReadsNotesOfLayers, SharesNotes, CountsInObjects]


@pytest.mark.parametrize(("net", "devices"), combined(NOTING, [(1,), (2,)]))
def test_what_a_layer_leaves_in_an_object_each_microbatch_finds_again(
    net: type[nn.Module], devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    """They ran one after the other."""
    torch.manual_seed(0)
    with caplog.at_level("INFO"):
        assert_same_training(
            Net(net()), samples(), num_microbatches=2, batch_size=4, devices=devices, device_memory="44KiB"
        )
    assert "one after the other" not in caplog.text


class Skips(Blocks):
    """A U-Net that keeps its skips on itself."""

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        self.skips = []
        for block in self.blocks[:2]:
            x = block(x)
            self.skips.append(x)
        for block in self.blocks[2:]:
            x = block(x + self.skips.pop())
        return F.mse_loss(x, y)


def test_graphs_that_a_microbatch_keeps_on_modules_are_its_own() -> None:
    # Tensors with two readers each.
    torch.manual_seed(0)
    assert_same_training(Net(Skips()), samples(), num_microbatches=2, batch_size=4, tolerance=1e-5)


class Headed(nets.Block):
    """A block of a network with deep supervision, whose heads write into one list that all blocks have."""

    def __init__(self, heads: list[Any], index: int) -> None:
        super().__init__()
        self.head, self.heads, self.index = nn.Linear(nets.WIDTH, nets.WIDTH), heads, index

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.heads[self.index] = self.head(x)
        return x


class SharesAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = [torch.zeros(1) for _ in range(3)]
        self.blocks = nn.ModuleList(Headed(self.heads, index) for index in range(3))

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y) + sum(F.mse_loss(head, y) for head in self.heads)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_list_that_several_modules_have_is_looked_at_once(devices: int) -> None:
    # The second look found what the first had put back, and took it for what the microbatch had left.
    torch.manual_seed(0)
    assert_same_training(
        Net(SharesAList()), samples(), num_microbatches=4, devices=devices, layers=[nn.Linear], tolerance=1e-5
    )


class SometimesSetsAnEntry(Blocks):
    """Some batches leave something in a dict until their end."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = {"factor": torch.ones(())}

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        if y.sum() > 0:
            self.extra["factor"] = y.mean() * 10
        x = self.run(x)
        loss = F.mse_loss(x, y) * self.extra["factor"]
        self.extra["factor"] = torch.ones(())
        return loss


@pytest.mark.parametrize("devices", [1, 2])
def test_what_some_microbatches_set_others_do_not_find(devices: int) -> None:
    # From its second turn on, what a microbatch had set in an earlier one stayed for those after it.
    torch.manual_seed(0)
    assert_same_training(Net(SometimesSetsAnEntry()), samples(), num_microbatches=4, batch_size=4, devices=devices)


class Switched(nets.Block):
    """A block that others switch."""

    def __init__(self) -> None:
        super().__init__()
        self.mode, self.parts, self.is_off = "plain", ["a"], False

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.is_off else super().forward(x)
        return x * (2.0 if self.mode == "double" else 1.0) / len(self.parts)


def by_name(blocks: Any, block: Any, x: Tensor) -> Tensor:
    block.mode = "double"
    y: Tensor = blocks(x)
    block.mode = "plain"
    return y


def by_flag(blocks: Any, block: Any, x: Tensor) -> Tensor:
    """As the reference of a preference loss is the same model without its adapter."""
    block.is_off = True
    with torch.no_grad():
        reference = blocks(x)
    block.is_off = False
    y: Tensor = blocks(x) - reference
    return y


def by_list(blocks: Any, block: Any, x: Tensor) -> Tensor:
    before, block.parts = block.parts, ["a", "b"]
    y: Tensor = blocks(x)
    block.parts = before
    return y


def by_function(blocks: Any, block: Any, x: Tensor) -> Tensor:
    before = block.forward
    block.forward = lambda x: before(x) * 2
    y: Tensor = blocks(x)
    block.forward = before
    return y


def by_hook(blocks: Any, block: Any, x: Tensor) -> Tensor:
    handle = block.register_forward_hook(lambda module, args, output: output * 2)
    y: Tensor = blocks(x)
    handle.remove()
    return y


def by_hook_within(blocks: Any, block: Any, x: Tensor) -> Tensor:
    """Of a module within a layer, whose recompute has to run it again when it is long gone."""
    handle = block.up.register_forward_hook(lambda module, args, output: output * 2)
    y: Tensor = blocks(x)
    handle.remove()
    return y


def by_hook_with_keywords(blocks: Any, block: Any, x: Tensor) -> Tensor:
    """As mixed adapters name theirs to each module within a layer: the recompute called the hook without keywords."""
    handle = block.up.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    y: Tensor = blocks(x)
    handle.remove()
    return y


SCALE = contextvars.ContextVar("scale", default=1.0)


class Scaled(Switched):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE.get()


def by_context(blocks: Any, block: Any, x: Tensor) -> Tensor:
    token = SCALE.set(2.0)
    y: Tensor = blocks(x)
    SCALE.reset(token)
    return y


class ChangesForAWhile(Blocks):
    """Sets something on a block, runs all blocks, and puts back what it found."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def block(self) -> nn.Module:
        return Scaled()

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.change(self.run, self.blocks[2], x), y)


CHANGES = [by_name, by_flag, by_list, by_function, by_hook, by_hook_within, by_hook_with_keywords, by_context]


@pytest.mark.parametrize(("change", "num_microbatches", "devices"), combined(CHANGES, [(4, 2), (4, 1), (1, 1)]))
def test_what_is_changed_for_a_part_of_a_step_no_other_microbatch_finds(
    change: Any, num_microbatches: int, devices: int
) -> None:
    # The next one found it so, and took that for what it had to put back.
    torch.manual_seed(0)
    module = Net(ChangesForAWhile(change))
    assert_same_training(
        module,
        samples(),
        num_microbatches=num_microbatches,
        batch_size=4,
        devices=devices,
        layers=[Scaled],
        # A reference and what follows are two readers of their input.
        tolerance=1e-6 if change is by_flag else 0.0,
        updates=["after the backward" if devices == 1 else "just in time"],
    )


def by_number(blocks: Any, block: Any, x: Tensor) -> Tensor:
    before, block.factor = block.factor, block.factor * 2
    y: Tensor = blocks(x)
    block.factor = before
    return y


class Multiplied(nets.Block):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class ChangesANumber(ChangesForAWhile):
    def block(self) -> nn.Module:
        return Multiplied()


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_number_that_is_changed_for_a_part_of_a_step_is_each_microbatchs_own(
    num_microbatches: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It was refused where microbatches take turns: now they run one after the other."""
    torch.manual_seed(0)
    net, data = ChangesANumber(by_number), samples()
    with caplog.at_level("INFO"):
        assert_same_training(Net(net), data, num_microbatches=num_microbatches, batch_size=4, layers=[Multiplied])
    assert ("'factor' of 'net.blocks.2' is changed" in caplog.text) == (num_microbatches > 1)


class PenalizesAList(Blocks):
    """A loss with parameters of layers in a list."""

    def __init__(self, *, as_dict: bool) -> None:
        super().__init__()
        some = [self.blocks[0].up.weight, self.blocks[2].up.weight]
        self.penalized: Any = dict(enumerate(some)) if as_dict else some

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        values = self.penalized.values() if isinstance(self.penalized, dict) else self.penalized
        return F.mse_loss(self.run(x), y) + 0.1 * sum(value.pow(2).sum() for value in values)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("as_dict", [False, True])
def test_a_list_of_parameters_is_no_list_that_microbatches_change(as_dict: bool, devices: int) -> None:
    # What it had held when the step began came back between two turns: the parameters, for which nothing stood in.
    torch.manual_seed(0)
    module = Net(PenalizesAList(as_dict=as_dict))
    assert_same_training(module, samples(), num_microbatches=4, batch_size=4, devices=devices, tolerance=1e-5)


class Late(Blocks):
    """Keeps something from its second step on."""

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        if len(self.first) > 1:
            self.context = x.mean(0)
        self.first.append(0)
        return F.mse_loss(self.run(x), y)

    def __init__(self) -> None:
        super().__init__()
        self.first: list[int] = []


def test_what_is_changed_for_the_first_time_after_the_first_step_is_told_apart_in_that_step() -> None:
    """Microbatches that took turns may have seen each other's, and a warning was all that was said."""
    torch.manual_seed(0)
    assert_same_training(Net(Late()), samples(), num_microbatches=2, batch_size=4)


class Keeper(pl.Callback):
    """Has what a module's code finds by way of its trainer."""

    factor = 1.0


class Elsewhere(Net):
    """In a later step a microbatch sets something for a while, where none waits in a call, and others read it.

    Args:
        change: sets it, given the module, and returns what takes that back.
        read: what the code between layers finds there.
    """

    def __init__(self, change: Any, read: Any) -> None:
        super().__init__(Blocks())
        self.change, self.read = change, read
        self.helper, self.array = nn.Identity(), np.ones(1)
        self.helper.factor, self.helper.mode = 1.0, "as it is"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        undo = self.change(self) if x[0, 0] > 10 else None
        for block in self.net.blocks:
            x = block(x) * self.read(self)
        if undo is not None:
            undo()
        loss = F.mse_loss(x, y)
        self.losses.append(loss.detach().clone())
        return loss


def sets(of: Any, name: str, value: Any) -> Any:
    """Sets an attribute of something that a module leads to."""

    def change(module: Any) -> Any:
        owner = of(module)
        before = getattr(owner, name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)

    return change


def helper(module: Any) -> Any:
    return module.helper


def callback(module: Any) -> Any:
    return next(each for each in module.trainer.callbacks if isinstance(each, Keeper))


def trainer(module: Any) -> Any:
    return module.trainer


def doubles_an_array(module: Any) -> Any:
    module.array *= 2
    return lambda: module.array.__itruediv__(2)


def filters_in_place(module: Any) -> Any:
    warnings.filters.insert(0, ("once", None, ResourceWarning, None, 1234))
    return lambda: warnings.filters.pop(0)


SET_ELSEWHERE = {
    "number": (sets(helper, "factor", 2.0), lambda m: m.helper.factor),
    "name": (sets(helper, "mode", "thrice"), lambda m: 3.0 if m.helper.mode == "thrice" else 1.0),
    "callback": (sets(callback, "factor", 2.0), lambda m: callback(m).factor),
    "trainer": (sets(trainer, "limit_test_batches", 3.0), lambda m: m.trainer.limit_test_batches),
    "array": (doubles_an_array, lambda m: float(m.array[0])),
    "filters": (filters_in_place, lambda m: 2.0 if warnings.filters[0][-1] == 1234 else 1.0),
}


@pytest.mark.parametrize("kind", SET_ELSEWHERE)
def test_what_a_microbatch_of_a_later_step_sets_elsewhere_for_a_while_others_do_not_find(kind: str) -> None:
    """It was back at the end of the step, and the modules that waited for layers were all that was looked at meanwhile."""
    torch.manual_seed(0)
    data = samples()
    data[6][0][0] = 11
    module = Elsewhere(*SET_ELSEWHERE[kind])
    assert_same_training(module, data, num_microbatches=4, batch_size=4, make_callbacks=lambda: [Keeper()])


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.kept: Any = None
        self.all = [torch.tensor(0)]
        self.latest = [torch.tensor(0)]
        self.names: list[str] = []
        self.by_name: dict[str, Any] = {"n": 0}
        self.total = SumMetric()


def test_in_the_end_all_is_as_if_one_microbatch_had_run_after_the_other() -> None:
    module = Module()
    counters = {"": {"count": 2}, "by_name": {"n": 2}}
    lanes = LaneAttributes(Places(module), KnownChanges({"", "all", "latest", "names", "by_name"}, counters, {"all"}))
    lanes.begin()
    for turn in (1, 2):
        for microbatch in (0, 1):
            lanes.switch(microbatch)
            # What it left in its first turn, and nothing that another one did.
            assert module.kept == (None if turn == 1 else f"turn 1 of {microbatch}")
            assert [int(each) for each in module.all] == [0] if turn == 1 else [0, 10 + microbatch]
            module.kept = f"turn {turn} of {microbatch}"
            module.count += 1
            module.total.update(1)
            module.all.append(torch.tensor(10 * turn + microbatch))
            module.latest.clear()
            module.latest.append(torch.tensor(microbatch))
            if "seen" not in module.names:
                module.names.append("seen")
            module.by_name["x"] = torch.tensor(microbatch)
            module.by_name["n"] += 1
    # What one microbatch added, the other found: that speaks against taking turns.
    assert lanes.late() == ["names"]
    lanes.finish()
    assert (module.count, module.kept, module.names) == (4, "turn 2 of 1", ["seen"])
    assert [int(each) for each in module.latest] == [1]
    assert [int(each) for each in module.all] == [0, 10, 20, 11, 21]
    assert {name: int(each) for name, each in module.by_name.items()} == {"x": 1, "n": 4}
    assert module.total.compute() == 4


class AsDeepAsItsSamplesSay(Blocks):
    """A microbatch that calls fewer layers comes to its end first."""

    def __init__(self) -> None:
        super().__init__()
        self.means = list[Tensor]()

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        for block in self.blocks[: 4 if x[0, 0] > 0 else 1]:
            x = block(x)
        self.means.append(x.detach().mean())
        return F.mse_loss(x, y)


def test_a_list_has_what_microbatches_add_at_their_ends_in_their_order() -> None:
    """It had it in the order in which they came to their ends."""
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(4).repeat(4)
    data = [(sign * x.abs(), y) for sign, (x, y) in zip(signs, samples() * 3, strict=False)]

    def means(strategy: Any, size: int, accumulated: int) -> Tensor:
        torch.manual_seed(0)
        net = AsDeepAsItsSamplesSay()
        trainer = trainer_for(strategy, 4, [], accumulate_grad_batches=accumulated)
        trainer.fit(Net(net), DataLoader(data, batch_size=size))
        return torch.stack(net.means).cpu()

    plain = means("auto", 4, 2)
    assert len(plain) == 8
    assert torch.equal(plain, means(HarmonyStrategy(num_microbatches=2, device_memory=room("48KiB")), 8, 1))


def test_what_is_changed_beside_the_model_is_named_as_code_names_it() -> None:
    trainer = SimpleNamespace(should_stop=False)
    lanes = LaneAttributes(Places(Module(), lambda names: [Other("the trainer", trainer)]), KnownChanges(set()))
    lanes.begin()
    lanes.switch(0)
    trainer.should_stop = True
    lanes.switch(1)
    assert set(lanes.late()) == {"trainer.should_stop"}


def test_an_attribute_that_a_microbatch_deletes_others_still_have() -> None:
    module = Module()
    module.extra = "before"
    lanes = LaneAttributes(Places(module), KnownChanges({""}))
    lanes.begin()
    lanes.switch(0)
    module.extra = "mine"
    lanes.switch(1)
    module.extra = "other"
    del module.extra
    lanes.switch(0)
    assert module.extra == "mine"
    lanes.finish()
    assert not hasattr(module, "extra")

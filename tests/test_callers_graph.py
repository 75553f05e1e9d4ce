"""A layer's call stays in the caller's graph: what reaches out of it, what is changed in place, and what comes in pieces."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from lightning_harmony.engine.layers.layer_call import LayerCall
from support import same_training
from support.nets import WIDTH
from support.same_training import Net, Update, assert_same_training, trainer_for
from support.sampling import combined

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning", "ignore:.*does not have many workers", "ignore:The PyTorch API of nested tensors"
)

ROWS = 16


class Block(nn.Module):
    """A layer whose saved tensors are more than its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Four layers and the mean square of what comes out."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        x = batch[:, None] * torch.linspace(0.1, 1.0, ROWS, device=batch.device)[:, None]
        loss: Tensor = self.head(self.run(x)).pow(2).mean()
        return loss + self.extra()

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def extra(self) -> Any:
        return 0.0


# ---- what reaches out of layers ----------------------------------------------------------------------------------------


class LeavesALoss(Block):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        self.aux = hidden.square().mean()
        return x + self.down(hidden)


class LossesInAttributes(Stack):
    def __init__(self) -> None:
        super().__init__(LeavesALoss)

    def extra(self) -> Any:
        return 0.01 * sum(block.aux for block in self.blocks)  # type: ignore[misc]


class LossesInAList(Stack):
    """The layers append them to a list that they are given."""

    class Appends(Block):
        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
            hidden = F.gelu(self.up(self.norm(x)))
            losses.append(hidden.abs().mean())
            return x + self.down(hidden)

    def __init__(self) -> None:
        super().__init__(LossesInAList.Appends)

    def run(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = [x.square().mean()]
        for block in self.blocks:
            x = block(x, losses)
        return x + torch.stack(losses).sum()


class LossesByHooks(Stack):
    """Hooks on what is within the layers collect what comes out of it."""

    def run(self, x: Tensor) -> Tensor:
        collected: list[Tensor] = []
        hooks = [
            block.up.register_forward_hook(lambda module, args, output: collected.append(output))
            for block in self.blocks
        ]
        try:
            x = super().run(x)
        finally:
            for hook in hooks:
                hook.remove()
        return x + torch.stack([each.square().mean() for each in collected]).sum()


@dataclass
class Cache:
    keys: Tensor
    values: Tensor


class Reads(Block):
    def forward(self, x: Tensor, cache: Any) -> Tensor:  # type: ignore[override]
        found: Tensor = super().forward(x * cache.keys.sigmoid() + cache.values)
        return found


class TakesADataclass(Stack):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any] = Cache) -> None:
        super().__init__(Reads)
        self.encoder, self.wrap = nn.Linear(WIDTH, WIDTH), wrap

    def run(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        cache = self.wrap(memory, memory * 0.5)
        for block in self.blocks:
            x = block(x, cache)
        return x


class ReturnsObjects(Stack):
    class Wraps(Block):
        def forward(self, x: Tensor) -> Any:
            hidden = F.gelu(self.up(self.norm(x)))
            return SimpleNamespace(x=x + self.down(hidden), seen={"hidden": [hidden]})

    def __init__(self) -> None:
        super().__init__(ReturnsObjects.Wraps)

    def run(self, x: Tensor) -> Tensor:
        seen = []
        for block in self.blocks:
            result = block(x)
            x = result.x
            seen.append(result.seen["hidden"][0].mean())
        return x + torch.stack(seen).sum()


class SeveralReaders(Stack):
    """One tensor that all layers read several times."""

    def __init__(self) -> None:
        super().__init__(Reads)

    def run(self, x: Tensor) -> Tensor:
        memory = self.blocks[0](x, Cache(x, x))
        for block in self.blocks[1:]:
            x = block(x, SimpleNamespace(keys=memory, values=memory)) + memory
        return x


class Marked(Tensor):
    """A class of the user's own."""


class KeepsATensorOfAClass(LeavesALoss):
    """Returns and keeps tensors of a class of their own, with a tensor that was set on one."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x.as_subclass(Tensor)).as_subclass(Marked)
        self.aux = self.aux.as_subclass(Marked)
        found.aux = self.aux * 2
        return found


class Classes(Stack):
    def __init__(self) -> None:
        super().__init__(KeepsATensorOfAClass)

    def run(self, x: Tensor) -> Tensor:
        rest: Any = 0.0
        for block in self.blocks:
            x = block(x)
            assert isinstance(x, Marked)
            rest = rest + x.aux + block.aux  # type: ignore[operator, attr-defined]
        return (x + 0.01 * rest).as_subclass(Tensor)


class TakesAClass(Stack):
    """What goes from layer to layer is of a class of its own, as is what is computed from it."""

    class Keeps(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            assert isinstance(y, Marked)
            return y

    def __init__(self) -> None:
        super().__init__(TakesAClass.Keeps)

    def run(self, x: Tensor) -> Tensor:
        return super().run(x.as_subclass(Marked)).as_subclass(Tensor)


class Grown:
    """What all layers so far have made."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.sum: Tensor | None = None

    def add(self, part: Tensor) -> Tensor:
        self.parts.append(part.mean())
        self.sum = part if self.sum is None else self.sum + part
        return self.sum


class Grows(Stack):
    """Layers add to an object that all of them are given, and compute with what it has by then."""

    class Adds(Block):
        def forward(self, x: Tensor, grown: Grown) -> Tensor:  # type: ignore[override]
            return x + self.down(F.gelu(grown.add(self.up(self.norm(x)))))

    def __init__(self) -> None:
        super().__init__(Grows.Adds)

    def run(self, x: Tensor) -> Tensor:
        grown = Grown()
        for block in self.blocks:
            x = block(x, grown)
        assert len(grown.parts) == len(self.blocks)
        return x + torch.stack(grown.parts).mean() + grown.sum.mean()


class ReturnsFunctions(Stack):
    """Functions that have tensors of the layer in their closures."""

    class Closes(Block):
        def forward(self, x: Tensor) -> Any:
            hidden = F.gelu(self.up(self.norm(x)))
            return x + self.down(hidden), lambda y: y * hidden.mean()

    def __init__(self) -> None:
        super().__init__(ReturnsFunctions.Closes)

    def run(self, x: Tensor) -> Tensor:
        functions = []
        for block in self.blocks:
            x, function = block(x)
            functions.append(function)
        return torch.stack([function(x) for function in functions]).sum(0)


class Yields(Stack):
    """The forward of each layer is a generator, which runs when its caller takes what comes of it."""

    class Generator(Block):
        def forward(self, x: Tensor) -> Any:
            hidden = F.gelu(self.up(self.norm(x)))
            yield x + self.down(hidden)
            yield hidden.mean()

    def __init__(self) -> None:
        super().__init__(Yields.Generator)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, mean = block(x)
            x = x + mean
        return x


class Jagged(Stack):
    """What goes from layer to layer is one tensor of sequences of several lengths."""

    layout = torch.jagged

    def run(self, x: Tensor) -> Tensor:
        lengths = [1 + number % ROWS for number in range(len(x))]
        ragged = torch.nested.as_nested_tensor(
            [rows[:length] for rows, length in zip(x, lengths, strict=True)], layout=self.layout
        )
        for block in self.blocks:
            ragged = block(ragged)
        return self.joined(ragged)

    def joined(self, ragged: Tensor) -> Tensor:
        return ragged.values()


class Nested(Jagged):
    """One that has no size, although torch calls its layout strided."""

    layout = torch.strided

    def joined(self, ragged: Tensor) -> Tensor:
        return torch.nested.to_padded_tensor(ragged, 0.0)


REACHING: dict[str, Callable[[], Stack]] = {
    "losses in attributes": LossesInAttributes,
    "losses in a list": LossesInAList,
    "losses by hooks": LossesByHooks,
    "a dataclass": TakesADataclass,
    "an object": lambda: TakesADataclass(lambda keys, values: SimpleNamespace(keys=keys, values=values)),
    "objects that are returned": ReturnsObjects,
    "several readers": SeveralReaders,
    "tensors of a class": Classes,
    "arguments of a class": TakesAClass,
    "an object that grows": Grows,
    "functions": ReturnsFunctions,
    "generators": Yields,
    "a jagged tensor": Jagged,
    "a nested tensor": Nested,
}
SAMPLES = 24


def samples() -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))


def refused(name: str, devices: int) -> AbstractContextManager[Any]:
    """Torch's autograd cannot order gradients that are jagged between streams, nor has it functions of nested tensors."""
    kinds = ["a nested tensor", *(["a jagged tensor"] if same_training.accelerator == "gpu" else [])]
    if devices > 1 and name in kinds:
        return pytest.raises(UnsupportedModelError, match=f"{name} that needs gradients")
    return nullcontext()


@pytest.mark.parametrize("memory", [None, "240KiB"])
@pytest.mark.parametrize("name", REACHING)
def test_what_reaches_out_of_layers_has_the_gradients_of_plain_training(name: str, memory: str | None) -> None:
    """Graphs are kept with all memory, and recomputed with less."""
    with refused(name, same_training.default_devices):
        assert_same_training(Net(REACHING[name]()), samples(), device_memory=memory, layers=[Block])


@pytest.mark.parametrize(("name", "update"), combined(REACHING, [("after the backward",), ("just in time",)]))
def test_what_reaches_out_of_layers_on_two_devices(name: str, update: Update) -> None:
    with refused(name, 2):
        assert_same_training(Net(REACHING[name]()), samples(), devices=2, layers=[Block], updates=[update])


# ---- changes in place --------------------------------------------------------------------------------------------------


class Relu(nn.Module):
    """Changes its input, as plain PyTorch allows of what nobody has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(F.relu(x, inplace=True))
        return found * 1.5 + 0.1


class AddsInPlace(Relu):
    def forward(self, x: Tensor) -> Tensor:
        x += 0.5
        return super().forward(x) + 0.0


class ChangesWhatItMade(Relu):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.mul_(2).add_(x)
        return y


@pytest.mark.parametrize("memory", [None, "48KiB"])
@pytest.mark.parametrize("block", [Relu, AddsInPlace, ChangesWhatItMade])
def test_a_layer_may_change_in_place_what_plain_training_lets_it_change(block: type[Relu], memory: str | None) -> None:
    """It was refused, as its backward ran on copies of its inputs."""
    assert_same_training(Net(Stack(block)), samples(), device_memory=memory, layers=[block, nn.Linear])


class ChangesTheOther(Relu):
    """Changes one of its inputs, and computes with another one that has the same memory, or a part of it."""

    def forward(self, part: Tensor, whole: Tensor) -> Tensor:
        part.mul_(1.5)
        return super().forward(whole * 1.0)


class GivesViews(Stack):
    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__(ChangesTheOther)
        self.part = part

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            whole = x * 1.5
            x = block(self.part(whole), whole) + x
        return x


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[:, 1:],
    "every other column": lambda x: x[..., ::2],
    "another type": lambda x: x.detach().view(torch.int32)[:, :1].view(torch.float32),
    "all, without a graph": Tensor.detach,
}


@pytest.mark.cpu
@pytest.mark.parametrize("part", PARTS)
def test_inputs_that_share_memory_share_it_when_the_layer_runs_again(part: str) -> None:
    """Each was a copy of its own: gradients were those of the input as it had been before the layer changed it."""
    assert_same_training(
        Net(GivesViews(PARTS[part])), samples(), device_memory="100KiB", layers=[ChangesTheOther], devices=1
    )


@pytest.mark.cpu
@pytest.mark.parametrize("part", PARTS)
def test_on_another_device_they_share_it_or_are_refused(part: str) -> None:
    """Copies of tensors without gradients were apart, and nothing told of it."""
    has_gradient = PARTS[part](torch.ones(2, 2, 2, requires_grad=True)).requires_grad
    refused = pytest.raises(UnsupportedModelError, match="others of its inputs share memory with")
    with nullcontext() if has_gradient else refused:
        assert_same_training(
            Net(GivesViews(PARTS[part])), samples(), device_memory="100KiB", layers=[ChangesTheOther], devices=2
        )


class ReadsWhatLayersChanged(Stack):
    """Uses what it has called a layer with once more, as that has left it."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x * 1.5
            x = block(x) + x.tanh()
        return x


class SetsAPart(Relu):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0.5
        return super().forward(x) + x


class ChangesAView(Relu):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0].mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("block", [Relu, AddsInPlace, SetsAPart])
def test_what_a_layer_has_changed_is_so_for_its_caller_on_another_device(block: type[Relu]) -> None:
    """Copies were changed on the layer's device, and the caller found the input as it had been."""
    net = Net(ReadsWhatLayersChanged(block))
    assert_same_training(net, samples(), device_memory="48KiB", layers=[block], devices=2)


class ChangesData(Stack):
    """Changes the data of what it has called a layer with, which counts no version, and uses it once more."""

    def __init__(self, data: Callable[[Tensor], Tensor]) -> None:
        super().__init__(Plain)
        self.data = data

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x * 1.1
            data, y = self.data(x), block(x)
            data.add_(1)
            x = x + y + block(x).detach()
        return x


DATA: list[Callable[[Tensor], Tensor]] = [lambda x: x.data, lambda x: x.view(-1).data]


@pytest.mark.parametrize("data", DATA)
def test_what_is_used_on_another_device_has_the_data_that_it_was_given(
    data: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy from before was used: losses were wrong without a word."""
    monkeypatch.setattr("lightning_harmony.engine.memory.stash.SMALLEST_BYTES", 16 * 1024)
    assert_same_training(Net(ChangesData(data)), samples(), layers=[Plain], devices=2)


def test_to_change_a_view_of_what_is_on_another_device_is_refused() -> None:
    net = Net(ReadsWhatLayersChanged(ChangesAView))
    assert_same_training(net, samples(), device_memory="48KiB", layers=[ChangesAView], devices=1)
    with pytest.raises(UnsupportedModelError, match="changes a view of one of its inputs in place"):
        assert_same_training(net, samples(), device_memory="48KiB", layers=[ChangesAView], devices=2)


class ChangesOutputs(Stack):
    """Changes what a layer has returned and, as autograd has saved it, needs for its backward."""

    class Squashes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).tanh()

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__(ChangesOutputs.Squashes)
        self.change = change

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            self.change(x)
        return x


def without_graph(x: Tensor) -> None:
    with torch.no_grad():
        x.clamp_(-0.5, 0.5)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "adds": lambda x: x.add_(1),
    "by index": lambda x: x.__setitem__((slice(None), 0), 0.0),
    "without a graph": without_graph,
    "a view of it": lambda x: x.view(-1).mul_(0.5),
}


@pytest.mark.parametrize("memory", [None, "40KiB"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_saved_output_that_is_changed_in_place_is_refused_as_by_plain_training(
    change: str, memory: str | None
) -> None:
    """Where graphs are kept, from the second step on, gradients were wrong without a word."""
    for strategy in ("auto", HarmonyStrategy(memory, num_microbatches=2, layers=[ChangesOutputs.Squashes])):
        trainer = trainer_for(strategy, 3, [])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trainer.fit(Net(ChangesOutputs(CHANGES[change])), DataLoader(samples(), batch_size=8))


class ChangesInputs(Stack):
    """A layer changes in place what it is called with, and what code before it has saved."""

    class Shifts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1) @ self.weight

    def __init__(self) -> None:
        super().__init__()
        self.last = self.Shifts(WIDTH, WIDTH)

    def run(self, x: Tensor) -> Tensor:
        return self.last(super().run(x).tanh())  # type: ignore[no-any-return]


def test_what_code_between_layers_has_saved_is_refused_if_a_layer_has_changed_it_in_place() -> None:
    """It was in the stash by then, as it was: plain training fails where this one went on."""
    for strategy in ("auto", HarmonyStrategy("40KiB", num_microbatches=2)):
        trainer = trainer_for(strategy, 3, [])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trainer.fit(Net(ChangesInputs()), DataLoader(samples(), batch_size=8))


class ShiftsOutputs(Stack):
    """Changes what a layer has returned and no backward needs."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
        return x


def test_an_output_that_nothing_has_saved_may_be_changed_in_place() -> None:
    assert_same_training(Net(ShiftsOutputs()), samples(), device_memory="100KiB", layers=[Block])


class Plain(nn.Module):
    """Saves nothing of its input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * 1.5).tanh()


class AddsToInputs(Stack):
    """Adds to what it has called a layer with what that returns: no backward needs what was there."""

    def __init__(self) -> None:
        super().__init__(Plain)

    def run(self, x: Tensor) -> Tensor:
        x = x * 1.5
        for block in self.blocks:
            x += block(x)
        return x


class FillsAgain(AddsToInputs):
    """All layers are given one tensor, which is filled anew for each."""

    class Moved(Plain):
        def forward(self, x: Tensor, offset: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x + offset)

    def __init__(self) -> None:
        Stack.__init__(self, FillsAgain.Moved)

    def run(self, x: Tensor) -> Tensor:
        offset = torch.empty_like(x)
        for number, block in enumerate(self.blocks):
            x = block(x, offset.fill_(number))
        return x


class CallsAgain(AddsToInputs):
    """Calls one layer several times before its backward comes."""

    def run(self, x: Tensor) -> Tensor:
        x = x * 1.5
        for _ in self.blocks:
            x += self.blocks[0](x)
        return x


@pytest.mark.parametrize("memory", [None, "48KiB"])
@pytest.mark.parametrize("net", [AddsToInputs, FillsAgain, CallsAgain])
def test_an_input_that_nothing_has_saved_may_be_changed_in_place_behind_the_layer(
    net: type[AddsToInputs], memory: str | None
) -> None:
    """It was refused unless it was small, as it had not gone to the host by then."""
    tolerance = 1e-6 if net is CallsAgain else 0.0
    assert_same_training(Net(net()), samples(), device_memory=memory, layers=[Plain], tolerance=tolerance)


# ---- other graphs ------------------------------------------------------------------------------------------------------


class Fickle(Block):
    """Does something else when it runs again, by what it finds in no attribute of its own."""

    # Of a list, a recompute finds what the call has found.
    calls: ClassVar[SimpleQueue[int]] = SimpleQueue()

    def forward(self, x: Tensor) -> Any:
        Fickle.calls.put(1)
        return super().forward(x) if Fickle.calls.qsize() <= 4 else super().forward(x.tanh().exp())


def test_a_layer_that_saves_other_tensors_when_it_runs_again_is_named() -> None:
    Fickle.calls = SimpleQueue()
    strategy = HarmonyStrategy(num_microbatches=1, layers=[Block])
    with pytest.raises(UnsupportedModelError, match=r"layer 'net\.blocks\.3' saves other tensors"):
        trainer_for(strategy, 1, []).fit(Net(Stack(Fickle)), DataLoader(samples(), batch_size=8))


class Penalized(Stack):
    """A backward within the step, for the gradient of activations alone."""

    def run(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        y = super().run(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        return y * slope.detach().square().mean()


@pytest.mark.parametrize("memory", [None, "100KiB"])
def test_a_backward_may_come_in_pieces(memory: str | None) -> None:
    assert_same_training(Net(Penalized()), samples(), device_memory=memory, layers=[Block])


class Twice(Stack):
    def run(self, x: Tensor) -> Tensor:
        first, second = self.blocks[0](x), self.blocks[1](x)
        return super().run(first * second)


def test_a_layer_that_is_called_twice_differs_by_the_rounding_of_its_sum_only() -> None:
    assert_same_training(Net(Twice()), samples(), device_memory="100KiB", layers=[Block], tolerance=1e-6)


# ---- weights -----------------------------------------------------------------------------------------------------------


class SetsData(Block):
    """Changes the data of a weight by one of the ways there are, from a call on."""

    def __init__(self, change: Callable[[nn.Parameter], Any], after: int) -> None:
        super().__init__()
        self.change, self.after, self.num_calls = change, after, 0

    def forward(self, x: Tensor) -> Any:
        self.num_calls += 1
        if self.num_calls > self.after:
            self.change(self.up.weight)
        return super().forward(x)


def assign(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.5


def assign_beside_the_old(weight: nn.Parameter) -> None:
    """In plain PyTorch that is not changed."""
    old = weight.data
    weight.data = old * 0.5
    assert not torch.equal(old, weight)


def assign_in_another_layout(weight: nn.Parameter) -> None:
    weight.data = weight.data.t().contiguous().t()


def change_in_numpy(weight: nn.Parameter) -> None:
    array = weight.detach().cpu().numpy() if weight.is_cuda else weight.detach().numpy()
    array *= 0.5
    if weight.is_cuda:
        torch._foreach_copy_([weight.data], [torch.from_numpy(array).to(weight.device)])


@pytest.mark.parametrize(
    "change",
    [
        assign,
        lambda weight: weight.data.mul_(0.9),
        lambda weight: weight.data.copy_(weight.data.clamp(-0.1, 0.1)),
        lambda weight: weight.data[0].zero_(),
        lambda weight: torch._foreach_mul_([weight.data], 0.9),
    ],
)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_change_of_a_weights_data_of_which_a_version_tells_gives_equal_bits(
    change: Callable[[Any], Any], num_microbatches: int
) -> None:
    """That was refused."""
    net = Stack(lambda: SetsData(change, 2 * num_microbatches))
    assert_same_training(Net(net), samples(), num_microbatches=num_microbatches, layers=[Block])


@pytest.mark.parametrize(
    "change",
    [
        assign_beside_the_old,
        assign_in_another_layout,
        lambda weight: weight.view(-1).data.mul_(0.9),
        lambda weight: weight.data.data.copy_(weight.roll(1, 0)),
        lambda weight: torch.from_dlpack(weight.detach()).clamp_(-0.1, 0.1),
        change_in_numpy,
    ],
)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_change_of_a_weights_data_is_found_in_the_step_in_which_it_is_made(
    change: Callable[[Any], Any], num_microbatches: int
) -> None:
    """Weights were compared in the first step alone, and then the versions of some of their aliases."""
    strategy = HarmonyStrategy(num_microbatches=num_microbatches, layers=[Block])
    trainer = trainer_for(strategy, 4, [])
    with pytest.raises(UnsupportedModelError, match=r"'net\.blocks\.\d.*' (modifies a parameter|changes the data)"):
        trainer.fit(Net(Stack(lambda: SetsData(change, 2 * num_microbatches))), DataLoader(samples(), batch_size=8))
    assert trainer.global_step == 2


# ---- what lasts ----------------------------------------------------------------------------------------------------------


class SeesTwice(Stack):
    """What comes of the second view is a target: no backward comes to its graph."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(x) - super().run(x.flip(0)).detach()


class RunsAgain(Stack):
    """Checkpoints run the layers again for the sake of what the code around them has saved."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: F.gelu(block(y)), x, use_reentrant=False)
        return x


class IgnoresOne(Stack):
    """Nothing uses what one layer returns."""

    def run(self, x: Tensor) -> Tensor:
        self.blocks[0](x)
        return super().run(x)


class LosesOne(Stack):
    """A layer's output ends in an error that the code catches."""

    def run(self, x: Tensor) -> Tensor:
        with suppress(RuntimeError):
            self.blocks[0](x).reshape(7, 7)
        return super().run(x)


@pytest.mark.parametrize("net", [Stack, SeesTwice, RunsAgain, IgnoresOne, LosesOne])
def test_calls_end_with_their_graph_without_the_garbage_collector(
    net: type[Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that no backward had come to kept their inputs on the device for ever: in the next step there was no room."""
    calls: weakref.WeakSet[LayerCall] = weakref.WeakSet()
    num_alive: list[int] = []
    begin = LayerCall.__init__

    def noted(call: LayerCall, *args: Any) -> None:
        begin(call, *args)
        calls.add(call)

    class Counts(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            num_alive.append(len(calls))

    monkeypatch.setattr(LayerCall, "__init__", noted)
    strategy = HarmonyStrategy(device_memory="100KiB", num_microbatches=2)
    gc.collect()
    gc.disable()
    try:
        trainer = trainer_for(strategy, 3, [Counts()])
        trainer.fit(Net(net()), DataLoader(samples(), batch_size=4))
    finally:
        gc.enable()
    assert num_alive == [0, 0, 0]


# ---- several reads within a layer on another device ----------------------------------------------------------------------


class NormedByHand(Block):
    """As models from Hugging Face do, whose `to` returns its operand."""

    def forward(self, x: Tensor) -> Any:
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return x + self.down(F.gelu(self.up(normed.contiguous())))


class NormedByModule(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)  # type: ignore[assignment]


class AttendsTo(Block):
    """One tensor is three operands of one operation, and is added to its result."""

    def forward(self, x: Tensor) -> Any:
        attended = F.scaled_dot_product_attention(x, x, x)
        return x + self.down(F.gelu(self.up(attended)))


class AttendsByModule(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x + self.attention(x, x, x, need_weights=False)[0])


class Joins(Block):
    def forward(self, x: Tensor) -> Any:
        joined = torch.cat([x, x.tanh(), x, F.dropout(x, 0.0)], -1)
        return x + self.down(self.up(self.norm(joined.unflatten(-1, (4, WIDTH)).mean(-2))))


class Composed(Block):
    """Operations that are made of others, of which several read the operand."""

    def forward(self, x: Tensor) -> Any:
        likeness = F.cosine_similarity(x, x.flip(-1), -1)[..., None]
        return x + super().forward(F.normalize(x, dim=-1) * likeness)


@pytest.mark.parametrize("block", [NormedByHand, AttendsTo, AttendsByModule, Joins])
def test_a_layer_reads_a_tensor_of_another_device_as_often_as_it_likes(block: type[Block]) -> None:
    """Gradients are added in the order of plain training. What `to` returned was another tensor to all that read it next."""
    assert_same_training(Net(Stack(block)), samples(), devices=2, layers=[Block])


@pytest.mark.parametrize("block", [NormedByModule, Composed])
def test_an_operation_made_of_others_that_read_a_tensor_of_another_device_differs_by_rounding_only(
    block: type[Block],
) -> None:
    """They are seen as one read: their gradients are added before they are added to those of the other reads."""
    assert_same_training(Net(Stack(block)), samples(), devices=2, layers=[Block], tolerance=2e-6)

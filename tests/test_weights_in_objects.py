"""Layers whose code keeps a frozen weight beside its parameter, as those of packages for quantized weights do."""

from __future__ import annotations

import copy
import json
import os
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from support import nets
from support.adapters import Adapted, Stack
from support.same_training import Net, assert_same_training, compare, root, train_harmony, train_plain, trainer_for
from support.taking_turns import ONE_AFTER_THE_OTHER, takes_turns

SIZE = 32
SAMPLES = torch.randn(24, SIZE, generator=torch.Generator().manual_seed(1))
# A file that tells where products found elements, in the forward and in the backward. Of a list or a queue, microbatches could
# read what others add.
FOUND = os.memfd_create("found")


def note_found(phase: str, device: torch.device, memory: int) -> None:
    os.write(FOUND, (json.dumps([phase, str(device), memory]) + "\n").encode())


class Coded(nn.Parameter):
    """A byte an element. As an attribute, it has these once more, and a scale a row, until a module takes them."""

    codes: Tensor | None
    scale: Tensor | None

    @staticmethod
    def of(codes: Tensor, scale: Tensor | None) -> Coded:
        parameter: Coded = Tensor._make_subclass(Coded, codes, False)
        parameter.codes, parameter.scale = parameter.data, scale
        return parameter

    @staticmethod
    def random() -> Coded:
        # Packages load such weights on the accelerator: `module.to` would leave behind what objects have of them.
        values = (torch.randn(SIZE, SIZE) / SIZE).to(root())
        scale = values.abs().amax(1) / 127
        return Coded.of((values / scale[:, None]).round().to(torch.int8), scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> Coded:
        made = memo[id(self)] = Coded.of(self.detach().clone(), copy.deepcopy(self.scale, memo))
        if self.codes is None:
            made.codes = None
        return made


class State:
    """What a product computes with."""

    codes: Tensor | None = None
    scale: Tensor | None = None
    newest: Tensor | None = None

    def weight(self, phase: str) -> Tensor:
        assert self.codes is not None
        assert self.scale is not None
        note_found(phase, self.codes.device, self.codes.untyped_storage().data_ptr())
        note_found(phase, self.scale.device, self.scale.untyped_storage().data_ptr())
        return self.codes.to(torch.float32) * self.scale[:, None]


class Product(torch.autograd.Function):
    """Saves nothing: its backward asks the state."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: State) -> Tensor:
        ctx.state = state
        state.newest = x.detach().abs().amax(0)
        return x @ state.weight("forward").t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.state.weight("backward"), None


class InState(nn.Module):
    """The first call moves what the parameter has to a state object, and each call gives the parameter its data back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Coded.random()
        self.state = State()

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.codes is not None:
            self.state.codes, self.state.scale = self.weight.codes, self.weight.scale
            self.weight.codes = self.weight.scale = None
        result: Tensor = Product.apply(x, self.state)  # type: ignore[no-untyped-call]
        assert self.state.codes is not None
        self.weight.data = self.state.codes
        return result


class StateMadeInTheForward(InState):
    """The first call makes the state, of the parameter's data."""

    def __init__(self) -> None:
        super().__init__()
        del self.state

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "state"):
            self.state = State()
            self.state.codes, self.state.scale = self.weight.data, self.weight.scale
            self.weight.codes = self.weight.scale = None
        return super().forward(x)


class AnewInEachCall(InState):
    """Each call makes a state, and keeps it in an object within an object."""

    def __init__(self) -> None:
        super().__init__()
        del self.state
        self.kept = SimpleNamespace(within={})

    def forward(self, x: Tensor) -> Tensor:
        state = State()
        state.codes, state.scale = self.weight.data, self.weight.scale
        self.kept.within["state"] = state
        return Product.apply(x, state)  # type: ignore[no-any-return, no-untyped-call]


class MovedByApply(InState):
    """What objects have of the weight comes along where the module is moved. It is made on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.to("cpu")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for each in (self.weight, self.state):
            if each.codes is not None and each.scale is not None:
                each.codes, each.scale = fn(each.codes), fn(each.scale)
        return self


class JoinedByApply(MovedByApply):
    """After each move, objects have the weight's own memory again."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for each in (self.weight, self.state):
            if each.codes is not None:
                each.codes = self.weight.data
        return self


class LeftBehind(InState):
    """The weight was moved to the host, and what the state has of it was not."""

    def __init__(self) -> None:
        super().__init__()
        assert self.weight.codes is not None
        self.state.codes, self.state.scale = self.weight.codes.clone(), self.weight.scale
        self.weight.codes = self.weight.scale = None
        self.weight.data = self.weight.detach().to("cpu")


class AsAttribute(nn.Module):
    """The module has the elements as an attribute, and the parameter none."""

    def __init__(self, weight: Coded | None = None) -> None:
        super().__init__()
        self.weight = Coded.random() if weight is None else weight
        self.codes, self.scale = self.weight.codes, self.weight.scale
        self.weight.codes = self.weight.scale = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AsAttribute:
        return AsAttribute(Coded.of(self.weight.detach().clone(), self.scale))

    def forward(self, x: Tensor) -> Tensor:
        state = State()
        state.codes, state.scale = self.codes, self.scale
        return Product.apply(x, state)  # type: ignore[no-any-return, no-untyped-call]


class Twice(Stack):
    """Calls its layers twice. They train nothing: gradients of several uses are summed in another order."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(torch.tanh(self.layers(self.first(x))))).pow(2).mean()  # type: ignore[no-any-return]


KINDS = [InState, StateMadeInTheForward, AnewInEachCall]
MOVED = [MovedByApply, JoinedByApply, LeftBehind]


def taken_found() -> list[tuple[str, torch.device, int]]:
    """What was noted since this was last asked for."""
    size = os.lseek(FOUND, 0, os.SEEK_CUR)
    noted = [json.loads(line) for line in os.pread(FOUND, size, 0).decode().splitlines()]
    os.ftruncate(FOUND, 0)
    os.lseek(FOUND, 0, os.SEEK_SET)
    return [(phase, torch.device(device), memory) for phase, device, memory in noted]


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("device_memory", [None, "28KiB"])
@pytest.mark.parametrize("kind", [*KINDS, AsAttribute, *MOVED])
def test_weights_in_objects_train_with_equal_bits(kind: type[nn.Module], device_memory: str | None) -> None:
    assert_same_training(Net(Stack(*[Adapted(kind(), SIZE) for _ in range(4)])), SAMPLES, device_memory=device_memory)


@pytest.mark.parametrize("kind", KINDS)
def test_each_device_of_a_spread_model_has_the_weight(kind: type[nn.Module]) -> None:
    net = Stack(*[Adapted(kind(), SIZE) for _ in range(3)])
    # Gradients are summed on each device first.
    assert_same_training(Net(net), SAMPLES, devices=2, parallel="data", tolerance=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_called_twice_finds_its_weight_in_each_call(kind: type[nn.Module]) -> None:
    assert_same_training(Net(Twice(*[kind() for _ in range(3)])), SAMPLES, layers=(nn.Linear, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_that_no_saved_tensor_announces_finds_the_weight(kind: type[nn.Module]) -> None:
    net = Stack(nn.Linear(SIZE, SIZE), kind(), nn.Linear(SIZE, SIZE), kind(), kind())
    assert_same_training(Net(net), SAMPLES, layers=(nn.Linear, kind))


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *MOVED])
def test_products_find_elements_and_scales_on_the_device_and_nowhere_else(
    kind: type[nn.Module], is_alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bases: list[Any] = [kind() for _ in range(4)]
    # Where they are layers by themselves, no saved tensor announces their backward.
    module = Net(Stack(nn.Linear(SIZE, SIZE), *bases) if is_alone else Stack(*[Adapted(each, SIZE) for each in bases]))
    home: set[int] = set()

    class Noting(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            home.update(base.weight.untyped_storage().data_ptr() for base in bases)

    layers = (nn.Linear, kind) if is_alone else None
    strategy = HarmonyStrategy(num_microbatches=4, device_memory="28KiB", layers=layers)
    taken_found()
    with caplog.at_level("INFO"):
        training = train_harmony(module, SAMPLES, strategy, 8, with_gradients=False, more_callbacks=[Noting()])
    found = taken_found()
    assert {phase for phase, _, _ in found} == {"forward", "backward"}
    assert {device.type for _, device, _ in found} == {root().type}
    after = [base.kept.within["state"] if kind is AnewInEachCall else base.state for base in bases]
    for base, state in zip(bases, after, strict=True):
        # They are on the host again, and in the parameter's memory.
        assert state.codes.device.type == state.scale.device.type == "cpu"
        assert state.codes.data_ptr() == base.weight.data_ptr()
        home |= {state.codes.untyped_storage().data_ptr(), state.scale.untyped_storage().data_ptr()}
    assert not home & {memory for _, _, memory in found}
    # Elements, scales and adapters, once for the forward and once for the backward. Each lies at a multiple of 512 bytes.
    most = SIZE * SIZE * 4 + 512 if is_alone else 4 * 2 * SIZE * 4 * 4
    most += 4 * (SIZE * SIZE + 512)
    # An object that a call leaves to the next has microbatches run one after the other, each of which may need them anew.
    num_turns = 4 if any(ONE_AFTER_THE_OTHER in message for message in caplog.messages) else 1
    assert training.reports[-1].swapped_in_bytes["weights"] <= 2 * num_turns * most


@pytest.mark.parametrize("kind", [InState, StateMadeInTheForward])
def test_microbatches_take_turns_where_an_object_has_the_weight(
    kind: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    class First(Stack):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch[0])

    net = First(nn.Linear(nets.WIDTH, SIZE), *[Adapted(kind(), SIZE) for _ in range(3)])
    assert takes_turns(net, caplog) == (True, [])


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_objects_are_left_as_plain_lightning_leaves_them(kind: type[nn.Module]) -> None:
    made = Net(Stack(*[Adapted(kind(), SIZE) for _ in range(2)]))
    plain, swapped = copy.deepcopy(made), copy.deepcopy(made)
    trainer_for("auto", 1, []).fit(plain, DataLoader(SAMPLES, batch_size=8))
    train_harmony(swapped, SAMPLES, HarmonyStrategy(num_microbatches=4), 8, with_gradients=False)
    for one, other in zip(plain.net.layers, swapped.net.layers, strict=True):
        assert vars(one.base.weight).keys() == vars(other.base.weight).keys()
        for name, value in vars(one.base.weight).items():
            assert (value is None) == (vars(other.base.weight)[name] is None), name


def test_a_second_fit_and_an_evaluation_find_the_weight() -> None:
    module = Net(Stack(*[Adapted(InState(), SIZE) for _ in range(3)]))
    plain, swapped = copy.deepcopy(module), copy.deepcopy(module)
    outputs = []
    for each, strategy in ((plain, "auto"), (swapped, None)):
        for _ in range(2):
            made = strategy or HarmonyStrategy(device_memory="28KiB", num_microbatches=1)
            trainer = trainer_for(made, 2, [])
            torch.manual_seed(0)
            trainer.fit(each, DataLoader(SAMPLES, batch_size=8))
        each.predict_step = lambda batch, index, net=each.net: net.layers(batch)
        made = strategy or HarmonyStrategy(device_memory="28KiB", num_microbatches=1)
        outputs.append(trainer_for(made, 2, []).predict(each, DataLoader(SAMPLES, batch_size=8)))
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(*outputs, strict=True))
    for name, value in plain.state_dict().items():
        assert torch.equal(value.cpu(), swapped.state_dict()[name].cpu()), name


class WritesToTheState(InState):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        assert self.state.scale is not None
        self.state.scale.mul_(0.5)
        return result


class TakesOtherData(InState):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.weight.data = self.weight.data + 1
        return result


@pytest.mark.parametrize("kind", [WritesToTheState, TakesOtherData])
def test_a_layer_that_changes_what_it_keeps_of_a_weight_is_refused(kind: type[nn.Module]) -> None:
    module = Net(Stack(*[Adapted(kind(), SIZE) for _ in range(2)]))
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(UnsupportedModelError, match=r"'net\.layers\.0' changes the data of a parameter in its forward"):
        train_harmony(module, SAMPLES, HarmonyStrategy(num_microbatches=4), 8, with_gradients=False)
    assert all(torch.equal(value.cpu(), module.state_dict()[name].cpu()) for name, value in before.items())


def test_other_data_for_a_weight_that_an_object_has_too_is_refused() -> None:
    module = Net(Stack(*[Adapted(InState(), SIZE) for _ in range(2)]))

    class Assigning(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                module.net.layers[0].base.weight.data = torch.zeros(SIZE, SIZE, dtype=torch.int8)

    strategy = HarmonyStrategy(num_microbatches=4)
    with pytest.raises(UnsupportedModelError, match="other data than an object has of it"):
        train_harmony(module, SAMPLES, strategy, 8, with_gradients=False, more_callbacks=[Assigning()])


class Lazy:
    """What is computed from a weight when somebody asks for it, as the kernels of Gaussian processes."""

    def __init__(self, module: nn.Module, weight: nn.Parameter, x: Tensor) -> None:
        self.module, self.weight, self.x = module, weight, x

    def value(self) -> Tensor:
        return self.module(self.x) * self.weight


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Asks(nn.Module):
    """A layer that has the weight, and is called with what holds it."""

    def __init__(self, scales: Scales, weight: nn.Parameter) -> None:
        super().__init__()
        self.scales, self.weight, self.linear = scales, weight, nn.Linear(16, 16)

    def forward(self, lazy: Lazy) -> Tensor:
        return torch.tanh(self.linear(lazy.value()))


class GivesWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.scales, self.weight = Scales(), nn.Parameter(torch.full((16,), 0.7))
        self.asks = Asks(self.scales, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.asks(Lazy(self.scales, self.weight, self.layers(x))).square().mean()  # type: ignore[no-any-return]


@pytest.mark.cpu
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_an_object_that_a_layer_is_called_with_may_hold_modules_and_weights_that_it_has(num_microbatches: int) -> None:
    """They were taken for tensors, to be stashed: that brought them, and the layer lost its own."""
    samples = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    plain = train_plain(Net(GivesWeights()), samples, num_microbatches, 4)
    strategy = HarmonyStrategy(device_memory="16KiB", num_microbatches=num_microbatches, profile_cache=False)
    compare(plain, train_harmony(Net(GivesWeights()), samples, strategy, 4, with_gradients=False))


class Regularized(nn.Module):
    """Keeps what it regularizes in tuples in a list, beside their factors, as deepctr does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.scale = nn.Parameter(torch.full((16,), 0.7))
        self.regularized = [
            ([pair for pair in self.layers.named_parameters() if "weight" in pair[0]], 0.0, 0.01),
            ([self.scale], 0.01, 0.0),
        ]

    def forward(self, x: Tensor) -> Tensor:
        loss = (self.layers(x) * self.scale).square().mean()
        for weights, one, two in self.regularized:
            for weight in weights:
                tensor = weight[1] if isinstance(weight, tuple) else weight
                loss = loss + one * tensor.abs().sum() + two * tensor.square().sum()
        return loss


@pytest.mark.cpu
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_weights_may_lie_in_tuples_in_lists(num_microbatches: int) -> None:
    """This was refused."""
    samples = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    plain = train_plain(Net(Regularized()), samples, num_microbatches, 4)
    net = Regularized()
    strategy = HarmonyStrategy(device_memory="16KiB", num_microbatches=num_microbatches, profile_cache=False)
    # Read between layers, too: their gradients are summed in another order.
    compare(plain, train_harmony(Net(net), samples, strategy, 4, with_gradients=False), tolerance=1e-6)
    pairs = net.regularized[0][0]
    assert all(weight is net.layers.get_parameter(name) for name, weight in pairs)

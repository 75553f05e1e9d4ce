"""Layers find on their weights the class and the attributes that the user's parameters have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.estimating.estimation import estimate
from lightning_harmony.plan.values.machine import H200
from support.same_training import Net, assert_same_training, compare, train_harmony, train_plain
from support.sampling import combined


class Scaled(nn.Linear):
    """Reads an attribute of its weight with a default, as muP's readout does: where it is lacking, nothing fails."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.weight.multiplier = 0.5  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * getattr(self.weight, "multiplier", 1.0), self.bias)


class Packed(nn.Parameter):
    """Four bits an element, two in a byte, and what it takes to read them, as a parameter of bitsandbytes."""

    state: Any
    original: Tensor

    @staticmethod
    def of(values: Tensor) -> Packed:
        scale = values.abs().amax(1, keepdim=True) / 7
        codes = (values / scale).round().to(torch.int8) + 8
        packed = (codes[:, ::2] * 16 + codes[:, 1::2]).to(torch.uint8)
        parameter = Tensor._make_subclass(Packed, packed, False)
        parameter.state = SimpleNamespace(scale=scale, shape=values.shape)
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        parameter = memo[id(self)] = Tensor._make_subclass(Packed, self.detach().clone(), False)
        parameter.state = self.state
        return parameter

    def unpacked(self) -> Tensor:
        codes = torch.stack([self.data >> 4, self.data & 15], 2).reshape(self.state.shape)
        return (codes.to(self.state.scale.dtype) - 8) * self.state.scale


class QLoRA(nn.Module):
    """A frozen packed weight and a trained product of two small ones."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = Packed.of(torch.randn(size, size))
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.linear(x, self.weight.unpacked()) / 8 + self.up(self.down(x))


class Offset(nn.Module):
    """Its weight carries a tensor."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size)
        self.weight.center = torch.randn(size)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.weight.center) @ self.weight  # type: ignore[attr-defined]


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.layers(batch) - 1).pow(2).mean()
        return loss


class InGlue(nn.Module):
    """Code between layers reads an attribute of a parameter that no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.gain = nn.Parameter(torch.randn(16))
        self.gain.power = 3  # type: ignore[attr-defined]

    def forward(self, batch: Tensor) -> Tensor:
        power = getattr(self.gain, "power", 1)
        loss: Tensor = (self.layers[1](self.layers[0](batch) * self.gain**power) - 1).pow(2).mean()
        return loss


class Marked(Net):
    """Its copies keep what was set on parameters, which `copy.deepcopy` leaves out."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Marked:
        copied = memo[id(self)] = Marked.__new__(Marked)
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        for own, other in zip(self.parameters(), copied.parameters(), strict=True):
            vars(other).update(vars(own))
        return copied


def trained(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("kind", [Scaled, QLoRA, Offset])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.cpu
def test_attributes_of_weights_reach_the_forward(kind: type[nn.Module], devices: int) -> None:
    torch.manual_seed(0)
    net = Stack(*(kind(16) for _ in range(3)))  # type: ignore[call-arg]
    assert_same_training(Marked(net, trained), torch.randn(32, 16), devices=devices)


def test_attributes_of_parameters_reach_the_code_between_layers() -> None:
    torch.manual_seed(0)
    assert_same_training(Marked(InGlue(), trained), torch.randn(32, 16))


@pytest.mark.cpu
def test_packed_bytes_alone_are_swapped_in() -> None:
    torch.manual_seed(0)
    net = Stack(*(QLoRA(64) for _ in range(3)))
    reports = assert_same_training(Marked(net, trained), torch.randn(32, 64), device_memory="64KiB")
    # Three layers, at most once for the forward and once for the backward; arenas are padded to 512 bytes a weight.
    assert reports[-1].swapped_in_bytes["weights"] <= 2 * 3 * (64 * 32 + 2 * 64 * 2 * 4 + 3 * 512)


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [Scaled, QLoRA, Offset])
def test_estimates_find_the_class_and_the_attributes_of_weights(kind: type[nn.Module]) -> None:
    net = Stack(*(kind(64) for _ in range(3)))  # type: ignore[call-arg]
    machine = replace(H200, host_bytes=2**40, device_bytes=None, library_bytes=0)
    batch = torch.empty(8, 64, device="meta")
    outlook = estimate(Marked(net, trained), batch, device_memory="80KiB", num_microbatches=4, machine=machine).outlook
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    assert weights <= outlook.host.weight_bytes <= weights + 3 * 3 * 512


class Kept:
    """What an object keeps that was set on a parameter."""

    factors: Tensor
    seen: list[int]
    num_calls: int


CHANGES: dict[str, Callable[[Any], object]] = {
    "another": lambda kept: setattr(kept, "factors", kept.factors * 1.01),
    "a number": lambda kept: setattr(kept, "num_calls", kept.num_calls + 1),
    "a list": lambda kept: kept.seen.append(len(kept.seen)),
}


class Changing(nn.Module):
    """Its code changes what is set on a weight, or on an object that was, and reads it.

    Args:
        change: changes it.
        frozen: whether the weight is.
        within: whether an object has it.
    """

    def __init__(self, change: Callable[[Any], object], *, frozen: bool, within: bool) -> None:
        super().__init__()
        self.one, self._change, self._within = nn.Linear(16, 16), change, within
        weight: Any = self.one.weight.requires_grad_(not frozen)
        if within:
            weight.kept = Kept()
        kept = self._kept()
        kept.factors, kept.seen, kept.num_calls = torch.full((16,), 0.5), [], 0

    def _kept(self) -> Any:
        weight: Any = self.one.weight
        return weight.kept if self._within else weight

    def forward(self, x: Tensor) -> Tensor:
        kept = self._kept()
        self._change(kept)
        return x + torch.tanh(self.one(x)) * kept.factors * (1 + 0.01 * (kept.num_calls + len(kept.seen)))


class CountedOnAWeight(nn.Module):
    """Its first call sets what later ones count on."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.one.weight
        weight.num_calls = getattr(weight, "num_calls", 0) + 1
        return x + torch.tanh(self.one(x)) * (1 + 0.01 * weight.num_calls)


def trained_twice(make: Callable[[], nn.Module], num_microbatches: int, *callbacks: pl.Callback) -> None:
    """Train a stack of layers as plain Lightning does, and swapped."""
    trained_alike(lambda: Stack(*(make() for _ in range(4))), num_microbatches, *callbacks)


def trained_alike(make: Callable[[], nn.Module], num_microbatches: int, *callbacks: pl.Callback) -> tuple[Net, Net]:
    """Train as plain Lightning does, and swapped; the modules, as each has left them."""
    samples = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))

    def built() -> Net:
        torch.manual_seed(0)
        return Net(make(), trained)

    one, other = built(), built()
    plain = train_plain(one, samples, num_microbatches, 6, more_callbacks=callbacks)
    strategy = HarmonyStrategy(device_memory="12KiB", num_microbatches=num_microbatches, profile_cache=False)
    compare(plain, train_harmony(other, samples, strategy, 6, with_gradients=False, more_callbacks=callbacks))
    return one, other


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("change", "frozen", "within", "num_microbatches"),
    combined(combined(list(CHANGES), [(True,), (False,)]), combined([True, False], [(1,), (3,)])),
)
def test_what_layers_change_on_their_parameters_counts_once(
    change: str, frozen: bool, within: bool, num_microbatches: int
) -> None:
    """The call that the backward runs again changed it once more, and nobody noticed."""
    trained_twice(lambda: Changing(CHANGES[change], frozen=frozen, within=within), num_microbatches)


@pytest.mark.cpu
@pytest.mark.parametrize("within", [True, False])
def test_a_layer_that_writes_to_what_a_frozen_weight_keeps_is_refused(within: bool) -> None:
    """It comes with the weight, and what was written there would be lost."""

    def write(kept: Any) -> None:
        kept.factors.mul_(1.01)

    with pytest.raises(UnsupportedModelError, match="a tensor which an object has of a frozen one"):
        trained_twice(lambda: Changing(write, frozen=True, within=within), 1)


@pytest.mark.cpu
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_what_the_first_call_sets_on_a_parameter_counts_once(num_microbatches: int) -> None:
    trained_twice(CountedOnAWeight, num_microbatches)


class Sharing(nn.Module):
    """What is set on its frozen weight lies in memory that others have, too.

    Args:
        share: sets that, and returns the others.
    """

    def __init__(self, share: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.one = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self.register_buffer("buffer", torch.rand(16))
        self.shared = SimpleNamespace(tensor=share(self, self.weight))

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return x + torch.tanh(self.one(x)) + x.sin() @ (weight * weight.factors)


def with_a_buffer(module: nn.Module, weight: Any) -> Tensor:
    buffer = module.get_buffer("buffer")
    weight.factors = buffer[None]
    return buffer


def with_one_of_ones_own(module: nn.Module, weight: Any) -> Tensor:
    weight.both = torch.rand(2, 16)
    weight.factors = weight.both[1]
    return weight.both  # type: ignore[no-any-return]


def with_one_elsewhere(module: nn.Module, weight: Any) -> Tensor:
    both = torch.rand(2, 16)
    weight.factors = both[0]
    return both


def in_other_units(module: nn.Module, weight: Any) -> Tensor:
    weight.factors = torch.rand(16)
    weight.bits = weight.factors.view(torch.int32)
    return weight.bits.view(torch.float32)  # type: ignore[no-any-return]


class Grow(pl.Callback):
    """Changes in place what is shared."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx % trainer.accumulate_grad_batches == 0:
            for layer in module.net.layers:
                layer.shared.tensor.mul_(1.1)


@pytest.mark.cpu
@pytest.mark.parametrize("share", [with_a_buffer, with_one_of_ones_own, with_one_elsewhere, in_other_units])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_attributes_change_with_what_shares_their_memory(
    share: Callable[[nn.Module, Any], Tensor], num_microbatches: int
) -> None:
    """They went to memory of their own, and what others changed of them was lost."""
    trained_twice(lambda: Sharing(share), num_microbatches, Grow())


class WithoutData(QLoRA):
    """Its weight tells of another one, that was never made, by its shape and type."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.weight.original = torch.empty(size, size, device="meta")


@pytest.mark.cpu
def test_attributes_may_have_no_data() -> None:
    trained_twice(lambda: WithoutData(16), 1)


class ScaledOnItsWeight(nn.Module):
    """Reads what other code sets on its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 16)
        cast(Any, self.one.weight).num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.one.weight
        return x + torch.tanh(self.one(x)) * getattr(weight, "scale", 1 + 0.01 * weight.num_calls)


class SetsBetweenLayers(Stack):
    """Sets something on weights between calls of layers.

    Args:
        at_once: whether it sets it on the weights of all layers before their calls, from some call on.
        layers: which have them.
    """

    def __init__(self, layers: list[nn.Module], *, at_once: bool) -> None:
        super().__init__(*layers)
        self._at_once, self._num_calls = at_once, 0

    def forward(self, batch: Tensor) -> Tensor:
        self._num_calls += 1
        for layer in self.layers:
            weight = cast(Any, layer).one.weight
            if self._at_once and self._num_calls > 7:
                weight.scale = float(batch.mean())
            if not self._at_once:
                weight.num_calls += 1
                batch = layer(batch)
        outputs = self.layers(batch) if self._at_once else batch
        return (outputs - 1).pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.cpu
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_layers_find_what_code_between_them_sets_on_their_weights(at_once: bool, num_microbatches: int) -> None:
    """It was set on what stands for the weight alone."""

    def make() -> Stack:
        return SetsBetweenLayers([ScaledOnItsWeight() for _ in range(3)], at_once=at_once)

    modules = trained_alike(make, num_microbatches)
    plain, swapped = ([vars(each) for each in module.parameters()] for module in modules)
    assert plain == swapped


class KeepsAView(nn.Module):
    """Its first call keeps a view of what a frozen weight has beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        cast(Any, self.weight).factors = torch.rand(2, 16)
        self.shared = SimpleNamespace(tensor=cast(Any, self.weight).factors)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if not hasattr(weight, "second"):
            weight.second = weight.factors[1]
        return x + torch.tanh(self.one(x)) + x.sin() @ (weight * weight.factors[0] * weight.second)


@pytest.mark.cpu
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_a_view_that_a_call_leaves_on_a_frozen_weight_follows_what_it_is_of(num_microbatches: int) -> None:
    """It kept the memory that it was found in on the device, and its values."""
    trained_twice(KeepsAView, num_microbatches, Grow())


class AsksForLeaves(nn.Linear):
    """A parameter is a leaf of the graph: a module takes nothing else as a parameter."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        other = nn.Linear(8, 8)
        other.weight, other.bias = self.weight, self.bias
        scale = 1.5 if self.weight.is_leaf and self.weight.grad_fn is None else 1.0
        out: Tensor = scale * other(x)
        return out


class Leaves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[AsksForLeaves() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.blocks(x).pow(2).mean()
        return loss


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_layers_find_leaves_in_their_weights(num_microbatches: int) -> None:
    assert_same_training(Net(Leaves()), torch.randn(40, 8), num_microbatches=num_microbatches)


class Hooks(AsksForLeaves):
    """Registers a hook in its first call, which in plain Lightning sees the gradient of the parameter from then on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.is_registered = how, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_registered:
            self.is_registered = True
            getattr(self.weight, self.how)(lambda gradient: None)
        return super().forward(x)


@pytest.mark.parametrize("how", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_layer_that_registers_a_hook_on_its_weight_is_refused(how: str) -> None:
    net = Leaves()
    net.blocks[1] = Hooks(how)
    strategy = HarmonyStrategy(num_microbatches=1, layers=[AsksForLeaves])
    with pytest.raises(
        UnsupportedModelError, match=r"layer 'net\.blocks\.1' registers a hook on one of its parameters"
    ):
        train_harmony(Net(net), torch.randn(40, 8), strategy, 8, with_gradients=False)

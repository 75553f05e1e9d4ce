"""Frozen weights whose values are in tensors of their own (``__tensor_flatten__``) are swapped as those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from lightning_harmony.engine.structures.parts import num_bytes_of, parts_of
from lightning_harmony.estimating.estimation import estimate
from lightning_harmony.fit.device_memory import LastingBytes
from lightning_harmony.plan.values.machine import H200
from support.adapters import Adapted, Stack
from support.composed import Composed, Lookup, Nested, Overlapping, Packed, Scaled, Unsteady, Views
from support.same_training import Net, assert_same_training, room, train_harmony, trainer_for

KINDS: list[type[Any]] = [Packed, Unsteady, Scaled, Nested, Views, Overlapping, Lookup]
SIZE = 64
SAMPLES = torch.randn(16, SIZE, generator=torch.Generator().manual_seed(1))


def frozen(kind: type[Any]) -> nn.Parameter:
    return nn.Parameter(kind.of(torch.randn(SIZE, SIZE) / 8), requires_grad=False)


def base(kind: type[Any]) -> nn.Linear:
    linear = nn.Linear(SIZE, SIZE).requires_grad_(False)
    linear.weight = frozen(kind)
    return linear


def stack(kind: type[Any]) -> nn.Module:
    return Stack(*[Adapted(base(kind), SIZE) for _ in range(4)])


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("device_memory", [None, "80KiB"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_beside_a_composed_weight_train_with_equal_bits(kind: type[Any], device_memory: str | None) -> None:
    assert_same_training(Net(stack(kind)), SAMPLES, device_memory=room(device_memory))


def test_parts_alone_are_swapped_in() -> None:
    net = stack(Packed)
    reports = assert_same_training(Net(net), SAMPLES, device_memory=room("80KiB"))
    weights = sum(map(num_bytes_of, net.parameters()))
    assert weights < 4 * (SIZE * SIZE / 2 + 2 * SIZE * 4 + SIZE * 4 + 2 * SIZE * 4 * 4 + 1)
    # At most once for the forward and once for the backward; what lies between parts is copied along.
    assert 0 < reports[-1].swapped_in_bytes["weights"] <= 2 * (weights + 4 * 6 * 512)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_leaves_the_users_weights_what_they_were(kind: type[Any]) -> None:
    module = Net(stack(kind))
    weights = {name: p for name, p in module.named_parameters() if isinstance(p, Composed)}
    before = {name: [part.clone() for part in parts_of(weight)] for name, weight in weights.items()}
    train_harmony(module, SAMPLES, HarmonyStrategy(num_microbatches=4), 8, with_gradients=False)
    after = dict(module.named_parameters())
    assert len(weights) == 4
    for name, weight in weights.items():
        assert after[name] is weight
        assert type(weight) is kind
        assert isinstance(weight, nn.Parameter)
        for part, old in zip(parts_of(weight), before[name], strict=True):
            assert part.device.type == "cpu"
            assert torch.equal(part, old)


class Saved(Net):
    """Trains from a file on, as code does that loads a checkpoint before a fit."""

    def __init__(self, net: nn.Module, path: Path) -> None:
        super().__init__(net)
        self.path = path

    def on_fit_start(self) -> None:
        with torch.serialization.safe_globals([*KINDS, torch.device]):
            self.load_state_dict(torch.load(self.path, weights_only=False)["state_dict"])


@pytest.mark.parametrize("kind", [Packed, Nested, Views])
def test_checkpoints_hold_the_parts_and_load_into_plain_and_into_swapped_training(
    kind: type[Any], tmp_path: Path
) -> None:
    for strategy in ("auto", HarmonyStrategy(num_microbatches=4)):
        module = Net(stack(kind))
        trainer = trainer_for(strategy, 2, [])
        trainer.fit(module, DataLoader(SAMPLES, batch_size=8))
        path = tmp_path / "a.ckpt"
        trainer.save_checkpoint(path)
        # A few bytes of Python objects, and no arena.
        assert path.stat().st_size < 3 * sum(map(num_bytes_of, module.parameters())) + 64 * 1024
        saved = torch.load(path, weights_only=False)["state_dict"]
        for name, parameter in module.named_parameters():
            assert type(saved[name]) is (kind if isinstance(parameter, kind) else Tensor)
            for part, other in zip(parts_of(saved[name]), parts_of(parameter), strict=True):
                assert torch.equal(part, other)
        assert_same_training(Saved(stack(kind), path), SAMPLES)


class Evaluating(Net):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.net(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net.layers(batch)  # type: ignore[no-any-return, operator]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_are_those_of_plain_lightning(kind: type[Any], devices: int) -> None:
    module = Evaluating(stack(kind))
    results = []
    for strategy, number in (("auto", 1), (HarmonyStrategy(num_microbatches=1), devices)):
        trainer = trainer_for(strategy, 2, [], devices=number)
        loader = DataLoader(SAMPLES, batch_size=8)
        results.append((trainer.validate(module, loader, verbose=False), trainer.predict(module, loader)))
    (metrics, outputs), (others, other_outputs) = results
    assert metrics == others
    assert all(torch.equal(one, other) for one, other in zip(outputs, other_outputs, strict=True))


# ---- where such weights are ------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two layers have one composed weight, which one of them uses transposed."""

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.first, self.second, self.head = Adapted(base(kind), SIZE), Adapted(base(kind), SIZE), nn.Linear(SIZE, SIZE)
        self.second.base.weight = self.first.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x))).pow(2).mean()  # type: ignore[no-any-return]


class Product(torch.autograd.Function):
    """A product that saves its weight, or keeps it on the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kept: bool) -> Tensor:
        ctx.save_for_backward(x, *([] if kept else [weight]))
        ctx.weight = weight if kept else None
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight = ctx.saved_tensors[1] if ctx.weight is None else ctx.weight
        return gradient @ weight, None, None


class SavingWhole(nn.Module):
    """Autograd saves the weight itself, before which another one of its shape lies. The layer shows it to others."""

    def __init__(self, base: nn.Module, *, kept: bool) -> None:
        super().__init__()
        self.before = nn.Linear(SIZE, SIZE, bias=False).requires_grad_(False)
        self.base, self.out, self.kept = base, nn.Linear(SIZE, SIZE), kept
        self.seen: Any = None

    def forward(self, x: Tensor) -> Any:
        weight: Any = self.base.weight
        self.seen = weight.detach()
        x = self.out(torch.tanh(self.before(x)))
        return Product.apply(x, weight, self.kept), weight  # type: ignore[no-untyped-call]


class Showing(nn.Module):
    """What layers return of their weights and leave on themselves is used after others have taken their places."""

    def __init__(self, kind: type[Any], *, kept: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SavingWhole(base(kind), kept=kept) for _ in range(4))
        self.between, self.kept = frozen(kind), kept

    def forward(self, x: Tensor) -> Tensor:
        shown: list[Any] = []
        for layer in self.layers:
            y, weight = layer(x)
            x = x + Product.apply(y, self.between, self.kept)  # type: ignore[no-untyped-call]
            shown += [weight, layer.seen]
        for weight in shown:
            x = x + torch.tanh(x) @ weight.t()
        return x.pow(2).mean()


class InGlue(nn.Module):
    """The code between layers computes with a composed weight, also with a view of it, and looks at its parts."""

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.between = frozen(kind)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) @ self.between.t() + nn.functional.linear(x, self.between) + self.between[:1]
        return x.pow(2).mean()


class Buffered(nn.Module):
    """A layer whose buffer is composed, and which may change it in each call."""

    def __init__(self, kind: type[Any], change: str = "") -> None:
        super().__init__()
        self.register_buffer("table", kind.of(torch.randn(SIZE, SIZE) / 8))
        self.out, self.kind, self.change = nn.Linear(SIZE, SIZE), kind, change

    def forward(self, x: Tensor) -> Tensor:
        if self.change and self.training:
            with torch.no_grad():
                table = self.kind.of(self.table * 0.5 + x.mean())
                if self.change == "replaced":
                    self.table = table
                elif self.change == "of another class":
                    self.table = (Scaled if isinstance(self.table, self.kind) else self.kind).of(table)
                elif self.change == "in place":
                    self.table.copy_(table)
                else:
                    parts_of(self.table)[-1].mul_(0.5)
        return torch.tanh(self.out(x @ self.table.clone()))  # type: ignore[operator]


class Untrained(nn.Module):
    """Layers without trained parameters between others."""

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.middle = nn.Sequential(*[base(kind) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x)))).pow(2).mean()  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """A composed table, of which rows are taken; it has an attribute of its own, and is a head, too."""

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(SIZE, SIZE).requires_grad_(False)
        self.embed.weight = frozen(kind)
        self.embed.weight.gain = 0.5  # type: ignore[attr-defined]
        self.blocks = nn.ModuleList(Adapted(base(kind), SIZE) for _ in range(2))
        self.head = nn.Linear(SIZE, SIZE, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed((x.abs() * 8).long().clamp(max=SIZE - 1)).mean(1) * getattr(self.embed.weight, "gain", 1.0)
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).mean()  # type: ignore[no-any-return]


NETS: dict[str, Callable[[type[Any]], nn.Module]] = {
    "shared by two layers": Tied,
    "used between layers": InGlue,
    "saved by autograd": partial(Showing, kept=False),
    "kept by a function": partial(Showing, kept=True),
    "a buffer": lambda kind: Stack(*[Buffered(kind) for _ in range(3)]),
    "layers without trained parameters": Untrained,
    "an embedding and a head": Embedding,
}


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("kind", [Packed, Unsteady, Scaled, Nested, Views])
@pytest.mark.parametrize("place", NETS)
def test_composed_weights_may_be_wherever_plain_ones_may(place: str, kind: type[Any]) -> None:
    assert_same_training(Net(NETS[place](kind)), SAMPLES)


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("change", ["replaced", "of another class", "in place", "in a part"])
@pytest.mark.parametrize("kind", [Packed, Nested])
def test_layers_may_change_composed_buffers(kind: type[Any], change: str) -> None:
    assert_same_training(Net(Stack(*[Buffered(kind, change) for _ in range(3)])), SAMPLES)


class Pair(nn.Module):
    """A layer with two weights whose tables are one tensor. They come last."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(SIZE, SIZE)
        self.weights = nn.ParameterList([frozen(Lookup), frozen(Lookup)])

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.weights
        return self.out(torch.tanh(x @ one)) @ other


@pytest.mark.devices(1, 2)
def test_weights_of_one_layer_may_have_a_part_in_common() -> None:
    assert_same_training(Net(Stack(*[Pair() for _ in range(3)])), SAMPLES, layers=[Pair])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_composed_weights_train_in_other_precisions(precision: str) -> None:
    assert_same_training(Net(stack(Packed)), SAMPLES, precision=precision)


class Requantizing(Net):
    """Changes weights between steps: in place, by other parts, and by another tensor in the same parameter's place."""

    def __init__(self, net: nn.Module, kind: type[Any], how: str) -> None:
        super().__init__(net)
        self.kind, self.how = kind, how

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches:
            return
        with torch.no_grad():
            for weight in [p for p in self.parameters() if isinstance(p, Composed)]:
                other = self.kind.of(weight * 0.5 + 0.01)
                if self.how == "in place":
                    weight.copy_(other)
                elif self.how == "parts":
                    for name in weight.names:
                        setattr(weight, name, getattr(other, name))
                else:
                    torch.utils.swap_tensors(weight, nn.Parameter(other, requires_grad=False))


@pytest.mark.parametrize("how", ["in place", "parts", "swapped"])
@pytest.mark.parametrize("kind", [Packed, Nested])
def test_weights_that_hooks_change_are_followed(kind: type[Any], how: str) -> None:
    assert_same_training(Requantizing(stack(kind), kind, how), torch.randn(24, SIZE))


# ---- what is refused -------------------------------------------------------------------------------------------------


class Replacing(Adapted):
    """Changes what its weight is made of in its forward."""

    def __init__(self, base: nn.Module, how: str) -> None:
        super().__init__(base, SIZE)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.base.weight
        if self.how == "another part":
            weight.scale = weight.scale * 2
        elif self.how == "data of a part":
            weight.scale.data = weight.scale * 2
        else:
            weight.scale.mul_(2)
        return super().forward(x)


@pytest.mark.parametrize("how", ["another part", "data of a part", "in place"])
def test_a_layer_that_changes_what_its_weight_is_made_of_is_refused(how: str) -> None:
    net = Stack(*[Replacing(base(Packed), how) for _ in range(3)])
    with pytest.raises(UnsupportedModelError, match="modifies a parameter in place in its forward, or its data"):
        train_harmony(Net(net), SAMPLES, HarmonyStrategy(num_microbatches=4), 8, with_gradients=False)


# ---- predictions -----------------------------------------------------------------------------------------------------


@pytest.mark.cpu
def test_estimates_count_the_parts() -> None:
    module = Net(stack(Packed))
    machine = replace(H200, host_bytes=2**40, device_bytes=None, library_bytes=0)
    outlook = estimate(
        module, torch.empty(8, SIZE, device="meta"), device_memory="80KiB", num_microbatches=4, machine=machine
    ).outlook
    strategy = HarmonyStrategy(device_memory="80KiB", num_microbatches=4)
    reports = train_harmony(module, SAMPLES, strategy, 8, with_gradients=False).reports
    assert outlook.plan.packs == strategy.plan.packs
    # Each part is padded, and there are six to a layer.
    weights = sum(map(num_bytes_of, module.parameters()))
    assert weights <= outlook.host.weight_bytes <= weights + 4 * 6 * 512
    for swapped_in in (outlook.swapped_in_bytes["weights"], reports[-1].swapped_in_bytes["weights"]):
        assert weights <= swapped_in <= 2 * (weights + 4 * 6 * 512)


@pytest.mark.cpu
def test_a_model_fits_in_memory_by_its_parts() -> None:
    net = stack(Packed)
    assert LastingBytes.of(net, None).weights == sum(map(num_bytes_of, net.parameters()))

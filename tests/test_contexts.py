"""What users' autograd functions keep on their contexts, beside what they save, takes no memory between the passes.

All weights of a model of bitsandbytes' layers stayed on the device from the forward to the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.same_training import Net, assert_same_training
from support.sampling import combined

WIDTH, LAYERS = 128, 6
WEIGHT_BYTES = 4 * WIDTH * WIDTH
SAMPLES = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")


class State:
    """What a function has of a weight, as `quant_state` of bitsandbytes."""

    def __init__(self, weight: Tensor, **others: Any) -> None:
        self.weight = weight
        vars(self).update(others)


class Bare(torch.autograd.Function):
    """Keeps tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight, ctx.scale = x, weight, 0.5
        return x @ weight * ctx.scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        gradient = gradient * ctx.scale
        return gradient @ ctx.weight.t(), ctx.x.t() @ gradient if ctx.needs_input_grad[1] else None


class InATuple(torch.autograd.Function):
    """Keeps the weight as the function of bitsandbytes for four bits does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.tensors = None, weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.tensors[1].t(), None


class InALoneList(torch.autograd.Function):
    """Keeps what it is given as the checkpoint of diffusion models does, which runs it again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.inputs, ctx.parameters = [x], {"weight": weight}
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.parameters["weight"].t(), None


class InAnObject(torch.autograd.Function):
    """Keeps an object, and in it random numbers that it has drawn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.state = State(weight, mask=torch.rand_like(x))
        return (x * ctx.state.mask) @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.state.weight.t() * ctx.state.mask, None


class SeenByOthers(torch.autograd.Function):
    """Keeps an object and a dict to which others refer, and which the backward changes."""

    seen: list[Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.state, ctx.counts = State(weight.clone(), total=0.0), {"weight": weight.clone(), "total": 0.0}
        SeenByOthers.seen += [ctx.state, ctx.counts]
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.state.total += float(gradient.sum())
        ctx.counts["total"] += 2 * float(gradient.sum())
        return gradient @ ctx.state.weight.t(), None


class Layer(nn.Module):
    """A weight for a function, and what else a layer has; alone, its backward begins and ends with the function."""

    def __init__(self, function: type[torch.autograd.Function], *, is_trained: bool, is_alone: bool) -> None:
        super().__init__()
        self.function, self.is_alone = function, is_alone
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=is_trained)
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_alone:
            return self.function.apply(x + self.up.bias, self.weight)  # type: ignore[no-any-return, no-untyped-call]
        return x + self.up(self.down(x)) + torch.tanh(self.function.apply(x, self.weight))  # type: ignore[no-untyped-call]


class Layers(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3)


def net(function: type[torch.autograd.Function], *, is_trained: bool = False, is_alone: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(Layers(lambda: Layer(function, is_trained=is_trained, is_alone=is_alone)), trained)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("function", "is_alone", "devices"),
    combined([Bare, InATuple, InALoneList, InAnObject], [(False, 1), (True, 1), (False, 2), (True, 2)]),
)
def test_functions_that_keep_weights_let_these_make_way(
    function: type[torch.autograd.Function], is_alone: bool, devices: int
) -> None:
    memory = 3 * WEIGHT_BYTES + 32 * 1024
    assert_same_training(net(function, is_alone=is_alone), SAMPLES, device_memory=memory, devices=devices)


@pytest.mark.cpu
def test_trained_weights_that_functions_keep_make_way_too() -> None:
    assert_same_training(net(Bare, is_trained=True), SAMPLES, device_memory=4 * WEIGHT_BYTES)


def test_what_others_keep_too_is_what_a_function_finds_again() -> None:
    """A recompute makes another object, of which nobody would know."""
    totals = []

    class Reads(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            SeenByOthers.seen = []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            totals.append([(each if isinstance(each, dict) else vars(each))["total"] for each in SeenByOthers.seen])

    SeenByOthers.seen = []
    module = Reads(net(SeenByOthers).net, trained)
    assert_same_training(module, SAMPLES[:8], num_microbatches=1, updates=["just-in-time"])
    plain, harmony = totals
    assert plain == harmony
    assert any(plain)


def test_a_graph_that_is_kept_finds_it_in_each_backward() -> None:
    class Twice(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer = self.optimizers()
            optimizer.zero_grad()  # type: ignore[union-attr]
            loss = self.net(batch)
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(2 * loss)
            optimizer.step()  # type: ignore[union-attr]
            return loss

    assert_same_training(Twice(net(InAnObject).net, trained), SAMPLES, num_microbatches=1)

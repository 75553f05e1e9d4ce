"""Autograd functions of the user's own between layers, which are given parameters: torch tells no stand-in of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from support.nets import WIDTH, Language, tokens
from support.same_training import Net, Update, assert_same_training, room, train_harmony
from support.sampling import combined

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning",
    "ignore:.*dataloader.*",
    "ignore:.*LeafSpec.*",
    # Torch itself scripts what forward-mode derivatives are made of.
    "ignore:.*torch.jit.script.*:DeprecationWarning",
)


class Saved(torch.autograd.Function):
    """A product that saves both factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Kept(torch.autograd.Function):
    """A product that keeps its factors beside what autograd saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient @ ctx.weight.t(), ctx.x.t() @ gradient


class Sum(torch.autograd.Function):
    """A product with the sum of two parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x, one, other)
        return x @ (one + other)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, one, other = ctx.saved_tensors
        return gradient @ (one + other).t(), x.t() @ gradient, x.t() @ gradient


class Sign(torch.autograd.Function):
    """One bit of a weight, and a gradient as if it were all of it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


# As documentation advises to name a function.
sign = Sign.apply

USES: Mapping[str, Callable[[Tensor, Any], Tensor]] = {
    "saves it": lambda x, w: Saved.apply(x, w[0]),
    "keeps it": lambda x, w: Kept.apply(x, w[0]),
    "saves nothing": lambda x, w: x @ sign(w[0]) / WIDTH,
    "is given a view": lambda x, w: Saved.apply(x, w[0].t()),
    "takes two": lambda x, w: Sum.apply(x, w[0], w[1]),
    "is given two": lambda x, w: Saved.apply(w[0], w[1])[: len(x)] + x,
    "runs after another use": lambda x, w: Saved.apply(x @ w[0], w[0]) / WIDTH,
    "runs twice": lambda x, w: Kept.apply(Saved.apply(x, w[0]), w[1]) @ w[2] / WIDTH,
}


class Around(nn.Module):
    """A function between two layers, with parameters that belong to none."""

    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(3)])
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.use(self.first(x), self.weights)).pow(2).mean()
        return loss


class Spikes(nn.Module):
    """A layer that keeps a state in an attribute, of which a function with a gradient of its own was made."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.memories = nn.Parameter(torch.tensor(0.5)), {"state": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        state = self.memories["state"]
        state = state + (x - state) * self.rate
        spikes = sign(state - 1.0)
        self.memories["state"] = (1.0 - spikes) * state
        return spikes


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.spikes = nn.Linear(WIDTH, WIDTH), Spikes()

    def forward(self, x: Tensor) -> Tensor:
        self.spikes.memories["state"] = torch.zeros(())
        losses = [(self.spikes(self.first(x * scale)) - x).pow(2).mean() for scale in (3.0, 2.0, 1.0)]
        return 0.01 * torch.stack(losses).sum()


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_backward_comes_to_functions_of_earlier_calls_of_a_layer_that_keeps_a_state(num_microbatches: int) -> None:
    """It ended in an error. Gradients of a layer that is called several times are summed in another order."""
    assert_same_training(
        Net(Spiking()),
        torch.randn(40, WIDTH),
        layers=[Spikes, nn.Linear],
        num_microbatches=num_microbatches,
        tolerance=1e-5,
    )


@pytest.mark.parametrize(("use", "num_microbatches", "devices"), combined(USES, [(4, 2), (1, 1), (4, 1), (1, 2)]))
def test_a_function_between_layers_may_be_given_parameters(use: str, num_microbatches: int, devices: int) -> None:
    # It computed with the stand-in, and the gradient that it returned went to no parameter.
    torch.manual_seed(1)
    assert_same_training(
        Net(Around(USES[use])),
        torch.randn(24, WIDTH),
        num_microbatches=num_microbatches,
        devices=devices,
        # In plain training a parameter's gradient has the sum of its uses in another order.
        tolerance=1e-5 if use == "runs after another use" else 0.0,
        updates=["after the backward" if devices == 1 else "just in time"],
    )


class Recomputed(torch.autograd.Function):
    """What a module computes, and again in the backward: with the gradients of its parameters, as solvers do it."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *weights: Tensor) -> Any:
        ctx.module = module
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.module(x), (x, *weights), gradient, allow_unused=True)


class Solver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + Recomputed.apply(self.field, x, *self.field.parameters())


class Solved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.solver, self.last = nn.Linear(WIDTH, WIDTH), Solver(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.solver(self.first(x))).pow(2).mean()
        return loss


def test_a_function_that_differentiates_layers_by_itself_is_refused_around_them_and_runs_in_one() -> None:
    module, samples = Net(Solved()), torch.randn(24, WIDTH)
    with pytest.raises(UnsupportedModelError, match=r"given parameters of layer 'net\.solver\.field\.0'.*layers="):
        train_harmony(module, samples, HarmonyStrategy(layers=[nn.Linear]), 8, with_gradients=True)
    assert_same_training(module, samples, layers=[nn.Linear, Solver])


class RunAgain(torch.autograd.Function):
    """Runs a part of a module again in the backward, as the checkpoint function of latent diffusion does: saves no tensor."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.run, ctx.x, ctx.weights = run, x, weights
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.run(x)
        return None, *torch.autograd.grad(made, (x, *ctx.weights), gradient, allow_unused=True)


class EndsSo(nn.Module):
    """Its last operations save no tensor, so that none opens its call before the function runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + 0.5 * RunAgain.apply(lambda y: self.inner(y).tanh(), x, *self.inner.parameters())


class SavesNothing(EndsSo):
    """No node of it saves a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        run = lambda y: self.inner(self.first(y)).tanh()  # noqa: E731
        found: Tensor = RunAgain.apply(run, x, *self.parameters())
        return found


class KeepsLoss(EndsSo):
    """What it leaves on itself is differentiated before what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        self.loss = RunAgain.apply(lambda y: self.inner(y).tanh(), x, *self.inner.parameters()).sum()
        found: Tensor = self.first(x)
        return found


class Blocks(nn.Module):
    def __init__(self, kind: type[EndsSo]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean() + 0.1 * sum(getattr(block, "loss", 0.0) for block in self.blocks)


@pytest.mark.parametrize(("kind", "num_microbatches"), combined([EndsSo, SavesNothing, KeepsLoss], [(1,), (4,)]))
def test_a_function_that_runs_a_part_of_a_layer_again_finds_its_weights(
    kind: type[EndsSo], num_microbatches: int
) -> None:
    """It ran with the parameters on the host, without a word, and those in its backward had no gradients."""
    samples = torch.randn(24, WIDTH)
    assert_same_training(Net(Blocks(kind)), samples, num_microbatches=num_microbatches, layers=[kind])


def tangent(x: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = torch.func.jvp(lambda y: torch.tanh(y @ weight), (x,), (torch.ones_like(x),))[1]
    return found


TRANSFORMS: Mapping[str, Callable[[Tensor, Any], Tensor]] = {
    "vectorized": lambda x, w: torch.vmap(lambda row: torch.tanh(row @ w[0]))(x),
    "vectorized over a copy": lambda x, w: torch.vmap(lambda column: x @ column)(w[0].clone()).t(),
    "a tangent": lambda x, w: tangent(x, w[0].clone()),
}


@pytest.mark.parametrize(
    ("use", "devices", "update"),
    combined(product(TRANSFORMS, [1, 2]), [("after the backward",), ("just in time",)]),
)
def test_a_transform_between_layers_may_find_parameters(use: str, devices: int, update: Update) -> None:
    torch.manual_seed(1)
    module, samples = Net(Around(TRANSFORMS[use])), torch.randn(24, WIDTH)
    assert_same_training(module, samples, devices=devices, layers=[nn.Linear], tolerance=1e-6, updates=[update])


def test_a_gradient_that_would_reach_no_parameter_is_refused() -> None:
    # It came to the stand-in, and the parameter was never updated.
    module = Net(Around(lambda x, w: torch.vmap(lambda column: x @ column)(w[0]).t()))
    strategy = HarmonyStrategy(layers=[nn.Linear])
    with pytest.raises(UnsupportedModelError, match=r"gradient of parameter 'net\.weights\.0'.*clone\(\)"):
        train_harmony(module, torch.randn(24, WIDTH), strategy, 8, with_gradients=False)


def test_microbatches_that_would_share_tangents_run_one_after_the_other() -> None:
    """The first to end its derivative took the tangents of all that had begun one: that was refused."""
    torch.manual_seed(1)
    module, samples = Net(Around(lambda x, w: tangent(x, w[0]))), torch.randn(24, WIDTH)
    # A weight has two readers, whose gradients are summed in another order.
    assert_same_training(module, samples, layers=[nn.Linear], tolerance=1e-6)


def test_an_array_of_a_parameter_keeps_its_values() -> None:
    arrays: list[Any] = []

    def use(x: Tensor, w: Any) -> Tensor:
        array = w[0].detach().cpu().numpy() if x.is_cuda else w[0].detach().numpy()
        arrays.append((array, array.copy()))
        return x @ w[0]

    module = Net(Around(use))
    strategy = HarmonyStrategy(room("24KiB"), layers=[nn.Linear])
    train_harmony(module, torch.randn(24, WIDTH), strategy, 8, with_gradients=False)
    assert arrays
    assert all((array == before).all() for array, before in arrays)


class Reversible(torch.autograd.Function):
    """As Reformer's: keeps the output alone, and has the inputs again in its backward, where it runs graphs of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        one, other = x.chunk(2, -1)
        with torch.no_grad():
            one = one + block.mixes(other)
        ctx.save_for_backward(one, other)
        ctx.block = block
        return torch.cat([one, other], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _, other = ctx.saved_tensors
        of_one, of_other = gradient.chunk(2, -1)
        with torch.enable_grad():
            other = other.detach().requires_grad_()
            ctx.block.mixes(other).backward(of_one)
        return torch.cat([of_one, of_other + other.grad], -1), None


class Mixes(nn.Module):
    """Uses each of two weights by itself, one frozen, beside others that are used together."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(WIDTH // 2, WIDTH // 2, bias=False)
        self.frozen = nn.Linear(WIDTH // 2, WIDTH // 2, bias=False).requires_grad_(False)
        self.values = nn.Linear(WIDTH // 2, WIDTH // 2)

    def mixes(self, x: Tensor) -> Tensor:
        return self.values(self.keys(x).sigmoid() * self.frozen(x))

    def forward(self, x: Tensor) -> Tensor:
        return Reversible.apply(x, self)


class ReversibleNet(Language):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixes() for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Reversible.apply(x, block)
        return x


@pytest.mark.parametrize("memory", [None, "16KiB"])
def test_a_weight_that_a_graph_in_a_backward_saves_is_there_when_that_is_differentiated(memory: str | None) -> None:
    torch.manual_seed(0)
    samples = tokens(12, 7)
    assert_same_training(Net(ReversibleNet()), samples, batch_size=4, num_microbatches=2, device_memory=memory)

"""Layers that are called with other tensors in place of their parameters, as `torch.func.functional_call` does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import weight_norm

from support.nets import WIDTH, Chain
from support.same_training import Net, assert_same_training, room
from support.sampling import combined

pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers")]


class Block(nn.Module):
    """Two layers: the second one runs while the first one has other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Perturbed(Chain):
    """The loss of weights with noise, beside that of the weights."""

    def forward(self, x: Tensor) -> Tensor:
        weights = {f"blocks.{name}": 1.01 * weight for name, weight in self.blocks.named_parameters()}
        noisy: Tensor = functional_call(_Plain(self.blocks), weights, (x,))
        return super().forward(x) + noisy


class _Plain(nn.Module):
    """What `Chain` does, for the same blocks."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


class Scaled(Chain):
    """A learned scale of one weight of each block, whose other layers have their own."""

    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        self.scales = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = functional_call(block, {"linear.weight": block.linear.weight * scale * x.mean().detach()}, (x,))
        return x.pow(2).mean()


class FastWeights(Chain):
    """An inner loop, of a copy of the weights, whose result the outer one learns from."""

    def forward(self, x: Tensor) -> Tensor:
        fast = {name: weight.detach().clone().requires_grad_() for name, weight in self.blocks[0].named_parameters()}
        for _ in range(2):
            loss = functional_call(self.blocks[0], fast, (x,)).pow(2).mean()
            steps = torch.autograd.grad(loss, list(fast.values()))
            fast = {
                name: (weight - 0.1 * step).detach().requires_grad_()
                for (name, weight), step in zip(fast.items(), steps, strict=True)
            }
        with torch.no_grad():
            learned = functional_call(self.blocks[0], fast, (x,))
        return super().forward(x) + (self.blocks[1](x) - learned).pow(2).mean()


class Vectorized(Chain):
    """An ensemble of noisy weights, in one call."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.linspace(0.9, 1.1, 3)
        weights = {name: torch.stack([weight * each for each in noise]) for name, weight in self.ensemble()}
        outputs = vmap(lambda own: functional_call(self.blocks[0], own, (x,)))(weights)
        return super().forward(outputs.mean(0))

    def ensemble(self) -> Any:
        return self.blocks[0].named_parameters()


class DeletesAndSets(Chain):
    """As libraries did before torch had a function for it: a tensor becomes a plain attribute for a while."""

    def forward(self, x: Tensor) -> Tensor:
        linear = self.blocks[1].linear
        weight = linear.weight
        del linear.weight
        linear.weight = 0.5 * weight
        try:
            return super().forward(x)
        finally:
            del linear.weight
            linear._parameters["weight"] = weight


class CopiesLayers(Chain):
    """Copies of layers get other weights: libraries make theirs by `copy.copy`, or give a new module all attributes."""

    def forward(self, x: Tensor) -> Tensor:
        copied, made = copy.copy(self.blocks[0].linear), nn.Linear.__new__(nn.Linear)
        made.__dict__ = vars(self.blocks[1].linear).copy()
        for module in (copied, made):
            module._parameters = {name: 1.01 * weight for name, weight in module._parameters.items()}  # type: ignore
        return super().forward(x) + super().forward(made(copied(x)))


@pytest.mark.parametrize(
    ("net", "num_microbatches", "devices"),
    combined([Perturbed, Scaled, FastWeights, Vectorized, DeletesAndSets], [(1, 1), (4, 1), (2, 2)]),
)
def test_a_layer_may_be_called_with_other_weights(net: type[Chain], num_microbatches: int, devices: int) -> None:
    """That was refused. Parameters that are read between layers, too, have gradients that are summed in another order."""
    memory = room("24KiB") if devices == 1 else None
    assert_same_training(
        Net(net(Block)),
        torch.randn(40, WIDTH),
        device_memory=memory,
        num_microbatches=num_microbatches,
        devices=devices,
        tolerance=1e-5,
    )


class CallsForwardsOfCopies(Chain):
    def forward(self, x: Tensor) -> Tensor:
        copied = copy.copy(self.blocks[0].linear)
        copied._parameters = {name: 1.01 * weight for name, weight in copied._parameters.items()}
        return super().forward(x) + super().forward(copied.forward(x))


class CopiesDerived(nn.Module):
    """The older weight_norm computes the weight of a copy from what the copy has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesDerived:
        # The weight that is computed refuses to be copied.
        copied = CopiesDerived()
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, x: Tensor) -> Tensor:
        copied = copy.copy(self.first)
        copied._parameters = {name: 1.01 * weight for name, weight in self.first._parameters.items()}
        out: Tensor = self.last(self.first(x)) + self.last(copied(x))
        return out.pow(2).mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "net",
    [lambda: CopiesLayers(Block), lambda: CallsForwardsOfCopies(Block), CopiesDerived],
    ids=["modules", "forwards", "derived weights"],
)
@pytest.mark.parametrize(("num_microbatches", "devices"), [(1, 1), (4, 1), (2, 2)])
def test_a_copy_of_a_layer_computes_with_its_own_weights(
    net: Callable[[], nn.Module], num_microbatches: int, devices: int
) -> None:
    """It ran the layer itself."""
    assert_same_training(
        Net(net()),
        torch.randn(40, WIDTH),
        layers=[nn.Linear, nn.LayerNorm],
        num_microbatches=num_microbatches,
        devices=devices,
        tolerance=1e-5,
    )


class Borrows(nn.Module):
    """A module of another class is given the forward of a layer, which has the layer's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.other.forward = self.layer.forward  # type: ignore[method-assign]
        out: Tensor = self.last(self.other(x)).pow(2).mean()
        del self.other.forward
        return out


def test_a_module_that_is_given_the_forward_of_a_layer_runs_the_layer() -> None:
    assert_same_training(Net(Borrows()), torch.randn(40, WIDTH), layers=[nn.Linear], num_microbatches=1)


class Learns(Net):
    """MAML: the gradient goes through the inner loop."""

    def __init__(self, automatic: bool) -> None:
        super().__init__(Chain(Block))
        self.automatic_optimization = automatic

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        fast = {name: weight.clone() for name, weight in self.net.named_parameters()}
        for _ in range(2):
            steps = torch.autograd.grad(self.loss(fast, batch[:1]), list(fast.values()), create_graph=True)
            fast = {name: weight - 0.1 * step for (name, weight), step in zip(fast.items(), steps, strict=True)}
        loss = self.loss(fast, batch[1:])
        self.losses.append(loss.detach().clone())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def loss(self, weights: dict[str, Tensor], batch: Tensor) -> Tensor:
        loss: Tensor = functional_call(self.net, weights, (batch,))
        return loss


@pytest.mark.parametrize(("is_automatic", "num_microbatches"), [(True, 1), (True, 4), (False, 1)])
def test_a_step_may_learn_through_an_inner_loop(is_automatic: bool, num_microbatches: int) -> None:
    assert_same_training(
        Learns(is_automatic), torch.randn(40, WIDTH), num_microbatches=num_microbatches, tolerance=1e-5
    )


class Late(Net):
    """The first steps call layers with their own weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        own = Chain.forward(self.net, batch) if self.global_step < 2 else self.net(batch)
        self.losses.append(own.detach().clone())
        return own


def test_a_step_that_gives_weights_for_the_first_time_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    """Microbatches that took turns would find the weights that another one has given."""
    assert_same_training(Late(Scaled(Block)), torch.randn(40, WIDTH), num_microbatches=4, tolerance=1e-5)
    assert "is called with other weights than its own" in caplog.text

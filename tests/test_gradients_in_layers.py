"""Layers that compute gradients in their forward: fast weights, forces of an energy, inner steps of an optimization."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from support.nets import WIDTH, Chain
from support.same_training import Net, assert_same_training, room, train_harmony, trainer_for
from support.sampling import combined

pytestmark = [pytest.mark.filterwarnings("ignore:.*does not have many workers")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Detached(Block):
    """Goes along a gradient that is not differentiated."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        start = h.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.second(start).tanh().sum(), start)
        return x + self.second(h) + slope


class FastWeights(Block):
    """Takes gradient steps on weights of its own, as test-time training does, through which it is trained."""

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.first(x), self.second(x)
        weight = torch.eye(WIDTH, device=x.device) + 0.0 * self.first.weight
        for _ in range(2):
            loss = (keys @ weight - values).pow(2).mean()
            weight = weight - 0.1 * torch.autograd.grad(loss, weight, create_graph=True)[0]
        return x + torch.tanh(x @ weight)


class OfItsWeights(Block):
    """Differentiates to its own parameters, draws, counts, and has a buffer: its first call does all that once."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().mean()
        y = torch.tanh(self.second(torch.dropout(self.first(x), 0.5, self.training)))
        (slope,) = torch.autograd.grad(y.sum(), self.second.weight, create_graph=True)
        self.calls += 1
        return x + y + 0.01 * slope.mean(0) / self.calls + 0.01 * self.total


class Forces(Block):
    """The gradient of an energy by positions, which are what it is called with."""

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()
        energy = torch.tanh(self.second(torch.sin(self.first(x)))).sum()
        return x - torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("kind", "num_microbatches", "devices"),
    combined([Detached, FastWeights, OfItsWeights, Forces], [(1, 1), (4, 1), (2, 2)]),
)
def test_a_layer_may_compute_gradients_in_its_forward(kind: type[Block], num_microbatches: int, devices: int) -> None:
    """That was refused: what its graph saves was not kept. The parameters get the gradients of gradients, too."""
    module, samples = Net(Chain(kind)), torch.randn(40, WIDTH)
    memory = room("40KiB") if devices == 1 else None
    assert_same_training(
        module, samples, device_memory=memory, num_microbatches=num_microbatches, layers=[kind], devices=devices
    )


RUNS: list[int] = []
TOTAL = {"runs": torch.zeros(())}


class Notes(Detached):
    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(len(RUNS))
        return super().forward(x * (1 + 0.01 * len(RUNS)))


class Notebook(Net):
    def on_train_start(self) -> None:
        RUNS.clear()

    def on_train_end(self) -> None:
        self.losses.append(torch.tensor(RUNS))


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_what_a_first_run_changes_is_taken_back_before_the_next(num_microbatches: int) -> None:
    """It counted twice with one microbatch, and was refused with several."""
    module, samples = Notebook(Chain(Notes)), torch.randn(40, WIDTH)
    assert_same_training(module, samples, num_microbatches=num_microbatches, layers=[Notes], updates=["just in time"])


class IntoItsDict(Block):
    """Puts an energy and its forces into the dict that it is called with."""

    def forward(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        RUNS.append(len(RUNS))
        assert "energy" not in found
        positions = found["positions"].requires_grad_()
        found["energy"] = torch.tanh(self.second(torch.sin(self.first(positions))))
        (slope,) = torch.autograd.grad(found["energy"].sum(), positions, create_graph=self.training)
        found["forces"] = -slope * (1 + 0.01 * len(RUNS))
        return found


class Molecules(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Chain(IntoItsDict)
        self.seen: list[Tensor] = []

    def on_validation_start(self) -> None:
        self.look(torch.ones(2, WIDTH, device=self.device))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.look(batch)

    def look(self, batch: Tensor) -> None:
        with torch.enable_grad():
            found = [block({"positions": batch.clone()}) for block in self.net.blocks]
        self.seen += [each["forces"].cpu() for each in found]


def test_a_layer_that_first_computes_a_gradient_in_an_evaluation_runs_once_as_far_as_its_code_can_see() -> None:
    """It found in its dict what it had just put there, and what it counts counted twice, as in any fit's first check."""
    module, seen, data = Molecules(), [], DataLoader(torch.randn(16, WIDTH), batch_size=8)
    for strategy in ("auto", HarmonyStrategy(layers=[IntoItsDict], device_memory=room("20KiB"))):
        RUNS.clear()
        trainer = trainer_for(strategy, 1, [], inference_mode=False)
        trainer.validate(module, data, verbose=False)
        seen.append([torch.tensor(RUNS), *module.seen])
        module.seen = []
    assert len(seen[0]) == len(seen[1])
    assert all(map(torch.equal, *seen))


class Totals(Detached):
    def forward(self, x: Tensor) -> Tensor:
        TOTAL["runs"].add_(1)
        return super().forward(x)


class Adds(Detached):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1.0))


@pytest.mark.parametrize(("kind", "changed"), [(Totals, "TOTAL"), (Adds, "one of its inputs")])
def test_what_a_first_run_would_change_twice_is_refused(kind: type[Block], changed: str) -> None:
    net = Chain(kind)
    net.blocks.insert(0, nn.Linear(WIDTH, WIDTH))
    for num_microbatches in (1, 4):
        strategy = HarmonyStrategy(layers=[kind], num_microbatches=num_microbatches)
        with pytest.raises(UnsupportedModelError, match=rf"runs twice.* changes .*{changed}.* in place"):
            train_harmony(Net(net), torch.randn(40, WIDTH), strategy, 8, with_gradients=False)


class Accumulates(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.first(x.detach()).sum().backward()
        return self.second(x)


def test_a_backward_in_a_forward_that_comes_to_parameters_is_refused() -> None:
    module = Net(Chain(Accumulates))
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(UnsupportedModelError, match=r"inside a layer's forward, that of 'net\.blocks\.0'"):
        train_harmony(module, torch.randn(40, WIDTH), HarmonyStrategy(layers=[Accumulates]), 8, with_gradients=False)
    assert all(map(torch.equal, before.values(), module.state_dict().values()))
    assert all(parameter.grad is None for parameter in module.parameters())

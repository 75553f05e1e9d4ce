"""What layers take and return, changed between them in ways that torch does not count."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_harmony.errors import UnsupportedModelError
from support.lightning_fits import QUIET_MARKS
from support.same_training import assert_same_training

pytestmark = QUIET_MARKS
WIDTH, LENGTH = 32, 16


class Shifted(nn.Module):
    """The graph saves nothing of what it takes beside the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + (torch.tanh(self.linear(x)) + gate).relu()


class Masked(Shifted):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)).masked_fill(gate > 1, 0.1)


class Changing(Shifted):
    """Its own code does so, and the next layer finds that."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        gate.data.mul_(1.25)
        return super().forward(x, gate)


class Gated(Shifted):
    """The graph saves the gate itself."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * gate


class Bounded(Shifted):
    """The graph saves what the layer returns."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + gate)


class Clamping(Shifted):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x.data.clamp_(-1, 1)
        return self.linear(x) + gate.mean()


class Rectifying(Shifted):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.linear(x.relu_()) + gate.mean()


class Halved(Shifted):
    """Its own code changes what its graph has saved last, which no recompute reaches that ends there."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        bounded = torch.sigmoid(self.linear(x) + gate)
        bounded.data.mul_(0.5)
        return bounded


class Growing(Shifted):
    """It changes an input that its graph and those of others have saved."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        result = x + torch.tanh(self.linear(x)) * gate
        gate.data.mul_(1.25)
        return result


class Net(pl.LightningModule):
    """Changes the gate, or the hidden state, behind the second of four layers."""

    def __init__(self, layer: type[Shifted], change: Callable[[Tensor], None], *, of_hidden: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.change, self.of_hidden = nn.ModuleList(layer() for _ in range(4)), change, of_hidden

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        x, gate = batch * 1, 0.5 + batch.square()
        for place, layer in enumerate(self.layers):
            x = layer(x, gate)
            if place == 1:
                self.change(x if self.of_hidden else gate)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def through_data(gate: Tensor) -> None:
    gate.data.mul_(2)


def through_rows(gate: Tensor) -> None:
    gate.data[1:].zero_()


def through_numpy(gate: Tensor) -> None:
    if gate.device.type != "cpu":
        pytest.skip("NumPy has none of a GPU's tensors")
    gate.detach().numpy()[...] *= 2


def other_memory(gate: Tensor) -> None:
    gate.data = gate.data * 2


CHANGES = [through_data, through_rows, through_numpy, other_memory]


def train(net: Net, layer: type[nn.Module], num_microbatches: int) -> None:
    samples = list(torch.randn(32, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)))
    assert_same_training(net, samples, layers=[layer], num_microbatches=num_microbatches, updates=["just in time"])


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("layer", [Shifted, Masked], ids=lambda layer: layer.__name__)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_layers_that_run_again_find_what_an_input_was_then(
    change: Callable[[Tensor], None], layer: type[Shifted], num_microbatches: int
) -> None:
    """Later ones found what it had been for earlier ones."""
    train(Net(layer, change, of_hidden=False), layer, num_microbatches)


def unchanged(gate: Tensor) -> None:
    """Layers change it."""


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_layer_that_changes_an_input_unseen_does_so_when_it_runs_again(num_microbatches: int) -> None:
    train(Net(Changing, unchanged, of_hidden=False), Changing, num_microbatches)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_layer_that_changes_what_its_graph_has_saved_last_runs_again_to_its_end(num_microbatches: int) -> None:
    train(Net(Halved, unchanged, of_hidden=False), Halved, num_microbatches)


def test_a_layer_may_not_change_unseen_what_the_graph_of_another_has_saved() -> None:
    with pytest.raises(UnsupportedModelError, match=r"layers\.0.*torch does not count.*out of place"):
        train(Net(Growing, unchanged, of_hidden=False), Growing, 2)


@pytest.mark.devices(2)
@pytest.mark.parametrize("layer", [Clamping, Rectifying], ids=lambda layer: layer.__name__)
def test_a_layer_may_change_an_input_of_another_device_that_nobody_uses_again(layer: type[Shifted]) -> None:
    """It has a copy."""
    train(Net(layer, unchanged, of_hidden=False), layer, 2)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(("layer", "of_hidden"), [(Gated, False), (Bounded, True)], ids=["input", "output"])
@pytest.mark.parametrize("change", [through_data, through_rows, through_numpy], ids=lambda change: change.__name__)
def test_what_a_graph_has_saved_itself_may_not_change_unseen(
    change: Callable[[Tensor], None], layer: type[Shifted], of_hidden: bool, num_microbatches: int
) -> None:
    """Plain PyTorch finds in the backward what is in that memory then."""
    with pytest.raises(UnsupportedModelError, match=r"layers\.[01].*torch does not count.*out of place"):
        train(Net(layer, change, of_hidden=of_hidden), layer, num_microbatches)


class Between(Net):
    """The graph of the code between layers saves what a layer takes, before or behind the change."""

    def __init__(self, change: Callable[[Tensor], None], *, is_saved_before: bool) -> None:
        super().__init__(Shifted, change, of_hidden=False)
        self.is_saved_before = is_saved_before

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        gate = (self.layers[0](batch, batch) - 0.5).relu() if self.is_saved_before else self.layers[0](batch, batch)
        x = self.layers[1](batch, gate)
        self.change(gate)
        return (self.layers[2](x, gate) * gate[:, :, :1]).square().mean()


@pytest.mark.parametrize("change", [through_data, through_rows], ids=lambda change: change.__name__)
def test_what_the_graph_of_code_between_layers_has_saved_may_not_change_unseen(
    change: Callable[[Tensor], None],
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"code between layers saves.*out of place"):
        train(Between(change, is_saved_before=True), Shifted, 2)


def test_what_the_graph_of_code_between_layers_saves_afterwards_may_have_changed() -> None:
    train(Between(through_data, is_saved_before=False), Shifted, 1)


def test_an_output_that_a_graph_has_saved_may_be_given_other_memory() -> None:
    """The graph keeps what was there."""
    train(Net(Bounded, other_memory, of_hidden=True), Bounded, 2)

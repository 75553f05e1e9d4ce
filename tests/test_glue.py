"""Parameters that the code between layers uses: what autograd saves of them is looked up again where they lie."""

from __future__ import annotations

import pytest
import torch
from nets import WIDTH
from same_training import Net, assert_same_training
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")


class Parameters(nn.Module):
    """Parameters of several types, which share a pack."""

    def __init__(self, num_first: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scales = nn.Parameter(torch.rand(num_first))
        self.precise = nn.Parameter(torch.rand(WIDTH, WIDTH).double() / WIDTH)
        self.rotation = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.blocks = nn.Parameter(torch.rand(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scales.mean()
        x = (x.double() @ self.precise).float()
        # As rotations are applied: a view of the complex numbers is saved, and elements of it.
        x = x * torch.view_as_real(self.rotation)[:, 1] + (x * self.rotation).real
        x = x * self.blocks[2] + self.blocks[:, 0].sum() * x
        loss: Tensor = self.last(x).pow(2).mean()
        return loss


@pytest.mark.parametrize("memory", [None, "32KiB"])
@pytest.mark.parametrize("num_first", [8, 1000])
def test_each_saved_parameter_is_looked_up_in_its_own_place(num_first: int, memory: str | None) -> None:
    # All in a pack are views of one buffer, and the place of the first was taken for that of each.
    torch.manual_seed(0)
    samples = torch.randn(24, WIDTH)
    assert_same_training(Net(Parameters(num_first)), samples, layers=[nn.Linear], device_memory=memory, tolerance=1e-5)


class InPlace(nn.Module):
    """Adds parameters to what layers return, and scales it by them, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias, self.scale = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x += self.bias
            x.mul_(self.scale)
            x[:, 0] *= 2
        return x.pow(2).mean()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_parameter_may_be_added_in_place(devices: int) -> None:
    # It was refused, as if the parameter itself were changed. A parameter that is used three times has three gradients.
    torch.manual_seed(0)
    assert_same_training(Net(InPlace()), torch.randn(24, WIDTH), layers=[nn.Linear], devices=devices, tolerance=1e-6)

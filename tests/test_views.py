"""Layers may be given any view. Chains of square layers and views, drawn at random, whose shapes tell little apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.nets import WIDTH
from support.same_training import Net, Update, assert_same_training, room

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*dataloader.*", "ignore:.*LeafSpec.*")

NUM_MICROBATCHES, MICROBATCH_SIZE = 2, 2


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, x, x, need_weights=False)[0]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.scale = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) * self.scale


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolve(x.transpose(1, 2)).transpose(1, 2)


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(WIDTH, WIDTH),
    Feedforward,
    Attention,
    Scaled,
    Convolution,
]
VIEWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x,
    "without the first": lambda x: x[:, 1:],
    "every other": lambda x: x[:, ::2],
    "in another order of memory": lambda x: x.permute(1, 0, 2).contiguous().permute(1, 0, 2),
    "expanded": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "backwards": lambda x: x.flip(1),
}


class Chain(nn.Module):
    """Layers, each with a view of what the one before returned."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(draw.choice(LAYERS)() for _ in range(draw.randint(3, 6)))
        self.views = [draw.choice(list(VIEWS)) for _ in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        for layer, view in zip(self.layers, self.views, strict=True):
            x = layer(VIEWS[view](x) if x.shape[1] > 2 else x)
        return x.square().mean()


@pytest.mark.parametrize("seed", range(32))
def test_layers_train_the_same_whatever_views_they_are_given(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as users' own tests are: what is too small for the stash stays on the device."""
    monkeypatch.setattr("lightning_harmony.engine.memory.stash.SMALLEST_BYTES", 16 * 1024)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module, length = Net(Chain(draw)), draw.choice([8, 9, 10, 16, 17])
    samples = torch.randn(3 * NUM_MICROBATCHES * MICROBATCH_SIZE, length, WIDTH)
    assert_same_training(
        module,
        samples,
        num_microbatches=NUM_MICROBATCHES,
        batch_size=NUM_MICROBATCHES * MICROBATCH_SIZE,
        layers={nn.Linear, Feedforward, Attention, Scaled, Convolution},
        device_memory=room("56KiB"),
        updates=[get_args(Update)[seed % 2]],
    )

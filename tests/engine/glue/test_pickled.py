"""Code between layers may pickle parameters, and save them to files."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.nets import WIDTH, Block
from support.same_training import Net, assert_same_training, room


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class Saves(nn.Module):
    """Saves all weights between layers, and goes on with what the file has."""

    def __init__(self, again: Callable[[Any], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        weights = self.again(self.state_dict())
        total = torch.stack([weight.double().abs().sum() for weight in weights.values()]).sum().float()
        loss: Tensor = self.head(x).pow(2).mean() * total.to(x.device)
        return loss


@pytest.mark.parametrize("again", [_saved, _pickled], ids=["saved", "pickled"])
def test_what_a_step_saves_of_weights_is_what_they_are(again: Callable[[Any], Any]) -> None:
    """A file had what was in the memory of the device when the file was written."""
    module = Net(Saves(again))
    module.make_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1e-4)
    assert_same_training(module, torch.randn(40, WIDTH), device_memory=room("72KiB"), num_microbatches=1)


class Copies(Saves):
    """A parameter that is pickled stays one; a copy lies where the parameter is computed with."""

    def forward(self, x: Tensor) -> Tensor:
        own, copied = self.again(self.head.weight), copy.copy(self.head.weight)
        assert isinstance(own, nn.Parameter)
        assert own.requires_grad
        assert copied.device == x.device
        return super().forward(x) * (copied - own.to(x.device)).detach().abs().sum().exp()


def test_a_parameter_stays_one_and_a_copy_lies_where_it_does() -> None:
    module = Net(Copies(_pickled))
    module.make_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1e-4)
    assert_same_training(module, torch.randn(16, WIDTH), num_microbatches=1)

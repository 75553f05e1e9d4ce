"""A step that says for a while which parameters need gradients, as where a part of a model is frozen for one of its losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_harmony import HarmonyStrategy, UnsupportedModelError
from support.changing_nets import SAMPLES, Layers
from support.same_training import Net, assert_same_training, train_harmony
from support.sampling import combined


def reference_without_gradients(net: Layers, x: Tensor) -> Tensor:
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    with torch.no_grad():
        reference = net.scores(x + 1)
    for parameter in trained:
        parameter.requires_grad = True
    return (net.scores(x) - reference).square().mean()


def frozen_where_it_is_used(net: Layers, x: Tensor) -> Tensor:
    net.layers[2:4].requires_grad_(False)
    scores = net.scores(x)
    net.layers[2:4].requires_grad_(True)
    return scores.square().mean()


def frozen_behind_its_use(net: Layers, x: Tensor) -> Tensor:
    scores = net.scores(x)
    net.layers[3].requires_grad_(False)
    with torch.no_grad():
        reference = net.scores(x + 1)
    net.layers[3].requires_grad_(True)
    return (scores - reference).square().mean()


def frozen_for_good(net: Layers, x: Tensor) -> Tensor:
    if net.num_calls > 6:
        net.layers[3].requires_grad_(False)
    return net.scores(x).square().mean()


WAYS = [reference_without_gradients, frozen_where_it_is_used, frozen_behind_its_use]


@pytest.mark.devices(1, 2)
@pytest.mark.parametrize(
    ("way", "num_frozen", "device_memory"), combined(WAYS, [(0, None), (1, "12KiB"), (0, "12KiB")])
)
def test_a_step_may_say_so_for_a_while(way: Any, num_frozen: int, device_memory: str | None) -> None:
    assert_same_training(Net(Layers(way, num_frozen)), SAMPLES, device_memory=device_memory)


@pytest.mark.one_after_the_other
def test_what_a_step_leaves_frozen_is_so_for_the_next_microbatch() -> None:
    assert_same_training(Net(Layers(frozen_for_good, 0)), SAMPLES)


def needed_late(net: Layers, x: Tensor) -> Tensor:
    net.layers[0].requires_grad_(True)
    return net.scores(x).square().mean()


def test_a_gradient_that_nobody_expected_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="gets a gradient, but needed none when the step began"):
        train_harmony(
            Net(Layers(needed_late, 1)), SAMPLES, HarmonyStrategy(num_microbatches=2), 4, with_gradients=False
        )


class SaysSoItself(torch.nn.Linear):
    """As a head whose prototypes stay as they are in the first epochs."""

    trains = True

    def forward(self, x: Tensor) -> Tensor:
        self.requires_grad_(self.trains)
        self.bias.requires_grad = self.trains
        return super().forward(x)


class WithHead(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = SAMPLES.shape[1]
        self.body = torch.nn.Sequential(*[torch.nn.Linear(size, size) for _ in range(6)])
        self.head = SaysSoItself(size, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).square().mean()  # type: ignore[no-any-return]


def test_a_layer_may_say_of_its_weights_what_is_so() -> None:
    assert_same_training(Net(WithHead()), SAMPLES, device_memory="12KiB")


@pytest.mark.parametrize("was_trained", [False, True])
def test_a_layer_that_changes_in_its_forward_whether_its_weights_are_trained_is_refused(was_trained: bool) -> None:
    """One that was frozen before stayed as it was, without a word."""
    module = Net(WithHead())
    module.net.head.requires_grad_(was_trained)
    module.net.head.trains = not was_trained
    strategy = HarmonyStrategy(device_memory="12KiB", num_microbatches=1, profile_cache=False)
    with pytest.raises(
        UnsupportedModelError, match="changes in its forward whether one of its parameters needs gradients"
    ):
        train_harmony(module, SAMPLES, strategy, 8, with_gradients=False)

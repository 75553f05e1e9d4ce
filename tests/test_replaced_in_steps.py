"""A step that puts other modules, hooks or forwards in the places of those that are there, for a while or for good."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_harmony import HarmonyStrategy
from support.changing_nets import SAMPLES, Layers
from support.same_training import Net, assert_same_training, train_harmony

# Its first step is watched.
LATE = 6


def another_layer(net: Layers, x: Tensor) -> Tensor:
    kept = net.layers[2]
    net.layers[2] = net.other
    scores = net.scores(x)
    net.layers[2] = kept
    return scores.square().mean()


def fewer_layers(net: Layers, x: Tensor) -> Tensor:
    kept = net.layers
    if net.num_calls > LATE:
        net.layers = kept[:3]
    scores = net.scores(x)
    net.layers = kept
    return scores.square().mean()


def hook_for_a_while(net: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        if net.num_calls > LATE:
            handle = net.layers[4].register_forward_hook(lambda module, args, output: output * 0.3)
            reference = net.scores(x)
            handle.remove()
        else:
            reference = net.scores(x)
    return (net.scores(x) - reference - 1).square().mean()


@pytest.mark.one_after_the_other
@pytest.mark.parametrize("way", [another_layer, fewer_layers, hook_for_a_while])
def test_no_other_microbatch_finds_what_one_puts_there_for_a_while(way: Any) -> None:
    assert_same_training(Net(Layers(way)), SAMPLES)


def another_forward_for_good(net: Layers, x: Tensor) -> Tensor:
    layer: Any = net.layers[1]
    if net.num_calls == 1:
        forward = layer.forward
        layer.forward = lambda x: forward(x) * 0.5
    return net.scores(x).square().mean()


def without_another_forward(net: Layers, x: Tensor) -> Tensor:
    layer: Any = net.layers[1]
    forward = layer.forward
    layer.forward = lambda x: forward(x) * 0.5
    scores = net.scores(x)
    vars(layer).pop("forward", None)
    return scores.square().mean()


@pytest.mark.parametrize(("way", "factor"), [(another_forward_for_good, 0.5), (without_another_forward, 1.0)])
def test_behind_the_fit_a_layer_has_the_forward_that_the_step_has_left(way: Any, factor: float) -> None:
    model = Net(Layers(way))
    train_harmony(model, SAMPLES, HarmonyStrategy(num_microbatches=2), 4, with_gradients=False)
    layer = model.get_submodule("net.layers.1")
    x = SAMPLES[:3]
    assert torch.equal(layer(x), nn.Sequential(*layer.children())(x) * factor)

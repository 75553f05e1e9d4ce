"""Which layers do the same, as far as their modules tell."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_harmony.engine.layers.structure import structure_of
from lightning_harmony.engine.model.layer import SwappedLayer
from support.composed import Nested, Packed, Scaled


class Block(nn.Module):
    """A block with attributes."""

    def __init__(self, width: int = 4, **attributes: Any) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        for name, value in attributes.items():
            setattr(self, name, value)


def layer(module: nn.Module, index: int = 0) -> SwappedLayer:
    return SwappedLayer(index, f"blocks.{index}", module, list(module.parameters()))


def test_layers_of_one_structure_differ_in_their_values_and_numbers_alone() -> None:
    one, other = layer(Block(layer_idx=1)), layer(Block(layer_idx=2), 2)
    assert structure_of(one) == structure_of(other)


@pytest.mark.parametrize("changed", [{"eps": 0.5}, {"mode": "fast"}, {"phase": 1j}, {"width": 5}])
def test_attributes_and_shapes_tell_layers_apart(changed: dict[str, Any]) -> None:
    usual = {"eps": 0.1, "mode": "slow", "phase": 2j}
    assert structure_of(layer(Block(**usual))) != structure_of(layer(Block(**{**usual, **changed})))


def test_what_is_frozen_or_tied_or_narrow_tells_layers_apart() -> None:
    frozen, tied, narrow, usual = Block(), Block(), layer(Block()), layer(Block())
    frozen.up.weight.requires_grad_(False)
    tied.norm.bias = tied.up.bias
    narrow.narrow = {narrow.parameters[0]: torch.bfloat16}
    structures = [structure_of(each) for each in (layer(frozen), layer(tied), narrow, usual)]
    assert len(set(structures)) == len(structures)


def test_what_composes_weights_tells_layers_apart() -> None:
    blocks = [Block() for _ in range(4)]
    for block, kind in zip(blocks[1:], (Packed, Scaled, Nested), strict=True):
        block.up.weight = nn.Parameter(kind.of(torch.randn(4, 4)), requires_grad=False)
    blocks[0].up.weight.requires_grad_(False)
    structures = [structure_of(layer(block)) for block in blocks]
    assert len(set(structures)) == len(structures)

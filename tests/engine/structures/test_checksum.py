"""The checksum is one of all bits, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_harmony.engine.structures.checksum import checksum


def changed(tensor: Tensor) -> Tensor:
    """The same but for the bits of its last element."""
    last = tensor.detach()[(-1,) * tensor.dim()]
    last.copy_(torch.ones_like(last) if last == 0 else torch.zeros_like(last))
    return tensor


SHAPES: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.randn(4, 6),
    "an odd number": lambda: torch.randn(3, 7),
    "a scalar": lambda: torch.randn(()),
    "bfloat16": lambda: torch.randn(3, 5).bfloat16(),
    "bool": lambda: torch.rand(5) > 0.5,
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "transposed": lambda: torch.randn(4, 6).t(),
    "every other": lambda: torch.randn(9)[::2],
    "off the words": lambda: torch.randn(9)[1:],
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_checksum_is_one_of_all_elements(name: str) -> None:
    tensor = SHAPES[name]()
    before = checksum(tensor)
    assert torch.equal(checksum(tensor), before)
    assert not torch.equal(checksum(changed(tensor)), before)


@pytest.mark.parametrize("shape", [(3, 5), (64, 256), (1000, 1000), (4084, 2), (5, 4084)])
def test_elements_that_change_places_change_the_checksum(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    others = [tensor.flip(0), tensor.flip(1), tensor.roll(1), tensor.roll(1, 0), tensor[[1, 0, *range(2, shape[0])]]]
    assert not [other for other in others if torch.equal(checksum(other), checksum(tensor))]


def test_nothing_has_no_elements() -> None:
    assert len(checksum(torch.empty(0, 3))) == 0

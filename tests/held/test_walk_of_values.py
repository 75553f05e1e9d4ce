"""The places that values lead to, such as what a layer is called with."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from lightning_harmony.held.walk_of_values import WalkOf


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_what_is_found_ends_with_its_places() -> None:
    """Places and their walk held each other: what a layer had been called with outlived its call."""
    tensor = torch.zeros(3)
    ended = weakref.ref(tensor)
    places = WalkOf([{"a": tensor, "b": [tensor]}, (tensor,)]).take_places()
    assert len(places) == 2
    del tensor, places
    assert ended() is None

"""What all devices have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_harmony.engine.devices.device import flat_buffer

# So much is mapped for it alone, and what the system maps is zero.
FRESH_BYTES = 64 << 20


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_buffers_are_not_written_before_they_are_used() -> None:
    """On a GPU, sums that one stream had written became no numbers when the fill on the stream of their pool was behind it."""
    host = torch.device("cpu")
    filled, buffer = torch.empty(FRESH_BYTES, dtype=torch.uint8, device=host), flat_buffer(FRESH_BYTES, host)
    assert (filled != 0).all()
    assert not buffer.any()
    assert (buffer.shape, buffer.dtype) == (filled.shape, filled.dtype)
    assert buffer.untyped_storage().nbytes() == FRESH_BYTES


def test_buffers_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        buffer = flat_buffer(8, torch.device("cpu"))
    assert buffer.fill_(1).sum() == 8

"""Whether a tensor alone has its memory."""

from __future__ import annotations

import pytest
import torch

from lightning_harmony.engine.structures.memory_users import has_memory_alone, place_in_memory


def test_a_tensor_has_its_memory_alone_until_there_is_a_view() -> None:
    tensor = torch.rand(4, 2)
    assert has_memory_alone(tensor)
    view = tensor[1:]
    assert not has_memory_alone(tensor)
    assert not has_memory_alone(view)


def test_what_nobody_has_any_more_counts_for_nobody() -> None:
    view = torch.rand(4, 1)[1:].squeeze(1)
    assert has_memory_alone(view)
    whole = view._base
    assert not has_memory_alone(view)
    del whole
    assert has_memory_alone(view)
    other = view[1:]
    assert not has_memory_alone(view)
    del other
    assert has_memory_alone(view)


def test_detached_tensors_share_memory() -> None:
    tensor = torch.rand(4, requires_grad=True)
    detached = tensor.detach()
    assert not has_memory_alone(detached)
    del tensor
    assert has_memory_alone(detached)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_stays_in_its_place_until_it_is_given_other_data(device: str) -> None:
    tensor = torch.empty(4, 2, device=device)
    place = place_in_memory(tensor)
    assert place_in_memory(tensor) == place
    for other in (torch.empty(4, 2, device=device), tensor.detach()[:2], tensor.detach()[2:]):
        tensor.data = other
        assert place_in_memory(tensor) != place

"""What optimizer state takes is counted while updates that are under way add to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_harmony.updating import optimizer_state
from lightning_harmony.updating.optimizer_state import bytes_by_parameter, state_bytes


@pytest.mark.parametrize("by_parameter", [True, False], ids=["by parameter", "in all"])
def test_a_parameter_may_be_trained_for_the_first_time_meanwhile(
    by_parameter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an expert that a token reaches late: a step ended with an error of an iteration, now and then."""
    early, late = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.SGD([early, late], momentum=0.9)
    early.grad = torch.ones(3)
    optimizer.step()
    late.grad = torch.ones(5)
    counted = optimizer_state._bytes_of

    def step_and_count(state: Any) -> int:
        optimizer.step()
        return counted(state)

    monkeypatch.setattr(optimizer_state, "_bytes_of", step_and_count)
    if by_parameter:
        assert bytes_by_parameter(optimizer) == {early: 12}
    else:
        assert state_bytes([optimizer]) == 12
    assert len(optimizer.state) == 2

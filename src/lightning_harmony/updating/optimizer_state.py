"""What the state of optimizers takes, before there is one and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

# Host bytes of optimizer state per parameter byte, where it is known before the first step.
STATE_COPIES = {
    "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Rprop": 2, "RMSprop": 1, "Adagrad": 1,
    "ASGD": 1, "Muon": 1,
}  # fmt: skip
# Of an optimizer that does not tell what its state will take: the two moments of Adam.
ASSUMED_STATE_COPIES = 2


def expected_state_bytes(optimizers: Sequence[Optimizer]) -> int | None:
    """What the state of optimizers takes once they have stepped; None where that cannot be told before."""
    known = [_expected(optimizer) for optimizer in optimizers]
    return None if None in known else sum(one or 0 for one in known)


def _expected(optimizer: Optimizer) -> int | None:
    if optimizer.state:
        return state_bytes([optimizer])
    copies = STATE_COPIES.get(type(optimizer).__name__)
    total = 0
    for group in optimizer.param_groups:
        if type(optimizer) is torch.optim.SGD:
            copies = 1 if group["momentum"] else 0
        if copies is None:
            return None
        extra = 1 if group.get("amsgrad") else 0
        total += (copies + extra) * sum(p.numel() * p.element_size() for p in group["params"] if p.requires_grad)
    return total


def state_bytes(optimizers: Sequence[Optimizer]) -> int:
    """What the state of optimizers takes now. An update may add to it meanwhile."""
    # Copies of dictionaries are made at once. Beside those of parameters, an optimizer may keep entries of its own.
    states = [_copied(state) for one in optimizers for state in list(one.state.values())]
    tensors = [leaf for state in states for leaf in tree_leaves(state)]
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors if isinstance(leaf, Tensor))


class StateSize:
    """What the state of optimizers takes, counted again when it has changed: models have thousands of parameters."""

    def __init__(self) -> None:
        self._counted: dict[int, tuple[tuple[int, int], int]] = {}

    def num_bytes(self, optimizers: Sequence[Optimizer]) -> int:
        """What it takes now."""
        return sum(self._of(number, optimizer) for number, optimizer in enumerate(optimizers))

    def _of(self, number: int, optimizer: Optimizer) -> int:
        mark = id(optimizer.state), len(optimizer.state)
        counted = self._counted.get(number)
        if counted is not None and counted[0] == mark:
            return counted[1]
        num_bytes = state_bytes([optimizer])
        # A history in a list grows, and what is None may become a tensor: those are counted each time.
        states = [_copied(state) for state in list(optimizer.state.values())]
        if all(isinstance(state, dict) and state and _is_settled(state) for state in states):
            self._counted[number] = mark, num_bytes
        return num_bytes


def _copied(state: Any) -> Any:
    return dict(state) if isinstance(state, Mapping) else state


def _is_settled(state: dict[str, Any]) -> bool:
    return all(isinstance(value, Tensor | int | float) for value in state.values())

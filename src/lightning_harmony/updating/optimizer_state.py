"""What the state of optimizers takes, before there is one and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.glue.glue import StandIn
from lightning_harmony.engine.nodes.division import Division
from lightning_harmony.engine.structures.tree import stood_for
from lightning_harmony.engine.updates.device_step import ASSUMED_STATE_COPIES

# Host bytes of optimizer state per parameter byte, where it is known before the first step.
STATE_COPIES = {
    "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Rprop": 2, "RMSprop": 1, "Adagrad": 1,
    "ASGD": 1, "Muon": 1,
}  # fmt: skip


def expected_state_bytes(optimizers: Sequence[Optimizer], division: Division | None = None) -> int | None:
    """What the state of optimizers takes once they have stepped; None where that cannot be told before.

    Args:
        optimizers: whose.
        division: of updates between nodes, each of which has a part of the state; None where this one has all.
    """
    known = [_expected(optimizer, division) for optimizer in optimizers]
    return None if None in known else sum(one or 0 for one in known)


def _expected(optimizer: Optimizer, division: Division | None) -> int | None:
    if optimizer.state:
        return state_bytes([optimizer])
    if any(_copies(optimizer, group) is None for group in optimizer.param_groups):
        return None
    return sum(bytes_by_parameter(optimizer, division).values())


def bytes_by_parameter(optimizer: Optimizer, division: Division | None = None) -> dict[Any, int]:
    """What the state of each parameter takes once all were updated; as Adam's takes where that cannot be told before.

    Args:
        optimizer: whose.
        division: as of `expected_state_bytes`.
    """
    if optimizer.state:
        # An update that is under way may add to it meanwhile: a copy of a dictionary is made at once.
        return {parameter: _bytes_of(state) for parameter, state in dict(optimizer.state).items()}
    found: dict[Any, int] = {}
    for group in optimizer.param_groups:
        copies = _copies(optimizer, group)
        for parameter in group["params"] if copies != 0 else ():
            if parameter.requires_grad and (division is None or division.is_own(parameter)):
                num_bytes = parameter.numel() * parameter.element_size()
                found[parameter] = (ASSUMED_STATE_COPIES if copies is None else copies) * num_bytes
    return found


def _copies(optimizer: Optimizer, group: Mapping[str, Any]) -> int | None:
    """Bytes of state for each byte of a parameter; None where that is not known."""
    copies = STATE_COPIES.get(type(optimizer).__name__)
    if type(optimizer) is torch.optim.SGD:
        copies = 1 if group["momentum"] else 0
    return None if copies is None else copies + (1 if group.get("amsgrad") else 0)


def state_bytes(optimizers: Sequence[Optimizer]) -> int:
    """What the state of optimizers takes now. An update may add to it meanwhile."""
    # Copies of dictionaries are made at once. Beside those of parameters, an optimizer may keep entries of its own.
    return sum(_bytes_of(state) for one in optimizers for state in list(one.state.values()))


def _bytes_of(state: Any) -> int:
    tensors = tree_leaves(_copied(state))
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors if isinstance(leaf, Tensor))


def key_by_parameters(optimizers: Sequence[Optimizer]) -> None:
    """Let state that a step has made, as `optimizer.state[parameter]` does, be that of the parameter, not of its stand-in."""
    for optimizer in optimizers:
        state = optimizer.state
        if any(isinstance(key, StandIn) for key in state):
            # In the same order.
            entries = [(stood_for(key), value) for key, value in state.items()]
            state.clear()
            state.update(entries)


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

"""What optimizers will take in host memory, before they take it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.free_memory import free_host_bytes
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.host_gradients import bytes_beside_state
from lightning_harmony.plan.memory_size import format_bytes

# Host bytes of optimizer state per parameter byte, where it is known before the first step.
STATE_COPIES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "RMSprop": 1, "Adagrad": 1}
# Of an optimizer that does not tell what its state will take: the two moments of Adam.
ASSUMED_STATE_COPIES = 2


def refuse_too_little(
    optimizers: Sequence[Optimizer], layers: Iterable[Iterable[nn.Parameter]], *, is_deferred: bool
) -> None:
    """Refuse to train where gradients and optimizer state will not fit.

    Args:
        optimizers: of the training.
        layers: the parameters of each. Packs of several will need more, as far as there is more.
        is_deferred: whether no update runs just in time.

    Raises:
        CapacityError: saying how many bytes the host is short.
    """
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    sizes = {p: p.numel() * p.element_size() for p in trained if p.requires_grad}
    copies = max((STATE_COPIES.get(type(optimizer).__name__, 0) for optimizer in optimizers), default=0)
    state_bytes = copies * sum(sizes.values())
    # Each parameter in one layer; those of none, by themselves.
    gradients = [sum(sizes.pop(p, 0) for p in layer) for layer in layers]
    gradients += sizes.values()
    needed = state_bytes + bytes_beside_state(gradients, state_bytes, is_deferred=is_deferred)
    free = free_host_bytes()
    if free is not None and needed > free:
        raise CapacityError(
            f"the host is {format_bytes(needed - free)} short: gradients and optimizer state take {format_bytes(needed)}, "
            f"{format_bytes(free)} are free. Add host memory, train fewer parameters, or choose an optimizer with less state"
        )


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

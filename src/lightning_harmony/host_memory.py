"""What optimizers will take in host memory, before they take it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_harmony.engine.device import free_host_bytes
from lightning_harmony.errors import CapacityError
from lightning_harmony.plan.memory_size import format_bytes

# Host bytes of optimizer state per parameter byte, where it is known before the first step.
STATE_COPIES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "RMSprop": 1, "Adagrad": 1}


def refuse_too_little(optimizers: Sequence[Optimizer]) -> None:
    """Refuse to train where gradients and optimizer state will not fit.

    Raises:
        CapacityError: saying how many bytes the host is short.
    """
    trainable = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    gradient_bytes = sum(p.numel() * p.element_size() for p in trainable if p.requires_grad)
    copies = 1 + max((STATE_COPIES.get(type(optimizer).__name__, 0) for optimizer in optimizers), default=0)
    needed, free = copies * gradient_bytes, free_host_bytes()
    if free is not None and needed > free:
        raise CapacityError(
            f"the host is {format_bytes(needed - free)} short: gradients and optimizer state take {format_bytes(needed)}, "
            f"{format_bytes(free)} are free. Add host memory, train fewer parameters, or choose an optimizer with less state"
        )


def state_bytes(optimizers: Sequence[Optimizer]) -> int:
    """What the state of optimizers takes now."""
    tensors = [leaf for one in optimizers for state in one.state.values() for leaf in tree_leaves(dict(state))]
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors if isinstance(leaf, Tensor))

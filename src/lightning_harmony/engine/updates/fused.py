"""Optimizers that run fused on the host, where the user left that open: one pass over memory instead of ten.

In 16 bits they don't: torch's fused SGD on the CPU gives wrong numbers there (seen in 2.11 and 2.13), also to those who
ask for it with ``fused=True`` because they train on a GPU, and the others round at other places. Nor does SGD where only some
parameters have a momentum yet, as after some were released in mid-run: fused, it fails at that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_FUSED_ON_HOST = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_FUSED_IN = (torch.float32, torch.float64)
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class FusedGroups:
    """The parameter groups whose implementation was chosen here, and not by the user."""

    def __init__(self) -> None:
        # What the user wrote, by the identity of the group.
        self._written: dict[int, bool | None] = {}

    def __len__(self) -> int:
        """How many groups run fused because it was chosen here."""
        return sum(written is None for written in self._written.values())

    def fuse(self, optimizer: Optimizer) -> None:
        """Choose it for the groups of an optimizer that left the choice open, and undo it where it is wrong on a host.

        Not through the optimizer's constructor, which would also announce that it unscales gradients.
        """
        if type(optimizer) not in _FUSED_ON_HOST:
            return
        if type(optimizer) is torch.optim.SGD:
            for group in filter(_is_in_16_bits, optimizer.param_groups):
                if group.get("fused"):
                    self._written[id(group)] = True
                    group["fused"] = False
        for group in optimizer.param_groups:
            if self._written.get(id(group), False) is None:
                group["fused"] = None
            if not _may_fuse(group) or (type(optimizer) is torch.optim.SGD and _lack_momentum(optimizer, group)):
                continue
            self._written[id(group)] = None
            group["fused"] = True
            for parameter in group["params"]:
                # Counted as a number of type float32, where the other implementations may have another one.
                state = optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(torch.float32)

    def unmark(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Make the saved state of an optimizer what it would be without the choice."""
        for number, group in enumerate(optimizer.param_groups):
            if id(group) in self._written:
                saved["param_groups"][number]["fused"] = self._written[id(group)]


def _is_in_16_bits(group: dict[str, Any]) -> bool:
    return any(parameter.dtype in _SIXTEEN_BITS for parameter in group["params"])


def _lack_momentum(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether some parameters that are trained have a momentum, and others don't."""
    trained = [parameter for parameter in group["params"] if parameter.requires_grad]
    having = sum(optimizer.state.get(parameter, {}).get("momentum_buffer") is not None for parameter in trained)
    return 0 < having < len(trained)


def _may_fuse(group: dict[str, Any]) -> bool:
    chosen = any(group.get(name) for name in ("foreach", "differentiable", "capturable"))
    return group.get("fused", False) is None and not chosen and all(p.dtype in _FUSED_IN for p in group["params"])

"""Optimizers that run fused on the host, where the user left that open: one pass over memory instead of ten."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_FUSED_ON_HOST = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class FusedGroups:
    """The parameter groups for which the fused implementation was chosen here, and not by the user."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def __len__(self) -> int:
        return len(self._known)

    def fuse(self, optimizer: Optimizer) -> None:
        """Choose it for the groups of an optimizer that left the choice open.

        Not through the optimizer's constructor, which would also announce that it unscales gradients.
        """
        if type(optimizer) not in _FUSED_ON_HOST:
            return
        for group in filter(_may_fuse, optimizer.param_groups):
            self._known.add(id(group))
            group["fused"] = True
            for parameter in group["params"]:
                # Counted as a number of type float32, where the other implementations may have another one.
                state = optimizer.state.get(parameter, {})
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(torch.float32)

    def unmark(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Make the saved state of an optimizer what it would be without the choice."""
        for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            if id(group) in self._known:
                saved_group["fused"] = None


def _may_fuse(group: dict[str, Any]) -> bool:
    chosen = any(group.get(name) for name in ("foreach", "differentiable", "capturable"))
    return group.get("fused", False) is None and not chosen and all(p.is_floating_point() for p in group["params"])

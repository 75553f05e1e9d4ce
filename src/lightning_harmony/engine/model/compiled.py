"""Compiled layers: who compiled them, and how."""

from __future__ import annotations

import torch
from torch import nn


def compiled_whole(module: nn.Module) -> bool:
    """Whether ``module.compile()`` compiled its call."""
    return module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether the user compiled a module, or one below it."""
    return any(compiled_whole(inner) or isinstance(inner, torch._dynamo.OptimizedModule) for inner in module.modules())

"""A module that has its parameters in several places."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Referring(nn.Module):
    """Refers to its parameters in every way that is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.bias = nn.Parameter(torch.zeros(2))
        self.as_list = [self.weight, "text", None]
        self.as_dict = {"bias": self.bias, "number": 1}
        object.__setattr__(self, "alias", self.weight)

    def forward(self) -> tuple[Any, ...]:
        return self.weight, self.bias, self.as_list[0], self.as_dict["bias"], self.alias

"""Networks and optimizers that the tests of exactness, of several devices and of races go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from support import nets

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": nets.Language,
    "dropout": lambda: nets.Language(dropout=0.3),
    "frozen": nets.Frozen,
    "skipped": nets.RandomlySkipped,
    "reordered": nets.Reordered,
    "rich": nets.Rich,
    "own-parameters": nets.OwnParameters,
    "returned-parameter": nets.ReturnedParameter,
    "spectral-norm": nets.SpectralNorm,
    "changes-an-input": nets.ChangesAnInput,
    "hooked": nets.Hooked,
    "several-consumers": nets.Shared,
    "skip-connections": nets.SkipConnections,
}


# Plain Lightning adds the sources of one microbatch, then microbatches; here each source adds its microbatches.
SUMMED_IN_ANOTHER_ORDER = {
    "tied": nets.Tied,
    "tied-by-code": nets.TiedByCode,
    "used-twice": nets.Repeated,
    "regularized": nets.Regularized,
}

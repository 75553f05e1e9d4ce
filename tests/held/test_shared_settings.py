"""Tests of the settings that microbatches share: a step that runs again begins with what they were."""

import decimal
import gc
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_harmony.engine.lanes.ambient import OF_PROCESS
from lightning_harmony.held.shared_settings import NOT_SWITCHED

CHANGES: dict[str, Callable[[], Any]] = {
    "os.environ": lambda: os.environ.update(A_SETTING_OF_A_STEP="1"),
    "the working directory": lambda: os.chdir(tempfile.gettempdir()),
    "decimal.getcontext()": lambda: (
        setattr(decimal.getcontext(), "prec", 5),
        decimal.getcontext().traps.update({decimal.Inexact: True}),
    ),
    "the level of forward-mode derivatives": torch.autograd.forward_ad.enter_dual_level,
    "the level of a logger": lambda: logging.getLogger("a logger of a step").setLevel(logging.DEBUG),
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the kernels for attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "cuDNN's flags": lambda: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "the precision of float32": lambda: torch.set_float32_matmul_precision("medium"),
    "mkldnn's flag": lambda: torch._C._set_mkldnn_enabled(False),
    "the hooks of all modules": lambda: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "the switch of the garbage collector": lambda: gc.disable() if gc.isenabled() else gc.enable(),
    "the recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
    "warnings.filters": lambda: warnings.simplefilter("ignore"),
}
SETTINGS = {setting.name: setting for setting in (*NOT_SWITCHED, *OF_PROCESS)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_a_step_changes_can_be_put_back(name: str) -> None:
    setting = SETTINGS[name]
    before = setting.get()
    try:
        CHANGES[name]()
        assert setting.get() != before
    finally:
        setting.set(before)
    assert setting.get() == before

"""Settings of the process that lanes do not switch, and of its thread: what a microbatch sets, the next ones find."""

from __future__ import annotations

import os
from contextvars import copy_context
from typing import Any

import torch

from lightning_harmony.engine.lanes.ambient import OfProcess, read_thread_locals, write_thread_locals


def _set_environment(value: dict[Any, Any]) -> None:
    os.environ.clear()
    os.environ.update({os.fsdecode(name): os.fsdecode(entry) for name, entry in value.items()})


def _end_levels(level: int) -> None:
    while torch.autograd.forward_ad._current_level > level:
        torch.autograd.forward_ad.exit_dual_level()


NOT_SWITCHED = (
    OfProcess("os.environ", lambda: dict(os.environ._data), _set_environment),  # type: ignore[attr-defined]
    OfProcess("the working directory", os.getcwd, os.chdir),
    OfProcess("the level of forward-mode derivatives", lambda: torch.autograd.forward_ad._current_level, _end_levels),
    OfProcess("an attribute of a threading.local", read_thread_locals, write_thread_locals),
)


def context_now() -> dict[int, int]:
    """What is set in the thread's context, by identities: nobody's comparison runs.

    Each lane has a context of its own. What a microbatch leaves there, no other one finds that takes turns with it.
    """
    return {id(variable): id(value) for variable, value in copy_context().items()}

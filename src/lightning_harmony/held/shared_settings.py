"""Settings of the process that lanes do not switch, and of its thread: what a microbatch sets, the next ones find."""

from __future__ import annotations

import decimal
import logging
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


_OF_DECIMAL = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _decimal() -> tuple[Any, ...]:
    """How decimal numbers round. That one has rounded is kept in `flags`."""
    context = decimal.getcontext()
    return *[getattr(context, name) for name in _OF_DECIMAL], *context.traps.items()


def _set_decimal(value: tuple[Any, ...]) -> None:
    context, number = decimal.getcontext(), len(_OF_DECIMAL)
    for name, each in zip(_OF_DECIMAL, value[:number], strict=True):
        setattr(context, name, each)
    context.traps.update(value[number:])


def _levels() -> dict[logging.Logger, tuple[int, bool]]:
    """From which level on loggers log. Those that have just been made have none of their own."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return {
        each: (each.level, each.disabled)
        for each in loggers
        if isinstance(each, logging.Logger) and (each.level or each.disabled)
    }


def _set_levels(value: dict[logging.Logger, tuple[int, bool]]) -> None:
    for logger in {**_levels(), **value}:
        level, logger.disabled = value.get(logger, (logging.NOTSET, False))
        logger.setLevel(level)


# These are looked at whenever lanes change.
OFTEN_LOOKED_AT = (
    OfProcess("os.environ", lambda: dict(os.environ._data), _set_environment),  # type: ignore[attr-defined]
    OfProcess("the working directory", os.getcwd, os.chdir),
    OfProcess("decimal.getcontext()", _decimal, _set_decimal),
    OfProcess("the level of forward-mode derivatives", lambda: torch.autograd.forward_ad._current_level, _end_levels),
    OfProcess("an attribute of a threading.local", read_thread_locals, write_thread_locals),
)
NOT_SWITCHED = (*OFTEN_LOOKED_AT, OfProcess("the level of a logger", _levels, _set_levels))


def context_now() -> dict[int, int]:
    """What is set in the thread's context, by identities: nobody's comparison runs.

    Each lane has a context of its own. What a microbatch leaves there, no other one finds that takes turns with it.
    """
    return {id(variable): id(value) for variable, value in copy_context().items()}

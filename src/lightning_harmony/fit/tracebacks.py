"""Tracebacks of users' errors: what the user's code and torch called, without what stands between them here."""

from __future__ import annotations

from itertools import takewhile
from types import TracebackType

_OWN_PACKAGE = __name__.partition(".")[0]
# Modules whose frames stand between ours.
_BETWEEN = ("contextlib", "torch.autograd.function")
# Methods that torch calls for each operation.
_PASSING_ON = ("__torch_dispatch__", "__torch_function__")


def of_user(error: BaseException) -> TracebackType | None:
    """The traceback of an error without our frames. Of one that was raised here, or by torch in a call from here, with all.

    What stands between the user's code and each operation of torch, as virtual devices do, calls nothing of its own accord.

    Args:
        error: as it was caught.
    """
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    to_operation = takewhile(lambda each: each.tb_frame.f_code.co_name not in _PASSING_ON, frames)
    packages = [package for package in map(_package, to_operation) if package not in ("torch", "contextlib")]
    if not packages or packages[-1] == _OWN_PACKAGE:
        return error.__traceback__
    shown, follows_ours = [], False
    for frame in frames:
        name = str(frame.tb_frame.f_globals.get("__name__"))
        # Those alone that ours have called: the user's code may use the same modules.
        follows_ours = _package(frame) == _OWN_PACKAGE or (follows_ours and name in _BETWEEN)
        if not follows_ours:
            shown.append(frame)
    rebuilt: TracebackType | None = None
    for frame in reversed(shown):
        rebuilt = TracebackType(rebuilt, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rebuilt


def _package(traceback: TracebackType) -> str:
    return str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0]

"""Functions of torch, written in Python, that hand their operands on to others."""

from __future__ import annotations

from types import FunctionType
from typing import Any

_ASKING = frozenset(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"))


def handing_on(func: Any) -> Any:
    """A function of torch, written in Python, that hands on what it is given, without asking who wants to see it.

    Args:
        func: any function.

    Returns:
        Its code, which calls others with its operands as they are; None for a function of another kind.
    """
    if not isinstance(func, FunctionType):
        return None
    asking = _ASKING.intersection(func.__code__.co_names)
    if not asking or not func.__module__.startswith("torch."):
        return None
    names = func.__globals__ | dict.fromkeys(asking, _tell_of_none)
    handing = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    handing.__kwdefaults__ = func.__kwdefaults__
    return handing


def _tell_of_none(*operands: Any) -> bool:
    return False

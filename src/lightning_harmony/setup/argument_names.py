"""Wrong names of arguments: an error that tells which one was probably meant, as that of Python 3.13 and later does."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def suggests_names(called: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for functions whose arguments users name. It changes neither the function's signature nor its type.

    Args:
        called: the name under which users call it.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        names = [name for name in signature(function).parameters if name not in ("self", "cls")]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            wrong = next((name for name in kwargs if name not in names), None)
            if wrong is not None:
                near = get_close_matches(wrong, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"its arguments are {', '.join(names)}"
                raise TypeError(f"{called}() got an unexpected keyword argument {wrong!r}: {hint}")
            return function(*args, **kwargs)

        return call

    return decorate

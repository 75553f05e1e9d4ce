"""What a value holds where no place is: in a tuple, behind a weak reference, or as what a function is made of."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from itertools import islice
from types import FunctionType
from typing import Any

from lightning_harmony.held.files import content_of
from lightning_harmony.held.held_state import FUNCTIONS
from lightning_harmony.held.walk import bound_to

# Of a long tuple, the first ones tell what the others are.
_MOST_ELEMENTS = 100


def parts_within(value: Any) -> Iterable[Any]:
    """What it holds: of a function its variables and defaults, of a method its object, of others nothing."""
    kind: Any = type(value)
    if issubclass(kind, tuple):
        return islice(tuple.__iter__(value), _MOST_ELEMENTS)
    if issubclass(kind, weakref.ref):
        return (value(),)
    if issubclass(kind, FunctionType):
        variables = map(content_of, value.__closure__ or ())
        return (*variables, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if issubclass(kind, partial):
        return value.func, value.args, *value.keywords.values()
    if issubclass(kind, FUNCTIONS):
        return (each for _, each in bound_to(value))
    return ()

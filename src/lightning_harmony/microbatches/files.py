"""Files of Python: whose they are, and of which the code of a model may use globals."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

LIBRARIES = frozenset(
    (
        "torch",
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "torchmetrics",
        "lightning_harmony",
        "builtins",
        "numpy",
    )
)
# Where what others have made is installed: it is used, and not changed by steps.
_INSTALLED = ("site-packages", "dist-packages")


def files_of(classes: Collection[type], functions: Iterable[FunctionType]) -> dict[str, None]:
    """The names of the modules of Python that define classes, and of those of the user's that code leads to.

    Args:
        classes: those of a model's modules.
        functions: that are among what these keep.
    """
    files = dict.fromkeys(kind.__module__ for kind in classes)
    waiting, seen = deque[Any]((*(each for kind in classes for each in kind.__mro__), *functions)), set[int]()
    while waiting:
        value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, FunctionType | type):
            waiting.append(type(value))
        elif _is_own(value.__module__):
            files[value.__module__] = None
            waiting += _named(value) if isinstance(value, FunctionType) else _functions_of(value)
    return files


def _functions_of(kind: type) -> Iterator[Any]:
    """The functions that the attributes of a class are made of."""
    for held in list(vars(kind).values()):
        if isinstance(held, property):
            yield from (held.fget, held.fset, held.fdel)
        else:
            yield held.__func__ if isinstance(held, staticmethod | classmethod) else held


def _named(function: FunctionType) -> Iterator[Any]:
    """What the code of a function names among globals, or in modules of Python among them."""
    names, among = _names(function.__code__), function.__globals__
    yield from (each for each in (_content(cell) for cell in function.__closure__ or ()) if callable(each))
    for name in names:
        value = among.get(name)
        if isinstance(value, ModuleType):
            if _is_own(value.__name__):
                yield from (vars(value)[each] for each in names if each in vars(value))
        elif value is not None:
            yield value


def _content(cell: Any) -> Any:
    """What is in a variable of a closure; None if nothing is."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


# By identity: code objects are hashed by all that is in them. They are kept, so that no other gets that.
_known: dict[int, tuple[CodeType, frozenset[str]]] = {}


def _names(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in a function's code, and in that of functions within it."""
    known = _known.get(id(code))
    if known is None:
        inner = (each for each in code.co_consts if isinstance(each, CodeType))
        known = _known[id(code)] = code, frozenset(code.co_names).union(*map(_names, inner))
    return known[1]


@cache
def _is_own(file: Any) -> bool:
    """Whether a module of Python is a part of the user's project: nobody has installed it."""
    module = sys.modules.get(file) if isinstance(file, str) else None
    if module is None or not is_users(file):
        return False
    path = getattr(module, "__file__", None)
    # A notebook has none.
    return file == "__main__" if path is None else not set(_INSTALLED) & set(Path(path).parts)


@cache
def is_users(file: str) -> bool:
    """Whether what a file defines is the user's: not that of the libraries above, or the standard library."""
    package = file.partition(".")[0]
    return package not in LIBRARIES and package not in sys.stdlib_module_names

"""Files of Python: whose they are, and of which the code of a model may use globals."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from lightning_harmony.engine.structures.object_state import attributes_of
from lightning_harmony.engine.structures.packages import LIBRARIES

Function = TypeVar("Function", bound=Callable[..., Any])
# What a Trainer calls in a step.
_OF_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step", "backward")
# Where what others have made is installed: it is used, and not changed by steps.
_INSTALLED = ("site-packages", "dist-packages")


class Code:
    """The code of a model's steps, as far as it is the user's.

    Args:
        classes: those of a model's modules.
        functions: that are among what these keep, such as hooks.

    Attributes:
        files: the names of the modules of Python that define the classes, and of those of the user's that the code leads to.
        names: of globals and attributes in it.
    """

    def __init__(self, classes: Collection[type], functions: Iterable[FunctionType]) -> None:
        self.files: dict[str, None] = {}
        self.names = set(_OF_STEPS)
        self._waiting = deque[Any]()
        self._seen: set[int] = set()
        # By their names, the functions of classes that no code has named so far.
        self._others: dict[str, list[Any]] = defaultdict(list)
        for kind in classes:
            self.files[kind.__module__] = None
            for each in kind.__mro__:
                self.add(each)
        for function in functions:
            self.add(function)
        self.follow()

    def add(self, value: Any) -> None:
        """Follow what a function, class or object leads to."""
        self._waiting.append(value)

    def follow(self) -> None:
        """Follow all."""
        while self._waiting:
            value = self._waiting.popleft()
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if isinstance(value, ModuleType):
                self.files[value.__name__] = None
            elif not isinstance(value, FunctionType | type):
                self.add(type(value))
                self.add((attributes_of(value) or {}).get("__wrapped__"))
            elif is_own(value.__module__):
                self.files[value.__module__] = None
                if isinstance(value, FunctionType):
                    self._read(value)
                else:
                    self._open(value)

    def _open(self, kind: type) -> None:
        """Follow those functions of a class that Python calls, or that code names."""
        for name, function in _functions_of(kind):
            if name in self.names or (name.startswith("__") and not name.startswith("__init")):
                self.add(function)
            else:
                self._others[name].append(function)

    def _read(self, function: FunctionType) -> None:
        new = _names(function.__code__) - self.names
        self.names |= new
        for name in new & self._others.keys():
            self._waiting += self._others.pop(name)
        self._waiting += _named(function)


def _functions_of(kind: type) -> Iterator[tuple[str, Any]]:
    """What the attributes of a class are made of, with their names."""
    for name, held in list(vars(kind).items()):
        if isinstance(held, property):
            yield from ((name, each) for each in (held.fget, held.fset, held.fdel))
        else:
            yield name, held.__func__ if isinstance(held, staticmethod | classmethod) else held


def _named(function: FunctionType) -> Iterator[Any]:
    """What the code of a function names among globals, or in modules of Python among them, and these."""
    names, among = _names(function.__code__), function.__globals__
    yield from (each for each in (content_of(cell) for cell in function.__closure__ or ()) if callable(each))
    for name in names:
        value = among.get(name)
        if isinstance(value, ModuleType):
            if is_own(value.__name__):
                # Code that names attributes of a file may set its variables, which tell of no file.
                yield value
                yield from (vars(value)[each] for each in names if each in vars(value))
        elif value is not None:
            yield value


def content_of(cell: Any) -> Any:
    """What is in a variable of a closure; None if nothing is."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def by_identity(function: Function) -> Function:
    """Let a function of a code object keep its results, by identity: such objects are hashed by all that is in them.

    The objects are kept, too, so that no other gets the identity of one.
    """
    known: dict[Any, tuple[CodeType, Any]] = {}

    def kept(code: CodeType, *others: Any) -> Any:
        key = id(code), *others
        found = known.get(key)
        if found is None:
            found = known[key] = code, function(code, *others)
        return found[1]

    return kept  # type: ignore[return-value]


@by_identity
def _names(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in a function's code, and in that of functions within it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


def is_of_libraries(file: str) -> bool:
    """Whether a module of Python is one of the libraries above."""
    return file.partition(".")[0] in LIBRARIES


@cache
def is_own(file: Any) -> bool:
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
    return not is_of_libraries(file) and file.partition(".")[0] not in sys.stdlib_module_names

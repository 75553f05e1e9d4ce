"""What Python holds for a step: attributes of modules, and of objects that they hold, and lists, dicts and sets among them.

Looked at are all modules of the model, and from each attribute lists, dicts, sets and deques to any depth, and objects to a
depth of `DEEPEST`; of functions, hooks among them, the variables of closures, attributes and defaults, and what methods and
`functools.partial` are bound to, through as many functions that hold each other; the classes of all these, with their
functions; and globals of the files that define the modules' classes, with what these define, and containers among them.

None of the user's code runs: objects and containers of all classes are read past it. Longer containers than `LONGEST` are
data, and so are more than `MOST` spaces. Left alone are metrics, whose states add up, parameters, and objects, functions and
classes of the libraries below, which no step of the user's keeps anything in. Functions of theirs may wrap one of the user's.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from enum import Enum, EnumMeta, auto
from functools import cache, partial
from itertools import islice
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_harmony.engine.model.attributes import HOOKS, LONGEST, OF_TORCH, GeneratorAccess
from lightning_harmony.engine.structures.containers import copied_content, have_same_content
from lightning_harmony.engine.structures.nested import is_ndarray
from lightning_harmony.microbatches.variables import (
    AttributesOfClass,
    EntriesOf,
    SlotsOf,
    VariableOfClosure,
    Variables,
    attributes_of,
    slots_of,
)

DEEPEST, MOST = 3, 20_000
# What is in these, lanes can switch: of other classes nobody knows how they are changed.
SWITCHED = (list, deque, set, dict, OrderedDict, defaultdict)
# Arrays up to this size are compared by what is in them.
_SMALL_BYTES = 64 * 1024
_PLAIN = (bool, int, float, complex, str, bytes, type(None), ModuleType)
_CONTAINERS = (list, deque, set, dict, tuple)
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial, staticmethod, classmethod, property)
# What is looked into by itself, or does not change: nothing tells by itself that it was changed in place.
_UNMARKED = frozenset((*_PLAIN, *_FUNCTIONS, *SWITCHED, tuple, type, nn.Parameter, torch.dtype, torch.device))
_LIBRARIES = frozenset(
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
# Those that run within a step.
_HOOKS = (*HOOKS, "_backward_hooks", "_backward_pre_hooks")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class Kind(Enum):
    """What a space is."""

    MODULE = auto()
    CONTAINER = auto()
    HOOKS = auto()
    # An object's attributes, or a container that is in one or of another class; globals, variables and attributes of a class.
    OBJECT = auto()


class Held:
    """What may be changed in one place: the attributes of a module or object, a list, set or dict, or a module's hooks.

    Attributes:
        name: for messages.
        content: the list, set or dict itself, or the attributes, in a dict or seen as one.
        kind: what it is.
        owner: whose attributes it is, if it is any.
        root: the module or class, with the name of its attribute, that leads to it, if it is no module's own.
        is_shared: whether other ways lead to it, too, as functions share variables.
        key: tells it from all others, and is the same whenever it is looked at.
    """

    __slots__ = ("content", "is_shared", "key", "kind", "name", "owner", "root")

    def __init__(self, name: str, content: Any, kind: Kind, owner: Any = None) -> None:
        self.name = name
        self.content = content
        self.kind = kind
        self.owner = owner
        self.root: tuple[Any, str] | None = None
        self.is_shared = False
        self.key = id(content.owner) if isinstance(content, Variables) else id(content)

    @property
    def is_named(self) -> bool:
        """Whether what is in it has names, as in a dict."""
        return isinstance(self.content, dict | Variables)

    @property
    def has_attributes(self) -> bool:
        """Whether its names are those that code has given them: attributes, globals or variables, not entries."""
        return self.owner is not None or (
            isinstance(self.content, Variables) and not isinstance(self.content, EntriesOf)
        )

    def copied(self) -> Any:
        """What is in it, in a list, dict or set."""
        content = self.content
        return content.copied() if isinstance(content, Variables) else copied_content(content)

    def is_as(self, before: Any) -> bool:
        """Whether the same objects are in it as in a copy."""
        content = self.content
        return content.has_content(before) if isinstance(content, Variables) else have_same_content(content, before)


def held_by(model: nn.Module, others: Sequence[tuple[str, Any]] = ()) -> Iterator[Held]:
    """All that a model holds, and other objects, given with their names. Each once, though several modules may have it."""
    yield from islice(_Walk(model).all(others), MOST)


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What `named_modules` gives, in less time where many modules are nested."""
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        children = [(_joined(name, each), child) for each, child in module._modules.items() if child is not None]
        waiting += reversed(children)


class _Walk:
    """Goes to all places, to each once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: set[int] = set()

    def all(self, others: Sequence[tuple[str, Any]]) -> Iterator[Held]:
        """All places."""
        classes: dict[type, None] = {}
        for name, module in modules_of(self._model):
            if isinstance(module, Metric):
                continue
            classes[type(module)] = None
            self._seen.add(id(module))
            attributes = vars(module)
            yield Held(name, attributes, Kind.MODULE, module)
            for attribute in HOOKS:
                yield Held(_joined(name, attribute), attributes[attribute], Kind.HOOKS)
            for attribute in _HOOKS:
                if attributes.get(attribute):
                    yield from self._each(_joined(name, attribute), list(attributes[attribute].items()), 0, 0)
            own = [each for each in attributes.items() if each[0] not in OF_TORCH and type(each[1]) not in _PLAIN]
            for attribute, value in own:
                yield from _led_to(self._within(_joined(name, attribute), value, 0, 0), module, attribute)
        for kind in classes:
            yield from self._class(kind, 0)
        yield from self._globals(classes)
        for name, value in others:
            self._seen.add(id(value))
            yield from self._attributes_of(name, value, 0, 0)

    def _within(self, name: str, value: Any, depth: int, nested: int) -> Iterator[Held]:
        """The places in a value.

        Args:
            name: its own.
            value: where to look.
            depth: of how many objects it is an attribute.
            nested: how many functions hold it.
        """
        kind = type(value)
        if kind in _PLAIN or issubclass(kind, Tensor) or id(value) in self._seen:
            return
        if issubclass(kind, _CONTAINERS):
            yield from self._container(name, value, depth, nested)
        elif issubclass(kind, _FUNCTIONS):
            if nested < DEEPEST:
                yield from _shared(self._function(name, value, depth, nested + 1))
        elif issubclass(kind, type):
            yield from self._class(value, nested)
        elif depth < DEEPEST and _is_looked_into(value):
            self._seen.add(id(value))
            yield from self._attributes_of(name, value, depth + 1, nested)
            yield from self._class(type(value), nested)

    def _each(self, name: str, content: Iterable[tuple[Any, Any]], depth: int, nested: int) -> Iterator[Held]:
        for key, each in content:
            if type(each) not in _PLAIN:
                named = f"{name}[{key!r}]" if isinstance(key, str | int) else name
                yield from self._within(named, each, depth, nested)

    def _container(self, name: str, value: Any, depth: int, nested: int) -> Iterator[Held]:
        kind = type(value)
        # A tuple is no place, but what it holds is.
        held = tuple.__iter__(value) if issubclass(kind, tuple) else copied_content(value)
        content = list(held.items() if isinstance(held, dict) else enumerate(held))
        if len(content) > LONGEST:
            return
        if not issubclass(kind, tuple):
            self._seen.add(id(value))
            # Not one of parameters, in whose places stand-ins are while a step runs.
            if not any(issubclass(type(each), nn.Parameter) for _, each in content):
                is_switched = kind in SWITCHED
                seen = EntriesOf(value) if issubclass(kind, dict) and not is_switched else value
                yield Held(name, seen, Kind.CONTAINER if is_switched and not depth else Kind.OBJECT)
        yield from self._each(name, content, depth, nested)
        if depth < DEEPEST and kind is not tuple and kind not in SWITCHED:
            yield from self._attributes_of(f"attributes of {name}", value, depth + 1, nested)
            yield from self._class(kind, nested)

    def _attributes_of(self, name: str, value: Any, depth: int, nested: int) -> Iterator[Held]:
        for held in _places_of(name, value):
            yield held
            for attribute, each in list(held.content.items()):
                if type(each) not in _PLAIN:
                    yield from self._within(f"{name}.{attribute}", each, depth, nested)

    def _function(self, name: str, function: Any, depth: int, nested: int) -> Iterator[Held]:
        self._seen.add(id(function))
        for inner, value in _bound_to(function):
            yield from self._within(f"{name}{inner}", value, depth, nested)
        if not isinstance(function, FunctionType):
            return
        is_own = is_users(str(function.__globals__.get("__name__")))
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                yield from self._variable(f"{name}.{variable}", variable, cell, depth, nested, is_own=is_own)
        if is_own:
            yield Held(name, vars(function), Kind.OBJECT, function)
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            yield from self._each(f"{name}, default", enumerate(defaults), depth, nested)
        for attribute, value in list(vars(function).items()):
            if is_own or issubclass(type(value), _FUNCTIONS):
                yield from self._within(f"{name}.{attribute}", value, depth, nested)

    def _variable(
        self, name: str, variable: str, cell: CellType, depth: int, nested: int, *, is_own: bool
    ) -> Iterator[Held]:
        self._seen.add(id(cell))
        content = VariableOfClosure(cell, variable)
        # The class of a method, which no code sets.
        if is_own and variable != "__class__":
            yield Held(name, content, Kind.CONTAINER if not depth else Kind.OBJECT)
        for value in content.values():
            if is_own or issubclass(type(value), _FUNCTIONS):
                yield from self._within(name, value, depth, nested)

    def _class(self, kind: type, nested: int) -> Iterator[Held]:
        for each in kind.__mro__:
            if id(each) in self._seen:
                continue
            self._seen.add(id(each))
            if not is_users(each.__module__) or isinstance(each, EnumMeta):
                continue
            name = f"class {each.__qualname__}"
            yield from _shared([Held(name, AttributesOfClass(each), Kind.OBJECT, each)])
            for attribute, value in list(vars(each).items()):
                is_of_python = attribute.startswith("__") and not issubclass(type(value), _FUNCTIONS)
                if type(value) not in _PLAIN and not is_of_python:
                    yield from _led_to(self._within(f"{name}.{attribute}", value, 0, nested), each, attribute)

    def _globals(self, classes: Iterable[type]) -> Iterator[Held]:
        """The globals of the files in which the classes of a model are defined, and what is the user's among them."""
        files = dict.fromkeys(kind.__module__ for kind in classes)
        for name in files:
            file = sys.modules.get(name)
            if file is None or not is_users(name):
                continue
            yield from _shared([Held(name, vars(file), Kind.OBJECT, file)])
            for attribute, value in list(vars(file).items()):
                if attribute.startswith("__") or not _is_users_global(value, files):
                    continue
                depth = DEEPEST if type(value) in SWITCHED else 0
                yield from _shared(self._within(f"{name}.{attribute}", value, depth, 0))


def _shared(places: Iterable[Held]) -> Iterator[Held]:
    for held in places:
        held.is_shared = True
        yield held


def _led_to(places: Iterable[Held], owner: Any, attribute: str) -> Iterator[Held]:
    for held in places:
        held.root = held.root or (owner, attribute)
        yield held


def _places_of(name: str, value: Any) -> Iterator[Held]:
    """The attributes of an object, and its slots."""
    attributes = attributes_of(value)
    if attributes is not None:
        yield Held(name, attributes, Kind.OBJECT, value)
    kind: Any = type(value)
    if is_users(kind.__module__) and slots_of(kind):
        yield Held(name, SlotsOf(value), Kind.OBJECT)


def _bound_to(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function is made of that is not its own."""
    kind = type(function)
    if issubclass(kind, MethodType):
        yield "", function.__self__
        yield "", function.__func__
    elif issubclass(kind, BuiltinFunctionType):
        yield "", function.__self__
    elif issubclass(kind, staticmethod | classmethod):
        yield "", function.__func__
    elif issubclass(kind, property):
        yield from (("", each) for each in (function.fget, function.fset, function.fdel))
    elif issubclass(kind, partial):
        yield "", function.func
        yield ", arguments", function.args
        yield ", arguments", function.keywords


def _is_users_global(value: Any, files: Container[str]) -> bool:
    """Whether a global is looked into: a container, or a function, class or object of what these files define."""
    if type(value) in SWITCHED or type(value) is SimpleNamespace:
        return True
    kind = type(value)
    if issubclass(kind, Tensor | nn.Module):
        return False
    defined_in = value.__module__ if issubclass(kind, type | FunctionType) else kind.__module__
    return defined_in in files


def _is_looked_into(value: Any) -> bool:
    """Whether an object may keep something of a step."""
    kind = type(value)
    if issubclass(kind, Metric | torch.optim.Optimizer | torch.utils.data.Dataset | torch.utils.data.DataLoader):
        return False
    return kind.__module__.partition(".")[0] not in _LIBRARIES


@cache
def is_users(file: str) -> bool:
    """Whether what a file defines is the user's: not that of the libraries above, or the standard library."""
    package = file.partition(".")[0]
    return package not in _LIBRARIES and package not in sys.stdlib_module_names


def _joined(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute


def mark_of(value: Any) -> Any:
    """What changes when an object is changed in place; None where that cannot be told, or of one that cannot be."""
    kind = type(value)
    if kind in _UNMARKED or issubclass(kind, nn.Module):
        return None
    if issubclass(kind, Tensor):
        return None if isinstance(value, nn.Parameter) or value.is_inference() else value._version
    if kind in _LOCKS:
        return is_held(value)
    if is_ndarray(value):
        return value.tobytes() if value.nbytes <= _SMALL_BYTES and not value.dtype.hasobject else None
    return state_of_generator(value)


def marked_in(copied: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The objects in a place that may be changed in place: their names, or numbers, the objects, and their marks.

    Args:
        copied: a copy of what is in it.
    """
    content = copied.items() if isinstance(copied, dict) else enumerate(copied)
    for name, value in [each for each in content if type(each[1]) not in _UNMARKED]:
        mark = mark_of(value)
        if mark is not None:
            yield name, value, mark


def state_of_generator(value: Any) -> Any:
    """What a generator of random numbers will draw; None of anything else."""
    access = GeneratorAccess.of(value)
    if access is None:
        return None
    state = access.get()
    if isinstance(state, Tensor):
        return bytes(state.numpy())
    # NumPy's hold arrays, which equal each other element by element.
    return state if isinstance(state, tuple) else pickle.dumps(state)


def is_held(value: Any) -> bool:
    """Whether a lock is held, by whichever thread."""
    kind = type(value)
    if issubclass(kind, threading.Condition):
        return is_held(value._lock)
    if issubclass(kind, threading.Semaphore):
        return bool(value._value == 0)
    return kind in _LOCKS and repr(value).startswith("<locked")

"""What Python holds for a step: attributes of modules, and of objects that they hold, and lists, dicts and sets among them.

Looked at are all modules of the model, and from each attribute lists, dicts, sets and deques to any depth, and objects to a
depth of `DEEPEST`; and globals of the files that define the modules' classes, with the containers among them. Longer
containers than `LONGEST` are data, and so are more than `MOST` spaces. Left alone are metrics, whose states add up,
parameters, and objects of the libraries below, which no step of the user's keeps anything in.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_harmony.engine.model.attributes import HOOKS, LONGEST, OF_TORCH, GeneratorAccess
from lightning_harmony.engine.structures.nested import is_ndarray

DEEPEST, MOST = 3, 20_000
# What is in these, lanes can switch: of other classes nobody knows how they are changed.
SWITCHED = (list, deque, set, dict, OrderedDict, defaultdict)
# Arrays up to this size are compared by what is in them.
_SMALL_BYTES = 64 * 1024
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    ModuleType,
)
# What is looked into by itself, or does not change: nothing tells by itself that it was changed in place.
_UNMARKED = frozenset((*_PLAIN, *SWITCHED, tuple, nn.Parameter, torch.dtype, torch.device))
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
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class Kind(Enum):
    """What a space is."""

    MODULE = auto()
    CONTAINER = auto()
    HOOKS = auto()
    # An object's attributes, or a container that is in one or of another class.
    OBJECT = auto()


class Held:
    """What may be changed in one place: the attributes of a module or object, a list, set or dict, or a module's hooks.

    Attributes:
        name: for messages.
        content: the list, set or dict itself, or the dict of attributes.
        kind: what it is.
        owner: whose attributes it is, if it is any.
        root: the module, with the name of its attribute, that leads to it, if it is no module's own.
    """

    def __init__(self, name: str, content: Any, kind: Kind, owner: Any = None) -> None:
        self.name = name
        self.content = content
        self.kind = kind
        self.owner = owner
        self.root: tuple[nn.Module, str] | None = None


def held_by(model: nn.Module, others: Sequence[tuple[str, Any]] = ()) -> Iterator[Held]:
    """All that a model holds, and other objects, given with their names. Each once, though several modules may have it."""
    yield from islice(_all(model, others, set()), MOST)


def _all(model: nn.Module, others: Sequence[tuple[str, Any]], seen: set[int]) -> Iterator[Held]:
    for name, module in model.named_modules():
        if isinstance(module, Metric):
            continue
        seen.add(id(module))
        yield Held(name, vars(module), Kind.MODULE, module)
        for attribute, value in list(vars(module).items()):
            if attribute in HOOKS:
                yield Held(_joined(name, attribute), value, Kind.HOOKS)
            elif attribute not in OF_TORCH and type(value) not in _PLAIN:
                for held in _within(_joined(name, attribute), value, seen, 0):
                    held.root = module, attribute
                    yield held
    yield from _globals(model, seen)
    for name, value in others:
        seen.add(id(value))
        yield from _attributes_of(name, value, seen, 0)


def _within(name: str, value: Any, seen: set[int], depth: int) -> Iterator[Held]:
    if type(value) in _PLAIN or isinstance(value, Tensor) or id(value) in seen:
        return
    if isinstance(value, list | deque | set | dict | tuple):
        yield from _container(name, value, seen, depth)
    elif depth < DEEPEST and _is_looked_into(value):
        seen.add(id(value))
        yield from _attributes_of(name, value, seen, depth + 1)


def _container(name: str, value: Any, seen: set[int], depth: int) -> Iterator[Held]:
    if len(value) > LONGEST:
        return
    # A tuple is no place, but what it holds is.
    content = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    if not isinstance(value, tuple):
        seen.add(id(value))
        # Not one of parameters, in whose places stand-ins are while a step runs.
        if not any(isinstance(each, nn.Parameter) for _, each in content):
            yield Held(name, value, Kind.CONTAINER if type(value) in SWITCHED and not depth else Kind.OBJECT)
    for key, each in content:
        if type(each) not in _PLAIN:
            yield from _within(f"{name}[{key!r}]" if isinstance(key, str | int) else name, each, seen, depth)


def _attributes_of(name: str, value: Any, seen: set[int], depth: int) -> Iterator[Held]:
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return
    yield Held(name, attributes, Kind.OBJECT, value)
    for attribute, each in list(attributes.items()):
        if type(each) not in _PLAIN:
            yield from _within(f"{name}.{attribute}", each, seen, depth)


def _globals(model: nn.Module, seen: set[int]) -> Iterator[Held]:
    """The globals of the files in which the classes of a model are defined, and the containers among them."""
    files = dict.fromkeys(type(module).__module__ for module in model.modules())
    for name in files:
        file = sys.modules.get(name)
        if file is None or name.partition(".")[0] in _LIBRARIES:
            continue
        yield Held(name, vars(file), Kind.OBJECT)
        for attribute, value in list(vars(file).items()):
            if type(value) in SWITCHED and not attribute.startswith("__"):
                yield from _within(f"{name}.{attribute}", value, seen, DEEPEST)


def _is_looked_into(value: Any) -> bool:
    """Whether an object may keep something of a step."""
    if isinstance(value, Metric | torch.optim.Optimizer | torch.utils.data.Dataset | torch.utils.data.DataLoader):
        return False
    return type(value).__module__.partition(".")[0] not in _LIBRARIES


def _joined(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute


def mark_of(value: Any) -> Any:
    """What changes when an object is changed in place; None where that cannot be told, or of one that cannot be."""
    if type(value) in _UNMARKED or isinstance(value, nn.Module):
        return None
    if isinstance(value, Tensor):
        return None if isinstance(value, nn.Parameter) or value.is_inference() else value._version
    if type(value) in _LOCKS:
        return is_held(value)
    if is_ndarray(value):
        return value.tobytes() if value.nbytes <= _SMALL_BYTES and not value.dtype.hasobject else None
    return state_of_generator(value)


def marked_in(held: Held) -> Iterator[tuple[Any, Any, Any]]:
    """The objects in a place that may be changed in place: their names, or numbers, the objects, and their marks."""
    content = held.content
    for name, value in list(content.items() if isinstance(content, dict) else enumerate(content)):
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
    if isinstance(value, threading.Condition):
        return is_held(value._lock)  # type: ignore[attr-defined]
    if isinstance(value, threading.Semaphore):
        return value._value == 0
    return type(value) in _LOCKS and repr(value).startswith("<locked")

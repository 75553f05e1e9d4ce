"""What Python holds for a step: attributes of modules, and of objects that they hold, and lists, dicts and sets among them.

Looked at are all modules of the model, and from each attribute lists, dicts, sets and deques to any depth, and objects to a
depth of `DEEPEST`; of functions, hooks among them, attributes, defaults and the variables of closures, of which those are
places that a function sets or draws from, and what methods and `functools.partial` are bound to, through `MOST_NESTED`
functions that hold each other; the classes of all these, with their functions; and globals of the files that define the
modules' classes, and of those of the user's whose functions, classes or objects their code names, with what these define,
and containers among them.

None of the user's code runs: objects and containers of all classes are read past it. Longer containers than `LONGEST` are
data, and so are more than `MOST` spaces. Left alone are metrics, whose states add up, parameters, and objects, functions and
classes of the libraries below, which no step of the user's keeps anything in. Functions of theirs may wrap one of the user's.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from dis import get_instructions, opmap
from enum import EnumMeta
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_harmony.engine.lanes.ambient import share_thread_local
from lightning_harmony.engine.lanes.lock_wait import LOCKS
from lightning_harmony.engine.model.attributes import HOOKS, LONGEST, OF_TORCH
from lightning_harmony.engine.structures.containers import size_of
from lightning_harmony.engine.structures.object_state import attributes_of
from lightning_harmony.engine.structures.packages import LIBRARIES
from lightning_harmony.engine.structures.seekable import holds_iterator
from lightning_harmony.engine.structures.tree import is_swapped
from lightning_harmony.held.cached_functions import Cached
from lightning_harmony.held.files import Code, by_identity, is_of_libraries, is_own, is_users
from lightning_harmony.held.held_state import FUNCTIONS, SWITCHED, Held, Kind, Leads, is_plain
from lightning_harmony.held.variables import (
    AttributesOfClass,
    Chosen,
    EntriesOf,
    PartsOf,
    SlotsOf,
    VariableOfClosure,
    slots_of,
)

# Of objects, and of functions.
DEEPEST, MOST_NESTED, MOST = 12, 3, 20_000
OF_THREADS = (*LOCKS, threading.Condition, threading.Event, threading.Semaphore, threading.Thread)
# What gives variables of functions that others share other values.
_REBINDING = frozenset(opmap[name] for name in ("STORE_DEREF", "DELETE_DEREF"))
_CONTAINERS = (list, deque, set, frozenset, dict, tuple)
# What a global may be that is no object which keeps something. A logger leads to all others.
_NO_OBJECTS = (ModuleType, type, *FUNCTIONS, Cached, Tensor, nn.Module, logging.Logger)
# Those that run within a step, beside those around a forward.
HOOKS_OF_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


class Other(NamedTuple):
    """An object that steps may change, and that is none of a model's.

    Attributes:
        name: for messages.
        value: the object.
        leads: whether what is in its attributes is looked into.
    """

    name: str
    value: Any
    leads: bool = True


# Given the names in the user's code.
Others = Callable[[Collection[str]], Iterable[Other]]


class Walk:
    """Goes to all places, to each once.

    Args:
        model: whose they are.
        others: what else may be changed.

    Attributes:
        places: all of them.
        too_long: containers that are data, until they are shorter.
        names: of globals and attributes in the user's code.
    """

    def __init__(self, model: nn.Module, others: Others = lambda names: ()) -> None:
        self._model, self._others = model, others
        # What was seen, by its identity: kept, so that nothing else gets that.
        self._seen: dict[int, Any] = {}
        self._functions: list[FunctionType] = []
        self.too_long: list[Any] = []
        self.names: Collection[str] = ()
        self.places: list[Held] = list(islice(self._all(), MOST))

    def leads_anywhere(self, held: Held, name: Any, value: Any) -> bool:
        """Whether there are other places than these in what is in one of them now, under some name or number."""
        num_seen = len(self._seen)
        if next(held.leads(name, value), None) is not None:
            return True
        while len(self._seen) > num_seen:
            self._seen.popitem()
        return False

    def may_lead(self, value: Any) -> bool:
        """Whether there may be places in a value."""
        kind = type(value)
        if is_plain(kind) or issubclass(kind, Tensor):
            return False
        if kind is tuple:
            return any(map(self.may_lead, value))
        leads = issubclass(kind, (*_CONTAINERS, *FUNCTIONS, type)) or is_looked_into(value)
        return leads or _is_foreign_module(kind)

    def _all(self) -> Iterator[Held]:
        classes: dict[type, None] = {}
        modules = list(modules_of(self._model))
        # Also where a list or an object refers to one, it is the model's: what torch keeps on it is no place.
        self._seen.update((id(module), module) for _, module in modules)
        for name, module in modules:
            if isinstance(module, Metric):
                continue
            classes[type(module)] = None
            attributes = vars(module)
            yield from self._place(Held(name, attributes, Kind.MODULE, module, partial(self._of_module, name, module)))
            for attribute in HOOKS:
                named = _joined(name, attribute)
                yield from self._place(
                    Held(named, attributes[attribute], Kind.HOOKS, None, partial(self._entry, named, 0, 0))
                )
            # A step may put others in their places for a while. Those of TorchScript stay what they are.
            if module._modules and isinstance(module._modules, dict):
                yield from self._place(Held(_joined(name, "_modules"), module._modules, Kind.CONTAINER))
            for attribute in HOOKS_OF_BACKWARD:
                for key, hook in list((attributes.get(attribute) or {}).items()):
                    yield from self._entry(_joined(name, attribute), 0, 0, key, hook)
        for kind in classes:
            yield from self._class(kind, 0)
        yield from self._globals(classes)
        for name, value, leads in self._others(self.names):
            self._seen[id(value)] = value
            if leads:
                yield from self._attributes_of(name, name, value, 0, 0)
            else:
                yield Held(name, vars(value), Kind.OBJECT, value)

    def _place(self, held: Held) -> Iterator[Held]:
        """A place, and those in what is in it."""
        yield held
        for name, value in held.items():
            if not is_plain(type(value)):
                yield from held.leads(name, value)

    def _of_module(self, name: str, module: nn.Module, attribute: str, value: Any) -> Iterator[Held]:
        if attribute in OF_TORCH:
            return iter(())
        return _led_to(self._within(_joined(name, attribute), value, 0, 0), module, attribute)

    def _within(self, name: str, value: Any, depth: int, nested: int) -> Iterator[Held]:
        """The places in a value.

        Args:
            name: its own.
            value: where to look.
            depth: of how many objects it is an attribute.
            nested: how many functions hold it.
        """
        kind = type(value)
        if is_plain(kind) or issubclass(kind, Tensor) or id(value) in self._seen:
            return
        if issubclass(kind, threading.local):
            share_thread_local(value)
        elif issubclass(kind, _CONTAINERS):
            yield from self._container(name, value, depth, nested)
        elif issubclass(kind, FUNCTIONS):
            if nested < MOST_NESTED:
                yield from _marked(self._function(name, value, depth, nested + 1), "is_shared")
        elif issubclass(kind, type):
            yield from self._class(value, nested)
        elif depth < DEEPEST and (is_looked_into(value) or _is_foreign_module(kind)):
            self._seen[id(value)] = value
            yield from self._attributes_of(name, name, value, depth + 1, nested)
            yield from self._class(kind, nested)

    def _entry(self, name: str, depth: int, nested: int, key: Any, value: Any) -> Iterator[Held]:
        return self._within(f"{name}[{key!r}]" if isinstance(key, str | int) else name, value, depth, nested)

    def _container(self, name: str, value: Any, depth: int, nested: int) -> Iterator[Held]:
        kind = type(value)
        if issubclass(kind, tuple | frozenset):
            holds: Any = tuple if issubclass(kind, tuple) else frozenset
            if holds.__len__(value) > LONGEST:
                return
            # It is no place, but what it holds is.
            for number, each in enumerate(holds.__iter__(value)):
                yield from self._entry(name, depth, nested, number, each)
        elif size_of(value) > LONGEST:
            self.too_long.append(value)
            return
        else:
            self._seen[id(value)] = value
            is_switched = kind in SWITCHED
            held = Held(
                name,
                EntriesOf(value) if issubclass(kind, dict) and not is_switched else value,
                Kind.CONTAINER if is_switched and not depth else Kind.OBJECT,
                leads=partial(self._entry, name, depth, nested),
            )
            # Not one of parameters, or of what stands in their places while a step runs.
            if any(is_swapped(each) for _, each in held.items()):
                for key, each in held.items():
                    yield from held.leads(key, each)
            else:
                yield from self._place(held)
        if depth < DEEPEST and kind not in (tuple, frozenset, *SWITCHED):
            yield from self._attributes_of(f"attributes of {name}", name, value, depth + 1, nested)
            yield from self._class(kind, nested)

    def _attributes_of(self, name: str, of: str, value: Any, depth: int, nested: int) -> Iterator[Held]:
        leads = partial(self._attribute, of, depth, nested)
        attributes = attributes_of(value)
        if attributes is not None:
            found = self._place(Held(name, attributes, Kind.OBJECT, value, leads))
            is_of_threads = any(issubclass(type(each), OF_THREADS) for each in list(attributes.values()))
            yield from _marked(found, "is_of_threads") if is_of_threads else found
        kind: Any = type(value)
        if is_users(kind.__module__) and slots_of(kind):
            yield from self._place(Held(name, SlotsOf(value), Kind.OBJECT, None, leads))

    def _attribute(self, of: str, depth: int, nested: int, attribute: str, value: Any) -> Iterator[Held]:
        return self._within(f"{of}.{attribute}", value, depth, nested)

    def _function(self, name: str, function: Any, depth: int, nested: int) -> Iterator[Held]:
        self._seen[id(function)] = function
        for inner, value in bound_to(function):
            yield from self._within(f"{name}{inner}", value, depth, nested)
        if issubclass(type(function), partial):
            yield from self._parts(f"{name}, arguments", function, depth, nested)
        if not isinstance(function, FunctionType):
            return
        is_own = is_users(str(function.__globals__.get("__name__")))
        rebound = rebound_by(function.__code__) if is_own else frozenset()
        self._functions += [function] if is_own else []
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            named, content = f"{name}.{variable}", VariableOfClosure(cell, variable)
            leads = partial(self._variable, named, depth, nested)
            is_place = variable in rebound or any(map(holds_iterator, content.values()))
            if is_place and id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                yield from self._place(Held(named, content, Kind.CONTAINER if not depth else Kind.OBJECT, leads=leads))
            elif is_own:
                for value in content.values():
                    yield from leads(variable, value)
            else:
                yield from _of_functions(content.items(), leads)
        leads = partial(self._attribute, name, depth, nested)
        if is_own:
            yield from self._place(Held(name, vars(function), Kind.OBJECT, function, leads))
            yield from self._parts(f"{name}, default", function, depth, nested)
            yield from self._within(f"{name}, default", function.__kwdefaults__, depth, nested)
        else:
            yield from _of_functions(vars(function).items(), leads)

    def _parts(self, name: str, function: Any, depth: int, nested: int) -> Iterator[Held]:
        """The places in the tuple that a function has, which is one itself if there are iterators in it."""
        parts, leads = PartsOf(function), partial(self._entry, name, depth, nested)
        if any(map(holds_iterator, parts.values())):
            yield from self._place(Held(name, parts, Kind.CONTAINER if not depth else Kind.OBJECT, leads=leads))
        else:
            for number, value in parts.items():
                yield from leads(number, value)

    def _variable(self, name: str, depth: int, nested: int, variable: str, value: Any) -> Iterator[Held]:
        return self._within(name, value, depth, nested)

    def _class(self, kind: type, nested: int) -> Iterator[Held]:
        for each in kind.__mro__:
            if id(each) in self._seen:
                continue
            self._seen[id(each)] = each
            if not is_users(each.__module__) or isinstance(each, EnumMeta):
                continue
            name = f"class {each.__qualname__}"
            held = Held(name, AttributesOfClass(each), Kind.OBJECT, each, partial(self._of_class, name, each, nested))
            held.is_shared = True
            num_functions = len(self._functions)
            yield from self._place(held)
            # Of its own functions those run that code names.
            del self._functions[num_functions:]
            # What Python itself calls.
            own = [item for item in vars(each).items() if item[0].startswith("__")]
            yield from _of_functions(own, held.leads)

    def _of_class(self, name: str, kind: type, nested: int, attribute: str, value: Any) -> Iterator[Held]:
        return _led_to(self._within(f"{name}.{attribute}", value, 0, nested), kind, attribute)

    def _globals(self, classes: Collection[type]) -> Iterator[Held]:
        """The globals of the files that the code of a model's classes may use, and what is the user's among them."""
        code = Code(classes, self._functions)
        files, self.names = code.files, code.names
        for name in files:
            file = sys.modules.get(name)
            if file is not None and is_users(name):
                held = Held(name, vars(file), Kind.OBJECT, file, partial(self._of_file, name, files))
                held.is_shared = True
                yield from self._place(held)
                if is_own(name):
                    yield from self._libraries(file)

    def _of_file(self, name: str, files: Container[str], attribute: str, value: Any) -> Iterator[Held]:
        if attribute.startswith("__"):
            return iter(())
        is_named = attribute in self.names and is_own(name)
        is_object = is_named and is_looked_into(value) and not isinstance(value, _NO_OBJECTS)
        if not is_object and not _is_users_global(value, files):
            return iter(())
        depth = DEEPEST if type(value) in SWITCHED else 0
        return _marked(self._within(f"{name}.{attribute}", value, depth, 0), "is_shared")

    def _libraries(self, file: ModuleType) -> Iterator[Held]:
        """The functions of libraries that a file names: its code may let others stand for them while it calls layers."""
        for attribute, value in list(vars(file).items()):
            is_library = isinstance(value, ModuleType) and is_of_libraries(value.__name__)
            if is_library and attribute in self.names and id(value) not in self._seen:
                self._seen[id(value)] = value
                own = vars(value)
                content = Chosen(own, [each for each in self.names if issubclass(type(own.get(each)), FUNCTIONS)])
                yield from _marked([Held(value.__name__, content, Kind.OBJECT)], "is_shared")


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


@by_identity
def rebound_by(code: CodeType) -> frozenset[str]:
    """The variables of the functions around it that a function gives other values, or those that it defines do."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    names = {name for each in inner for name in rebound_by(each)}
    # Most have none: not each instruction is looked at.
    if not _REBINDING.isdisjoint(code.co_code[::2]):
        names |= {each.argval for each in get_instructions(code) if each.opcode in _REBINDING}
    return frozenset(names & set(code.co_freevars))


def _of_functions(items: Iterable[tuple[Any, Any]], leads: Leads) -> Iterator[Held]:
    """The places in the functions among some values."""
    for name, value in list(items):
        if issubclass(type(value), FUNCTIONS):
            yield from leads(name, value)


def _marked(places: Iterable[Held], mark: str) -> Iterator[Held]:
    for held in places:
        setattr(held, mark, True)
        yield held


def _led_to(places: Iterable[Held], owner: Any, attribute: str) -> Iterator[Held]:
    for held in places:
        held.root = held.root or (owner, attribute)
        yield held


def bound_to(function: Any) -> Iterator[tuple[str, Any]]:
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
        yield ", arguments", function.keywords


def _is_users_global(value: Any, files: Container[str]) -> bool:
    """Whether a global is looked into: a container, or a function, class or object of what these files define.

    Of a function that wraps another one, as a cache of `functools` does, that is meant.
    """
    value = (attributes_of(value) or {}).get("__wrapped__", value)
    kind = type(value)
    if kind in SWITCHED or kind is SimpleNamespace or issubclass(kind, threading.local):
        return True
    if issubclass(kind, Tensor | nn.Module):
        return False
    defined_in = value.__module__ if issubclass(kind, type | FunctionType) else kind.__module__
    return defined_in in files


def _is_foreign_module(kind: type) -> bool:
    """Whether objects of a class are modules: one that is no part of a model may be changed as a whole, as a teacher is."""
    return issubclass(kind, nn.Module) and not issubclass(kind, Metric)


def is_looked_into(value: Any) -> bool:
    """Whether an object may keep something of a step."""
    kind = type(value)
    if issubclass(kind, Metric | torch.optim.Optimizer | torch.utils.data.Dataset | torch.utils.data.DataLoader):
        return False
    return kind.__module__.partition(".")[0] not in LIBRARIES


def _joined(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute

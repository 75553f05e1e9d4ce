"""Who reads certain attributes, and computes with certain tensors: told while a step runs, and at no other time."""

from __future__ import annotations

import dis
import inspect
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_harmony.engine.structures.containers import MISSING
from lightning_harmony.engine.structures.operations import version_of
from lightning_harmony.engine.structures.tree import tensors_of
from lightning_harmony.held.files import by_identity
from lightning_harmony.held.held_state import ALL, SWITCHED, Held
from lightning_harmony.held.variables import StandIn

# They write a tensor, or ask what it is, and compute nothing with what it holds.
_READ_NOTHING = frozenset(
    (
        *("copy_", "zero_", "fill_", "normal_", "uniform_", "__setitem__", "__set__"),
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_contiguous", "__len__"),
        *("is_floating_point", "is_complex", "is_inference", "get_device", "__hash__"),
    )
)
# Flags of classes, as CPython has them.
_IMMUTABLE_TYPE, _HEAP_TYPE = 1 << 8, 1 << 9
_ATTRIBUTES_WITH_DATA = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))


_READERS = "_lightning_harmony_readers"
_OWN = f"{__name__.partition('.')[0]}."


def _let_go(tensor: Tensor) -> None:
    tensor.__class__ = Tensor
    del vars(tensor)[_READERS]


class Watched(Tensor):
    """A tensor that was found, until it is computed with."""

    tells_of_reads = True

    # Nothing of ours is to be traced.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            is_read = getattr(getattr(func, "__self__", None), "__name__", "") in _ATTRIBUTES_WITH_DATA
        else:
            is_read = name not in _READ_NOTHING
        operands = [*(args if is_read else args[1:]), *kwargs.values()]
        for tensor in tensors_of(*operands):
            readers = vars(tensor).get(_READERS) if type(tensor) is Watched else None
            if readers is not None:
                readers.note([tensor])
        others = [kind for kind in types if not issubclass(kind, Watched)]
        if not others:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if any(kind.__module__.startswith(_OWN) for kind in others):
            # What stands for a parameter or buffer has nothing in it, and puts that there.
            return NotImplemented
        return _as_plain(func, args, kwargs)


def _as_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that other classes of tensors answer, too: their code finds none of ours."""
    watched: list[Tensor] = [each for each in tensors_of(*args, *kwargs.values()) if issubclass(type(each), Watched)]
    for tensor in watched:
        tensor.__class__ = Tensor
    try:
        return func(*args, **kwargs)
    finally:
        for tensor in watched:
            if _READERS in vars(tensor):
                tensor.__class__ = Watched


# The places found in the attributes of objects, by the identities of these, and who is told that one is read.
_Watcher = tuple[dict[int, list[Any]], Callable[[Any], None]]


class Reads(StandIn):
    """Takes the place of an attribute on a class, and tells who reads it; the value stays where it is.

    Fits in several threads may watch the same one: when the last of them has seen enough, the class is as it was.
    """

    _in_use: ClassVar[dict[tuple[type, str], Reads]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name
        self._watchers: list[_Watcher] = []
        self.own = vars(kind).get(name, MISSING)
        setattr(kind, name, self)

    @classmethod
    def watch(
        cls, kind: type, name: str, found: dict[int, list[Any]], note: Callable[[Any], None]
    ) -> Callable[[], None]:
        """Tell of reads from now on; calling the result ends that."""
        watcher = found, note
        with cls._lock:
            reads = cls._in_use.get((kind, name)) or cls(kind, name)
            cls._in_use[kind, name] = reads
            reads._watchers = [*reads._watchers, watcher]

        def end() -> None:
            with cls._lock:
                reads._watchers = [each for each in reads._watchers if each is not watcher]
                if not reads._watchers and cls._in_use.pop((kind, name), None) is not None:
                    reads._give_back()

        return end

    @classmethod
    def renew(cls, kind: type, name: str) -> None:
        """Go on to tell of reads, though somebody has set the attribute of the class."""
        reads, there = cls._in_use.get((kind, name)), vars(kind).get(name, MISSING)
        if reads is not None and there is not reads:
            reads.own = there
            setattr(kind, name, reads)

    @staticmethod
    def is_possible(kind: type, name: str) -> bool:
        """Whether instances of a class have the attribute in their `__dict__`, and the class may be changed."""
        default = inspect.getattr_static(kind, name, MISSING)
        is_mutable = bool(kind.__flags__ & _HEAP_TYPE) and not kind.__flags__ & _IMMUTABLE_TYPE
        return is_mutable and (
            isinstance(default, Reads) or default is MISSING or not inspect.isdatadescriptor(default)
        )

    def _give_back(self) -> None:
        # Somebody may have set the attribute of the class.
        if vars(self._kind).get(self._name) is not self:
            return
        if self.own is MISSING:
            delattr(self._kind, self._name)
        else:
            setattr(self._kind, self._name, self.own)

    @property
    def _default(self) -> Any:
        """What instances find that have none of their own."""
        if self.own is not MISSING:
            return self.own
        bases = (vars(kind) for kind in self._kind.__mro__[1:])
        return next((base[self._name] for base in bases if self._name in base), MISSING)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        attributes = {} if instance is None else vars(instance)
        is_own = self._name in attributes
        added: list[Any] | None = None
        for places, note in self._watchers:
            for key in (id(attributes),) if is_own else (id(attributes), id(self._kind)):
                for found in places.get(key, ()):
                    if is_own and found.name is ALL:
                        # It finds nothing of what is in there.
                        added = (
                            added_to(sys._getframe(1), self._name, attributes[self._name]) if added is None else added
                        )
                        if any(each is found.held.content for each in added):
                            continue
                    note(found)
        if is_own:
            return attributes[self._name]
        default = self._default
        if default is MISSING:
            kind = owner.__name__ if instance is None else type(instance).__name__
            raise AttributeError(f"{kind!r} object has no attribute {self._name!r}")
        get = getattr(type(default), "__get__", None)
        return default if get is None else get(default, instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._name] = value

    def __delete__(self, instance: Any) -> None:
        try:
            del vars(instance)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None


class Readers:
    """Tells who asks for what is in some places, and who computes with tensors as they were found there.

    Until then these are of another class, which torch asks: no operation on others takes longer, and none is compiled anew.

    Args:
        places: each with what is `held` where, and the `name` under which.
        note_fetched: told a place that is asked for.
        note_used: told one with whose tensor something is computed.

    Attributes:
        unseen: the places of which nothing tells that they are asked for.
    """

    def __init__(
        self, places: Iterable[Any], note_fetched: Callable[[Any], None], note_used: Callable[[Any], None]
    ) -> None:
        self._note_used = note_used
        self._tensors: dict[int, Tensor] = {}
        self._found: dict[int, list[tuple[Any, int | None]]] = defaultdict(list)
        self.unseen: list[Any] = []
        told: dict[tuple[type, str], dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for place in places:
            if (target := _target_of(place.held, place.name)) is None:
                self.unseen.append(place)
            else:
                told[target[:2]][target[2]].append(place)
        # Attributes of classes, in whose places who sets them puts another value.
        self._of_classes = [(kind, name) for (kind, name), by_key in told.items() if id(kind) in by_key]
        self._ends = [Reads.watch(kind, name, by_key, note_fetched) for (kind, name), by_key in told.items()]

    def watch(self, tensor: Tensor, found: Any, version: int | None = None) -> None:
        """From now on, tell of uses of a tensor.

        Args:
            tensor: the one.
            found: what is told.
            version: of which alone it is told; None of each.
        """
        self._found[id(tensor)].append((found, version))
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor
            tensor.__class__ = Watched
            vars(tensor)[_READERS] = self

    def watches(self, tensor: Tensor) -> bool:
        """Whether this one is watched."""
        return id(tensor) in self._tensors

    def note(self, operands: Iterable[Any]) -> None:
        """These are computed with, or changed."""
        for tensor in tensors_of(*operands):
            if self._tensors.pop(id(tensor), None) is not None:
                _let_go(tensor)
                for found, version in self._found.pop(id(tensor)):
                    if version is None or version_of(tensor) == version:
                        self._note_used(found)

    def renew(self) -> None:
        """Go on to tell of reads, though somebody has set attributes of classes."""
        for kind, name in self._of_classes:
            Reads.renew(kind, name)

    def close(self) -> None:
        """Tell of nothing any more."""
        for tensor in self._tensors.values():
            _let_go(tensor)
        self._tensors = {}
        self._found.clear()
        for end in self._ends:
            end()
        self._ends, self._of_classes, self.unseen = [], [], []


def _target_of(held: Held, name: Any) -> tuple[type, str, int] | None:
    """What tells that something in a place is read: an attribute of a class, and what tells by which object.

    None if nothing does, as with variables of closures, and globals.
    """
    owners = [] if held.owner is None or not isinstance(name, str) else [(held.owner, name)]
    if held.root is not None and not held.is_shared:
        owners.append(held.root)
    for owner, attribute in owners:
        kind = owner if isinstance(owner, type) else type(owner)
        if Reads.is_possible(kind, attribute):
            return kind, attribute, id(owner) if owner is kind else id(vars(owner))
    return None


# ---- code that only adds ----------------------------------------------------------------------------------------------

_ADDING = frozenset(("append", "extend", "add", "update"))
# What goes on elsewhere in the code.
_ELSEWHERE = frozenset((*dis.hasjrel, *dis.hasjabs))
_OF_NAMES, _OF_ITEMS = ("LOAD_ATTR", "LOAD_METHOD"), ("BINARY_SUBSCR", "BINARY_OP")


def added_to(frame: FrameType, name: str, value: Any) -> list[Any]:
    """The lists and sets to one of which code adds that asks for an attribute, and does nothing else with it.

    Args:
        frame: where it is asked for.
        name: of the attribute.
        value: what is there: one of these, or a dict or list that leads to them.
    """
    depth = _depth_of_addition(frame.f_code, frame.f_lasti, name)
    if depth is None:
        return []
    values = [value]
    for _ in range(depth):
        if any(type(each) not in SWITCHED or issubclass(type(each), set) for each in values):
            return []
        values = [item for each in values for item in (each.values() if isinstance(each, dict) else each)]
    # The methods of other classes may read what they add to.
    return values if all(type(each) in (list, set, deque) for each in values) else []


@by_identity
def _depth_of_addition(code: CodeType, offset: int, name: str) -> int | None:
    """Of how many entries of entries an item is asked for, to add to it; None if something else happens to what is there.

    Args:
        code: what runs.
        offset: of the instruction that asks for the attribute.
        name: of that.
    """
    left = iter(each for each in dis.get_instructions(code) if each.offset >= offset)
    first = next(left, None)
    if first is None or first.offset != offset or first.opname not in _OF_NAMES or first.argval != name:
        return None
    depth = above = 0
    for each in left:
        effect = dis.stack_effect(each.opcode, each.arg, jump=False)
        if above == 0 and each.opname in _OF_NAMES:
            return depth if each.argval in _ADDING else None
        if above == 1 and each.opname in _OF_ITEMS and each.argrepr in ("", "[]"):
            depth, above = depth + 1, 0
        elif each.opname.startswith("LOAD_") if effect > 0 else each.opcode not in _ELSEWHERE and 1 - effect <= above:
            # It puts something on top, or makes one thing of what is there.
            above += effect
        else:
            return None
    return None

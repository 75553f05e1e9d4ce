"""Fingerprints: they tell that something has changed where nothing else does.

Torch counts no changes of a tensor that are made through `data`, through a view of NumPy's, in inference mode or by kernels
that keep running statistics. Objects of torch's and NumPy's, and those of C, keep state out of sight. To look at all that
takes time: it is done for two microbatches of a step that is watched.
"""

from __future__ import annotations

import ctypes
import gc
import io
import pickle
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction

from lightning_harmony.engine.layers.runtime import FoundAtCall
from lightning_harmony.engine.model.attributes import LONGEST
from lightning_harmony.engine.structures.checksum import checksum
from lightning_harmony.engine.structures.containers import have_same_content
from lightning_harmony.engine.structures.nested import is_ndarray
from lightning_harmony.engine.structures.object_state import attributes_of
from lightning_harmony.engine.structures.operations import version_of
from lightning_harmony.engine.structures.packages import LIGHTNING
from lightning_harmony.engine.structures.tree import is_swapped
from lightning_harmony.errors import UnsupportedModelError
from lightning_harmony.held.cached_functions import Cached, filling_of
from lightning_harmony.held.files import is_users
from lightning_harmony.held.held_state import FUNCTIONS, Held, is_plain, mark_of
from lightning_harmony.held.reads import Watched
from lightning_harmony.held.variables import slots_of
from lightning_harmony.held.walk import is_looked_into

_OF_FILES = ("_io", "io")
# A flag of classes, as CPython has it: those of C are such.
_IMMUTABLE_TYPE = 1 << 8
# Of an object with attributes and weak references.
_SIZE_WITH_ATTRIBUTES = object.__basicsize__ + 2 * ctypes.sizeof(ctypes.c_void_p)
# Larger tensors and arrays are data, and so are objects that lead to more than so many others.
_LARGEST_BYTES, _MOST_OBJECTS = 256 << 20, 20_000
_SOON_READ_BYTES = 1 << 20


def is_of_numbers(value: Any) -> bool:
    """Whether a value is a tensor or an array; by its type, for proxies answer otherwise by the user's code."""
    return issubclass(type(value), Tensor) or is_ndarray(value)


class _Print:
    """A fingerprint.

    Args:
        in_words: what it is of.
        value: that. A tensor is not kept.

    Attributes:
        in_words: the same.
        is_soon_taken: whether it may be taken around each run of a layer's code.
    """

    def __init__(self, in_words: str, value: Any) -> None:
        self.in_words, self._kind = in_words, type(value)
        is_large = is_of_numbers(value) and value.nbytes > _SOON_READ_BYTES
        self.is_soon_taken = not is_large
        self._value: Callable[[], Any] = weakref.ref(value) if issubclass(self._kind, Tensor) else lambda: value
        self._state = _state_of(value)

    def anew(self) -> _Print | None:
        """That of now; None if what it is of is gone."""
        value = self._value()
        return None if value is None else _Print(self.in_words, value)

    def has_changed(self) -> bool:
        """Whether it is another one now, and nothing else would tell."""
        value = self._value()
        now = self._state if value is None else _state_of(value)
        if not issubclass(self._kind, Tensor):
            return bool(now != self._state)
        (version, bits), (version_then, bits_then) = now, self._state
        return bool(version == version_then and bits != bits_then)


class Fingerprints:
    """Of what is in places, as far as nothing else tells that it is changed.

    Args:
        places: each with what is in it, with names or numbers.
        parameters: whose attributes are looked at, too, with their names.
    """

    def __init__(
        self,
        places: Iterable[tuple[Held, Iterable[tuple[Any, Any]]]],
        parameters: Iterable[tuple[str, nn.Parameter]] = (),
    ) -> None:
        self._attributes = [(name, parameter, dict(vars(parameter))) for name, parameter in parameters]
        found = {id(value): (held, value) for held, items in places for _, value in items if is_silent(value)}
        self._all = [_Print(_in_words(held, value), value) for held, value in found.values()]
        self._changed_again: str | None = None

    def changed(self) -> str | None:
        """Something that has changed, in words."""
        for name, parameter, before in self._attributes:
            if not have_same_content(vars(parameter), before):
                return f"an attribute of parameter {name!r}"
        return next((each.in_words for each in self._all if each.has_changed()), None)

    def checked(self, found: FoundAtCall) -> FoundAtCall:
        """What puts back what a call has found, looking at what the code of the layer changes when it runs again."""
        return found._replace(again=partial(self._checking, found.again))

    @contextmanager
    def _checking(self, context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """The context of a layer's code that runs again: sees whether it changes something of this, which nothing takes back.

        Args:
            context: makes the one around which this is.

        Raises:
            UnsupportedModelError: if a layer's code that ran before has done so. What this one raises may never be heard of.
        """
        self.refuse_changed_again()
        now = [anew for each in self._all if each.is_soon_taken and (anew := each.anew()) is not None]
        try:
            with context():
                yield
        finally:
            # Code that has come far enough ends with an exception.
            self._changed_again = next((each.in_words for each in now if each.has_changed()), None)

    def refuse_changed_again(self) -> None:
        """Refuse layers whose code has changed something of this when it ran again.

        Raises:
            UnsupportedModelError: if one has.
        """
        if self._changed_again is not None:
            raise UnsupportedModelError(
                f"{self._changed_again} is changed by a layer's code, which runs again in the backward, and nothing tells of "
                "it: pass its result to the layer as an argument, or change a tensor by operations that torch counts, "
                "and not through `data`"
            )


def _in_words(held: Held, value: Any) -> str:
    kind = "tensor" if issubclass(type(value), Tensor) else type(value).__name__
    return f"a {kind} held by {held.in_words}"


def is_silent(value: Any) -> bool:
    """Whether nothing else may tell that something is changed in place."""
    kind: Any = type(value)
    if issubclass(kind, Tensor):
        is_plain = kind in (Tensor, Watched, nn.Parameter) and not is_swapped(value) and value.layout is torch.strided
        return is_plain and value.device.type != "meta" and 0 < value.untyped_storage().nbytes() <= _LARGEST_BYTES
    if kind in _KEEP_NOTHING or _stands_for_itself(kind) or mark_of(value) is not None:
        return False
    if is_ndarray(value):
        return bool(value.nbytes <= _LARGEST_BYTES)
    if kind.__module__ in _OF_FILES:
        return True
    # What has attributes is looked into, if its class is not a library's.
    has_attributes = attributes_of(value) is not None or (is_users(kind.__module__) and slots_of(kind))
    return not is_looked_into(value) or not has_attributes or _hides(kind) or _shows_memory(value)


@cache
def _hides(kind: type) -> bool:
    """Whether objects of a class keep more than attributes, or what containers hold: one of its bases is of C, and larger."""
    if issubclass(kind, (BaseException, *_CONTAINERS, *_KEEP_NOTHING)):
        return False
    return any(each.__flags__ & _IMMUTABLE_TYPE and each.__basicsize__ > _SIZE_WITH_ATTRIBUTES for each in kind.__mro__)


def _shows_memory(value: Any) -> bool:
    try:
        return memoryview(value).nbytes > 0
    except TypeError:
        return False


def _stands_for_itself(kind: type) -> bool:
    """Whether what an object of a class keeps is looked at elsewhere, or is nobody's."""
    # What Lightning's keep is no user's: a Trainer leads to everything.
    return (
        issubclass(kind, (nn.Module, ModuleType, type, threading.local, *FUNCTIONS))
        or kind.__module__.partition(".")[0] in LIGHTNING
    )


_CONTAINERS = (list, dict, set, frozenset, tuple, deque)
_KEEP_NOTHING = frozenset(
    (
        *(*_CONTAINERS, bool, int, float, complex, str, bytes, type(None)),
        *(*weakref.ProxyTypes, weakref.ref, torch.Size, torch.dtype, torch.device),
    )
)


def _state_of(value: Any) -> Any:
    if issubclass(type(value), Tensor):
        # Nobody computes with what a microbatch before has left there.
        with DisableTorchFunction():
            return version_of(value), _bits_of(value)
    if is_ndarray(value) and not value.dtype.hasobject:
        return zlib.crc32(value.tobytes())
    for read in (_position, _memory, _written):
        try:
            return read(value)
        except Exception:
            # It does not tell that of itself.
            continue
    return None


def _bits_of(tensor: Tensor) -> Any:
    """What tells whether a tensor's bits have changed."""
    if tensor.device.type != "cpu":
        with torch.no_grad():
            return checksum(tensor).tolist()
    # An operation would count the tensor as the device's that computes.
    memory = tensor.untyped_storage()
    return zlib.crc32((ctypes.c_char * memory.nbytes()).from_address(memory.data_ptr()))


def _position(value: Any) -> int:
    """How far a file is read. What is written to one that is not, as a log, is read by nobody."""
    if type(value).__module__ not in _OF_FILES or not value.readable():
        raise TypeError
    return int(value.tell())


def _memory(value: Any) -> int:
    """What is in the memory that an object shows, as those of ctypes do."""
    return zlib.crc32(memoryview(value).tobytes())


def _written(value: Any) -> bytes:
    """What an object leads to."""
    with io.BytesIO() as written:
        _Pickler(written, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return written.getvalue()


class _Pickler(pickle.Pickler):
    """Writes what an object leads to, and runs none of the user's code for that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_objects = 0

    def persistent_id(self, value: Any) -> Any:
        """Tensors, functions and the like stand for themselves."""
        self._num_objects += 1
        if self._num_objects > _MOST_OBJECTS:
            raise _TooMuchError
        kind = type(value)
        if issubclass(kind, Tensor):
            return id(value), version_of(value)
        if kind in _CONTAINERS and len(value) > LONGEST:
            return id(value), len(value)
        return id(value) if _stands_for_itself(kind) else None

    def reducer_override(self, value: Any) -> Any:
        """An object is its attributes, and what it holds as a container."""
        kind: Any = type(value)
        attributes = attributes_of(value)
        if attributes is None:
            if is_users(kind.__module__):
                return _standing_for, (id(value),)
            try:
                value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            except Exception:
                return _standing_for, (id(value), _told_by(value))
            return NotImplemented
        items: Sequence[Any] = ()
        if _hides(kind):
            items = _told_by(value)
        elif issubclass(kind, dict):
            items = list(dict.items(value))
        else:
            base = next((each for each in (list, deque, set, tuple) if issubclass(kind, each)), None)
            items = () if base is None else list(base.__iter__(value))
        return _standing_for, (id(value), items), dict(attributes)


def _told_by(value: Any) -> list[Any]:
    """What an object of C tells of itself that cannot be written.

    Hashes tell their digest, caches of `functools` how often they were filled, and others, such as queues, what they refer to,
    also in a list.
    """
    if issubclass(type(value), Cached):
        return [filling_of(value)]
    digest = getattr(value, "hexdigest", None)
    if isinstance(digest, BuiltinFunctionType):
        return [_digest(digest)]
    referents = gc.get_referents(value)
    listed = [each for found in referents if type(found) is list and len(found) <= LONGEST for each in found]
    return [each if is_plain(type(each)) else id(each) for each in (*referents, *listed)]


def _digest(asked: Any) -> Any:
    try:
        return asked()
    except TypeError:
        # It is of any length.
        return asked(32)


class _TooMuchError(Exception):
    """An object leads to too many others."""


def _standing_for(*state: Any) -> None:
    """Named where an object was written: nobody reads it."""

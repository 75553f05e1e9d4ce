"""State that objects keep where Python does not show it: generators, iterators and arrays; how it is read and set."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import cache, partial
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple

import torch

from lightning_harmony.engine.structures.nested import is_ndarray
from lightning_harmony.engine.structures.seekable import Seekable

# Larger arrays are data.
LARGEST_BYTES = 64 * 1024


class Access(NamedTuple):
    """How the state of an object is read and set."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]

    @classmethod
    def of_generator(cls, value: Any) -> Access | None:
        """For generators of random numbers, PyTorch's, Python's and NumPy's, and seekable iterators; None of anything else."""
        kind = type(value)
        if kind is Seekable:
            return cls(lambda: value.position, value.seek)
        if issubclass(kind, torch.Generator):
            return cls(value.get_state, value.set_state)
        if issubclass(kind, random.Random):
            return cls(value.getstate, value.setstate)
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None and issubclass(kind, numpy.RandomState):
            return cls(partial(value.get_state, legacy=False), value.set_state)
        if numpy is not None and issubclass(kind, numpy.Generator):
            bits = value.bit_generator
            return cls(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
        return None

    @classmethod
    def of_array(cls, value: Any) -> Access | None:
        """For an array of NumPy's or Python's up to `LARGEST_BYTES`, or a bytearray; None of anything else."""
        kind = type(value)
        if is_ndarray(value):
            is_number = value.nbytes <= LARGEST_BYTES and not value.dtype.hasobject
            return cls(value.tobytes, partial(_fill, value)) if is_number else None
        arrays: Any = sys.modules.get("array")
        if issubclass(kind, bytearray) or (arrays is not None and issubclass(kind, arrays.array)):
            holds: Any = bytearray if issubclass(kind, bytearray) else arrays.array
            is_small = memoryview(value).nbytes <= LARGEST_BYTES
            return cls(partial(bytes, value), partial(_refill, holds, value)) if is_small else None
        return None


def _fill(array: Any, numbers: bytes) -> None:
    # One that is only shown here is changed elsewhere.
    if array.flags.writeable:
        array[...] = sys.modules["numpy"].frombuffer(numbers, array.dtype).reshape(array.shape)


def _refill(holds: Any, array: Any, numbers: bytes) -> None:
    holds.__delitem__(array, slice(None))
    (holds.extend if holds is bytearray else holds.frombytes)(array, numbers)


def restore_of(value: Any) -> Callable[[], None] | None:
    """What makes a generator, an iterator or an array what it is now; None of anything else."""
    access = Access.of_generator(value) or Access.of_array(value)
    return None if access is None else partial(access.set, access.get())


@cache
def _dict_of(kind: type) -> Any:
    found = (vars(each).get("__dict__") for each in kind.__mro__)
    return next(
        (each for each in found if type(each) is GetSetDescriptorType or type(each) is MemberDescriptorType), None
    )


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, past the code of its class, which may make it up; None if there is none."""
    kind: Any = type(value)
    descriptor = _dict_of(kind)
    found = None if descriptor is None else descriptor.__get__(value)
    return found if type(found) is dict else None

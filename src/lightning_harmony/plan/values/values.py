"""Values as JSON: frozen dataclasses, and tuples in them, to plain data and back, with everything checked on the way back."""

import re
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_harmony.errors import PlanError
from lightning_harmony.plan.values.task import Task

T = TypeVar("T")

# Sizes, seconds, speeds, positions and numbers of things: the largest that fits a signed integer of 64 bits.
_LARGEST = 2**63 - 1


def encode(value: object) -> Any:
    """A dataclass, or what lies in one, as JSON knows it."""
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, Task):
        return str(value)
    if isinstance(value, Mapping):
        return {name: encode(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def decode(expected: type[T], data: Any, name: str) -> T:
    """Read what `encode` wrote.

    Args:
        expected: the dataclass.
        data: from JSON.
        name: what errors call it.

    Raises:
        PlanError: if anything is missing, unknown, of another type, or a number that is no size of anything.
    """
    value: T = _decode(expected, data, name)
    return value


def _decode(expected: Any, data: Any, name: str) -> Any:
    if is_dataclass(expected):
        return _decode_fields(expected, data, name)
    origin, arguments = get_origin(expected), get_args(expected)
    if expected is Task:
        return _decode_task(data, name)
    if hasattr(expected, "_fields"):
        return expected(*_decode_items(tuple(get_type_hints(expected).values()), data, name))
    if origin in (tuple, frozenset, Mapping):
        return _decode_container(origin, arguments, data, name)
    if origin in (types.UnionType, Union):
        if data is None:
            return None
        return _decode(arguments[0], data, name)
    if origin is Literal:
        if data not in arguments:
            raise _wrong(name, f"one of {', '.join(map(repr, arguments))}", data)
        return data
    if expected in (int, float):
        return _decode_number(expected, data, name)
    if not isinstance(data, expected):
        raise _wrong(name, expected.__name__, data)
    return data


def _decode_number(expected: type[int] | type[float], data: Any, name: str) -> int | float:
    if isinstance(data, bool) or not isinstance(data, int if expected is int else int | float):
        raise _wrong(name, expected.__name__, data)
    # NaN compares false.
    if not 0 <= data <= _LARGEST:
        raise _wrong(name, f"a number from 0 to {_LARGEST:.1e}", data)
    # The speed itself, or one of several by name.
    if data == 0 and re.search(r"_per_second(\.\w+)?$", name):
        raise _wrong(name, "a speed above 0, or null for one that is not known,", data)
    return expected(data)


def _decode_fields(expected: Any, data: Any, name: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(name, "an object", data)
    hints = get_type_hints(expected)
    names = [field.name for field in fields(expected)]
    if missing := [field for field in names if field not in data]:
        raise PlanError(f"{name} has no {missing[0]!r}")
    if unknown := [field for field in data if field not in names]:
        raise PlanError(f"{name} has {unknown[0]!r}, which is not known")
    return expected(**{field: _decode(hints[field], data[field], f"{name}.{field}") for field in names})


def _decode_container(origin: Any, arguments: tuple[Any, ...], data: Any, name: str) -> Any:
    if origin is Mapping:
        if not isinstance(data, dict):
            raise _wrong(name, "an object", data)
        return {key: _decode(arguments[1], item, f"{name}.{key}") for key, item in data.items()}
    if origin is tuple and Ellipsis not in arguments:
        return _decode_items(arguments, data, name)
    if not isinstance(data, list):
        raise _wrong(name, "a list", data)
    return origin(_decode(arguments[0], item, f"{name}[{number}]") for number, item in enumerate(data))


def _decode_items(expected: tuple[Any, ...], data: Any, name: str) -> tuple[Any, ...]:
    """Items of a type each."""
    if not isinstance(data, list) or len(data) != len(expected):
        raise _wrong(name, f"a list of {len(expected)}", data)
    items = enumerate(zip(expected, data, strict=True))
    return tuple(_decode(kind, item, f"{name}[{number}]") for number, (kind, item) in items)


def _decode_task(data: Any, name: str) -> Task:
    try:
        return Task.parse(data)
    except (TypeError, ValueError) as error:
        raise _wrong(name, "a task such as '3F0'", data) from error


def _wrong(name: str, expected: str, data: Any) -> PlanError:
    return PlanError(f"{name} is {data!r:.60}, where {expected} is needed")

"""Values as JSON: frozen dataclasses to plain data and back, with everything checked on the way back."""

import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_harmony.errors import PlanError

T = TypeVar("T")


def encode(value: object) -> Any:
    """A dataclass, or what lies in one, as JSON knows it."""
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, frozenset):
        return sorted(value)
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
        PlanError: if anything is missing, unknown or of another type.
    """
    value: T = _decode(expected, data, name)
    return value


def _decode(expected: Any, data: Any, name: str) -> Any:
    if is_dataclass(expected):
        return _decode_fields(expected, data, name)
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (tuple, frozenset):
        if not isinstance(data, list):
            raise _wrong(name, "a list", data)
        return origin(_decode(arguments[0], item, f"{name}[{number}]") for number, item in enumerate(data))
    if origin in (types.UnionType, Union):
        if data is None:
            return None
        return _decode(arguments[0], data, name)
    if origin is Literal:
        if data not in arguments:
            raise _wrong(name, f"one of {', '.join(map(repr, arguments))}", data)
        return data
    if expected is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, expected) or (isinstance(data, bool) and expected is not bool):
        raise _wrong(name, expected.__name__, data)
    return data


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


def _wrong(name: str, expected: str, data: Any) -> PlanError:
    return PlanError(f"{name} is {data!r:.60}, where {expected} is needed")

"""A file of a user's project beside that of the model, whose functions keep something in globals and objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_scale: Any = 1.0
_context = SimpleNamespace(scale=1.0)
_by_name: dict[str, Any] = {}


def put(value: Any) -> None:
    global _scale  # noqa: PLW0603
    _scale = value


def get() -> Any:
    return _scale


class Context:
    """Of which an object is a global."""

    scale: Any = 1.0

    def put(self, value: Any) -> None:
        _by_name["scale"] = value

    @staticmethod
    def get() -> Any:
        return _by_name.get("scale", 1.0)


context = Context()

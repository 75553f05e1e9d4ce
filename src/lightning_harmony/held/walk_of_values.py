"""The places that some values lead to, such as what a layer is called with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_harmony.held.held_state import Held
from lightning_harmony.held.walk import Walk


class WalkOf(Walk):
    """Goes to all places that some values lead to, but those of modules, which are a model's.

    Args:
        values: where to look.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values
        super().__init__(nn.Module())

    def take_places(self) -> list[Held]:
        """All of them. They lead to the walk, which keeps nothing of theirs: no tensor waits for the garbage collector."""
        places, self.places = self.places, []
        self._seen, self._values = {}, ()
        return places

    @override
    def _all(self) -> Iterator[Held]:
        for value in self._values:
            yield from self._within(f"an argument of class {type(value).__name__}", value, 0, 0)

    @override
    def _within(self, name: str, value: Any, depth: int, nested: int) -> Iterator[Held]:
        return iter(()) if isinstance(value, nn.Module) else super()._within(name, value, depth, nested)

"""Kept graphs: calls of layers that need no recompute, as long as the weights that they were computed with stay."""

from __future__ import annotations

import weakref
from typing import Protocol

from lightning_harmony.engine.model.pack import SwappedPack


class HasGraph(Protocol):
    """A call that keeps its graph, and with it the weights that it was computed with."""

    def forget(self) -> None:
        """Let the graph go."""


class KeptGraphs:
    """The graphs that calls of layers keep on a device, by the packs of the layers."""

    def __init__(self) -> None:
        self._calls: dict[int, weakref.WeakSet[HasGraph]] = {}

    def keep(self, pack: SwappedPack, call: HasGraph) -> None:
        """A call of a layer of this pack keeps its graph, until the pack is evicted."""
        self._calls.setdefault(pack.index, weakref.WeakSet()).add(call)

    def has(self, pack: SwappedPack) -> bool:
        """Whether calls of a pack's layers keep their graphs."""
        return bool(self._calls.get(pack.index))

    def forget(self, pack: SwappedPack) -> bool:
        """Let the graphs of a pack's calls go; whether there were any."""
        calls = list(self._calls.pop(pack.index, ()))
        for call in calls:
            call.forget()
        return bool(calls)

"""Streams of a virtual device on which copies take no time, or as long as there is room for."""

from __future__ import annotations

from typing import Any

from lightning_harmony.engine.devices.stream import HostStream


class Prompt(HostStream):
    """Copies before anything else goes on."""

    def submit(self, work: Any, *others: Any, **named: Any) -> Any:
        event = super().submit(work, *others, **named)
        event.synchronize()
        return event


class Late(HostStream):
    """Copies that nobody sees end before they are waited for."""

    def submit(self, work: Any, *others: Any, **named: Any) -> Any:
        event = super().submit(work, *others, **named)
        event.done = lambda: False  # type: ignore[method-assign]
        return event

"""Updates that begin when somebody waits for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from lightning_harmony.engine.updates.optimizer_twin import Share
from lightning_harmony.engine.updates.postponed import PostponedUpdate
from lightning_harmony.engine.updates.streamed_update import StreamedUpdate
from lightning_harmony.engine.updates.update import Updater

# An update that is deferred and goes on when its step has ended, and one that runs just in time and outlasts the step.
WAYS: dict[str, dict[str, Any]] = {"postponed": {"gradient_clip_val": 0.02}, "outlasting": {}}
BOTH_WAYS = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


@pytest.fixture
def postponed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each share of an update begins when somebody waits for it, and no sooner.

    Returns:
        For each update that was postponed, or left to outlast its step, whether a forward had to wait for it.
    """
    found: list[bool] = []
    gates: list[tuple[set[nn.Parameter], threading.Event]] = []
    gate_of: dict[Share, threading.Event] = {}
    # How many of them begin together: what arrives in a backward is updated in another order.
    num_together = 0
    make, update = Share.__init__, StreamedUpdate.update
    start, follow, wait_for, finish = (
        getattr(PostponedUpdate, name) for name in ("start", "follow", "wait_for", "finish_parameters")
    )
    wait_in_step = Updater._wait_for

    def gated(self: Share, optimizer: Any, groups: Any, *others: Any) -> None:
        make(self, optimizer, groups, *others)
        gate_of[self] = threading.Event()
        gates.append((set(groups), gate_of[self]))

    def late_update(self: StreamedUpdate, share: Share, *args: Any, **options: Any) -> None:
        assert gate_of[share].wait(30)
        update(self, share, *args, **options)

    def opening(others: Any) -> Any:
        def open_all(self: Any, *args: Any) -> Any:
            for _, gate in gates:
                gate.set()
            return others(self, *args)

        return open_all

    def late_start(self: PostponedUpdate, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        if not options["waits"]:
            found.append(False)

    def late_follow(self: PostponedUpdate, *args: Any) -> None:
        nonlocal num_together
        # Of the step before, nothing is left. Of this one, nothing is to begin.
        with monkeypatch.context() as patch:
            patch.setattr(PostponedUpdate, "finish_parameters", finish)
            follow(self, *args)
        found.append(False)
        num_together = len(gates)

    def opening_wait(self: PostponedUpdate, parameters: Sequence[nn.Parameter], *others: Any) -> None:
        asked = [number for number, (members, _) in enumerate(gates) if members & set(parameters)]
        last = max(asked, default=-1) + 1
        for _, gate in gates[: max(last, num_together) if asked else 0]:
            if found:
                found[-1] |= not gate.is_set()
            gate.set()
        wait_for(self, parameters, *others)

    monkeypatch.setattr(Share, "__init__", gated)
    monkeypatch.setattr(StreamedUpdate, "update", late_update)
    monkeypatch.setattr(PostponedUpdate, "start", late_start)
    monkeypatch.setattr(PostponedUpdate, "follow", late_follow)
    monkeypatch.setattr(PostponedUpdate, "wait_for", opening_wait)
    monkeypatch.setattr(PostponedUpdate, "finish_parameters", opening(finish))
    monkeypatch.setattr(Updater, "_wait_for", opening(wait_in_step))
    # Nothing waits for room in between.
    monkeypatch.setattr("lightning_harmony.engine.updates.update.RING", 1000)
    return found

"""Actions that a step has Lightning's profiler record: each microbatch has its own, while it has its turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_harmony.engine.lane import current_lane
from lightning_harmony.lightning_tree import LightningTree


class ProfiledActions:
    """Lets several microbatches have the same action of a profiler open.

    From `begin` to `end`, the profiler's methods `start` and `stop` are replaced on that instance. What a microbatch has
    started stops when another one has its turn, and starts again when its own goes on. To `SimpleProfiler`, which counts
    actions, it stays one: it took what the turns of its microbatch took.
    """

    def __init__(self) -> None:
        self._profiler: Any = None
        self._before: dict[str, Any] = {}

    def begin(self, tree: LightningTree, profiler: Any) -> None:
        """Watch a Trainer's profiler, until `end`."""
        self.end()
        self._profiler = profiler
        self._before = {name: vars(profiler)[name] for name in ("start", "stop") if name in vars(profiler)}
        start, stop = profiler.start, profiler.stop
        pause: Callable[[str], Callable[[], None]] = partial(_restarting, start, stop)
        if isinstance(profiler, tree.part("profilers").SimpleProfiler):
            pause = partial(_going_on, profiler.current_actions)

        def start_in_lane(action_name: str) -> None:
            start(action_name)
            if (lane := current_lane()) is not None:
                lane.pauses[action_name] = partial(pause, action_name)

        def stop_in_lane(action_name: str) -> None:
            if (lane := current_lane()) is not None:
                lane.pauses.pop(action_name, None)
            stop(action_name)

        profiler.start, profiler.stop = start_in_lane, stop_in_lane

    def end(self) -> None:
        """Leave the profiler as it was."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            del profiler.start, profiler.stop
            vars(profiler).update(self._before)


def _restarting(start: Callable[[str], None], stop: Callable[[str], None], action: str) -> Callable[[], None]:
    """Stop an action; return what starts it again."""
    stop(action)
    return partial(start, action)


def _going_on(began_at: dict[str, float], action: str) -> Callable[[], None]:
    """Leave the time out of a simple profiler's action from now until what is returned is called."""
    began, paused = began_at.pop(action), time.perf_counter()

    def go_on() -> None:
        began_at[action] = began + time.perf_counter() - paused

    return go_on

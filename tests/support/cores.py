"""The cores of the processor that tests run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_CAN_CHOOSE = hasattr(os, "sched_setaffinity")
_all = os.sched_getaffinity(0) if _CAN_CHOOSE else set[int]()


def keep_to_one() -> None:
    """Keep this process to a core, if there is one for each process of tests.

    Threads of a fit wait for each other, whatever they do. Where the next one has to be woken on another core, a fit takes a
    third longer; and the other core is another test's. Where others are busy, too, the system finds better places.
    """
    name, number = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if name is not None and _CAN_CHOOSE and number <= len(_all) and os.getloadavg()[0] <= len(_all):
        os.sched_setaffinity(0, {sorted(_all)[int(name.removeprefix("gw"))]})


@contextmanager
def all_cores() -> Iterator[set[int]]:
    """The context in which this thread, and those that it starts, may run on all cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _all)
    try:
        yield set(_all)
    finally:
        os.sched_setaffinity(0, before)

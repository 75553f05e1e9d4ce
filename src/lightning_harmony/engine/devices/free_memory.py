"""How much host memory can still be taken: of the machine, and of the control groups that the process is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil


class HostMemory(NamedTuple):
    """The host's memory, as far as the process may have it.

    Attributes:
        total: bytes of all of it.
        free: bytes that can still be taken without swapping to disk.
    """

    total: int
    free: int


def free_host_bytes() -> int:
    """Host memory that can still be taken without swapping to disk."""
    return host_memory().free


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The host's memory.

    A container, or a job of a cluster, has a limit of its own, which the system's figures say nothing of.

    Args:
        root: of the file systems ``/proc`` and ``/sys`` that tell of control groups.
    """
    machine = psutil.virtual_memory()
    limits = [HostMemory(machine.total, machine.available), *_limits(root)]
    return HostMemory(min(limit.total for limit in limits), max(min(limit.free for limit in limits), 0))


def _limits(root: Path) -> Iterator[HostMemory]:
    """What each control group leaves to the process, whichever of those above it has the limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounted, limit, usage, prefix = "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            mounted, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        else:
            continue
        group = root / mounted / path.lstrip("/")
        while group.is_relative_to(root / mounted):
            try:
                most = (group / limit).read_text().strip()
                # Most groups have no limit, and what a group uses takes the system long to tell.
                if most != "max":
                    now = int((group / usage).read_text())
                    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                    # Cached files count as used, and go when the memory is wanted.
                    cached = int(stat.get(f"{prefix}active_file", 0)) + int(stat.get(f"{prefix}inactive_file", 0))
                    yield HostMemory(int(most), int(most) - now + cached)
            except (OSError, ValueError):
                # The root has no limit, and a container does not see the groups above its own.
                pass
            group = group.parent

"""How much memory can still be taken."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lightning_harmony.engine.devices.free_memory import HostMemory, free_host_bytes, host_memory

GIB = 2**30


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 100 GiB available, as far as it tells."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=128 * GIB, available=100 * GIB))


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_free_host_memory_is_that_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 0 < free_host_bytes() <= psutil.virtual_memory().total


def test_a_system_without_control_groups_has_no_other_limit(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == HostMemory(128 * GIB, 100 * GIB)


def test_without_limits_all_that_is_available_is_free(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user\n",
        "sys/fs/cgroup/user/memory.max": "max\n",
        "sys/fs/cgroup/user/memory.current": "1",
    }
    assert host_memory(system(tmp_path, files)) == HostMemory(128 * GIB, 100 * GIB)


GROUPS = {
    "a container's own": (
        "0::/\n",
        {"sys/fs/cgroup": ("max", "current", "active_file 1\ninactive_file 3\n")},
    ),
    "of a group above": (
        "0::/job/step\n",
        {
            "sys/fs/cgroup/job": ("max", "current", "active_file 1\ninactive_file 3\n"),
            "sys/fs/cgroup/job/step": ("max", "current", "active_file 0\ninactive_file 0\n"),
        },
    ),
    "the first version's": (
        "4:cpu,cpuacct:/x\n9:memory:/job\n0::/\n",
        {
            "sys/fs/cgroup/memory/job": (
                "limit_in_bytes",
                "usage_in_bytes",
                "active_file 9\ntotal_active_file 1\ntotal_inactive_file 3\n",
            )
        },
    ),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_control_groups_limit_counts_and_its_cached_files_do_not(tmp_path: Path, kind: str) -> None:
    """A job of a cluster was planned for all of the machine's memory, and killed at its own limit."""
    membership, groups = GROUPS[kind]
    files = {"proc/self/cgroup": membership}
    for number, (folder, (limit, usage, stat)) in enumerate(groups.items()):
        files[f"{folder}/memory.{limit}"] = f"{10 * GIB}\n" if number == 0 else "max\n"
        files[f"{folder}/memory.{usage}"] = f"{4 * GIB}\n"
        files[f"{folder}/memory.stat"] = stat
    root = system(tmp_path, files)
    assert host_memory(root) == HostMemory(10 * GIB, 6 * GIB + 4)


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "10",
        "sys/fs/cgroup/memory.current": "20",
        "sys/fs/cgroup/memory.stat": "",
    }
    assert host_memory(system(tmp_path, files)) == HostMemory(10, 0)

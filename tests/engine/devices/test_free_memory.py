"""How much memory can still be taken."""

from pathlib import Path

import pytest

from lightning_harmony.engine.devices.free_memory import HostMemory, free_host_bytes, host_memory

GIB = 2**30


def system(root: Path, files: dict[str, str]) -> Path:
    """A machine with 100 GiB available, as far as it tells."""
    for name, text in {
        "proc/meminfo": f"MemTotal: {128 * 2**20} kB\nMemAvailable:   {100 * 2**20} kB\n",
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_free_host_memory_is_positive_where_the_system_tells() -> None:
    free = free_host_bytes()
    assert free is None or free > 0


def test_what_no_system_tells_is_not_known(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None


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

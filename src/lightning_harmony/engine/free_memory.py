"""How much host memory can still be taken."""


def free_host_bytes() -> int | None:
    """Host memory that can still be taken without swapping to disk; None where the system doesn't tell."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
    except OSError:
        return None
    return int(fields["MemAvailable"].split()[0]) * 1024

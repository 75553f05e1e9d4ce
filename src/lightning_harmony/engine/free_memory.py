"""How much memory can still be taken, of a GPU and of the host."""

import torch


def free_device_bytes(device: torch.device) -> int:
    """What this process may still allocate on a GPU, less a tenth for fragmentation and libraries' work space."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(0.9 * (free + cached))


def free_host_bytes() -> int | None:
    """Host memory that can still be taken without swapping to disk; None where the system doesn't tell."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
    except OSError:
        return None
    return int(fields["MemAvailable"].split()[0]) * 1024

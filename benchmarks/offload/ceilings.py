"""What the machine can do, by which a row of the comparison is judged: copies, the host's memory, and updates beside copies.

python benchmarks/offload/ceilings.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_harmony.engine.devices.cuda_device import CudaDevice

# Of a block of the GPT: what is updated and copied at a time.
PARAMETERS = 4096 * 4096 * 12
REPEATS = 7
# An update with AdamW reads weight, gradient and two moments, and writes all but the gradient.
UPDATE_BYTES = 28


def median_seconds(work: Callable[[], object]) -> float:
    """What a call takes, the first one left out."""
    work()
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


class Copier:
    """Copies a block to the GPU and another one back, over and over or once.

    Args:
        device: the GPU.
    """

    def __init__(self, device: CudaDevice) -> None:
        num_bytes = PARAMETERS * 4
        self._hosts = [device.host_buffer(num_bytes) for _ in range(2)]
        self._there = [torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]
        self._streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def copy(self, ways: str) -> float:
        """Copy in, out, or both at once; the bytes of both."""
        pairs: dict[str, tuple[int, Tensor, Tensor]] = {
            "in": (0, self._there[0], self._hosts[0]),
            "out": (1, self._hosts[1], self._there[1]),
        }
        chosen = [pairs[way] for way in ways.split("+")]
        for number, target, source in chosen:
            with torch.cuda.stream(self._streams[number]):
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return float(sum(source.numel() for _, _, source in chosen))

    @contextmanager
    def copying(self) -> Iterator[Callable[[], float]]:
        """Copy both ways while this lasts; calling what it yields tells how many bytes a second it has copied."""
        ended, copied, start = threading.Event(), [0.0], time.perf_counter()

        def repeat() -> None:
            while not ended.is_set():
                copied[0] += self.copy("in+out")

        thread = threading.Thread(target=repeat)
        thread.start()
        try:
            yield lambda: copied[0] / (time.perf_counter() - start)
        finally:
            ended.set()
            thread.join()


def updater(device: CudaDevice) -> Callable[[], object]:
    """The update of a block whose weights and gradients are page-locked, as the strategy's are."""
    weights, gradients = (device.host_buffer(PARAMETERS * 4).view(torch.float32) for _ in range(2))
    parameter = nn.Parameter(weights)
    parameter.grad = gradients.fill_(1e-3)
    return torch.optim.AdamW([parameter], fused=True).step


def main() -> None:
    """Measure, and print a line of JSON for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = os.cpu_count() or 1
    choices = sorted({cores // 4, cores // 2, cores - 4, cores - 2, cores})
    parser.add_argument("--threads", type=int, nargs="+", default=[number for number in choices if number > 0])
    options = parser.parse_args()
    device = CudaDevice(torch.device("cuda", 0), None)
    copier = Copier(device)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "cores": cores, "torch": torch.__version__}), flush=True)
    for ways in ("in", "out", "in+out"):
        seconds = median_seconds(lambda ways=ways: copier.copy(ways))  # type: ignore[misc]
        print(json.dumps({"copies": ways, "GB/s": round(copier.copy(ways) / seconds / 1e9, 1)}), flush=True)
    update = updater(device)
    source, target = (torch.ones(PARAMETERS) for _ in range(2))
    for threads in options.threads:
        torch.set_num_threads(threads)
        seconds = median_seconds(lambda: torch.mul(source, 2, out=target))
        row: dict[str, float] = {"threads": threads, "read and write GB/s": round(8 * PARAMETERS / seconds / 1e9, 1)}
        seconds = median_seconds(update)
        row |= {
            "update ms": round(seconds * 1e3, 1),
            "update GB/s": round(UPDATE_BYTES * PARAMETERS / seconds / 1e9, 1),
        }
        with copier.copying() as rate:
            seconds = median_seconds(update)
            copied = rate()
        row["update beside copies ms"] = round(seconds * 1e3, 1)
        row["GB/s beside copies"] = round(UPDATE_BYTES * PARAMETERS / seconds / 1e9, 1)
        row["copies GB/s beside updates"] = round(copied / 1e9, 1)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

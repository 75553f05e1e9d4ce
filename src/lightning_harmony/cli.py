"""The command `lightning-harmony`."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from importlib.metadata import version

import torch

from lightning_harmony.engine.device import free_device_bytes, free_host_bytes
from lightning_harmony.plan.memory_size import format_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="lightning-harmony", description=__doc__)
    parser.add_argument("--version", action="version", version=version("lightning-harmony"))
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("machine", help="show what this machine offers: versions, and memory of host and devices")
    parser.parse_args(arguments)
    print("\n".join(describe_machine()))
    return 0


def describe_machine() -> list[str]:
    """Versions, and the memory that a training could take, a line each."""
    names = ("lightning-harmony", "torch", "lightning")
    lines = [", ".join([f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)])]
    free = free_host_bytes()
    lines.append(f"host: {'unknown' if free is None else format_bytes(free)} free")
    for index in range(torch.cuda.device_count()):
        usable = format_bytes(free_device_bytes(torch.device("cuda", index)))
        lines.append(
            f"cuda:{index}: {torch.cuda.get_device_name(index)}, {usable} for HarmonyStrategy(device_memory=None)"
        )
    if torch.cuda.device_count() == 0:
        lines.append('no CUDA device: accelerator="cpu" trains on a virtual device in host memory')
    return lines

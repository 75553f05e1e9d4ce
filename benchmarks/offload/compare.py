"""Train the GPT in memory and under several capacities, each in its own process, and print a table.

python benchmarks/offload/compare.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

# Half of the model: of the whole one, what DeepSpeed keeps on the host does not fit 128 GiB.
_HALF = ["--layers", "12"]
CONTENDERS: dict[str, list[str]] = {
    "in memory, recompute": ["--strategy", "recompute"],
    "in memory": ["--strategy", "plain"],
    "harmony, 16 GiB": ["--device-memory", "16GiB"],
    "harmony, 8 GiB": ["--device-memory", "8GiB"],
    "harmony, the whole GPU": [],
    "in memory, recompute, bf16 parameters": ["--strategy", "recompute", "--precision", "bf16-true"],
    "harmony, 16 GiB, bf16-compute": ["--device-memory", "16GiB", "--precision", "bf16-compute"],
    "in memory, recompute, gradients clipped": ["--strategy", "recompute", "--clip", "1.0"],
    "harmony, 16 GiB, gradients clipped": ["--device-memory", "16GiB", "--clip", "1.0"],
    "harmony, 16 GiB, a quarter of the tokens": ["--device-memory", "16GiB", "--num-microbatches", "2"],
    **{
        f"harmony, {number} x 16 GiB, bf16-compute, twice the tokens": [
            *("--devices", str(number), "--device-memory", "16GiB", "--num-microbatches", "16"),
            *("--precision", "bf16-compute"),
        ]
        for number in (1, 2, 4)
    },
    "half: in memory, recompute, bf16 parameters": ["--strategy", "recompute", "--precision", "bf16-true", *_HALF],
    "half: harmony, 16 GiB, bf16-compute": ["--device-memory", "16GiB", "--precision", "bf16-compute", *_HALF],
    "half: RoundPipe": ["roundpipe", *_HALF],
    "half: RoundPipe, synchronous": ["roundpipe", "--synchronous", *_HALF],
    "half: DeepSpeed ZeRO-3, both offloads": ["deepspeed", *_HALF],
    "half: FSDP2, CPU offload": ["fsdp2", *_HALF],
}


def run(arguments: list[str]) -> dict[str, Any]:
    """The row that a contender prints.

    Raises:
        RuntimeError: if it doesn't, with what it said last.
    """
    script = "train.py" if arguments[0].startswith("--") else "peers.py"
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(lines[-1])
    return row


def _num_devices(arguments: list[str]) -> int:
    return int(arguments[arguments.index("--devices") + 1]) if "--devices" in arguments else 1


def main() -> None:
    """Run those that were asked for; by default all that the machine has GPUs for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=9)
    here = [name for name, arguments in CONTENDERS.items() if _num_devices(arguments) <= torch.cuda.device_count()]
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=here)
    options = parser.parse_args()
    columns = ("step", "tokens", "device GiB", "reserved GiB", "host GiB", "first step")
    print("| | " + " | ".join(columns) + " | swapped in, GB | out, GB | update hidden |")
    print("|---|" + "--:|" * (len(columns) + 3))
    for name in options.only:
        try:
            row = run([*CONTENDERS[name], "--steps", str(options.steps)])
        except RuntimeError as error:
            # A peer that isn't installed, say: the others are compared all the same.
            print(f"| {name} | {str(error).splitlines()[-1]} |", flush=True)
            continue
        report = row.get("report", {})
        swapped = [sum(report.get(f"swapped_{way}_bytes", {}).values()) / 1e9 for way in ("in", "out")]
        cells = [str(row[column]) for column in columns] + [f"{each:.1f}" for each in swapped]
        cells.append(f"{report['update_hidden']:.2f}" if report else "")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        print(json.dumps({name: {**row, "report": report}}), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

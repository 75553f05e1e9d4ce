"""Rows of the benchmark: each a run of harmony beside its reference in memory, in one call, with the ratio of their speeds.

    python benchmarks/realworld/rows.py --out rows.jsonl bert gpt2 resnet50 mlp
    python benchmarks/realworld/rows.py --table rows.jsonl

A model that does not fit in memory has no reference of its own. It is run in memory with two smaller numbers of layers, with
the model's own checkpointing, and the time of all layers is extrapolated from these.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN = Path(__file__).with_name("run.py")


@dataclass(frozen=True)
class Row:
    """A row.

    Attributes:
        model: arguments of both runs.
        harmony: arguments of harmony's alone.
        reference: arguments of the reference's alone.
        depths: the numbers of layers to extrapolate from, where the model does not fit; and its own.
        goal: the ratio of harmony's speed to the reference's that is to be reached.
    """

    model: str
    harmony: str = ""
    reference: str = ""
    depths: tuple[int, int, int] | None = None
    goal: float | None = None


_LLAMA_8B = "--model llama8b --batch 16"
_RECOMPUTE = "--checkpointing --microbatches 8"
ROWS = {
    "bert": Row("--model bert --batch 32 --length 512 --steps 14", goal=0.97),
    "gpt2": Row("--model gpt2 --batch 16 --length 1024 --steps 14", goal=0.97),
    "resnet50": Row("--model resnet50 --batch 64 --length 224 --steps 14", goal=0.97),
    "mlp": Row("--model mlp --batch 512 --length 32 --steps 30", goal=0.97),
    "bert-4": Row("--model bert --batch 32 --length 512 --steps 14 --microbatches 4", goal=0.97),
    "llama8b": Row(_LLAMA_8B, "--gpu-free 24 --microbatches 8", _RECOMPUTE, (8, 16, 32), 0.95),
    "llama8b-clipped": Row(_LLAMA_8B + " --clip 1.0", "--gpu-free 24 --microbatches 8", _RECOMPUTE, (8, 16, 32), 0.80),
    "llama8b-bf16": Row(_LLAMA_8B + " --precision bf16-true", "--gpu-free 24 --microbatches 8", _RECOMPUTE, None, 0.97),
    "llama3b": Row("--model llama3b --batch 16", "--gpu-free 24 --microbatches 8", _RECOMPUTE, None, 1.0),
    "llama3b-12": Row("--model llama3b --batch 16", "--gpu-free 12 --microbatches 8", _RECOMPUTE, None, 0.95),
    # Batches that need three times the card.
    "vit-l": Row("--model vit-l --length 512 --batch 64 --steps 8", "--gpu-free 20", goal=0.95),
    "resnet152": Row("--model resnet152 --length 512 --batch 64 --steps 8", "--gpu-free 16", goal=0.95),
    "llama3b-dpo": Row("--model llama3b-dpo --batch 8", "--gpu-free 24 --microbatches 8", _RECOMPUTE, None, 0.97),
    "moe10b": Row(
        "--model moe10b --batch 16 --precision bf16-true", "--gpu-free 24 --microbatches 8", _RECOMPUTE, None, 0.90
    ),
    "llama8b-predict": Row(
        "--model llama8b --batch 16 --length 2048 --precision bf16-true --predict --steps 8", "--gpu-free 12", goal=0.95
    ),
    "qwen32b-lora": Row(
        "--model qwen32b --batch 16 --lora --precision bf16-true",
        "--gpu-free 24 --microbatches 8",
        _RECOMPUTE,
        None,
        1.0,
    ),
}


def run(arguments: str, timeout: float) -> dict[str, Any]:
    """Run once; a run that failed has an entry "failed"."""
    command = [sys.executable, str(RUN), *arguments.split()]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False).stdout
    except subprocess.TimeoutExpired:
        return {"arguments": arguments, "failed": f"took more than {timeout:.0f} s"}
    last = (output.strip().splitlines() or ["FAILED without a word"])[-1]
    row = json.loads(last) if last.startswith("{") else {"failed": output[-3000:]}
    return {"arguments": arguments, **row}


def reference(row: Row, timeout: float) -> tuple[float | None, list[dict[str, Any]]]:
    """The seconds of a step in memory, and the runs that they come from."""
    plain = f"{row.model} {row.reference} --strategy plain"
    if row.depths is None:
        runs = [run(plain, timeout)]
        return runs[0].get("step"), runs
    few, many, own = row.depths
    runs = [run(f"{plain} --layers {depth} --steps 6", timeout) for depth in (few, many)]
    if any("failed" in each for each in runs):
        return None, runs
    slope = (runs[1]["step"] - runs[0]["step"]) / (many - few)
    return runs[1]["step"] + slope * (own - many), runs


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    lines = [
        "| row | step, s | in memory, s | ratio | goal | predicted, s | of the card, GiB | host, GiB | first step, s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        ours, memory = row["harmony"], row["reference_step"]
        if "failed" in ours:
            lines.append(f"| {row['name']} | failed: {ours['failed'].strip().splitlines()[-1][:120]} |||||||| ")
            continue
        ratio = "" if memory is None else f"{memory / ours['step']:.3f}"
        taken = ", ".join(f"{each:.1f}" for each in ours["taken_gib"])
        predicted = "" if ours.get("predicted") is None else f"{ours['predicted']:.2f}"
        lines.append(
            f"| {row['name']} | {ours['step']:.3f} | {'' if memory is None else f'{memory:.3f}'} | {ratio} | {row['goal']} | "
            f"{predicted} | {taken} | {ours['host_gib']} | {ours['first_step']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []])
    parser.add_argument("--out", type=Path, help="where the rows go, a line of JSON each")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a run")
    parser.add_argument("--table", type=Path, help="print the table of rows that were run before")
    options = parser.parse_args()
    if options.table is not None:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return
    done: list[dict[str, Any]] = []
    for name in options.rows:
        row = ROWS[name]
        ours = run(f"{row.model} {row.harmony}", options.timeout)
        seconds, runs = reference(row, options.timeout)
        done.append({"name": name, "goal": row.goal, "harmony": ours, "reference_step": seconds, "references": runs})
        if options.out is not None:
            options.out.write_text("".join(json.dumps(each) + "\n" for each in done))
        print(table(done[-1:]).splitlines()[-1], flush=True)
    print(table(done))


if __name__ == "__main__":
    main()

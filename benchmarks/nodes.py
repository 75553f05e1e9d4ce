"""What a step takes on several machines: simulated from what one of them takes, and from what they send each other.

A machine's step is the predicted one. As the gradients of a pack become final, they are sent, one pack after the other, beside
the backward of the next packs; what is sent is updated, and is there when the next forward comes to the pack. Each machine
sends 2 (n - 1) / n bytes for each byte of gradients, as `step_report.node_sent_bytes` counts them. What a message takes
besides its bytes is not counted, nor that machines are not equally fast.

python benchmarks/nodes.py
python benchmarks/nodes.py --machine 4090 --device-memory 24GiB --tokens 4096 --nodes 2 4 --gigabits 10
"""

from __future__ import annotations

import argparse

import torch
from offload.model import GPT, Shape

from lightning_harmony.estimating.estimation import estimate
from lightning_harmony.plan.outlook.nodes import Nodes, packs_of, seconds_on
from lightning_harmony.plan.simulate.replay import predict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--device-memory", default="24GiB")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072], help="of a machine's step")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--gigabits", type=float, nargs="+", default=[25, 100, 400], help="of each machine's network")
    parser.add_argument("--precision", default="bf16-mixed")
    options = parser.parse_args()
    shape = Shape()
    for tokens in options.tokens:
        batch = torch.empty(tokens // shape.length, shape.length + 1, dtype=torch.int64, device="meta")
        result = estimate(
            lambda: GPT(shape, recompute=False, fused=None),
            batch,
            machine=options.machine,
            device_memory=options.device_memory,
            num_microbatches=len(batch),
            precision=options.precision,
        )
        plan = result.outlook.plan
        assert plan.profile is not None
        prediction = predict(plan)
        alone, packs = prediction.seconds, packs_of(prediction, plan.profile.pack_costs(plan.packs))
        sent = sum(pack.num_bytes for pack in packs) / 1e9
        print(f"\n{tokens} tokens a machine, {alone:.2f} s alone, {sent:.1f} GB of gradients\n")
        print("| Gb/s | " + " | ".join(f"{number} machines" for number in options.nodes) + " |")
        print("|--:|" + "--:|" * len(options.nodes))
        for gigabits in options.gigabits:
            times = [seconds_on(Nodes(number, 1.0, gigabits * 1e9 / 8), alone, packs) for number in options.nodes]
            print(f"| {gigabits:g} | " + " | ".join(f"{each:.2f} s ({alone / each:.2f})" for each in times) + " |")


if __name__ == "__main__":
    main()

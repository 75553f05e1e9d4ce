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
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from offload.model import GPT, Shape

from lightning_harmony.estimating.estimation import estimate
from lightning_harmony.plan.simulate.replay import predict
from lightning_harmony.plan.values.plan import Plan
from lightning_harmony.plan.values.task import Phase


class Pack(NamedTuple):
    """What a step does with a pack on each machine.

    Attributes:
        begins: when its forward does.
        final: when its gradients are.
        num_bytes: of these.
    """

    begins: float
    final: float
    num_bytes: int


def packs_of(plan: Plan) -> tuple[float, list[Pack]]:
    """What a step of one machine takes, and its packs, in the order in which their gradients are final."""
    assert plan.profile is not None
    prediction = predict(plan)
    begins: defaultdict[int, list[float]] = defaultdict(list)
    final: defaultdict[int, list[float]] = defaultdict(list)
    for device in prediction.devices:
        for span in device.spans:
            kinds = {Phase.FORWARD: begins, Phase.BACKWARD: final}
            if span.task.kind in kinds:
                place = span.start_seconds if span.task.kind is Phase.FORWARD else span.end_seconds
                kinds[span.task.kind][span.task.pack].append(place)
    costs = plan.profile.pack_costs(plan.packs)
    packs = [Pack(min(begins[n]), max(final[n]), cost.gradient_bytes) for n, cost in enumerate(costs)]
    return prediction.seconds, sorted(packs, key=lambda pack: pack.final)


def seconds_on(num_nodes: int, bytes_per_second: float, alone: float, packs: Sequence[Pack]) -> float:
    """What a step takes where it repeats.

    Args:
        num_nodes: how many machines.
        bytes_per_second: that each can send while it receives as much.
        alone: what a step of one takes.
        packs: of it, in the order in which their gradients are final.
    """
    free, seconds, factor = 0.0, alone, 2 * (num_nodes - 1) / num_nodes / bytes_per_second
    for pack in packs:
        free = max(free, pack.final) + factor * pack.num_bytes
        # In the next step.
        seconds = max(seconds, free - pack.begins)
    return max(seconds, factor * sum(pack.num_bytes for pack in packs))


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
        alone, packs = packs_of(result.outlook.plan)
        sent = sum(pack.num_bytes for pack in packs) / 1e9
        print(f"\n{tokens} tokens a machine, {alone:.2f} s alone, {sent:.1f} GB of gradients\n")
        print("| Gb/s | " + " | ".join(f"{number} machines" for number in options.nodes) + " |")
        print("|--:|" + "--:|" * len(options.nodes))
        for gigabits in options.gigabits:
            times = [seconds_on(number, gigabits * 1e9 / 8, alone, packs) for number in options.nodes]
            print(f"| {gigabits:g} | " + " | ".join(f"{each:.2f} s ({alone / each:.2f})" for each in times) + " |")


if __name__ == "__main__":
    main()
